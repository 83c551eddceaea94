"""qkv_norm_rope: heads of a merged projection, normalised and rotated, in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_ext.ops.dtypes import accumulate_dtype
from dflash_ext.ops.qkv_norm_rope.naive import (
    qkv_norm_rope_backward_naive,
    qkv_norm_rope_naive,
)

__all__ = ["qkv_norm_rope", "qkv_norm_rope_backward"]

_INPUTS = (
    "Tensor qkv, Tensor? q_weight, Tensor k_weight, Tensor cos, Tensor sin, "
    "float eps, int q_heads, int k_heads"
)
torch.library.define("dflash_ext::qkv_norm_rope", f"({_INPUTS}) -> (Tensor q, Tensor k, Tensor v)")
torch.library.define(
    "dflash_ext::qkv_norm_rope_backward",
    f"(Tensor? grad_q, Tensor grad_k, Tensor grad_v, {_INPUTS}) "
    "-> (Tensor dqkv, Tensor dq_weight, Tensor dk_weight)",
)


def qkv_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    q_heads: int,
    k_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v), contiguous, of a projection that computed all three by one GEMM.

    Heads of q and k are divided by their rms, weighted, and rotated: dimension i with i + D/2.

    qkv       [N, (Hq + 2 Hk) * D]  q's heads, k's, v's; rows may have any stride
    q_weight  [D] or None           None: no q (Hq = 0), as of a context
    k_weight  [D]                   D even
    cos, sin  [N, D/2]              any float dtype, no gradient
    q, k, v   [N, Hq or Hk, D]      in qkv's dtype; fp32 inside (fp64 for fp64), rounded once

    The gradient of qkv comes as one contiguous tensor; those of the weights are fp32 and the same
    in every run. Raises RuntimeError for shapes or devices that do not fit.
    """
    return torch.ops.dflash_ext.qkv_norm_rope.default(
        qkv, q_weight, k_weight, cos, sin, eps, q_heads, k_heads
    )


def qkv_norm_rope_backward(
    grad_q: Tensor | None,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    q_heads: int,
    k_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dqkv, dq_weight, dk_weight) for code that runs its own backward pass.

    grad_q [N, Hq, D], grad_k and grad_v [N, Hk, D] may be fp32 sums or in qkv's dtype, at any row
    stride; the rest is what the forward pass was given. dqkv is contiguous, in qkv's dtype; the
    weights' gradients are fp32 (fp64 for fp64), dq_weight [0] without q.
    """
    return torch.ops.dflash_ext.qkv_norm_rope_backward.default(
        grad_q, grad_k, grad_v, qkv, q_weight, k_weight, cos, sin, eps, q_heads, k_heads
    )


def _check(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_heads: int,
    k_heads: int,
) -> None:
    dim = k_weight.shape[0] if k_weight.dim() == 1 else 0
    torch._check(
        dim > 0 and dim % 2 == 0,
        lambda: f"k_weight: found {list(k_weight.shape)}, want [D] with an even D",
    )
    torch._check(
        (q_heads == 0) if q_weight is None else (q_weight.shape == k_weight.shape and q_heads > 0),
        lambda: (
            f"q_weight: found {None if q_weight is None else list(q_weight.shape)} for "
            f"{q_heads} heads, want [{dim}], or None for 0 heads"
        ),
    )
    width = (q_heads + 2 * k_heads) * dim
    torch._check(
        qkv.dim() == 2 and qkv.shape[1] == width and k_heads > 0,
        lambda: f"qkv: found {list(qkv.shape)}, want [N, {width}]",
    )
    for name, table in (("cos", cos), ("sin", sin)):
        _check_table(name, table, [qkv.shape[0], dim // 2])
    for name, other in (("k_weight", k_weight), ("cos", cos), ("sin", sin)):
        _check_device(name, other, qkv.device)


def _check_table(name: str, table: Tensor, shape: list[int]) -> None:
    torch._check(
        list(table.shape) == shape,
        lambda: f"{name}: found {list(table.shape)}, want {shape}",
    )


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    torch._check(
        tensor.device == device, lambda: f"{name}: found on {tensor.device}, want {device}"
    )


@torch.library.impl("dflash_ext::qkv_norm_rope", "CPU")
def _(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    q_heads: int,
    k_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(qkv, q_weight, k_weight, cos, sin, q_heads, k_heads)
    return qkv_norm_rope_naive(qkv, q_weight, k_weight, cos, sin, eps, q_heads, k_heads)


@torch.library.impl("dflash_ext::qkv_norm_rope", "CUDA")
def _(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    q_heads: int,
    k_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(qkv, q_weight, k_weight, cos, sin, q_heads, k_heads)
    args = (qkv, q_weight, k_weight, cos, sin, eps, q_heads, k_heads)
    if qkv.dtype == torch.float64:
        return qkv_norm_rope_naive(*args)
    from dflash_ext.ops.qkv_norm_rope.triton import qkv_norm_rope_triton

    return qkv_norm_rope_triton(*args)


def _check_grads(grad_q: Tensor | None, grad_k: Tensor, grad_v: Tensor, *inputs: Any) -> None:
    qkv, _, k_weight, *_, q_heads, k_heads = inputs
    found = [None if grad is None else list(grad.shape) for grad in (grad_q, grad_k, grad_v)]
    rows, dim = qkv.shape[0], k_weight.shape[0]
    wanted = [[rows, heads, dim] for heads in (q_heads, k_heads, k_heads)]
    torch._check(
        found == [wanted[0] if q_heads else None, *wanted[1:]],
        lambda: f"grad_q, grad_k, grad_v: found {found}, want {wanted}, None for 0 heads",
    )


@torch.library.impl("dflash_ext::qkv_norm_rope_backward", "CPU")
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check_grads(*args)
    return qkv_norm_rope_backward_naive(*args)


@torch.library.impl("dflash_ext::qkv_norm_rope_backward", "CUDA")
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check_grads(*args)
    if args[3].dtype == torch.float64:
        return qkv_norm_rope_backward_naive(*args)
    from dflash_ext.ops.qkv_norm_rope.triton import qkv_norm_rope_backward_triton

    return qkv_norm_rope_backward_triton(*args)


@torch.library.register_fake("dflash_ext::qkv_norm_rope")
def _(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    q_heads: int,
    k_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(qkv, q_weight, k_weight, cos, sin, q_heads, k_heads)
    rows, dim = qkv.shape[0], k_weight.shape[0]
    q, k, v = (qkv.new_empty(rows, heads, dim) for heads in (q_heads, k_heads, k_heads))
    return q, k, v


@torch.library.register_fake("dflash_ext::qkv_norm_rope_backward")
def _(
    grad_q: Tensor | None,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor,
    *_others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = accumulate_dtype(qkv.dtype)
    dq_weight = k_weight.new_empty(0 if q_weight is None else k_weight.shape[0], dtype=wide)
    return qkv.new_empty(qkv.shape), dq_weight, k_weight.new_empty(k_weight.shape, dtype=wide)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, eps, q_heads, k_heads = inputs
    ctx.options = eps, q_heads, k_heads
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple:
    saved = ctx.saved_tensors
    with_q = saved[1] is not None
    dqkv, dq_weight, dk_weight = qkv_norm_rope_backward(
        grad_q if with_q else None, grad_k, grad_v, *saved, *ctx.options
    )
    return dqkv, dq_weight if with_q else None, dk_weight, *[None] * 5


torch.library.register_autograd("dflash_ext::qkv_norm_rope", _backward, setup_context=_save)
