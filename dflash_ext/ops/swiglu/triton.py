"""swiglu for GPUs: element by element, every tensor moves once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dflash_ext.ops.triton_launch import launch, rows_of

COLS = 2048
NUM_WARPS = 4


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, stride, SIZE: tl.constexpr, COLS: tl.constexpr):
    blocks: tl.constexpr = (SIZE + COLS - 1) // COLS
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * COLS + tl.arange(0, COLS)
    mask = cols < SIZE
    gate = tl.load(gate_up_ptr + row * stride + cols, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + SIZE + cols, mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * SIZE + cols, out.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def swiglu_backward_kernel(
    grad_ptr, gate_up_ptr, d_gate_up_ptr, grad_stride, stride, d_stride,
    SIZE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (SIZE + COLS - 1) // COLS
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * COLS + tl.arange(0, COLS)
    mask = cols < SIZE
    grad = tl.load(grad_ptr + row * grad_stride + cols, mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + row * stride + cols, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + SIZE + cols, mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    d_up = grad * gate * sigmoid
    at = d_gate_up_ptr + row * d_stride + cols
    tl.store(at, d_gate.to(d_gate_up_ptr.dtype.element_ty), mask)
    tl.store(at + SIZE, d_up.to(d_gate_up_ptr.dtype.element_ty), mask)


def swiglu_triton(gate_up: Tensor) -> Tensor:
    """[..., I] of gate_up [..., 2 I]."""
    size = gate_up.shape[-1] // 2
    out, flat = gate_up.new_empty(*gate_up.shape[:-1], size), rows_of(gate_up)
    launch(
        swiglu_kernel,
        (flat.shape[0] * triton.cdiv(size, COLS),),
        gate_up.device,
        flat,
        out,
        flat.stride(0),
        SIZE=size,
        COLS=COLS,
        num_warps=NUM_WARPS,
    )
    return out


def swiglu_backward_triton(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient [..., 2 I] of gate_up, for that of its activation [..., I]."""
    size = gate_up.shape[-1] // 2
    grad, flat, d_gate_up = rows_of(grad), rows_of(gate_up), gate_up.new_empty(gate_up.shape)
    launch(
        swiglu_backward_kernel,
        (flat.shape[0] * triton.cdiv(size, COLS),),
        gate_up.device,
        grad,
        flat,
        d_gate_up,
        grad.stride(0),
        flat.stride(0),
        2 * size,
        SIZE=size,
        COLS=COLS,
        num_warps=NUM_WARPS,
    )
    return d_gate_up
