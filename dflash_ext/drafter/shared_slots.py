"""Slots that show one and the same token, the mask token, are projected once in the first layer.

Behind a block's clean tokens every slot has the same embedding, so that of A * K rows of queries,
keys and values before their rotation only A * clean + 1 differ. Later layers have seen where a slot
sits.

Letters: A anchors, K slots, H hidden, C channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dflash_ext.ops.dtypes import accumulate_dtype
from dflash_ext.ops.gather_rows import gather_rows

# Of the row that they share: its gradient is a sum over thousands of slots, and two rows of 16 bits
# carry it with twice the digits of one.
COPIES = 2


class SharedSlots(NamedTuple):
    """Blocks [A, K] whose slots from `clean` on are equal, in all blocks."""

    blocks: int
    size: int
    clean: int

    def distinct(self, x: Tensor) -> Tensor:
        """Rows [A * clean + COPIES, H] of x [A, K, H], which has no gradient: what differs."""
        shared = x[:1, self.clean].expand(COPIES, -1)
        return torch.cat([x[:, : self.clean].flatten(0, 1), shared])

    def spread(self, rows: Tensor) -> Tensor:
        """[A, K, C] of what became of the distinct rows [A * clean + COPIES, C]."""
        return _Spread.apply(rows, self)


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, shared: SharedSlots) -> Tensor:
        ctx.shared = shared
        blocks, size, clean = shared
        slot = torch.arange(size, device=rows.device)
        first = torch.arange(0, blocks * clean, clean, device=rows.device)
        row_of = (first[:, None] + slot).where(slot < clean, blocks * clean)
        return gather_rows(rows, row_of.flatten()).view(blocks, size, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        blocks, size, clean = ctx.shared
        grad = grad.view(blocks, size, -1)
        rows = grad.new_empty(blocks * clean + COPIES, grad.shape[2])
        rows[: blocks * clean].view(blocks, clean, -1).copy_(grad[:, :clean])
        rest = grad[:, clean:].sum((0, 1), dtype=accumulate_dtype(grad.dtype))
        for row in rows[blocks * clean :]:
            row.copy_(rest)
            rest = rest - row
        return rows, None
