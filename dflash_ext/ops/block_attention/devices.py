"""Which code runs block_attention where: the C++ extension on CPUs, Triton on CUDA, else torch."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from dflash_ext.ops.block_attention.portable import portable_backward, portable_forward
from dflash_ext.ops.dtypes import accumulate_dtype

HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_DIM = 256  # of the Triton kernels


def check(
    tensors: list[Tensor], ranges: list[Tensor], window: int | None, others: dict[str, Tensor]
) -> None:
    """Raises RuntimeError, as the C++ kernels do; the ranges' values stay on their device.

    `others` are further tensors of q's shape (grad_out, out), of lse's, or of k_ctx's.
    """
    q, k_ctx, v_ctx, k_blk, v_blk = tensors
    for name, x, dims in (("q", q, 4), ("k_ctx", k_ctx, 3), ("k_blk", k_blk, 4)):
        if x.dim() != dims:
            raise RuntimeError(f"{name}: found {list(x.shape)}, want {dims} dimensions")
    blocks, slots, q_heads, dim = q.shape
    kv_heads = k_blk.shape[2]
    context, block = (k_ctx.shape[0], kv_heads, dim), (blocks, slots, kv_heads, dim)
    total = accumulate_dtype(q.dtype)
    kinds = {
        "k_ctx": (context, q.dtype),
        "v_ctx": (context, q.dtype),
        "k_blk": (block, q.dtype),
        "v_blk": (block, q.dtype),
        "ctx_start": ((blocks,), torch.int64),
        "ctx_end": ((blocks,), torch.int64),
        "grad_out": (q.shape, q.dtype),
        "out": (q.shape, q.dtype),
        "lse": (q.shape[:3], total),
        "dk_ctx": (context, total),
        "dv_ctx": (context, total),
    }
    named = dict(zip(list(kinds)[:6], (*tensors[1:], *ranges), strict=True)) | others
    for name, x in named.items():
        shape, dtype = kinds[name]
        if x.shape != shape or x.dtype != dtype or x.device != q.device:
            raise RuntimeError(
                f"{name}: found {list(x.shape)} {x.dtype} on {x.device}, "
                f"want {list(shape)} {dtype} on {q.device}"
            )
        if name in ("lse", "dk_ctx", "dv_ctx") and not x.is_contiguous():
            raise RuntimeError(f"{name}: found strides {x.stride()}, want contiguous")
    if kv_heads == 0 or q_heads % kv_heads:
        raise RuntimeError(f"q: found {q_heads} heads, want a multiple of the {kv_heads} of k_blk")
    if window is not None and window < 1:
        raise RuntimeError(f"window: found {window}, want >= 1")


def use_triton(q: Tensor, scale: float) -> bool:
    """Triton's kernels take the largest score of a row before they scale it: scale > 0."""
    return (
        HAS_TRITON
        and q.is_cuda
        and q.dtype in TRITON_DTYPES
        and q.shape[3] <= MOST_DIM
        and scale > 0
    )


def problem_of(tensors: list[Tensor], scale: float, window: int | None, causal: bool) -> Any:
    from dflash_ext.ops.block_attention.triton import Problem

    q, k_ctx, _, k_blk, _ = tensors
    blocks, slots, q_heads, dim = q.shape
    kv_heads = k_blk.shape[2]
    return Problem(
        blocks, slots, kv_heads, q_heads // kv_heads, dim, k_ctx.shape[0], scale, window, causal
    )


def forward(
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_blk: Tensor,
    v_blk: Tensor,
    ctx_start: Tensor,
    ctx_end: Tensor,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    tensors, ranges = [q, k_ctx, v_ctx, k_blk, v_blk], [ctx_start, ctx_end]
    check(tensors, ranges, window, {})
    if q.numel() == 0 or not use_triton(q, scale):
        return portable_forward(tensors, ranges, scale=scale, window=window, causal=causal)
    from dflash_ext.ops.block_attention import triton

    problem = problem_of(tensors, scale, window, causal)
    with torch.cuda.device(q.device):
        return triton.forward(problem, tensors, [x.contiguous() for x in ranges])


def backward(
    grad_out: Tensor,
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_blk: Tensor,
    v_blk: Tensor,
    out: Tensor,
    lse: Tensor,
    ctx_start: Tensor,
    ctx_end: Tensor,
    dk_ctx: Tensor,
    dv_ctx: Tensor,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors, ranges = [q, k_ctx, v_ctx, k_blk, v_blk], [ctx_start, ctx_end]
    others = {"grad_out": grad_out, "out": out, "lse": lse, "dk_ctx": dk_ctx, "dv_ctx": dv_ctx}
    check(tensors, ranges, window, others)
    if q.numel() == 0 or not use_triton(q, scale):
        return portable_backward(
            grad_out, tensors, lse, ranges, dk_ctx, dv_ctx,
            scale=scale, window=window, causal=causal,
        )  # fmt: skip
    from dflash_ext.ops.block_attention import triton

    problem = problem_of(tensors, scale, window, causal)
    ranges = [x.contiguous() for x in ranges]
    with torch.cuda.device(q.device):
        return triton.backward(problem, grad_out, tensors, out, lse, ranges, dk_ctx, dv_ctx)


def gradients(
    grad_out: Tensor,
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_blk: Tensor,
    v_blk: Tensor,
    out: Tensor,
    lse: Tensor,
    ctx_start: Tensor,
    ctx_end: Tensor,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk_ctx, dv_ctx, dk_blk, dv_blk), where nothing else adds to the context's gradients."""
    tensors, ranges = [q, k_ctx, v_ctx, k_blk, v_blk], [ctx_start, ctx_end]
    if q.numel() == 0 or not use_triton(q, scale):
        dtype = accumulate_dtype(q.dtype)
        dk_ctx, dv_ctx = (
            torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (k_ctx, v_ctx)
        )
        dq, dk_blk, dv_blk = torch.ops.dflash_ext.block_attention_backward.default(
            grad_out, *tensors, out, lse, *ranges, dk_ctx, dv_ctx,
            scale=scale, window=window, causal=causal,
        )  # fmt: skip
        return dq, dk_ctx.to(q.dtype), dv_ctx.to(q.dtype), dk_blk, dv_blk
    from dflash_ext.ops.block_attention import triton

    check(tensors, ranges, window, {"grad_out": grad_out, "out": out, "lse": lse})
    problem = problem_of(tensors, scale, window, causal)
    ranges = [x.contiguous() for x in ranges]
    dk_ctx, dv_ctx = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k_ctx, v_ctx))
    with torch.cuda.device(q.device):
        dq, dk_blk, dv_blk = triton.backward(
            problem, grad_out, tensors, out, lse, ranges, dk_ctx, dv_ctx, add=False
        )
    return dq, dk_ctx, dv_ctx, dk_blk, dv_blk


def register_devices() -> None:
    """Registers for CUDA and, as "default", for devices without a kernel of their own."""
    for key in ("CUDA", "default"):
        torch.library.impl("dflash_ext::block_attention", key)(forward)
        torch.library.impl("dflash_ext::block_attention_backward", key)(backward)
    torch.library.impl("dflash_ext::block_attention_gradients", "default")(gradients)
