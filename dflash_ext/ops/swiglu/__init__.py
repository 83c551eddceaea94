"""swiglu: the gated activation of a merged gate and up projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_ext.ops.swiglu.naive import swiglu_backward_naive, swiglu_naive

__all__ = ["swiglu", "swiglu_backward"]

torch.library.define("dflash_ext::swiglu", "(Tensor gate_up) -> Tensor")
torch.library.define("dflash_ext::swiglu_backward", "(Tensor grad, Tensor gate_up) -> Tensor")


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [..., I] of gate_up [..., 2 I]: gate first; any strides.

    fp32 inside (fp64 for fp64), rounded once. The backward pass keeps gate_up alone and returns its
    gradient as one tensor. Raises RuntimeError for an odd last dimension.
    """
    return torch.ops.dflash_ext.swiglu.default(gate_up)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient [..., 2 I] of gate_up for code that runs its own backward pass; grad [..., I]."""
    return torch.ops.dflash_ext.swiglu_backward.default(grad, gate_up)


def _check(gate_up: Tensor) -> None:
    torch._check(
        gate_up.dim() > 0 and gate_up.shape[-1] % 2 == 0,
        lambda: f"gate_up: found {list(gate_up.shape)}, want an even last dimension",
    )


def _check_grad(grad: Tensor, gate_up: Tensor) -> None:
    _check(gate_up)
    wanted = [*gate_up.shape[:-1], gate_up.shape[-1] // 2]
    torch._check(
        list(grad.shape) == wanted and grad.device == gate_up.device,
        lambda: (
            f"grad: found {list(grad.shape)} on {grad.device}, want {wanted} on {gate_up.device}"
        ),
    )


@torch.library.impl("dflash_ext::swiglu", "CPU")
def _(gate_up: Tensor) -> Tensor:
    _check(gate_up)
    return swiglu_naive(gate_up)


@torch.library.impl("dflash_ext::swiglu", "CUDA")
def _(gate_up: Tensor) -> Tensor:
    _check(gate_up)
    if gate_up.dtype == torch.float64:
        return swiglu_naive(gate_up)
    from dflash_ext.ops.swiglu.triton import swiglu_triton

    return swiglu_triton(gate_up)


@torch.library.impl("dflash_ext::swiglu_backward", "CPU")
def _(grad: Tensor, gate_up: Tensor) -> Tensor:
    _check_grad(grad, gate_up)
    return swiglu_backward_naive(grad, gate_up)


@torch.library.impl("dflash_ext::swiglu_backward", "CUDA")
def _(grad: Tensor, gate_up: Tensor) -> Tensor:
    _check_grad(grad, gate_up)
    if gate_up.dtype == torch.float64:
        return swiglu_backward_naive(grad, gate_up)
    from dflash_ext.ops.swiglu.triton import swiglu_backward_triton

    return swiglu_backward_triton(grad, gate_up)


@torch.library.register_fake("dflash_ext::swiglu")
def _(gate_up: Tensor) -> Tensor:
    _check(gate_up)
    return gate_up.new_empty([*gate_up.shape[:-1], gate_up.shape[-1] // 2])


@torch.library.register_fake("dflash_ext::swiglu_backward")
def _(grad: Tensor, gate_up: Tensor) -> Tensor:
    _check_grad(grad, gate_up)
    return gate_up.new_empty(gate_up.shape)


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    (gate_up,) = ctx.saved_tensors
    return swiglu_backward(grad, gate_up)


torch.library.register_autograd("dflash_ext::swiglu", _backward, setup_context=_save)
