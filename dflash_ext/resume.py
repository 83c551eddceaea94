"""What a checkpoint gives back to a run, and whether it is a checkpoint of that run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from dflash_ext.checkpoint import CheckpointManager
from dflash_ext.config import Config, UserError, load_config, to_dict
from dflash_ext.config_values import shown
from dflash_ext.drafter.spec import DrafterSpec
from dflash_ext.run_folder import CONFIG

# Fields that a resumed run may change; all of log, checkpoint and topology may too. A text that
# moved is found by its hash.
MAY_CHANGE = {
    *(
        "data.train",
        "data.eval",
        "data.hidden_states",
        "data.num_workers",
        "train.steps",
        "train.epochs",
    ),
    *("train.metrics_every", "train.eval_every", "train.stall_timeout_s"),
    *("train.max_nonfinite_steps", "train.recompute", "train.cuda_graph"),
}
_META: dict[str, tuple[type, ...]] = {
    "world": (int,),
    "batches": (int,),
    "tokens": (int,),
    "data_hash": (str,),
    "config": (dict,),
    "drafter": (dict,),
    "score": (int, float, NoneType),
    "accept_len_before": (int, float, NoneType),
}


@dataclass
class Resume:
    """What a checkpoint gives back: nothing, for a run that starts. `notes` are for the user."""

    step: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    drafter: DrafterSpec | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def batches(self) -> int:
        """Batches that all drafters together have trained."""
        return int(self.meta.get("batches", 0))

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names start with `prefix`, without it."""
        named = self.tensors.items()
        return {k.removeprefix(prefix): v for k, v in named if k.startswith(prefix)}

    def check_same_text(self, data_hash: str, accept_changed: bool) -> None:
        """Raise UserError if the run trained on other text, unless that is accepted."""
        want = self.meta.get("data_hash", data_hash)
        if data_hash == want:
            return
        found = f"data.train: found text with hash {data_hash[:12]}"
        before = f"{want[:12]} as in the checkpoint of step {self.step}"
        if not accept_changed:
            raise UserError(f"{found}, want {before}, or --accept_changed_data to go on with it")
        self.notes.append(f"warning  {found}, not {before}: going on with it")

    def check_steps(self, total: int) -> None:
        """Raise UserError if the run is to end before where it is; notes if it ends there."""
        if total < self.step:
            raise UserError(
                f"train.steps: found {total}, want at least {self.step}, the checkpoint's step"
            )
        if self.meta and total == self.step:
            self.notes.append(f"resume   all {total} steps are done: nothing is left to train")

    def check_same_target(self, checksum: int) -> None:
        """Raise UserError if the run trained on another target under this name."""
        want = self.meta.get("target", checksum)
        if checksum != want:
            raise UserError(
                f"model.target: found weights with checksum {checksum}, want {want} as in the "
                f"checkpoint of step {self.step}"
            )


def weights_checksum(parameters: Iterable[Tensor]) -> int:
    """Of the bits: a sum of floats would depend on the order in which a machine adds."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = (p.detach().reshape(-1).view(words[p.element_size()]) for p in parameters)
    return sum(int(part.sum()) for part in bits)


def load_resume(checkpoints: CheckpointManager, cfg: Config, processes: int = 1) -> Resume:
    """The newest intact checkpoint; nothing, if the run ended before its first one.

    Raises UserError if none is intact, or the run that was begun is not this one.
    """
    begun = checkpoints.folder.parent / CONFIG
    if not checkpoints.steps():
        if begun.exists():
            _check_same_run(to_dict(load_config(begun)), cfg, str(begun))
        note = "resume   found no checkpoint yet: from the beginning"
        if not cfg.checkpoint.every:
            note += "; checkpoint.every 0 saves only at the end or at a signal"
        return Resume(notes=[note])
    tensors, meta = checkpoints.load()
    place = f"{checkpoints.folder}, step {meta['step']}"
    for name, types in _META.items():
        if type(meta.get(name)) not in types:
            raise UserError(
                f"{place}: meta data: {name}: found {shown(meta.get(name))}, "
                f"want a checkpoint of this program"
            )
    _check_same_run(meta["config"], cfg, place)
    world = processes * len(cfg.topology.drafters)
    notes = []
    if meta["world"] != world:
        notes.append(
            f"resume   {meta['world']} drafters before, {world} now: goes on with the next batch, "
            "each example once an epoch; not bit for bit what the same number would train"
        )
    drafter = DrafterSpec.from_hf_config(meta["drafter"], place)
    return Resume(meta["step"], tensors, meta, drafter, notes)


def _check_same_run(saved: dict[str, Any], cfg: Config, place: str) -> None:
    """What decides the weights must be as it was; lengths, logging and machines may change."""
    now, defaults = to_dict(cfg), to_dict(Config())
    sections = ("model", "drafter", "data", "train")
    for section in sections:
        if not isinstance(saved.get(section), dict):
            found = shown(saved.get(section))
            raise UserError(f"{place}: meta data: config.{section}: found {found}, want its fields")
    for section in sections:
        for name, value in now[section].items():
            old = saved[section].get(name, defaults[section][name])  # a field of a later release
            if f"{section}.{name}" not in MAY_CHANGE and value != old:
                raise UserError(
                    f"{section}.{name}: found {value!r}, want {old!r} as in the run to resume"
                )
