"""qkv_norm_rope in plain torch: the specification, in any dtype, differentiated by autograd.

Norms of each head as in Qwen3; rotary embedding of Su et al., RoFormer (2021), in the NeoX layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_ext.ops.dtypes import accumulate_dtype
from dflash_ext.ops.rms_norm.naive import rms_norm_backward_naive, rms_norm_naive


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, D] turned by angles [N, D/2]; dimension i pairs with i + D/2."""
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def qkv_norm_rope_naive(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    q_heads: int,
    k_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q [N, Hq, D], k [N, Hk, D], v [N, Hk, D]) in qkv's dtype, each rounded once."""
    wide = accumulate_dtype(qkv.dtype)
    heads = qkv.reshape(qkv.shape[0], q_heads + 2 * k_heads, k_weight.shape[0])
    q, k, v = heads.split([q_heads, k_heads, k_heads], dim=1)
    turned = [
        part if weight is None else rotate(rms_norm_naive(part.to(wide), weight, eps)[0], cos, sin)
        for part, weight in ((q, q_weight), (k, k_weight))
    ]
    # clone: no output may share the storage of qkv.
    q, k, v = (x.to(qkv.dtype).clone(memory_format=torch.contiguous_format) for x in (*turned, v))
    return q, k, v


def qkv_norm_rope_backward_naive(
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
    """(gradient of qkv in its dtype, of q_weight and k_weight [D] unrounded; [0] without q)."""
    wide = accumulate_dtype(qkv.dtype)
    heads = qkv.reshape(qkv.shape[0], q_heads + 2 * k_heads, k_weight.shape[0]).to(wide)
    q, k, _ = heads.split([q_heads, k_heads, k_heads], dim=1)
    dq, dq_weight = _head_backward(grad_q, q, q_weight, cos, sin, eps)
    dk, dk_weight = _head_backward(grad_k, k, k_weight, cos, sin, eps)
    merged = torch.cat([dq, dk, grad_v.to(wide)], dim=1)
    return merged.reshape(qkv.shape).to(qkv.dtype), dq_weight, dk_weight


def _head_backward(
    grad: Tensor | None, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if grad is None or weight is None:
        return torch.zeros_like(x), x.new_zeros(0 if weight is None else weight.shape[0])
    turned_back = rotate(grad.to(x.dtype), cos, -sin)
    _, rstd = rms_norm_naive(x, weight, eps)
    return rms_norm_backward_naive(turned_back, None, x, weight, rstd)
