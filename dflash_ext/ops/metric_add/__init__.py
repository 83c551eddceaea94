"""metric_add: adds a batch's statistics to an accumulator on its device, without a sync."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_ext.ops.metric_add.layout import (
    MAX_BLOCK,
    MAX_VALUE,
    NUM_WORDS,
    SCALE,
    WORD,
    new_accumulator,
)

__all__ = [
    "MAX_BLOCK",
    "MAX_VALUE",
    "NUM_WORDS",
    "SCALE",
    "WORD",
    "metric_add",
    "new_accumulator",
]


def metric_add(acc: Tensor, rank: Tensor, terms: Tensor, weights: Tensor) -> None:
    """Adds one batch to `acc`; a slot is supervised if its weight is > 0.

    acc      [NUM_WORDS] i64  laid out as in WORD; sums are fixed point, multiples of 1 / SCALE
    rank     [A, K] i64       ids before the label; [0, 0] if this batch is not measured: then only
                              loss_sum, loss_weight, nonfinite_values and batches are added
    terms    [A, K, 4] f32    (loss, ce, kl, cap) of each slot, unweighted
    weights  [A, K] f32

    loss_sum is the sum of w * loss, and so on; top1/4/8 count ranks below 1/4/8; streak1/4/8 add,
    over the blocks with a supervised slot, the number of leading slots with such a rank. A streak
    starts at slot 0 if that is supervised, else at slot 1, and ends at a slot that is not.
    A supervised slot with a non-finite term only adds its number of non-finite terms to
    nonfinite_values, and ends the streak. Integer sums: any order of adding gives the same bits.

    Raises RuntimeError for shapes or dtypes that do not fit, or K > MAX_BLOCK.
    """
    torch.ops.dflash_ext.metric_add.default(acc, rank, terms, weights)


@torch.library.register_fake("dflash_ext::metric_add")
def _(acc: Tensor, rank: Tensor, terms: Tensor, weights: Tensor) -> None:
    torch._check(acc.dim() == 1, lambda: f"acc: found {acc.shape}, want [{NUM_WORDS}]")
    torch._check(weights.dim() == 2, lambda: f"weights: found {weights.shape}, want [A, K]")
