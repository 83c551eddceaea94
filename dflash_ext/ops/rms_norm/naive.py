"""rms_norm in plain torch: the specification, in any dtype.

Zhang & Sennrich, Root Mean Square Layer Normalization (2019).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_ext.ops.dtypes import accumulate_dtype


def rms_norm_naive(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x / rms(x) * weight, rounded once to x's dtype; 1 / rms(x) [...] unrounded)."""
    wide = x.to(accumulate_dtype(x.dtype))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out = wide * rstd * weight.to(wide.dtype)
    return out.to(x.dtype), rstd.squeeze(-1)


def rms_norm_backward_naive(
    grad_out: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """(gradient of x in its dtype, with grad_total added; gradient of weight [H] unrounded)."""
    wide = rstd.dtype
    normed = x.to(wide) * rstd.unsqueeze(-1)
    grad = grad_out.to(wide)
    weighted = grad * weight.to(wide)
    dx = (weighted - normed * (weighted * normed).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    if grad_total is not None:
        dx = dx + grad_total.to(wide)
    return dx.to(x.dtype), (grad * normed).reshape(-1, weight.shape[0]).sum(0)
