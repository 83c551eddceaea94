"""Layers whose weight gradients go straight into fp32 storage, the parameters' `main_grad`.

Autograd would round the gradient of a bf16 weight to bf16, or cast it to fp32 and add it in passes
of its own. Here the GEMM that makes it writes fp32, overwrites in the first use of an optimizer
step and adds from the second on, so that nothing zeroes, casts or copies a gradient. Weights that
are used side by side (q, k, v; gate, up) are adjacent in storage and make one GEMM.

Letters: N rows, H hidden, Hq/Hk query/key heads, D head size, F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dflash_ext import ops
from dflash_ext.flat_params import merged_view
from dflash_ext.ops.qkv_norm_rope import qkv_norm_rope_backward
from dflash_ext.ops.rms_norm import rms_norm_backward


class RowBlocks(NamedTuple):
    """A gradient is made in at most `number` blocks of rows, each then handed to `made`."""

    number: int
    made: Callable[[Tensor], None]


def request_blocks(weight: Tensor, blocks: RowBlocks | None) -> None:
    """How the weight's `main_grad` is made from now on, by a product of its own."""
    weight.main_grad_blocks = blocks  # type: ignore[attr-defined]


def has_main_grad(parameter: Tensor) -> bool:
    """Whether the parameter's gradient has storage of its own, which the optimizer gave it."""
    return getattr(parameter, "main_grad", None) is not None


def mark_gradients(parameters: Iterable[Tensor], *, started: bool) -> None:
    """Whether the next use of each parameter adds to its `main_grad`, or overwrites it as the
    first use in an optimizer step does. A replayed graph leaves no mark of its own."""
    for parameter in parameters:
        parameter.main_grad_started = started  # type: ignore[attr-defined]


def add_matrix_grad(weights: Sequence[Tensor], grad_out: Tensor, x: Tensor) -> None:
    """main_grad of adjacent weights [out_i, in] += grad_out[N, sum out]^T @ x[N, in]."""
    grad = merged_view([weight.main_grad for weight in weights])  # type: ignore[attr-defined]
    started = _start(weights)
    for rows, grad_rows in _row_blocks(weights[0], grad, grad_out):
        _gemm(rows, grad_rows, x, started)


def _row_blocks(weight: Tensor, grad: Tensor, grad_out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """grad [out, in] and grad_out [N, out] transposed, by rows if the weight wants it so."""
    blocks: RowBlocks | None = getattr(weight, "main_grad_blocks", None)
    if blocks is None:
        yield grad, grad_out.T
        return
    parts = grad.chunk(blocks.number), grad_out.T.chunk(blocks.number)
    for rows, grad_rows in zip(*parts, strict=True):
        yield rows, grad_rows
        blocks.made(rows)


def _gemm(out: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """out = a @ b, or out += a @ b, in out's dtype, whatever that of a and b."""
    if a.dtype == out.dtype:  # CPUs have no GEMM with another dtype of its output
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif add:
        torch.addmm(out, a, b, out.dtype, out=out)
    else:
        torch.mm(a, b, out.dtype, out=out)


def add_vector_grad(weight: Tensor, grad: Tensor) -> None:
    """main_grad of a norm's weight += grad."""
    main: Tensor = weight.main_grad  # type: ignore[attr-defined]
    if _start([weight]):
        main.add_(grad)
    else:
        main.copy_(grad)


def _start(weights: Sequence[Tensor]) -> bool:
    """Whether these weights have a gradient in this step already; from now on they have."""
    started = {bool(getattr(weight, "main_grad_started", False)) for weight in weights}
    assert len(started) == 1, "weights of one GEMM of which only some have a gradient"
    for weight in weights:
        weight.main_grad_started = True  # type: ignore[attr-defined]
    return started.pop()


def flat(x: Tensor) -> Tensor:
    """[..., C] as [N, C]."""
    return x.reshape(-1, x.shape[-1])


def linear(x: Tensor, *weights: Tensor) -> Tensor:
    """x [..., in] times each weight [out_i, in] transposed, side by side: [..., sum out]."""
    return _Linear.apply(x, merged_view(weights), *weights)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.weights = weight, weights
        return x @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        add_matrix_grad(ctx.weights, flat(grad_out), flat(x))
        dx = grad_out @ ctx.weight if ctx.needs_input_grad[0] else None
        return dx, None, *[None] * len(ctx.weights)


def split_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Sum over l of x[l] [N, H] times columns [l*H, (l+1)*H) of weight [out, L*H], transposed.

    x [L, N, H] has no gradient: it is what the frozen target captured.
    """
    return _SplitLinear.apply(x, weight)


class _SplitLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        parts = weight.detach().chunk(x.shape[0], dim=1)
        out = x[0] @ parts[0].T
        for states, part in zip(x[1:], parts[1:], strict=True):
            out.addmm_(states, part.T)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[None, None]:
        (x,) = ctx.saved_tensors
        started = _start([ctx.weight])
        for rows, grad_rows in _row_blocks(ctx.weight, ctx.weight.main_grad, grad_out):
            for states, grad in zip(x, rows.chunk(x.shape[0], dim=1), strict=True):
                _gemm(grad, grad_rows, states, started)
        return None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension of x [..., H]."""
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, rstd = torch.ops.dflash_ext.rms_norm.default(x, weight, eps)
        ctx.save_for_backward(x, rstd)
        ctx.weight = weight
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_normed: Tensor) -> tuple[Tensor, None, None]:
        x, rstd = ctx.saved_tensors
        dx, dweight = rms_norm_backward(grad_normed, None, x, ctx.weight.detach(), rstd)
        add_vector_grad(ctx.weight, dweight)
        return dx, None, None


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(total), total) of total = x + residual, each [..., H]."""
    return _AddRMSNorm.apply(x, residual, weight, eps)


class _AddRMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        normed, total, rstd = torch.ops.dflash_ext.add_rms_norm.default(x, residual, weight, eps)
        ctx.save_for_backward(total, rstd)
        ctx.weight = weight
        return normed, total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_normed: Tensor, grad_total: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None]:
        total, rstd = ctx.saved_tensors
        weight = ctx.weight
        dx, dweight = rms_norm_backward(grad_normed, grad_total, total, weight.detach(), rstd)
        add_vector_grad(weight, dweight)
        return dx, dx, None, None


class HeadNorms(NamedTuple):
    """How merged projections become heads: the arguments of `ops.qkv_norm_rope` after qkv."""

    q_weight: Tensor | None  # [D]; None: there are no queries, as in a context
    k_weight: Tensor
    cos: Tensor  # [N, D/2] fp32
    sin: Tensor
    eps: float
    q_heads: int
    k_heads: int

    @property
    def weights(self) -> list[Tensor]:
        return [self.k_weight] if self.q_weight is None else [self.q_weight, self.k_weight]

    def backward(
        self, grad_q: Tensor | None, grad_k: Tensor, grad_v: Tensor, qkv: Tensor
    ) -> Tensor:
        """Gradient of qkv [N, (Hq+2Hk)*D], in its dtype; those of the norms are added."""
        dqkv, dq_weight, dk_weight = qkv_norm_rope_backward(grad_q, grad_k, grad_v, qkv, *self)
        if self.q_weight is not None:
            add_vector_grad(self.q_weight, dq_weight)
        add_vector_grad(self.k_weight, dk_weight)
        return dqkv


def qkv_norm_rope(qkv: Tensor, heads: HeadNorms) -> tuple[Tensor, Tensor, Tensor]:
    """Normed, rotated queries and keys, and values, [..., heads, D], of qkv [..., (Hq+2Hk)*D]."""
    parts = _QKVNormRope.apply(flat(qkv), heads, *heads.weights)
    return tuple(part.view(*qkv.shape[:-1], *part.shape[1:]) for part in parts)  # type: ignore


class _QKVNormRope(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: HeadNorms, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv)
        ctx.heads = heads
        return ops.qkv_norm_rope(qkv, *heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dqkv = ctx.heads.backward(*grads, *ctx.saved_tensors)
        return dqkv, None, *[None] * len(ctx.heads.weights)
