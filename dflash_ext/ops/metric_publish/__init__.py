"""metric_publish: moves an accumulator to a staging row and clears it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["metric_publish"]


def metric_publish(acc: Tensor, staging: Tensor, step: Tensor) -> None:
    """Row step % R of staging becomes [acc..., step], acc becomes zeros and step grows by one.

    acc      [NUM_WORDS] i64
    staging  [R, NUM_WORDS + 1] i64
    step     [] i64                   lives on acc's device, so that a captured graph can replay it

    Raises RuntimeError for shapes or dtypes that do not fit.
    """
    torch.ops.dflash_ext.metric_publish.default(acc, staging, step)


@torch.library.register_fake("dflash_ext::metric_publish")
def _(acc: Tensor, staging: Tensor, step: Tensor) -> None:
    torch._check(staging.dim() == 2, lambda: f"staging: found {staging.shape}, want [R, words]")
