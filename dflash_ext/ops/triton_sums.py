"""Second stage of the weights' gradients: sums over the rows that programs left behind."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dflash_ext.ops.triton_launch import launch


@triton.jit
def sum_rows_kernel(
    rows_ptr, first_ptr, second_ptr, split, num_rows,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    begin, end, out_ptr = 0, split, first_ptr
    if tl.program_id(1) == 1:
        begin, end, out_ptr = split, num_rows, second_ptr
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(begin, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & (cols < SIZE)[None, :]
        total += tl.load(rows_ptr + rows[:, None] * SIZE + cols[None, :], mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, 0), cols < SIZE)


def sum_rows(rows: Tensor, split: int | None = None) -> tuple[Tensor, Tensor]:
    """Sums [C] of rows [:split] and [split:] of fp32 [R, C], in one order; None: all, and [0]."""
    num_rows, size = rows.shape
    first = rows.new_empty(size)
    second = rows.new_empty(0 if split is None else size)
    split = num_rows if split is None else split
    # Few rows of many columns, or the reverse: one or two loads in a row at 8192 sums a program.
    tile = min(512, triton.next_power_of_2(max(1, split, num_rows - split)))
    launch(
        sum_rows_kernel,
        (triton.cdiv(size, 8192 // tile), 2 if second.numel() else 1),
        rows.device,
        rows,
        first,
        second,
        split,
        num_rows,
        SIZE=size,
        ROWS=tile,
        COLS=8192 // tile,
        num_warps=8,
    )
    return first, second
