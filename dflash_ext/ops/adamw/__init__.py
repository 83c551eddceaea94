"""adamw: one pass over a flat buffer of parameters, moments and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_ext.ops.adamw.naive import adamw_naive

__all__ = ["adamw"]

torch.library.define(
    "dflash_ext::adamw",
    "(Tensor(a!) master, Tensor(b!)? weight, Tensor grad, Tensor(c!) exp_avg, "
    "Tensor(d!) exp_avg_sq, Tensor scalars, int num_decayed, "
    "float beta1, float beta2, float eps) -> ()",
)


def adamw(
    master: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Tensor,
    *,
    num_decayed: int,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """One step of AdamW in place; what changes from step to step is read on the device.

    master, grad, exp_avg, exp_avg_sq  [P] fp32, contiguous
    weight       [P]  copy of master in a lower precision, or None
    scalars      [5] fp32: 0 to change nothing; factor of the gradient (clipping); learning rate
                 * weight decay; learning rate / (1 - beta1^t); sqrt(1 - beta2^t), t from 1
    num_decayed  only the first so many elements are decayed

    Raises RuntimeError for shapes, dtypes or devices that do not fit.
    """
    torch.ops.dflash_ext.adamw.default(
        master, weight, grad, exp_avg, exp_avg_sq, scalars, num_decayed, beta1, beta2, eps
    )


def _check(
    master: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Tensor,
) -> None:
    flat = {"master": master, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if weight is not None:
        flat["weight"] = weight
    for name, x in {**flat, "scalars": scalars}.items():
        _check_vector(name, x, [5] if name == "scalars" else [master.numel()], master.device)


def _check_vector(name: str, x: Tensor, shape: list[int], device: torch.device) -> None:
    torch._check(
        list(x.shape) == shape
        and x.is_contiguous()
        and x.device == device
        and (name == "weight" or x.dtype == torch.float32),
        lambda: (
            f"{name}: found {list(x.shape)} {x.dtype} on {x.device}, "
            f"want contiguous {shape} float32 on {device}"
        ),
    )


@torch.library.impl("dflash_ext::adamw", "CPU")
def _(
    master: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Tensor,
    num_decayed: int,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    tensors = (master, weight, grad, exp_avg, exp_avg_sq, scalars)
    _check(*tensors)
    adamw_naive(*tensors, num_decayed, beta1, beta2, eps)


@torch.library.impl("dflash_ext::adamw", "CUDA")
def _(
    master: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Tensor,
    num_decayed: int,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    tensors = (master, weight, grad, exp_avg, exp_avg_sq, scalars)
    _check(*tensors)
    from dflash_ext.ops.adamw.triton import adamw_triton

    adamw_triton(*tensors, num_decayed, beta1, beta2, eps)


@torch.library.register_fake("dflash_ext::adamw")
def _(
    master: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Tensor,
    num_decayed: int,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    _check(master, weight, grad, exp_avg, exp_avg_sq, scalars)
