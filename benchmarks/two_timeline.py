"""What the GPUs did in profiled steps: the training stream, the sums beside it, and what they leave
uncovered."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch.autograd import DeviceType
from torch.profiler import profile

from benchmarks.trace import Spans, joined

Span = tuple[float, float]
LAUNCH_GAP_NS = 20_000

# The first kind whose pattern a name matches.
KINDS = (
    ("nccl", re.compile(r"nccl", re.I)),
    ("copies", re.compile(r"memcpy", re.I)),
    ("products", re.compile(r"nvjet|gemm|cutlass|cublas|head_|lm_head", re.I)),
)


@dataclass(frozen=True)
class Activity:
    """A kernel or a copy; times in ns."""

    device: int
    stream: int
    name: str
    start: int
    end: int


def activities(prof: profile) -> list[Activity]:
    """All GPUs' activities, of all threads."""
    return [
        Activity(e.device_index(), e.device_resource_id(), e.name(), e.start_ns(), e.end_ns())
        for e in prof.profiler.kineto_results.events()  # type: ignore[union-attr]
        if e.device_type() == DeviceType.CUDA and not e.is_user_annotation()
    ]


def timelines(found: Iterable[Activity], steps: int) -> dict[str, dict[str, float]]:
    """`timeline` of each GPU."""
    by_device: dict[int, list[Activity]] = defaultdict(list)
    for activity in found:
        by_device[activity.device].append(activity)
    return {f"cuda:{i}": timeline(x, steps) for i, x in sorted(by_device.items())}


def timeline(found: Sequence[Activity], steps: int) -> dict[str, float]:
    """Milliseconds of a step on one GPU.

    The training stream is the busiest one; all others belong to the sums. span: first start to last
    end; main, sums: when either has anything running; both: when both have; exposed: sums alone;
    idle: neither; stalled: of that, more than gaps between launches; longest_wait: the longest
    pause of the training stream (of all steps); products, main_other, nccl, copies, additions:
    times of their activities, added up.
    """
    lasts: Counter[int] = Counter()
    for a in found:
        lasts[a.stream] += a.end - a.start
    main_stream = lasts.most_common(1)[0][0]
    main = union((a.start, a.end) for a in found if a.stream == main_stream)
    sums = union((a.start, a.end) for a in found if a.stream != main_stream)
    either = union([*main, *sums])
    both = total(main) + total(sums) - total(either)
    parts: Counter[str] = Counter()
    for a in found:
        kind = next((kind for kind, pattern in KINDS if pattern.search(a.name)), "")
        if kind not in ("nccl", "copies") and a.stream != main_stream:
            kind = "additions"
        parts[kind or "main_other"] += a.end - a.start
    span = either[-1][1] - either[0][0]
    result = {
        "span": span,
        "main": total(main),
        "sums": total(sums),
        "both": both,
        "exposed": total(sums) - both,
        "idle": span - total(either),
        "stalled": sum(ns for ns in pauses(either) if ns > LAUNCH_GAP_NS),
        **{kind: parts[kind] for kind in ("products", "main_other", "nccl", "copies", "additions")},
    }
    return {name: ns / steps / 1e6 for name, ns in result.items()} | {
        "longest_wait": max(pauses(main), default=0) / 1e6
    }


def union(spans: Iterable[Span]) -> Spans:
    """Spans without overlap, in order."""
    return joined(sorted(spans), 0)


def pauses(spans: Sequence[Span]) -> list[float]:
    """Between neighbours of `union`."""
    return [after[0] - before[1] for before, after in pairwise(spans)]


def total(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
