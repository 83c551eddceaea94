"""block_attention in plain torch: the specification, in any dtype, differentiated by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_ext.ops.dtypes import accumulate_dtype


def visible_keys(
    context: Tensor, block_size: int, width: int, window: int | None, causal: bool
) -> Tensor:
    """Bool [A, K, width + K]: what slot k of each block sees.

    Keys are the block's context, whose lengths are context[A], padded to `width`, then its K slots.
    Slot k has position context + k; the window is a bound on the distance between positions.
    """
    device = context.device
    slot = torch.arange(block_size, device=device)
    query = context[:, None] + slot
    own = query
    past = torch.arange(width, device=device).expand(context.numel(), width)
    present = torch.cat([past < context[:, None], torch.ones_like(own, dtype=torch.bool)], 1)
    distance = query[:, :, None] - torch.cat([past, own], 1)[:, None, :]
    seen = present[:, None, :].expand_as(distance)
    if causal:
        seen = seen & (distance >= 0)
    if window is not None:
        seen = seen & (distance.abs() < window)
    return seen


def block_attention_naive(
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
    """(out [A, K, Hq, D] in q's dtype, lse [A, K, Hq] in the accumulation dtype)."""
    num_blocks, block_size, q_heads, dim = q.shape
    kv_heads = k_blk.shape[2]
    dtype = accumulate_dtype(q.dtype)
    context = ctx_end - ctx_start
    width = int(context.max()) if num_blocks else 0
    gather = ctx_start[:, None] + torch.arange(width, device=q.device)
    gather = torch.minimum(gather, (ctx_end - 1).clamp_min(0)[:, None])

    def keys(context_part: Tensor, block_part: Tensor) -> Tensor:
        picked = context_part.index_select(0, gather.reshape(-1))
        picked = picked.view(num_blocks, width, kv_heads, dim)
        return torch.cat([picked, block_part], 1).to(dtype)

    grouped = q.to(dtype).view(num_blocks, block_size, kv_heads, q_heads // kv_heads, dim)
    scores = torch.einsum("akhgd,ashd->ahgks", grouped, keys(k_ctx, k_blk)) * scale
    seen = visible_keys(context, block_size, width, window, causal)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    lse = torch.logsumexp(scores, -1)
    probs = torch.exp(scores - lse[..., None])
    out = torch.einsum("ahgks,ashd->akhgd", probs, keys(v_ctx, v_blk))
    lse = lse.permute(0, 3, 1, 2).reshape(num_blocks, block_size, q_heads)
    return out.reshape(q.shape).to(q.dtype), lse.detach()
