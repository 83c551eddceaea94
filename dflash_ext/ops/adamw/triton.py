"""adamw for GPUs: one pass over 30 bytes of a bf16 parameter. Rounds as the naive twin does."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dflash_ext.ops.triton_launch import launch

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def adamw_kernel(
    master_ptr, weight_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, scalars_ptr, numel, num_decayed,
    one_minus_beta1, one_minus_beta2, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = tl.load(scalars_ptr) != 0
    clip, decay = tl.load(scalars_ptr + 1), tl.load(scalars_ptr + 2)
    step_size, root_bias2 = tl.load(scalars_ptr + 3), tl.load(scalars_ptr + 4)
    mask = (at < numel) & live
    grad = tl.load(grad_ptr + at, mask, other=0.0) * clip
    master = tl.load(master_ptr + at, mask, other=0.0)
    first = tl.load(exp_avg_ptr + at, mask, other=0.0)
    second = tl.load(exp_avg_sq_ptr + at, mask, other=0.0)
    master = tl.where(at < num_decayed, master - master * decay, master)
    first = first + (grad - first) * one_minus_beta1
    second = second + (grad * grad - second) * one_minus_beta2
    denominator = tl.div_rn(tl.sqrt_rn(second), root_bias2) + eps
    master = master - step_size * tl.div_rn(first, denominator)
    tl.store(exp_avg_ptr + at, first, mask)
    tl.store(exp_avg_sq_ptr + at, second, mask)
    tl.store(master_ptr + at, master, mask)
    if weight_ptr is not None:
        tl.store(weight_ptr + at, master.to(weight_ptr.dtype.element_ty), mask)


def adamw_triton(
    master: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Tensor,
    num_decayed: int,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    launch(
        adamw_kernel,
        (triton.cdiv(master.numel(), BLOCK),),
        master.device,
        master,
        weight,
        grad,
        exp_avg,
        exp_avg_sq,
        scalars,
        master.numel(),
        num_decayed,
        1 - beta1,
        1 - beta2,
        eps,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        # A product and a sum are rounded one by one, as in the naive twin.
        enable_fp_fusion=False,
    )
