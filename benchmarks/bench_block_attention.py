"""block_attention, forward and backward: on CPUs in fp32 against SDPA over all keys under a dense
mask, on GPUs in bf16 against compiled flex_attention, whose mask is built beforehand; there both
sides are replays of CUDA graphs, so that no host is timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import Case
from dflash_ext import ops
from dflash_ext.ops.block_attention.portable import portable_backward, portable_forward

# (blocks, slots, query heads, KV heads, head size, context tokens, tokens of a document, window)
CPU_SHAPES = [
    (40, 4, 9, 3, 64, 256, 128, None),
    (128, 8, 9, 3, 64, 4096, 256, None),
    (64, 16, 32, 8, 128, 2048, 512, None),
]
GPU_SHAPES = [
    (1024, 16, 32, 8, 128, 49152, 4096, None),
    (1024, 16, 32, 8, 128, 49152, 4096, 2048),
    (512, 16, 32, 8, 128, 16384, 2048, None),
    (512, 16, 32, 8, 128, 16384, 2048, 2048),
    (1024, 16, 9, 3, 64, 49152, 4096, None),
]


class Inputs:
    """Random queries, keys and values of sorted anchors in documents of equal length."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        blocks: int,
        slots: int,
        q_heads: int,
        kv_heads: int,
        dim: int,
        tokens: int,
        document: int,
        window: int | None,
    ) -> None:
        self.window, self.document, self.scale = window, document, dim**-0.5
        self.end = torch.randperm(tokens, device=device)[:blocks].sort().values
        self.start = self.end // document * document
        shapes = [
            (blocks, slots, q_heads, dim),
            *[(tokens, kv_heads, dim)] * 2,
            *[(blocks, slots, kv_heads, dim)] * 2,
        ]
        self.tensors = [
            torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes
        ]
        self.grad_out = torch.randn(shapes[0], device=device, dtype=dtype)

    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        slots = self.tensors[0].shape[1]
        context = (self.end - self.start)[:, None].expand(-1, slots)
        if self.window is not None:
            context = context.minimum(
                (self.window - 1 - torch.arange(slots, device=context.device)).clamp_min(0)
            )
        return int(context.sum()) + self.end.numel() * slots * slots

    def exact(self) -> list[Tensor]:
        """Output and gradients in fp64."""
        tensors = [x.detach().double() for x in self.tensors]
        options = {"scale": self.scale, "window": self.window, "causal": False}
        ranges = [self.start, self.end]
        out, lse = portable_forward(tensors, ranges, **options)
        dk, dv = (torch.zeros_like(x) for x in tensors[1:3])
        dq, dk_blk, dv_blk = portable_backward(
            self.grad_out.double(), tensors, lse, ranges, dk, dv, **options
        )
        return [out, dq, dk, dv, dk_blk, dv_blk]

    def step(self, leaves: list[Tensor], grad_out: Tensor, out: Tensor) -> list[Tensor]:
        for x in leaves:
            x.grad = None
        out.backward(grad_out)
        return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]

    def run(self) -> list[Tensor]:
        out = ops.block_attention(
            *self.tensors, self.start, self.end, scale=self.scale, window=self.window
        )
        return self.step(self.tensors, self.grad_out, out)


class Captured:
    """A function's replay from a CUDA graph, captured at the first call."""

    def __init__(self, function: Callable[[], list[Tensor]]) -> None:
        self.function = function
        self.graph: torch.cuda.CUDAGraph | None = None
        self.results: list[Tensor] = []

    def __call__(self) -> list[Tensor]:
        if self.graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.function()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.results = self.function()
        self.graph.replay()
        return self.results


def all_keys(inputs: Inputs) -> list[Tensor]:
    """Queries [1, Hq, A * K, D], keys and values [1, Hk, T + A * K, D]: leaves of their own."""
    q, k_ctx, v_ctx, k_blk, v_blk = (x.detach() for x in inputs.tensors)
    joined = [torch.cat([x, y.flatten(0, 1)]) for x, y in ((k_ctx, k_blk), (v_ctx, v_blk))]
    return [
        x.transpose(0, 1)[None].contiguous().requires_grad_() for x in (q.flatten(0, 1), *joined)
    ]


def dense_sdpa(inputs: Inputs) -> Callable[[], list[Tensor]]:
    leaves = all_keys(inputs)
    blocks, slots = inputs.tensors[0].shape[:2]
    block = torch.arange(blocks).repeat_interleave(slots)
    key = torch.arange(inputs.tensors[1].shape[0])
    seen = (key >= inputs.start[block, None]) & (key < inputs.end[block, None])
    mask = torch.cat([seen, block[:, None] == block], 1)
    grad_out = inputs.grad_out.flatten(0, 1).transpose(0, 1)[None].contiguous()

    def run() -> list[Tensor]:
        out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
        return inputs.step(leaves, grad_out, out)

    return run


def flex(inputs: Inputs) -> Callable[[], list[Tensor]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    leaves = all_keys(inputs)
    slots, tokens = inputs.tensors[0].shape[1], inputs.tensors[1].shape[0]
    start, end, window = inputs.start, inputs.end, inputs.window
    device = str(end.device)

    def seen(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // slots
        own = (key >= tokens) & ((key - tokens) // slots == block)
        context = (key >= start[block]) & (key < end[block])
        if window is not None:
            context = context & (end[block] + query % slots - key < window)
        return context | own

    queries, keys = leaves[0].shape[2], leaves[1].shape[2]
    mask = torch.compile(create_block_mask, dynamic=False)(
        seen, None, None, queries, keys, device=device
    )
    attend = torch.compile(flex_attention, dynamic=False)
    grad_out = inputs.grad_out.flatten(0, 1).transpose(0, 1)[None].contiguous()

    def run() -> list[Tensor]:
        return inputs.step(leaves, grad_out, attend(*leaves, block_mask=mask, enable_gqa=True))

    return run


def split_keys(inputs: Inputs, results: list[Tensor]) -> list[Tensor]:
    """A peer's output and gradients in the layout of the op's."""
    tokens, shape = inputs.tensors[1].shape[0], inputs.tensors[3].shape
    out, dq, dk, dv = (x[0].transpose(0, 1) for x in results)
    return [
        *(x.reshape(inputs.tensors[0].shape) for x in (out, dq)),
        dk[:tokens],
        dv[:tokens],
        *(x[tokens:].reshape(shape) for x in (dk, dv)),
    ]


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]


def make_case(device: torch.device, shape: tuple) -> Case:
    on_cpu = device.type == "cpu"
    inputs = Inputs(device, torch.float32 if on_cpu else torch.bfloat16, *shape)
    run = inputs.run if on_cpu else Captured(inputs.run)
    peer = dense_sdpa(inputs) if on_cpu else Captured(flex(inputs))

    def check() -> None:
        wanted = inputs.exact()
        mine = errors(run(), wanted)
        others = errors(split_keys(inputs, peer()), wanted)
        limits = [1e-5 if on_cpu else 2 * other for other in others]
        assert all(a <= b for a, b in zip(mine, limits, strict=True)), (mine, others)

    blocks, slots, q_heads, kv_heads, dim, tokens, _, window = shape
    pairs = inputs.pairs()
    name = f"A{blocks} K{slots} {q_heads}/{kv_heads}x{dim} T{tokens}"
    name += f" W{window}" if window else f" keys {pairs // (blocks * slots)}"
    return Case(
        op="block_attention",
        shape=name,
        run=run,
        peer=peer,
        peer_name="dense SDPA" if on_cpu else "compiled flex",
        check=check,
        flops=14 * pairs * q_heads * dim,  # two products forward, five backward
    )


def forward_case(device: torch.device, shape: tuple) -> Case:
    """Hopper's forward alone, for heads of 128, against the Triton one."""
    from dflash_ext.ops.block_attention import triton
    from dflash_ext.ops.block_attention.devices import problem_of

    inputs = Inputs(device, torch.bfloat16, *shape)
    tensors, ranges = [x.detach() for x in inputs.tensors], [inputs.start, inputs.end]
    problem = problem_of(tensors, inputs.scale, inputs.window, False)
    config = dataclasses.replace(triton.config_for(tensors[0]), hopper=False)
    kernel = torch.ops.dflash_ext.block_attention_forward_hopper
    options = {"scale": inputs.scale, "window": inputs.window}
    run = Captured(lambda: list(kernel(*tensors, *ranges, **options)))
    peer = Captured(lambda: list(triton.forward(problem, tensors, ranges, config)))

    def check() -> None:
        wanted = portable_forward([x.double() for x in tensors], ranges, causal=False, **options)
        mine, others = (errors(call(), list(wanted)) for call in (run, peer))
        assert mine[0] <= 2 * others[0] and mine[1] <= 1e-5, (mine, others)

    blocks, slots, q_heads, kv_heads, dim, tokens, _, window = shape
    return Case(
        op="forward (CUDA)",
        shape=f"A{blocks} K{slots} {q_heads}/{kv_heads}x{dim} T{tokens} W{window}",
        run=run,
        peer=peer,
        peer_name="forward (Triton)",
        check=check,
        flops=4 * inputs.pairs() * q_heads * dim,
    )


def cases(device: torch.device) -> Iterator[Case]:
    for shape in CPU_SHAPES if device.type == "cpu" else GPU_SHAPES:
        yield make_case(device, shape)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        for shape in GPU_SHAPES:
            if shape[4] == 128:
                yield forward_case(device, shape)
