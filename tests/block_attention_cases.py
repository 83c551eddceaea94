"""Cases of block_attention, and attention under one dense mask in plain torch."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

MASKS = [
    {},
    {"causal": True},
    {"window": 7},
    {"window": 3, "causal": True},
    {"window": 1},
    {"window": 1000},
]
NAMES = ("out", "q", "k_ctx", "v_ctx", "k_blk", "v_blk")


@dataclasses.dataclass
class Case:
    tensors: list[Tensor]  # q, k_ctx, v_ctx, k_blk, v_blk
    ctx_start: Tensor
    ctx_end: Tensor
    grad_out: Tensor

    def run(self, function, dtype: torch.dtype, **options) -> dict[str, Tensor]:
        """Output and gradients of an attention function with inputs in `dtype`."""
        inputs = [x.detach().to(dtype, copy=True).requires_grad_() for x in self.tensors]
        scale = inputs[0].shape[-1] ** -0.5
        out = function(*inputs, self.ctx_start, self.ctx_end, scale=scale, **options)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(self.grad_out.to(dtype))
        return dict(zip(NAMES, [out.detach(), *(x.grad for x in inputs)], strict=True))


def make_case(
    blocks: int,
    slots: int,
    heads: tuple[int, int],
    dim: int,
    context: int,
    dtype: torch.dtype = torch.float32,
    longest: int = 40,
) -> Case:
    """Overlapping, unsorted blocks, the first two with one anchor; the last is padding."""
    shapes = [
        (blocks, slots, heads[0], dim),
        *[(context, heads[1], dim)] * 2,
        *[(blocks, slots, heads[1], dim)] * 2,
    ]
    end = torch.randint(0, context + 1, (blocks,))
    start = (end - torch.randint(0, longest, (blocks,))).clamp_min(0)
    start[1:2], end[1:2] = start[:1].clone(), end[:1].clone()
    if blocks > 1:
        start[-1] = end[-1] = context
    return Case(
        [torch.randn(shape).to(dtype) for shape in shapes],
        start,
        end,
        torch.randn(shapes[0]).to(dtype),
    )


def error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|, |wanted| at least 0.01; a NaN is infinitely wrong."""
    found, wanted = found.double(), wanted.double()
    ratio = (found - wanted).norm() / wanted.norm().clamp_min(1e-2)
    return float("inf") if ratio.isnan() else ratio.item()


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    return {name: error(found[name], wanted[name]) for name in NAMES}


def sdpa(*args: Tensor, scale: float, window: int | None = None, causal: bool = False) -> Tensor:
    """Plain torch: all keys of all blocks under one dense mask."""
    q, k_ctx, v_ctx, k_blk, v_blk, start, end = args
    blocks, slots, heads, dim = q.shape
    context = k_ctx.shape[0]
    block = torch.arange(blocks, device=q.device).repeat_interleave(slots)
    slot = torch.arange(slots, device=q.device).repeat(blocks)
    position = torch.arange(context, device=q.device)
    distance = end[block, None] + slot[:, None] - position
    seen = (position >= start[block, None]) & (position < end[block, None])
    own_distance = slot[:, None] - slot
    own = block[:, None] == block
    if causal:
        own &= own_distance >= 0
    if window is not None:
        seen &= distance < window
        own &= own_distance.abs() < window
    keys, values = (
        torch.cat([ctx, blk.flatten(0, 1)]).transpose(0, 1)[None]
        for ctx, blk in ((k_ctx, k_blk), (v_ctx, v_blk))
    )
    out = F.scaled_dot_product_attention(
        q.reshape(1, blocks * slots, heads, dim).transpose(1, 2),
        keys,
        values,
        attn_mask=torch.cat([seen, own], 1),
        scale=scale,
        enable_gqa=True,
    )
    return out.transpose(1, 2).reshape(q.shape)
