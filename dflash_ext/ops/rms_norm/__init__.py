"""rms_norm: root mean square normalisation, alone or of a sum with the residual stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_ext.ops.dtypes import accumulate_dtype
from dflash_ext.ops.rms_norm.naive import rms_norm_backward_naive, rms_norm_naive

__all__ = ["add_rms_norm", "rms_norm", "rms_norm_backward"]

torch.library.define(
    "dflash_ext::rms_norm", "(Tensor x, Tensor weight, float eps) -> (Tensor normed, Tensor rstd)"
)
torch.library.define(
    "dflash_ext::add_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, float eps) "
    "-> (Tensor normed, Tensor total, Tensor rstd)",
)
torch.library.define(
    "dflash_ext::rms_norm_backward",
    "(Tensor grad_normed, Tensor? grad_total, Tensor x, Tensor weight, Tensor rstd) "
    "-> (Tensor dx, Tensor dweight)",
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in x's dtype.

    x       [..., H]  any strides; fp32 inside (fp64 for fp64), rounded once
    weight  [H]       its gradient is fp32 and the same in every run

    Raises RuntimeError for shapes or devices that do not fit.
    """
    return torch.ops.dflash_ext.rms_norm.default(x, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(total), total) of total = x + residual, rounded to x's dtype, in one pass.

    x, residual  [..., H]  one shape and dtype; their common gradient takes one kernel too
    weight       [H]

    Raises RuntimeError for shapes, dtypes or devices that do not fit.
    """
    normed, total, _ = torch.ops.dflash_ext.add_rms_norm.default(x, residual, weight, eps)
    return normed, total


def rms_norm_backward(
    grad_normed: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx, dweight) for code that runs its own backward pass, as the ops' autograd does.

    grad_normed [..., H]  gradient of the normed output
    grad_total  [..., H]  gradient of the other output of add_rms_norm, which is added to dx
    x           [..., H]  what was normalised: x, or the total of add_rms_norm
    rstd        [...]     third output of torch.ops.dflash_ext.{add_,}rms_norm

    dx is in x's dtype, dweight [H] in fp32 (fp64 for fp64).
    """
    return torch.ops.dflash_ext.rms_norm_backward.default(grad_normed, grad_total, x, weight, rstd)


def _check(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    torch._check(
        x.dim() > 0 and weight.shape == x.shape[-1:],
        lambda: f"weight: found {list(weight.shape)}, want the last dimension of {list(x.shape)}",
    )
    torch._check(
        weight.device == x.device, lambda: f"weight: found on {weight.device}, want {x.device}"
    )
    if residual is not None:
        torch._check(
            residual.shape == x.shape and residual.dtype == x.dtype and residual.device == x.device,
            lambda: (
                f"residual: found {list(residual.shape)} {residual.dtype} {residual.device}, "
                f"want {list(x.shape)} {x.dtype} {x.device}"
            ),
        )


@torch.library.impl("dflash_ext::rms_norm", "CPU")
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check(x, weight)
    return rms_norm_naive(x, weight, eps)


@torch.library.impl("dflash_ext::rms_norm", "CUDA")
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check(x, weight)
    if x.dtype == torch.float64:
        return rms_norm_naive(x, weight, eps)
    from dflash_ext.ops.rms_norm.triton import rms_norm_triton

    normed, _, rstd = rms_norm_triton(x, None, weight, eps)
    return normed, rstd


@torch.library.impl("dflash_ext::add_rms_norm", "CPU")
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight, residual)
    total = x + residual
    normed, rstd = rms_norm_naive(total, weight, eps)
    return normed, total, rstd


@torch.library.impl("dflash_ext::add_rms_norm", "CUDA")
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight, residual)
    if x.dtype == torch.float64:
        total = x + residual
        normed, rstd = rms_norm_naive(total, weight, eps)
        return normed, total, rstd
    from dflash_ext.ops.rms_norm.triton import rms_norm_triton

    return rms_norm_triton(x, residual, weight, eps)


@torch.library.impl("dflash_ext::rms_norm_backward", "CPU")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    return rms_norm_backward_naive(*args)


@torch.library.impl("dflash_ext::rms_norm_backward", "CUDA")
def _(
    grad_normed: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    args = (grad_normed, grad_total, x, weight, rstd)
    if x.dtype == torch.float64:
        return rms_norm_backward_naive(*args)
    from dflash_ext.ops.rms_norm.triton import rms_norm_backward_triton

    return rms_norm_backward_triton(*args)


@torch.library.register_fake("dflash_ext::rms_norm")
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check(x, weight)
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=accumulate_dtype(x.dtype))


@torch.library.register_fake("dflash_ext::add_rms_norm")
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight, residual)
    rstd = x.new_empty(x.shape[:-1], dtype=accumulate_dtype(x.dtype))
    return x.new_empty(x.shape), x.new_empty(x.shape), rstd


@torch.library.register_fake("dflash_ext::rms_norm_backward")
def _(
    grad_normed: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=rstd.dtype)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx: Any, grad_normed: Tensor, _grad_rstd: Tensor | None) -> tuple:
    return *rms_norm_backward(grad_normed, None, *ctx.saved_tensors), None


def _save_add(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, total, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(total, inputs[2], rstd)


def _backward_add(ctx: Any, grad_normed: Tensor, grad_total: Tensor, _grad_rstd: Any) -> tuple:
    dx, dweight = rms_norm_backward(grad_normed, grad_total, *ctx.saved_tensors)
    return dx, dx, dweight, None


torch.library.register_autograd("dflash_ext::rms_norm", _backward, setup_context=_save)
torch.library.register_autograd("dflash_ext::add_rms_norm", _backward_add, setup_context=_save_add)
