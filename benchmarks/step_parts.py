"""Where the time of a drafter step goes: profiled operators and kernels, sorted into parts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from dflash_ext.drafter import DrafterSpec

BETWEEN = "between two profiled calls"
PARTS = ("projections", "mlp", "attention", "norms and rope", "loss", "optimizer", "other")
_PRODUCT = re.compile(r"aten::(add)?b?mm|aten::linear|aten::matmul|gemm|cutlass|nvjet|cublas", re.I)
# The first part whose pattern a name matches; the kernel's own name comes before its operator's.
_NAMES = (
    ("optimizer", re.compile(r"adam|optimizer|clip|muon|foreach_norm|vector_norm", re.I)),
    ("attention", re.compile(r"attn|attention|block_att", re.I)),
    ("loss", re.compile(r"draft_loss|loss|metric|softmax|nll|head_rows|row_kernel", re.I)),
    ("mlp", re.compile(r"swiglu|silu", re.I)),
    ("norms and rope", re.compile(r"rms|norm|rope|rotary", re.I)),
)


@dataclass(frozen=True)
class Record:
    """One kernel (on a CPU: one operator without its callees)."""

    name: str
    op: str  # the operator that launched it, "" if unknown
    shapes: Sequence[Sequence[int]]  # of that operator's inputs
    seconds: float


def profiled(
    run: Callable[[], object],
    between: Callable[[], object],
    device: torch.device,
    *,
    rounds: int,
) -> list[Record]:
    """The records of ``rounds`` calls of ``run``, which must have run before.

    ``between`` runs before each call and leaves no record: it keeps the device at work, so that
    the clocks are those of sustained load.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as prof:
        for _ in range(rounds):
            with record_function(BETWEEN):
                between()
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return list(_kernels(prof) if device.type == "cuda" else _operators(prof))


def _operators(prof: profile) -> Iterator[Record]:
    for event in prof.events():
        parents = [event]
        while parents[-1].cpu_parent is not None:
            parents.append(parents[-1].cpu_parent)
        if not any(parent.name == BETWEEN for parent in parents):
            seconds = event.self_cpu_time_total / 1e6
            yield Record(event.name, event.name, event.input_shapes or [], seconds)


def _kernels(prof: profile) -> Iterator[Record]:
    events = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
    on_host = [e for e in events if e.device_type() == DeviceType.CPU]
    apart = [(e.start_ns(), e.end_ns()) for e in on_host if e.name() == BETWEEN]
    ops = {e.correlation_id(): e for e in on_host}
    for event in events:
        if event.device_type() != DeviceType.CUDA or event.is_user_annotation():
            continue
        op = ops.get(event.linked_correlation_id())
        if op is not None and any(start <= op.start_ns() <= end for start, end in apart):
            continue
        yield Record(
            event.name(),
            op.name() if op else "",
            op.shapes() if op else [],
            event.duration_ns() / 1e9,
        )


def part_of(record: Record, spec: DrafterSpec) -> str:
    """The part of the step that a record belongs to: products by their sizes, others by name."""
    names = (record.name, record.op)
    if not any(_PRODUCT.search(name) for name in names):
        for name in names:
            for part, pattern in _NAMES:
                if pattern.search(name):
                    return part
    sizes = {int(n) for shape in record.shapes for n in shape if isinstance(n, int)}
    if spec.vocab_size in sizes:
        return "loss"
    if sizes & {spec.intermediate_size, 2 * spec.intermediate_size}:
        return "mlp"
    is_product = any(_PRODUCT.search(name) for name in names)
    return "projections" if is_product and len(record.shapes) > 1 else "other"


@dataclass
class Breakdown:
    """Seconds of each part, and the names that hold most of the part "other"."""

    seconds: dict[str, float]
    largest_others: list[tuple[str, float]]

    def per_call(self, calls: int) -> Breakdown:
        return Breakdown(
            {part: seconds / calls for part, seconds in self.seconds.items()},
            [(name, seconds / calls) for name, seconds in self.largest_others],
        )

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def breakdown(records: Sequence[Record], spec: DrafterSpec) -> Breakdown:
    seconds = dict.fromkeys(PARTS, 0.0)
    others: dict[str, float] = defaultdict(float)
    for record in records:
        part = part_of(record, spec)
        seconds[part] += record.seconds
        if part == "other":
            others[record.name] += record.seconds
    largest = sorted(others.items(), key=lambda item: -item[1])
    return Breakdown(seconds, largest[:6])
