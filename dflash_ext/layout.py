"""The block of a DFlash drafter: which tokens go in, what each slot predicts, where it sits.

This is the only owner of those facts; the planner, the model, the objective, the metric walk and
the export all read them here. Letters: A anchors, K slots of a block (`size`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ROW_ALIGN = 128  # the rows that the loss sees are padded to a multiple of it


@dataclass(frozen=True)
class BlockLayout:
    """One block of `size` slots that starts at an anchor token.

    Slot k sits at the anchor's position + k and predicts the token at anchor + k + `shift`. The
    first `prefix` slots hold real tokens (the anchor), the others the mask token. A slot whose
    label lies inside the prefix predicts a token it already sees, so it has no loss.
    `causal_in_block` is the in-block mask of full-attention layers.
    """

    size: int
    shift: int = 0
    causal_in_block: bool = False
    prefix: int = 1

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"BlockLayout.size: found {self.size}, want at least 2")
        if self.shift not in (0, 1):
            raise ValueError(f"BlockLayout.shift: found {self.shift}, want 0 or 1")
        if not 1 <= self.prefix < self.size:
            raise ValueError(f"BlockLayout.prefix: found {self.prefix}, want 1..{self.size - 1}")

    @property
    def first_loss_slot(self) -> int:
        """The first slot whose label lies beyond the prefix: 1 for DFlash, 0 for shift 1."""
        return self.prefix - self.shift

    @property
    def num_proposals(self) -> int:
        """Tokens one block proposes to the verifier."""
        return self.size - self.first_loss_slot

    def input_ids(
        self, anchor_tokens: Tensor, mask_token_id: int, prefix: Tensor | None = None
    ) -> Tensor:
        """Block input [A, K]: the clean tokens ([A], or [A, prefix]), then mask tokens.

        With `prefix` [A] each block has its own number of clean tokens, the first of its K
        anchor_tokens [A, K].
        """
        if prefix is not None:
            slots = torch.arange(self.size, device=prefix.device)
            return anchor_tokens.where(slots < prefix[:, None], mask_token_id)
        clean = anchor_tokens.reshape(-1, self.prefix)
        ids = clean.new_full((clean.shape[0], self.size), mask_token_id)
        ids[:, : self.prefix] = clean
        return ids

    def label_offsets(self) -> Tensor:
        """[K] int64: slot k predicts the token at anchor + offset."""
        return torch.arange(self.size) + self.shift

    def predecessor_offsets(self) -> Tensor:
        """[K] int64: the token before the label, where the label's teacher sits."""
        return self.label_offsets() - 1

    def positions(self, anchor_positions: Tensor) -> Tensor:
        """Rotary positions [A, K] of the slots of blocks anchored at `anchor_positions` [A]."""
        return anchor_positions[:, None] + torch.arange(self.size, device=anchor_positions.device)

    def loss_slots(self) -> Tensor:
        """[K] bool: the slots that can carry a loss."""
        return torch.arange(self.size) >= self.first_loss_slot

    def decay(self, gamma: float, prefix: Tensor | None = None) -> Tensor:
        """[K] float32 weights exp(-(k - k0) / gamma) from the first loss slot k0 on, 0 before.

        [A, K] with `prefix` [A], each block's own number of clean tokens.
        """
        first = self.first_loss_slot if prefix is None else prefix[:, None] - self.shift
        steps = torch.arange(self.size, dtype=torch.float32) - first
        return torch.where(steps >= 0, torch.exp(-steps / gamma), torch.zeros(()))
