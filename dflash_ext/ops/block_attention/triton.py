"""Launches block_attention's kernels on GPUs: in Triton, with tile sizes fixed for a shape.

Hopper has two kernels in CUDA: the forward for heads of 128, the context's gradients for 64 too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dflash_ext import _C
from dflash_ext.ops.block_attention.triton_backward import (
    context_kernel,
    prepare_kernel,
    query_kernel,
    sight_kernel,
)
from dflash_ext.ops.block_attention.triton_forward import forward_kernel

ANCHOR_CHUNK = 1024  # blocks whose ranges a program of sight_kernel looks at together
MIN_DOT = 16  # least size of a product's operand
HOPPER_DIMS = (64, 128)  # heads that the CUDA kernel of the context's gradients takes
HOPPER_FORWARD_DIM = 128  # that of the forward; with 64, Triton's is the faster one
HOPPER_KEYS = 128  # a tile of context keys in the context's gradients
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
    copy_engine: bool = False  # TMA where the shapes allow it
    hopper: bool = False  # the CUDA kernels where the shapes allow it


def choose_config(dtype: torch.dtype, dim: int, shared_memory: int) -> Config:
    """Tile sizes for a GPU that gives a block so many bytes of shared memory, at least 99 KiB.

    Measured on an H200 for heads of 128; the others are what fits.
    """
    if dtype == torch.float32:
        tiles = Tiles(16, 16, 4, 1) if dim > 128 else Tiles(32, 32, 4, 1)
        return Config(tiles, tiles, tiles, tiles)
    if dim > 128:
        walk = Tiles(32, 32, 4, 1)
        return Config(walk, walk, Tiles(32, 32, 8, 1), Tiles(32, 0, 8, 1))
    context = Tiles(32, 64, 8, 2)
    if shared_memory < LARGE_SHARED_MEMORY:
        walk = Tiles(64, 64, 8, 2)
        return Config(walk, walk, context, Tiles(64, 0, 4, 1))
    walk = Tiles(64, 64, 4, 3)
    query, prepare = Tiles(128, 64, 8, 3), Tiles(64, 0, 4, 1)
    return Config(walk, query, context, prepare, copy_engine=True)


@functools.cache
def device_config(device: torch.device, dtype: torch.dtype, dim: int) -> Config:
    facts = torch.cuda.get_device_properties(device)
    limit = facts.shared_memory_per_block_optin  # type: ignore[attr-defined]
    built = "9.0a" in _C.archs and torch.cuda.get_device_capability(device) == (9, 0)
    config = choose_config(dtype, dim, limit)
    return dataclasses.replace(config, hopper=built and dtype != torch.float32)


def config_for(q: Tensor) -> Config:
    return device_config(q.device, q.dtype, q.shape[3])


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


def fits_hopper(problem: Problem, *tensors: Tensor) -> bool:
    """Whether the CUDA kernels take these: few heads a group, tensors that TMA can read."""
    return (
        problem.dim in HOPPER_DIMS
        and problem.group <= 64
        and problem.rows * problem.kv_heads < 2**31
        and all(x.data_ptr() % 16 == 0 for x in tensors)
        and all(0 < s < 2**31 and s % 8 == 0 for x in tensors for s in x.stride()[:2])
        and all(x.stride(-2) * x.shape[-2] < 2**31 for x in tensors)
    )


def context_strides(k_ctx: Tensor, v_ctx: Tensor) -> dict[str, int]:
    return {
        "STRIDE_K": k_ctx.stride(0),
        "STRIDE_V": v_ctx.stride(0),
        "HEAD_K": k_ctx.stride(1),
        "HEAD_V": v_ctx.stride(1),
    }


def walk_options(problem: Problem, tiles: Tiles, strides: dict[str, int]) -> dict[str, Any]:
    """Options of the kernels that walk the keys of a tile of rows."""
    own = min(tiles.rows // (problem.slots * problem.group) + 1, 2) * problem.slots
    return {
        **problem.constants(),
        **strides,
        "CAUSAL": problem.causal,
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.keys,
        "BLOCK_O": min(tiles.keys, max(MIN_DOT, triton.next_power_of_2(own))),
        "STAGES": tiles.stages,
        "num_warps": tiles.warps,
    }


def query_prepares(problem: Problem, config: Config) -> bool:
    """Where a tile's rows are whole blocks, that is all that sees its own keys.

    Registers suffice for that if those keys are few, and the context's are not loaded by pointers.
    """
    tiles = config.query
    whole = tiles.rows % (problem.slots * problem.group) == 0
    return config.copy_engine and whole and tiles.rows // problem.group <= tiles.keys // 2


def query_options(problem: Problem, config: Config, strides: dict[str, int]) -> dict[str, Any]:
    options = walk_options(problem, config.query, strides)
    prepares = query_prepares(problem, config)
    if prepares:
        options["BLOCK_O"] = max(MIN_DOT, config.query.rows // problem.group)
    return {**options, "PREPARE": prepares}


def prepare_options(problem: Problem, tiles: Tiles) -> dict[str, Any]:
    return {
        **problem.constants(),
        "CAUSAL": problem.causal,
        "BLOCK_M": tiles.rows,
        "BLOCK_K": max(MIN_DOT, triton.next_power_of_2(problem.slots)),
        "num_warps": tiles.warps,
    }


def sight_options(problem: Problem, keys: int) -> dict[str, Any]:
    return {
        "K": problem.slots,
        "WINDOW": problem.window is not None,
        "BLOCK_N": keys,
        "CHUNK": ANCHOR_CHUNK,
        "num_warps": 4,
    }


def context_options(
    problem: Problem, tiles: Tiles, strides: dict[str, int], add: bool
) -> dict[str, Any]:
    return {
        **problem.constants(),
        **strides,
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.keys,
        "ADD": add,
        "STAGES": tiles.stages,
        "num_warps": tiles.warps,
    }


def tile_descriptor(x: Tensor, rows: int, problem: Problem, config: Config) -> Any:
    """Of tiles of `rows` rows of a head of x [rows, heads, D] for the copy engine, or None."""
    columns = (x.shape[1] - 1) * x.stride(1) + problem.dim
    readable = (
        x.data_ptr() % 16 == 0
        and all(s > 0 and s * x.element_size() % 16 == 0 for s in x.stride()[:2])
        and columns < 2**31
    )
    whole = problem.constants()["BLOCK_D"] == problem.dim
    if not (config.copy_engine and readable and whole and x.shape[0] >= rows):
        return None
    return TensorDescriptor(x, [x.shape[0], columns], [x.stride(0), 1], [rows, problem.dim])


_first_launch = threading.Lock()
_compiled: dict[tuple, Any] = {}


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Launches on the current device once threads have agreed on who compiles.

    Triton's caches are not theirs to share, so the first launch of what may be a specialisation of
    its own holds a lock. Later ones do not: a launch can wait for its GPU, and that must not hold
    up the thread of another. They also skip Triton's binding of arguments, most of a launch's time.
    """
    if programs == 0:
        return
    kinds = tuple(
        (x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else type(x) for x in arguments
    )
    key = (kernel.fn, arguments[0].device, kinds, tuple(options.items()))
    compiled = _compiled.get(key)
    if compiled is None:
        with _first_launch:
            _compiled[key] = kernel[(programs,)](*arguments, **options)
        return
    constants = [options[name] for name in kernel.arg_names[len(arguments) :]]
    compiled[(programs, 1, 1)](*arguments, *constants)


def prepare_inputs(tensors: list[Tensor]) -> list[Tensor]:
    """Contiguous, except that rows and heads of the context may have any stride."""
    q, k_ctx, v_ctx, k_blk, v_blk = tensors
    k_ctx, v_ctx = (x if x.stride(2) == 1 else x.contiguous() for x in (k_ctx, v_ctx))
    return [q.contiguous(), k_ctx, v_ctx, k_blk.contiguous(), v_blk.contiguous()]


def scalars(problem: Problem) -> tuple[float, int, int, int]:
    """Scale of scores in powers of 2, blocks, tokens, window."""
    return problem.scale * math.log2(math.e), problem.blocks, problem.tokens, problem.window or 0


def forward(
    problem: Problem, tensors: list[Tensor], ranges: list[Tensor], config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q, k_ctx, v_ctx, k_blk, v_blk and ctx_start, ctx_end."""
    q, k_ctx, v_ctx, k_blk, v_blk = prepare_inputs(tensors)
    config = config or config_for(q)
    hopper = config.hopper and problem.dim == HOPPER_FORWARD_DIM and problem.tokens > 0
    if hopper and fits_hopper(problem, q, k_ctx, v_ctx, k_blk, v_blk):
        return torch.ops.dflash_ext.block_attention_forward_hopper(
            q, k_ctx, v_ctx, k_blk, v_blk, *ranges,
            scale=problem.scale, window=problem.window, causal=problem.causal,
        )  # fmt: skip
    tiles = config.forward
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    described = (tile_descriptor(x, tiles.keys, problem, config) for x in (k_ctx, v_ctx))
    launch(
        forward_kernel,
        triton.cdiv(problem.rows, tiles.rows) * problem.kv_heads,
        *(q, k_ctx, v_ctx, *described, k_blk, v_blk, *ranges, out, lse, *scalars(problem)),
        **walk_options(problem, tiles, context_strides(k_ctx, v_ctx)),
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
    *,
    add: bool = True,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk_blk, dv_blk); adds to dk_ctx and dv_ctx, or writes them."""
    q, k_ctx, v_ctx, k_blk, v_blk = prepare_inputs(tensors)
    grad_out, out = grad_out.contiguous(), out.contiguous()
    config = config or config_for(q)
    dq, dk_blk, dv_blk = (torch.empty_like(x) for x in (q, k_blk, v_blk))
    shift, delta = (torch.empty_like(lse) for _ in range(2))
    facts = scalars(problem)
    scale, blocks, tokens, window = facts
    strides = context_strides(k_ctx, v_ctx)
    if not query_prepares(problem, config):
        launch(
            prepare_kernel,
            problem.blocks * problem.kv_heads,
            *(q, k_blk, v_blk, out, grad_out, lse, shift, delta, dk_blk, dv_blk),
            *(scale, blocks, window),
            **prepare_options(problem, config.prepare),
        )
    described = (tile_descriptor(x, config.query.keys, problem, config) for x in (k_ctx, v_ctx))
    launch(
        query_kernel,
        triton.cdiv(problem.rows, config.query.rows) * problem.kv_heads,
        *(q, k_ctx, v_ctx, *described, k_blk, v_blk, *ranges, out, grad_out, lse, shift, delta),
        *(dq, dk_blk, dv_blk, *facts),
        **query_options(problem, config, strides),
    )
    hopper = config.hopper and fits_hopper(problem, q, k_ctx, v_ctx, grad_out)
    keys = HOPPER_KEYS if hopper else config.context.keys
    tiles = triton.cdiv(problem.tokens, keys)
    sight = torch.empty((tiles, 4), dtype=torch.int32, device=q.device)
    launch(
        sight_kernel,
        tiles,
        *(*ranges, sight, blocks, tokens, window),
        **sight_options(problem, keys),
    )
    if hopper:
        torch.ops.dflash_ext.block_attention_context_gradients(
            q, grad_out, shift, delta, k_ctx, v_ctx, *ranges, sight, dk_ctx, dv_ctx,
            scale=problem.scale, window=problem.window, add=add,
        )  # fmt: skip
        return dq, dk_blk, dv_blk
    launch(
        context_kernel,
        tiles * problem.kv_heads,
        *(q, k_ctx, v_ctx, *ranges, sight, grad_out, shift, delta, dk_ctx, dv_ctx, *facts),
        **context_options(problem, config.context, strides, add),
    )
    return dq, dk_blk, dv_blk
