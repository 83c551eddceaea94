"""Rows of a matrix by index, zero where there is none: one kernel, and its own way back.

No operator of its own: only code that runs its own backward pass calls it.
"""

from __future__ import annotations

from torch import Tensor


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """[M, C] rows index[i] of x [N, C], 0 for an index of -1; index [M] int64 in [-1, N)."""
    if x.is_cuda:
        from dflash_ext.ops.gather_rows.triton import gather_rows_triton

        return gather_rows_triton(x, index)
    rows = x.new_zeros(index.shape[0], x.shape[1])
    found = index >= 0
    rows[found] = x[index[found]]
    return rows
