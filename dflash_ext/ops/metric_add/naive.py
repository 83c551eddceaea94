"""metric_add in plain torch: the specification, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_ext.ops.metric_add.layout import MAX_VALUE, SCALE, WORD


def metric_add_naive(acc: Tensor, rank: Tensor, terms: Tensor, weights: Tensor) -> None:
    """Sums are fixed point: each product is rounded to a multiple of 2^-24, then added exactly."""

    def add(name: str, value: Tensor | int) -> None:
        acc[WORD[name]] += value

    weights, terms = weights.double(), terms.double()
    products = weights[..., None] * terms
    supervised = weights > 0
    countable = (products.abs() < MAX_VALUE) & (weights[..., None] < MAX_VALUE)
    good = supervised & countable.all(-1)
    add("nonfinite_values", (supervised[..., None] & ~countable).sum())

    def fixed_sum(value: Tensor) -> Tensor:
        return torch.where(good, value * SCALE, 0.0).round().long().sum()

    add("loss_sum", fixed_sum(products[..., 0]))
    add("loss_weight", fixed_sum(weights))
    add("batches", 1)
    if rank.shape[1] == 0:
        return

    add("ce_sum", fixed_sum(products[..., 1]))
    add("kl_sum", fixed_sum(products[..., 2]))
    add("cap_sum", fixed_sum(products[..., 3]))
    add("term_weight", fixed_sum(weights))
    add("measured_batches", 1)
    add("slots", good.sum())
    add("blocks", supervised.any(1).sum())
    for width in (1, 4, 8):
        hit = good & (rank < width)
        add(f"top{width}", hit.sum())
        # Slot 0 is the anchor itself unless it has a weight; the streak starts after it.
        run = hit.clone()
        run[:, :1] |= ~supervised[:, :1]
        run = run.cumprod(1).bool() & hit
        add(f"streak{width}", run.sum())
    block_size = weights.shape[1]
    n, hits = WORD["slot_n"], WORD["slot_hit"]
    acc[n : n + block_size] += good.sum(0)
    acc[hits : hits + block_size] += (good & (rank < 1)).sum(0)
