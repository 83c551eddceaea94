"""Launches the Triton kernels of block_attention; tile sizes are fixed for a shape."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import Any

import torch
import triton
from torch import Tensor

from dflash_ext.ops.block_attention.triton_backward import (
    context_kernel,
    prepare_kernel,
    query_kernel,
)
from dflash_ext.ops.block_attention.triton_forward import forward_kernel

ANCHOR_CHUNK = 1024  # blocks whose ranges a program of context_kernel looks at together
MIN_DOT = 16  # least size of a product's operand
LARGE_SHARED_MEMORY = 227 * 1024  # of a block: Hopper, data center Blackwell


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows (queries) and keys of a tile, warps of a program, tiles in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Config:
    forward: Tiles
    query: Tiles
    context: Tiles
    prepare: Tiles


def choose_config(dtype: torch.dtype, dim: int, shared_memory: int) -> Config:
    """Tile sizes for a GPU that gives a block so many bytes of shared memory, at least 99 KiB.

    Measured on an H200 for heads of 128; the others are what fits.
    """
    if dtype == torch.float32:
        tiles = Tiles(16, 16, 4, 1) if dim > 128 else Tiles(32, 32, 4, 1)
        return Config(tiles, tiles, tiles, tiles)
    if dim > 128:
        walk = Tiles(64, 32, 4, 1)
        return Config(walk, walk, Tiles(32, 64, 8, 1), Tiles(32, 0, 4, 1))
    if shared_memory < LARGE_SHARED_MEMORY:
        walk = Tiles(64, 64, 4, 2)
        return Config(walk, walk, Tiles(32, 64, 4, 2), Tiles(64, 0, 4, 1))
    return Config(
        Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(32, 128, 8, 3), Tiles(64, 0, 4, 1)
    )


def config_for(q: Tensor) -> Config:
    facts = torch.cuda.get_device_properties(q.device)
    limit = facts.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return choose_config(q.dtype, q.shape[3], limit)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and strides of a call; `constants` are compiled into the kernels."""

    blocks: int
    slots: int
    kv_heads: int
    group: int
    dim: int
    tokens: int
    scale: float
    window: int | None
    causal: bool

    @property
    def rows(self) -> int:
        return self.blocks * self.slots * self.group

    def constants(self) -> dict[str, Any]:
        return {
            "KV_HEADS": self.kv_heads,
            "K": self.slots,
            "G": self.group,
            "D": self.dim,
            "WINDOW": self.window is not None,
            "BLOCK_D": max(MIN_DOT, triton.next_power_of_2(self.dim)),
        }


def context_strides(k_ctx: Tensor, v_ctx: Tensor) -> dict[str, int]:
    return {
        "STRIDE_K": k_ctx.stride(0),
        "STRIDE_V": v_ctx.stride(0),
        "HEAD_K": k_ctx.stride(1),
        "HEAD_V": v_ctx.stride(1),
    }


_first_launch = threading.Lock()
_launched: set[tuple] = set()


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Launches once threads have agreed on who compiles: Triton's caches are not theirs to share.

    The first launch of what may be a new specialisation holds a lock that later ones do not take:
    a launch can wait for its GPU, and that must not hold up the thread of another.
    """
    device = arguments[0].device
    if programs == 0:
        return
    alignment = tuple(x.data_ptr() % 16 == 0 for x in arguments if isinstance(x, Tensor))
    key = (kernel.fn, device, arguments[0].dtype, alignment, tuple(options.items()))
    with torch.cuda.device(device):
        if key in _launched:
            kernel[(programs,)](*arguments, **options)
            return
        with _first_launch:
            kernel[(programs,)](*arguments, **options)
            _launched.add(key)


def rows_contiguous(x: Tensor) -> Tensor:
    """x itself if its last dimension is contiguous and its strides are positive, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def forward(
    problem: Problem, tensors: list[Tensor], ranges: list[Tensor], config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q, k_ctx, v_ctx, k_blk, v_blk and ctx_start, ctx_end."""
    q, k_ctx, v_ctx, k_blk, v_blk = prepare_inputs(tensors)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    tiles = (config or config_for(q)).forward
    launch(
        forward_kernel,
        triton.cdiv(problem.rows, tiles.rows) * problem.kv_heads,
        *(q, k_ctx, v_ctx, k_blk, v_blk, *ranges, out, lse),
        *scalars(problem),
        **problem.constants(),
        **context_strides(k_ctx, v_ctx),
        CAUSAL=problem.causal,
        **walk_options(problem, tiles),
    )
    return out, lse


def backward(
    problem: Problem,
    grad_out: Tensor,
    tensors: list[Tensor],
    out: Tensor,
    lse: Tensor,
    ranges: list[Tensor],
    dk_ctx: Tensor,
    dv_ctx: Tensor,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk_blk, dv_blk); adds to dk_ctx and dv_ctx."""
    q, k_ctx, v_ctx, k_blk, v_blk = prepare_inputs(tensors)
    grad_out, out = grad_out.contiguous(), out.contiguous()
    delta = torch.empty_like(lse)
    dq, dk_blk, dv_blk = (torch.empty_like(x) for x in (q, k_blk, v_blk))
    config = config or config_for(q)
    constants, strides = problem.constants(), context_strides(k_ctx, v_ctx)
    scale, blocks, tokens, window = scalars(problem)
    launch(
        prepare_kernel,
        problem.blocks * problem.kv_heads,
        *(q, k_blk, v_blk, out, grad_out, lse, delta, dk_blk, dv_blk, scale, blocks, window),
        **constants,
        CAUSAL=problem.causal,
        BLOCK_M=config.prepare.rows,
        BLOCK_K=max(MIN_DOT, triton.next_power_of_2(problem.slots)),
        num_warps=config.prepare.warps,
    )
    launch(
        query_kernel,
        triton.cdiv(problem.rows, config.query.rows) * problem.kv_heads,
        *(q, k_ctx, v_ctx, k_blk, v_blk, *ranges, grad_out, lse, delta, dq),
        *(scale, blocks, tokens, window),
        **constants,
        **strides,
        CAUSAL=problem.causal,
        **walk_options(problem, config.query),
    )
    launch(
        context_kernel,
        triton.cdiv(problem.tokens, config.context.keys) * problem.kv_heads,
        *(q, k_ctx, v_ctx, *ranges, grad_out, lse, delta, dk_ctx, dv_ctx),
        *(scale, blocks, tokens, window),
        **constants,
        **strides,
        BLOCK_M=config.context.rows,
        BLOCK_N=config.context.keys,
        CHUNK=ANCHOR_CHUNK,
        STAGES=config.context.stages,
        num_warps=config.context.warps,
    )
    return dq, dk_blk, dv_blk


def prepare_inputs(tensors: list[Tensor]) -> list[Tensor]:
    q, k_ctx, v_ctx, k_blk, v_blk = tensors
    context = [rows_contiguous(x) for x in (k_ctx, v_ctx)]
    return [q.contiguous(), *context, k_blk.contiguous(), v_blk.contiguous()]


def scalars(problem: Problem) -> tuple[float, int, int, int]:
    """Scale of scores in powers of 2, blocks, tokens, window."""
    return problem.scale * math.log2(math.e), problem.blocks, problem.tokens, problem.window or 0


def walk_options(problem: Problem, tiles: Tiles) -> dict[str, int]:
    own = min(tiles.rows // (problem.slots * problem.group) + 1, 2) * problem.slots
    return {
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.keys,
        "BLOCK_O": min(tiles.keys, max(MIN_DOT, triton.next_power_of_2(own))),
        "STAGES": tiles.stages,
        "num_warps": tiles.warps,
    }
