"""block_attention: each draft block attends to its context prefix and to itself."""

from __future__ import annotations

from torch import Tensor

from dflash_ext.ops.block_attention.naive import block_attention_naive

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

    q               [A, K, Hq, D]  (Hq a multiple of Hk)
    k_ctx, v_ctx    [T, Hk, D]     packed context, shared by the blocks
    k_blk, v_blk    [A, K, Hk, D]  the blocks' own slots
    ctx_start, end  [A] i64        block a's context is [ctx_start, ctx_end); both T: none

    Slot k sees context [max(ctx_start, ctx_end + k - window + 1), ctx_end) and its own block's
    slots: all of them, or those <= k if causal, and with a window those nearer than it.
    """
    out, _ = block_attention_naive(
        q, k_ctx, v_ctx, k_blk, v_blk, ctx_start, ctx_end, scale=scale, window=window, causal=causal
    )
    return out
