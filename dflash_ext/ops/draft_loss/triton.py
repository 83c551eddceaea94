"""draft_loss' backward pass for 16-bit states on GPUs: a multiplication, 16 bytes at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_ext.ops.triton_launch import launch

BLOCK = 4096
NUM_WARPS = 8


@triton.jit
def loss_scale_kernel(x_ptr, factor_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    x = tl.load(x_ptr + at, mask, other=0.0).to(tl.float32)
    scaled = x * tl.load(factor_ptr)
    tl.store(out_ptr + at, scaled.to(out_ptr.dtype.element_ty), mask)


def scale_triton(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor in fp32, rounded to x's dtype; x contiguous, factor [1] fp32."""
    out = torch.empty_like(x)
    launch(
        loss_scale_kernel,
        (triton.cdiv(x.numel(), BLOCK),),
        x.device,
        x,
        factor,
        out,
        x.numel(),
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return out
