"""block_attention, forward and backward, against SDPA over all keys under a dense mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import Case
from dflash_ext import ops
from dflash_ext.ops.block_attention.naive import block_attention_naive

# (blocks, slots, query heads, KV heads, head size, context tokens, tokens of a document)
SHAPES = [
    (40, 4, 9, 3, 64, 256, 128),
    (128, 8, 9, 3, 64, 4096, 256),
    (64, 16, 32, 8, 128, 2048, 512),
]


def dense_sdpa(
    q: Tensor, k_ctx: Tensor, v_ctx: Tensor, k_blk: Tensor, v_blk: Tensor, mask: Tensor
) -> Tensor:
    blocks, slots, heads, dim = q.shape
    keys, values = (
        torch.cat([context, block.flatten(0, 1)]).transpose(0, 1)[None]
        for context, block in ((k_ctx, k_blk), (v_ctx, v_blk))
    )
    queries = q.reshape(1, blocks * slots, heads, dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).reshape(q.shape)


def make_case(
    device: torch.device,
    blocks: int,
    slots: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    context: int,
    document: int,
) -> Case:
    end = torch.randint(context, (blocks,), device=device).sort().values
    start = end // document * document
    shapes = [
        (blocks, slots, q_heads, dim),
        *[(context, kv_heads, dim)] * 2,
        *[(blocks, slots, kv_heads, dim)] * 2,
    ]
    inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    grad_out = torch.randn(shapes[0], device=device)
    block = torch.arange(blocks, device=device).repeat_interleave(slots)
    key = torch.arange(context, device=device)
    seen = (key >= start[block, None]) & (key < end[block, None])
    mask = torch.cat([seen, block[:, None] == block], 1)

    def step(out: Tensor) -> list[Tensor]:
        for x in inputs:
            x.grad = None
        out.backward(grad_out)
        return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]

    def run() -> list[Tensor]:
        return step(ops.block_attention(*inputs, start, end, scale=dim**-0.5))

    def peer() -> list[Tensor]:
        return step(dense_sdpa(*inputs, mask))

    def check() -> None:
        exact = [x.detach().double().requires_grad_() for x in inputs]
        out, _ = block_attention_naive(*exact, start, end, scale=dim**-0.5)
        out.backward(grad_out.double())
        wanted = [out, *(x.grad for x in exact)]
        for a, b in zip(run(), wanted, strict=True):
            assert b is not None and (a.double() - b).norm() <= 1e-5 * b.norm()

    keys = int((end - start + slots).sum())
    return Case(
        op="block_attention",
        shape=f"A{blocks} K{slots} {q_heads}/{kv_heads}x{dim} T{context} keys {keys // blocks}",
        run=run,
        peer=peer,
        peer_name="dense SDPA",
        check=check,
        flops=14 * keys * slots * q_heads * dim,  # two products forward, five backward
    )


def cases(device: torch.device) -> list[Case]:
    return [make_case(device, *shape) for shape in SHAPES]
