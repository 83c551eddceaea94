"""block_attention: each draft block attends to its context prefix and to itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_ext.ops.block_attention.devices import register_devices
from dflash_ext.ops.dtypes import accumulate_dtype

__all__ = ["block_attention"]


def block_attention(
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
) -> Tensor:
    """Attention of A blocks of K slots; returns [A, K, Hq, D] in q's dtype.

    q               [A, K, Hq, D]  Hq a multiple of Hk; sums are fp32 (fp64 for fp64)
    k_ctx, v_ctx    [T, Hk, D]     packed context, shared by the blocks
    k_blk, v_blk    [A, K, Hk, D]  the blocks' own slots
    ctx_start, end  [A] i64        block a's context is [ctx_start, ctx_end); both T: none

    Slot k sees context [max(ctx_start, ctx_end + k - window + 1), ctx_end) and its own block's
    slots: all of them, or those <= k if causal, and with a window those nearer than it.
    The gradient is deterministic, and exactly zero for context that no block sees.

    Raises RuntimeError for shapes or dtypes that do not fit; for ranges outside T an IndexError on
    CPUs, while GPU kernels, whose host never sees the ranges, cut them to the context.
    """
    out, _ = torch.ops.dflash_ext.block_attention.default(
        q, k_ctx, v_ctx, k_blk, v_blk, ctx_start, ctx_end, scale=scale, window=window, causal=causal
    )
    return out


@torch.library.register_fake("dflash_ext::block_attention")
def _(
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
    torch._check(q.dim() == 4, lambda: f"q: found {q.shape}, want [A, K, Hq, D]")
    torch._check(k_ctx.dim() == 3, lambda: f"k_ctx: found {k_ctx.shape}, want [T, Hk, D]")
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))


@torch.library.register_fake("dflash_ext::block_attention_backward")
def _(
    grad_out: Tensor,
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_blk: Tensor,
    v_blk: Tensor,
    *_others: Tensor,
    scale: float,
    window: int | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k_blk.new_empty(k_blk.shape), v_blk.new_empty(v_blk.shape)


@torch.library.register_fake("dflash_ext::block_attention_gradients")
def _(
    grad_out: Tensor,
    *tensors: Tensor,
    scale: float,
    window: int | None = None,
    causal: bool = False,
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors[:5])


def _save_inputs(
    ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: tuple[Tensor, Tensor]
) -> None:
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.options = keyword_only_inputs
    *tensors, ctx_start, ctx_end = inputs
    ctx.save_for_backward(*tensors, out, lse, ctx_start, ctx_end)


def _backward(ctx: Any, grad_out: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: a checkpoint hands each tensor out only once
    gradients = torch.ops.dflash_ext.block_attention_gradients.default(
        grad_out, *saved, **ctx.options
    )
    return *gradients, None, None


torch.library.register_autograd(
    "dflash_ext::block_attention", _backward, setup_context=_save_inputs
)

register_devices()
