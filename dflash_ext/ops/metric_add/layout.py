"""The words of a metric accumulator; csrc/metric_layout.h is its C++ twin."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_BLOCK = 32  # slots of a block that have their own counters

_NAMES = (
    "loss_sum",  # fixed point, like every *_sum and *_weight: multiples of 1 / SCALE
    "loss_weight",
    "ce_sum",
    "kl_sum",
    "cap_sum",
    "term_weight",
    "slots",
    "top1",
    "top4",
    "top8",
    "blocks",
    "streak1",
    "streak4",
    "streak8",
    "nonfinite_values",
    "batches",
    "measured_batches",
    "nonfinite_steps",  # the optimizer's
    "tokens",  # the training loop's, like the two below
    "grad_norm_sum",
    "grad_norm_steps",
)

SCALE = float(2**24)
MAX_VALUE = float(2**31)  # a larger product is counted as non-finite: sums of 2^8 of them still fit

WORD: dict[str, int] = {name: i for i, name in enumerate(_NAMES)}
WORD["slot_n"] = len(_NAMES)
WORD["slot_hit"] = len(_NAMES) + MAX_BLOCK
NUM_WORDS = len(_NAMES) + 2 * MAX_BLOCK


def new_accumulator(device: torch.device | str = "cpu") -> Tensor:
    """An empty accumulator, int64[NUM_WORDS]."""
    return torch.zeros(NUM_WORDS, dtype=torch.int64, device=device)
