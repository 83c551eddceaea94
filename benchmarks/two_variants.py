"""How drafters sum their gradients in step_two: as a run does, and what tells its costs apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from dflash_ext.drafter.overlap import FC_BLOCKS
from dflash_ext.dtypes import DTYPES
from dflash_ext.grad_copies import Board
from dflash_ext.grad_sync import GradSync, make_board

SUMS = ("library", "copies", "none", "meet", "late")


@dataclasses.dataclass(frozen=True)
class Variant:
    """How gradients are summed; None: as a run does it."""

    name: str = "default"
    sums: str = "default"  # library: NCCL or Gloo; late too, but behind the backward pass
    bucket_mib: int | None = None
    fc_blocks: int = FC_BLOCKS
    dtype: torch.dtype = torch.float32

    def board(self, devices: Sequence[torch.device]) -> Board | None:
        """Of a group with this variant."""
        if self.sums == "default":
            return make_board(devices)
        return Board(len(devices)) if self.sums == "copies" else None

    @property
    def is_summed(self) -> bool:
        return self.sums not in ("none", "meet")

    @classmethod
    def of(cls, words: str) -> Variant:
        """From "default", or "copies,dtype=bfloat16"."""
        fields: dict[str, Any] = {}
        for word in words.split(","):
            key, _, value = word.partition("=")
            if word in SUMS:
                fields["sums"] = word
            elif key in ("bucket_mib", "fc_blocks") and value.isdigit():
                fields[key] = int(value)
            elif key == "dtype" and value in DTYPES:
                fields[key] = DTYPES[value]
            elif word != "default":
                known = f"{', '.join(SUMS)}, bucket_mib=, fc_blocks= or dtype="
                raise ValueError(f"variant: found {word!r}, want {known}")
        return cls(words, **fields)


class MeetOnly(GradSync):
    """The ranks meet as often as for sums, of which there are none."""

    def start(self, grads: Sequence[torch.Tensor]) -> None:
        plan = self._plan(grads)
        plan.gather(grads)
        self._meet("all-reduce")
        self._meet("all-reduce")
        self._started.append((plan, grads, []))
