"""rms_norm for GPUs: a program holds whole rows, so every tensor moves once.

The gradient of the weight is summed by each program over its rows, in order; a second kernel adds
the programs' sums. Without atomics it is the same in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_ext.ops.triton_launch import launch, num_sms, rows_of, shared_bytes
from dflash_ext.ops.triton_sums import sum_rows


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    rstd_ptr,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    mask = (rows < num_rows)[:, None] & (cols < SIZE)[None, :]
    weight = tl.load(weight_ptr + cols, cols < SIZE, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask, other=0.0)
    at = rows[:, None] * SIZE + cols[None, :]
    if residual_ptr is not None:
        residual = tl.load(
            residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask, other=0.0
        )
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + at, x, mask)
    x = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / SIZE + eps)
    tl.store(out_ptr + at, (x * rstd[:, None] * weight[None, :]).to(out_ptr.dtype.element_ty), mask)
    tl.store(rstd_ptr + rows, rstd, rows < num_rows)


@triton.jit
def rms_norm_backward_kernel(
    grad_ptr,
    grad_total_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    num_rows,
    grad_stride,
    grad_total_stride,
    x_stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    cols = tl.arange(0, COLS)
    weight = tl.load(weight_ptr + cols, cols < SIZE, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, COLS], tl.float32)
    for block in tl.range(
        tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        rows = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (cols < SIZE)[None, :]
        grad = tl.load(grad_ptr + rows[:, None] * grad_stride + cols[None, :], mask, other=0.0)
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask, other=0.0)
        rstd = tl.load(rstd_ptr + rows, rows < num_rows, other=0.0)[:, None]
        grad = grad.to(tl.float32)
        normed = x.to(tl.float32) * rstd
        dweight += grad * normed
        weighted = grad * weight[None, :]
        dx = (weighted - normed * (tl.sum(weighted * normed, 1) / SIZE)[:, None]) * rstd
        if grad_total_ptr is not None:
            dx += tl.load(
                grad_total_ptr + rows[:, None] * grad_total_stride + cols[None, :], mask, other=0.0
            ).to(tl.float32)
        at = rows[:, None] * SIZE + cols[None, :]
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask)
    partial = partial_ptr + tl.program_id(0).to(tl.int64) * SIZE + cols
    tl.store(partial, tl.sum(dweight, 0), cols < SIZE)


def tile(size: int) -> dict[str, int]:
    """Rows and columns of a program's tile, and its warps, for rows of `size`."""
    cols = triton.next_power_of_2(size)
    rows = max(1, 2048 // cols)
    return {"ROWS": rows, "COLS": cols, "num_warps": min(16, max(4, rows * cols // 512))}


def pipeline(x: Tensor, config: dict[str, int]) -> tuple[int, int]:
    """(stages, programs of a multiprocessor): loads under way in shared memory, or in registers."""
    block = 3 * config["ROWS"] * config["COLS"] * x.dtype.itemsize  # two gradients and x
    ahead = min(3, shared_bytes(x.device) // block)
    return (1 + ahead, 1) if ahead >= 2 else (1, 2)


def rms_norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed, x + residual, 1 / rms) of x [..., H]; without a residual the second is x."""
    size = x.shape[-1]
    flat, config = rows_of(x), tile(size)
    out, rstd = (x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32))
    more = None if residual is None else rows_of(residual)
    total = x if residual is None else x.new_empty(x.shape)
    launch(
        rms_norm_kernel,
        (triton.cdiv(flat.shape[0], config["ROWS"]),),
        x.device,
        flat,
        more,
        weight,
        out,
        None if residual is None else total,
        rstd,
        flat.shape[0],
        flat.stride(0),
        0 if more is None else more.stride(0),
        eps,
        SIZE=size,
        **config,
    )
    return out, total, rstd


def rms_norm_backward_triton(
    grad_out: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """(gradient of x, gradient of weight in fp32)."""
    size = x.shape[-1]
    grad, flat, config = rows_of(grad_out), rows_of(x), tile(size)
    more = None if grad_total is None else rows_of(grad_total)
    dx = x.new_empty(x.shape)
    stages, per_sm = pipeline(x, config)
    programs = min(triton.cdiv(flat.shape[0], config["ROWS"]), per_sm * num_sms(x.device))
    partial = x.new_empty(programs, size, dtype=torch.float32)
    launch(
        rms_norm_backward_kernel,
        (programs,),
        x.device,
        grad,
        more,
        flat,
        weight,
        rstd,
        dx,
        partial,
        flat.shape[0],
        grad.stride(0),
        0 if more is None else more.stride(0),
        flat.stride(0),
        SIZE=size,
        STAGES=stages,
        **config,
    )
    return dx, sum_rows(partial)[0]
