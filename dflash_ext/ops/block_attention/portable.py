"""block_attention in plain torch for any device and dtype, in bounded memory.

Blocks are taken in runs whose contexts together form one range of keys, so that a run is a few
matrix products under a mask. It reads the ranges on the host: unlike the kernels, it waits for the
device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dflash_ext.ops.dtypes import accumulate_dtype

MOST_SCORES = 2**25  # of a run, unless one block alone has more


def runs(
    ctx_start: Tensor, ctx_end: Tensor, rows: int, most_scores: int
) -> Iterator[tuple[slice, slice]]:
    """(blocks, keys) of runs of consecutive blocks with `rows` rows of scores each."""
    ranges = list(zip(ctx_start.tolist(), ctx_end.tolist(), strict=True))
    first, low, high = 0, 0, 0
    for a, (start, end) in enumerate(ranges):
        if start == end:
            start, end = (low, low) if a > first else (0, 0)
        new_low, new_high = (start, end) if high == low else (min(low, start), max(high, end))
        if start == end and a > first:
            new_low, new_high = low, high
        if a > first and (a + 1 - first) * rows * (new_high - new_low) > most_scores:
            yield slice(first, a), slice(low, high)
            first, new_low, new_high = a, start, end
        low, high = new_low, new_high
    if ranges:
        yield slice(first, len(ranges)), slice(low, high)


def seen_keys(
    start: Tensor, end: Tensor, keys: slice, slots: int, window: int | None, causal: bool
) -> Tensor:
    """Bool [a, K, keys + a * K]: what the slots of a run see of its context and of its slots."""
    device, blocks = start.device, start.numel()
    slot = torch.arange(slots, device=device)
    position = torch.arange(keys.start, keys.stop, device=device)
    seen = (position >= start[:, None]) & (position < end[:, None])
    seen = seen[:, None, :].expand(-1, slots, -1)
    distance = slot[:, None] - slot
    own = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        own = own & (distance >= 0)
    if window is not None:
        seen = seen & (end[:, None, None] + slot[:, None] - position < window)
        own = own & (distance.abs() < window)
    same = torch.eye(blocks, dtype=torch.bool, device=device)
    own = (same[:, None, :, None] & own[None, :, None, :]).reshape(blocks, slots, blocks * slots)
    return torch.cat([seen, own], 2)


class Run:
    """Scores and operands of a run; rows are slots x group, as [Hk, a * K * G, ...]."""

    def __init__(
        self,
        tensors: list[Tensor],
        ranges: list[Tensor],
        where: tuple[slice, slice],
        scale: float,
        window: int | None,
        causal: bool,
    ) -> None:
        q, k_ctx, v_ctx, k_blk, v_blk = tensors
        self.blocks, self.keys = where
        self.kv_heads = k_blk.shape[2]
        self.dtype = accumulate_dtype(q.dtype)
        start, end = (x[self.blocks] for x in ranges)
        seen = seen_keys(start, end, self.keys, q.shape[1], window, causal)
        group = q.shape[2] // self.kv_heads
        used = seen.flatten(0, 1).any(0)
        self.q = self.to_rows(q)
        self.k, self.v = (
            torch.cat([context[self.keys], block[self.blocks].flatten(0, 1)])
            .to(self.dtype)
            .masked_fill(~used[:, None, None], 0)  # may be NaN, which 0 * NaN is too
            .transpose(0, 1)
            for context, block in ((k_ctx, k_blk), (v_ctx, v_blk))
        )
        seen = seen.flatten(0, 1).repeat_interleave(group, 0)
        self.scores = (self.q @ self.k.mT * scale).masked_fill_(~seen, float("-inf"))

    def to_rows(self, x: Tensor) -> Tensor:
        x = x[self.blocks].to(self.dtype)
        return x.unflatten(2, (self.kv_heads, -1)).permute(2, 0, 1, 3, 4).flatten(1, 3)

    def from_rows(self, rows: Tensor, like: Tensor) -> Tensor:
        """[Hk, a * K * G, ...] as [a, K, Hq, ...], where `like` is [A, K, Hq, ...]."""
        blocks = self.blocks.stop - self.blocks.start
        shape = (self.kv_heads, blocks, like.shape[1], like.shape[2] // self.kv_heads)
        rows = rows.reshape(*shape, *rows.shape[2:])
        return rows.permute(1, 2, 0, 3, *range(4, rows.dim())).flatten(2, 3)

    def split(self, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients [Hk, keys + a * K, D] of the context and of the blocks, heads second."""
        count = self.keys.stop - self.keys.start
        gradients = gradients.transpose(0, 1)
        return gradients[:count], gradients[count:]


def portable_forward(
    tensors: list[Tensor],
    ranges: list[Tensor],
    *,
    scale: float,
    window: int | None,
    causal: bool,
    most_scores: int = MOST_SCORES,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q, k_ctx, v_ctx, k_blk, v_blk under ctx_start, ctx_end."""
    q = tensors[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=accumulate_dtype(q.dtype), device=q.device)
    for where in runs(ranges[0], ranges[1], q.shape[1] * q.shape[2], most_scores):
        run = Run(tensors, ranges, where, scale, window, causal)
        row_lse = run.scores.logsumexp(-1)
        values = run.scores.sub_(row_lse[..., None]).exp_() @ run.v
        out[run.blocks] = run.from_rows(values, q).to(q.dtype)
        lse[run.blocks] = run.from_rows(row_lse, q)
    return out, lse


def portable_backward(
    grad_out: Tensor,
    tensors: list[Tensor],
    lse: Tensor,
    ranges: list[Tensor],
    dk_ctx: Tensor,
    dv_ctx: Tensor,
    *,
    scale: float,
    window: int | None,
    causal: bool,
    most_scores: int = MOST_SCORES,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk_blk, dv_blk); adds to dk_ctx and dv_ctx."""
    q, _, _, k_blk, v_blk = tensors
    dq, dk_blk, dv_blk = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k_blk, v_blk)
    )
    for where in runs(ranges[0], ranges[1], q.shape[1] * q.shape[2], most_scores):
        run = Run(tensors, ranges, where, scale, window, causal)
        grads = run.to_rows(grad_out)
        probs = run.scores.sub_(run.to_rows(lse[..., None])).exp_()
        d_scores = grads @ run.v.mT
        d_scores = d_scores.sub_((probs * d_scores).sum(-1, keepdim=True)).mul_(probs)
        dq[run.blocks] = run.from_rows(d_scores @ run.k * scale, q).to(q.dtype)
        for gradients, context, block in (
            (d_scores.mT @ run.q * scale, dk_ctx, dk_blk),
            (probs.mT @ grads, dv_ctx, dv_blk),
        ):
            of_context, of_blocks = run.split(gradients)
            context[run.keys] += of_context
            block[run.blocks] = of_blocks.unflatten(0, (-1, q.shape[1])).to(q.dtype)
    return dq, dk_blk, dv_blk
