"""The targets of a run before its threads start: copies, fused modules, warm-up."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from dflash_ext.config import ModelConfig
from dflash_ext.data.packing import BatchPlanner
from dflash_ext.fast_gdn import gdn_modules
from dflash_ext.fp8 import Fp8Effect, quantise_target
from dflash_ext.target import Target
from dflash_ext.target_fast import fuse_target

Shape = tuple[int, int]
MOST_PASSES = 6  # of full size
NORM_ROWS = 2048 * 32  # one for each token and head: with so many more, a norm is compiled anew
SHORT = 64  # tokens of a row: one chunk of the gated delta rule


def fuse(target: Target) -> None:
    """Let a target on GPUs run fused modules; says which in its ``kernel_lines``."""
    if target.device.type != "cuda":
        return
    fused = fuse_target(target.model, target.gdn_kernels)
    counts = ", ".join(f"{count} {what}" for what, count in fused.items())
    target.kernel_lines.append(f"fused modules: {counts or 'none'}")


def with_weights(
    target: Target, cfg: ModelConfig, planner: BatchPlanner, layer_ids: Sequence[int]
) -> Fp8Effect | None:
    """Brings the target's weights into the form of model.weights; the effect, if there is one."""
    if cfg.weights != "fp8":
        return None
    effect = quantise_target(target, planner.batch(0), layer_ids)
    target.kernel_lines.append(effect.line(cfg.dtype))
    return effect


def copies(target: Target, entries: Sequence[str]) -> dict[str, Target]:
    """The target of each entry of topology.targets; it was loaded for the first one."""
    others = dict.fromkeys(entry for entry in entries if entry != entries[0])
    return {entries[0]: target} | {entry: target.copy_to(entry) for entry in others}


def representative_shapes(shapes: Iterable[Shape], gdn_heads: Iterable[int] = ()) -> list[Shape]:
    """The shapes [B, S] to warm up with, largest first: the largest one, then short ones.

    Triton compiles kernels anew for sizes that are 1, or divisible by 16: short rows will do. Those
    of flash-linear-attention are also compiled for every B, for which they will do, too, and their
    norms for ranges of the rows they have with each of `gdn_heads` (a hybrid target's numbers of
    heads): of these ranges the largest are taken.
    """
    heads = tuple(gdn_heads)
    shapes = sorted(shapes, key=_order, reverse=True)
    if not shapes:
        return []
    ranges = {
        tuple(-(-rows * length * count // NORM_ROWS) for count in heads): (rows, length)
        for rows, length in reversed(shapes)
    }
    full = list(ranges.values())[: -MOST_PASSES - 1 : -1]
    short: dict[tuple[int, ...], Shape] = {}
    for rows, length in shapes:
        kind = (rows == 1, rows % 16 == 0, length % 16 == 0)
        short.setdefault(kind, (rows, min(length, SHORT - (length % 16 > 0))))
        if heads:
            short.setdefault((rows,), (rows, min(length, SHORT)))
    seen = dict.fromkeys(full)
    return [*full, *sorted(set(short.values()) - seen.keys(), key=_order, reverse=True)]


def gdn_heads(target: Target) -> set[int]:
    """The numbers of heads that GatedDeltaNet layers on flash-linear-attention's kernels have."""
    if target.gdn_kernels is None:
        return set()
    names = ("num_k_heads", "num_v_heads")
    return {getattr(module, name) for module in gdn_modules(target.model) for name in names}


def _order(shape: Shape) -> tuple[int, Shape]:
    return shape[0] * shape[1], shape


def needs_warm_up(device: torch.device) -> bool:
    """On a CPU nothing is tuned or compiled."""
    return device.type == "cuda"


def warm_up(
    targets: Mapping[str, Target],
    shapes: Iterable[Shape],
    layer_ids: Sequence[int],
    need_last: bool,
) -> list[str]:
    """Forward passes of representative shapes, one target after the other; says how long it took.

    Kernels are tuned and compiled here, in one thread (Triton's and flash-linear-attention's caches
    race when cold) and while there is most memory to spare. Call it before slots and drafters are
    allocated.
    """
    shapes, lines = list(shapes), []
    for entry, target in targets.items():
        # What was tuned for the first target holds for its copies.
        chosen = representative_shapes(shapes, gdn_heads(target))
        if not needs_warm_up(target.device) or not chosen:
            continue
        start = time.perf_counter()
        for shape in chosen:
            _pass(shape, layer_ids, need_last, target)
        _give_back(target)
        rows, length = chosen[0]
        lines.append(
            f"warm-up  {entry}: {len(chosen)} shapes of the target's input, the largest "
            f"{rows} x {length}, {time.perf_counter() - start:.1f} s"
        )
    return lines


def first_pass(
    shapes: Iterable[Shape], target: Target, layer_ids: Sequence[int], need_last: bool
) -> Callable[[Target], None] | None:
    """For the thread of each target on GPUs, on its own streams: a pass of the largest shape.

    What it takes is there for all batches, of which a later epoch may have the largest one, and if
    it is too much, the run ends now. None on a CPU.
    """
    shape = max(shapes, key=_order, default=None)
    if shape is None or not needs_warm_up(target.device):
        return None
    return functools.partial(_pass, shape, layer_ids, need_last)


def _pass(shape: Shape, layer_ids: Sequence[int], need_last: bool, target: Target) -> None:
    rows, length = shape
    ids = torch.arange(rows * length, device=target.device) % target.info.vocab_size
    target.forward_capture(ids.view(shape), layer_ids, lambda index, hidden: None, need_last)


def _give_back(target: Target) -> None:
    """What the passes took: the workers' streams could not use it."""
    devices = [device for device in target.devices if device.type == "cuda"]
    for device in devices:
        torch.cuda.synchronize(device)
    if devices:
        torch.cuda.empty_cache()  # of all devices, and it can unmap what is still in use
