"""Behind the last layer's attention only the slots that the loss looks at go on.

Nothing there depends on other slots any more, so the output projection, the MLP and the norms of
the last layer need only the rows that the head will project.

Letters: A anchors, K slots, R projected rows, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dflash_ext.ops.gather_rows import gather_rows


class LiveRows(NamedTuple):
    """Which slot each row holds and the reverse; -1: none."""

    slot_of: Tensor  # [R] int64, of A * K slots
    row_of: Tensor  # [A * K]
    blocks: int
    size: int

    def pick(self, x: Tensor) -> Tensor:
        """Rows [R, H] of slots x [A, K, H]; zero where a row holds none."""
        return _Gather.apply(x.flatten(0, 1), self.slot_of, self.row_of)

    def place(self, rows: Tensor) -> Tensor:
        """Slots [A, K, H] of rows [R, H]; zero where no row holds a slot."""
        slots = _Gather.apply(rows, self.row_of, self.slot_of)
        return slots.view(self.blocks, self.size, -1)


def live_rows(rows: Tensor, n_rows: Tensor, blocks: int, size: int) -> LiveRows:
    """Of rows[:n_rows], different slots; `rows` [R] may be padded. Does not wait for the device."""
    order, slots = torch.arange(rows.shape[0], device=rows.device), blocks * size
    slot_of = rows.where(order < n_rows, -1)
    row_of = rows.new_full((slots + 1,), -1)
    row_of.scatter_(0, slot_of.where(slot_of >= 0, slots), order)  # padding goes behind the slots
    return LiveRows(slot_of, row_of[:slots], blocks, size)


class _Gather(Function):
    """Rows by one index; the way back is a gather by the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, reverse: Tensor) -> Tensor:
        ctx.reverse = reverse
        return gather_rows(x, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_rows(grad, ctx.reverse), None, None
