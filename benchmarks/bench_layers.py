"""The fused operators of a layer against plain torch, torch.compile and flash-linear-attention."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import Case, median_seconds
from dflash_ext import ops
from dflash_ext.drafter.attention import apply_rope
from dflash_ext.ops.qkv_norm_rope import qkv_norm_rope_backward
from dflash_ext.ops.rms_norm import rms_norm_backward
from dflash_ext.ops.swiglu import swiglu_backward

EPS = 1e-6
SETS = 2  # of inputs, which take turns
LIMIT = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


@dataclass(frozen=True)
class Size:
    """Rows and widths of a drafter."""

    rows: int
    hidden: int
    q_heads: int
    k_heads: int
    dim: int
    inner: int
    dtype: torch.dtype


SIZES = {
    "cpu": Size(2048, 576, 9, 3, 64, 1536, torch.float32),  # of SmolLM2's drafter
    "cuda": Size(8192, 5120, 32, 8, 128, 17408, torch.bfloat16),  # of a 27B target's
}


@dataclass(frozen=True)
class Op:
    """One pass of an operator: tensors of a set of inputs, ours, plain torch, others by name."""

    name: str
    shape: str
    make: Callable[[], list[Tensor]]
    run: Callable[..., Any]
    plain: Callable[..., Any]
    others: dict[str, Callable[..., Any]]
    bytes_moved: int


def error(found: Any, wanted: Any) -> float:
    """Largest relative error of one or several tensors."""
    if isinstance(found, Tensor):
        found, wanted = (found,), (wanted,)
    return max(
        ((f.double() - w.double()).norm() / w.double().norm()).item()
        for f, w in zip(found, wanted, strict=True)
        if w.numel()
    )


@functools.cache
def copy_rate(bytes_moved: int, device: torch.device) -> float:
    """Bytes a second, read and written, of a copy that moves as many: small ones are slower."""
    source = torch.randint(0, 100, (bytes_moved // 16,), device=device)
    target = torch.empty_like(source)
    (seconds,) = median_seconds((lambda: target.copy_(source),), device)
    return bytes_moved / seconds


def case(op: Op, peer_name: str, peer: Callable[..., Any], device: torch.device) -> Case:
    sets = [op.make() for _ in range(SETS)]
    turns, peer_turns = itertools.cycle(sets), itertools.cycle(sets)

    def check() -> None:
        found = op.run(*sets[0])
        assert error(found, op.plain(*sets[0])) <= LIMIT[sets[0][0].dtype]

    return Case(
        op=op.name,
        shape=op.shape,
        run=lambda: op.run(*next(turns)),
        peer=lambda: peer(*next(peer_turns)),
        peer_name=peer_name,
        check=check,
        bytes_moved=op.bytes_moved,
        ceiling=copy_rate(op.bytes_moved, device),
    )


def backward_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward pass alone of plain torch, whose graph is built once for each set of inputs."""
    graphs: dict[int, tuple] = {}

    def backward(*tensors: Tensor) -> tuple[Tensor, ...]:
        key = tensors[0].data_ptr()
        if key not in graphs:
            leaves, outs = forward(*(t.detach().requires_grad_() for t in tensors))
            graphs[key] = leaves, outs
        leaves, outs = graphs[key]
        return torch.autograd.grad(outs[0], leaves, outs[1], retain_graph=True)

    return backward


def compiled(plain: Callable[..., Any], device: torch.device) -> dict[str, Callable[..., Any]]:
    return {"torch.compile": torch.compile(plain)} if device.type == "cuda" else {}


def with_fla(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("fla") is not None


def norm_ops(size: Size, device: torch.device) -> Iterator[Op]:
    rows, hidden = size.rows, size.hidden

    def make(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [torch.randn(s, device=device).to(size.dtype) for s in shapes]

    def make_backward() -> list[Tensor]:
        total, weight, *grads = make(flat, vector, flat, flat)
        rstd = torch.ops.dflash_ext.rms_norm.default(total, weight, EPS)[1]
        return [*grads, total, weight, rstd]

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, weight.shape, weight, EPS), total

    def plain_graph(g1: Tensor, g2: Tensor, total: Tensor, weight: Tensor, _: Tensor) -> tuple:
        normed = F.rms_norm(total, weight.shape, weight, EPS)
        return (total, weight), (normed, g1.detach())

    graph = backward_of(plain_graph)

    def plain_backward(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        dx, dweight = graph(*tensors)
        return dx + tensors[1], dweight

    flat, vector = (rows, hidden), (hidden,)
    others, more = compiled(plain, device), {}
    if with_fla(device):
        from fla.modules.norm import layernorm

        others["fla"] = lambda x, residual, weight: layernorm.layer_norm_fwd(
            x, weight, None, EPS, residual=residual, is_rms_norm=True
        )
        more["fla"] = lambda g1, g2, total, weight, rstd: layernorm.layer_norm_bwd(
            g1, total, weight, None, None, rstd, g2, has_residual=True, is_rms_norm=True
        )
    moved = 4 * rows * hidden * size.dtype.itemsize
    shape = f"N{rows} H{hidden}"
    yield Op(
        "add_rms_norm",
        f"{shape} forward",
        lambda: make(flat, flat, vector),
        lambda *t: ops.add_rms_norm(*t, EPS),
        plain,
        others,
        moved,
    )
    yield Op(
        "add_rms_norm",
        f"{shape} backward",
        make_backward,
        rms_norm_backward,
        plain_backward,
        more,
        moved,
    )


def head_ops(size: Size, device: torch.device) -> Iterator[Op]:
    element = size.dtype.itemsize
    for q_heads in (size.q_heads, 0):
        heads, dim = (q_heads, size.k_heads, size.k_heads), size.dim
        width = sum(heads) * dim

        def make(width: int = width, dim: int = dim) -> list[Tensor]:
            angles = torch.randn(size.rows, dim // 2, device=device)
            qkv = torch.randn(size.rows, width, device=device)
            weights = torch.randn(2, dim, device=device)
            return [t.to(size.dtype) for t in (qkv, *weights, angles.cos(), angles.sin())]

        def run(qkv: Tensor, q_weight: Tensor, *rest: Tensor, heads: tuple = heads) -> Any:
            weight = q_weight if heads[0] else None
            return ops.qkv_norm_rope(qkv, weight, *rest, EPS, *heads[:2])

        def plain(
            qkv: Tensor, qw: Tensor, kw: Tensor, cos: Tensor, sin: Tensor, heads: tuple = heads
        ) -> Any:
            q, k, v = qkv.view(len(qkv), sum(heads), -1).split(heads, 1)
            rope, dim = (cos[:, None], sin[:, None]), (qw.shape[0],)
            turned = apply_rope(F.rms_norm(k, dim, kw, EPS), rope)
            if not heads[0]:
                return q, turned, v.contiguous()
            return apply_rope(F.rms_norm(q, dim, qw, EPS), rope), turned, v.contiguous()

        def make_backward(make: Callable = make, run: Callable = run) -> list[Tensor]:
            tensors = make()
            return [*tensors, *(torch.randn_like(out) for out in run(*tensors))]

        def run_backward(*tensors: Tensor, heads: tuple = heads) -> Any:
            qkv, q_weight, *rest, dq, dk, dv = tensors
            with_q = heads[0] > 0
            return qkv_norm_rope_backward(
                dq if with_q else None,
                dk,
                dv,
                qkv,
                q_weight if with_q else None,
                *rest,
                EPS,
                *heads[:2],
            )

        def plain_graph(*tensors: Tensor, plain: Callable = plain, heads: tuple = heads) -> tuple:
            inputs, grads = tensors[:5], tensors[5:]
            outs = plain(*inputs)
            first = 0 if heads[0] else 1
            leaves = inputs[:3] if heads[0] else (inputs[0], inputs[2])
            return leaves, (outs[first:], tuple(g.detach() for g in grads[first:]))

        def plain_backward(*tensors: Tensor, graph: Callable, heads: tuple = heads) -> Any:
            found = graph(*tensors)
            return found if heads[0] else (found[0], found[0].new_zeros(0), found[1])

        graph = backward_of(plain_graph)
        shape = f"N{size.rows} heads {q_heads}/{size.k_heads}x{dim}"
        moved = 2 * size.rows * width * element
        yield Op(
            "qkv_norm_rope",
            f"{shape} forward",
            make,
            run,
            plain,
            compiled(plain, device),
            moved,
        )
        yield Op(
            "qkv_norm_rope",
            f"{shape} backward",
            make_backward,
            run_backward,
            lambda *t, graph=graph, back=plain_backward: back(*t, graph=graph),
            {},
            moved * 3 // 2 - size.rows * size.k_heads * dim * element,  # v itself is not read
        )


def gate_ops(size: Size, device: torch.device) -> Iterator[Op]:
    rows, inner = size.rows, size.inner

    def make(*widths: int) -> list[Tensor]:
        return [torch.randn(rows, w, device=device).to(size.dtype) for w in widths]

    def plain(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def plain_graph(gate_up: Tensor, grad: Tensor) -> tuple:
        return (gate_up,), ((plain(gate_up),), (grad.detach(),))

    graph = backward_of(plain_graph)
    others, more = compiled(plain, device), {}
    if with_fla(device):
        from fla.modules.activations import ops as fla

        name = "fla, gate and up apart"
        others[name] = lambda gate_up: fla.swiglu_fwd(*gate_up.view(2, rows, inner))
        more[name] = lambda gate_up, grad: fla.swiglu_fwdbwd(*gate_up.view(2, rows, inner), grad)
    moved = rows * inner * size.dtype.itemsize
    shape = f"N{rows} I{inner}"
    yield Op(
        "swiglu",
        f"{shape} forward",
        lambda: make(2 * inner),
        ops.swiglu,
        plain,
        others,
        3 * moved,
    )
    yield Op(
        "swiglu",
        f"{shape} backward",
        lambda: make(2 * inner, inner),
        lambda gate_up, grad: swiglu_backward(grad, gate_up),
        lambda *t: graph(*t)[0],
        more,
        5 * moved,
    )


def cases(device: torch.device) -> Iterator[Case]:
    size = SIZES[device.type]
    for kind in (norm_ops, head_ops, gate_ops):
        for op in kind(size, device):
            for name, peer in {"torch": op.plain, **op.others}.items():
                yield case(op, name, peer, device)
