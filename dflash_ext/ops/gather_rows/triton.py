"""gather_rows for GPUs: a program copies one row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dflash_ext.ops.triton_launch import launch, rows_of

MOST_COLS = 8192  # of a row in registers at a time


@triton.jit
def gather_rows_kernel(
    x_ptr, index_ptr, out_ptr, stride, SIZE: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(index_ptr + row)
    for start in tl.static_range(0, SIZE, COLS):
        cols = start + tl.arange(0, COLS)
        mask = cols < SIZE
        x = tl.load(x_ptr + source * stride + cols, mask & (source >= 0), other=0.0)
        tl.store(out_ptr + row * SIZE + cols, x, mask)


def gather_rows_triton(x: Tensor, index: Tensor) -> Tensor:
    """As `gather_rows`; rows of x may have any stride."""
    flat, size = rows_of(x), x.shape[1]
    out = x.new_empty(index.shape[0], size)
    cols = min(MOST_COLS, triton.next_power_of_2(size))
    launch(
        gather_rows_kernel,
        (index.shape[0],),
        x.device,
        flat,
        index,
        out,
        flat.stride(0),
        SIZE=size,
        COLS=cols,
        num_warps=max(1, min(8, cols // 1024)),
    )
    return out
