"""What to do about memory that did not suffice: the plan's numbers, and the setting to lower."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from dflash_ext.config import Config, UserError
from dflash_ext.ops.draft_loss import MOST_CHUNK_ROWS
from dflash_ext.plan import GIB, Plan

# What allocators say, in lower case: torch's on a CPU and on a GPU, cuBLAS's, the system's.
_SAYINGS = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
)
# By the innermost file of this package that was at work: the stage, and the fields that decide its
# size, the most effective one first. Files that several stages use are not listed.
_STAGES = {
    "hs_queue.py": ("the slots", "topology.slots_per_drafter", "data.token_budget"),
    "target.py": ("the target", "data.token_budget", "data.max_length"),
    "target_fast.py": ("the target", "data.token_budget", "data.max_length"),
    "target_loop.py": ("the target", "data.token_budget", "data.max_length"),
    "fast_gdn.py": ("the target", "data.token_budget", "data.max_length"),
    "draft_loss": ("the loss", "train.loss_chunk_rows", "train.anchor_group"),
    "lm_head_topk": ("the loss", "train.loss_chunk_rows", "train.anchor_group"),
    "context.py": ("the drafter's context", "data.token_budget"),
    "loss.py": ("the drafter's activations", "train.anchor_group", "train.max_anchors"),
    "loop.py": ("the drafter", "train.anchor_group", "data.token_budget"),
    "optim.py": ("the optimizer", "drafter.num_layers"),
    "flat_params.py": ("the optimizer", "drafter.num_layers"),
    "checkpoint.py": ("the copy for a checkpoint", "drafter.num_layers"),
    "packing.py": ("the plans", "data.token_budget", "train.max_anchors"),
}
_EVALUATION = ("the evaluation", "data.token_budget")  # wherever in it
_ANY = ("the run", "data.token_budget", "train.anchor_group")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation failed, on a GPU or on the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(said in text for said in _SAYINGS)


def advice(error: BaseException, cfg: Config) -> str:
    """One line: what ran out of memory, what to lower, what the run was planned to need."""
    stage, *names = _stage(error)
    fields = " or ".join(f"{name} ({_value(cfg, name)})" for name in names)
    return f"{stage} ran out of memory: lower {fields}; planned: {_planned(cfg)}"


def _stage(error: BaseException) -> tuple[str, ...]:
    package = Path(__file__).parent
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [path for path in reversed(frames) if package in path.parents]
    if any(path.name == "acceptance.py" for path in ours):
        return _EVALUATION
    names = [name for path in ours for name in (path.name, path.parent.name)]
    return next((_STAGES[name] for name in names if name in _STAGES), _ANY)


def _value(cfg: Config, name: str) -> object:
    section, _, field = name.partition(".")
    value = getattr(getattr(cfg, section), field)
    if value is None and field == "loss_chunk_rows":
        return f"null, that is up to {MOST_CHUNK_ROWS}"
    return value if value is not None else f"null, that is {cfg.train.max_anchors}"


def _planned(cfg: Config) -> str:
    try:
        memory = Plan(cfg).memory
    except (UserError, MemoryError):  # a target whose config has gone, or no memory even for this
        return "unknown"
    devices = []
    for device, parts in memory.items():
        largest = sorted(parts.items(), key=lambda part: -part[1])
        total = sum(parts.values())
        unit, name = (GIB, "GiB") if total >= GIB else (2**20, "MiB")
        numbers = ", ".join(f"{part} {size / unit:.1f}" for part, size in largest)
        devices.append(f"{device} {total / unit:.1f} {name} ({numbers})")
    return "; ".join(devices)
