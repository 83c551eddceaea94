"""Noise on the captured hidden states: a drafter that also sees states it was not given exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash_ext.data.buckets import seeded_generator

if TYPE_CHECKING:
    from dflash_ext.data.packing import BatchPlan

NOISE = 1  # the generator's purpose, apart from that of the anchors
CHUNK_ROWS = 4096


def with_noise(hidden: Tensor, plan: BatchPlan, std: float, seed: int) -> Tensor:
    """Hidden states [T, L*H] or [L, T, H] with Gaussian noise, a pure function of the plan.

    The noise depends on (seed, epoch, batch id), the device's kind and the layout of hidden. On a
    GPU it is added in place, to the rows that hold tokens, a chunk of rows at a time.
    """
    if std == 0.0:
        return hidden
    generator = seeded_generator(seed, plan.epoch, plan.batch_id, NOISE)
    if hidden.device.type == "cpu":
        noise = torch.randn(hidden.shape, generator=generator, dtype=hidden.dtype)
        return hidden + std * noise
    on_gpu = torch.Generator(hidden.device).manual_seed(generator.initial_seed())
    for layer in hidden if hidden.dim() == 3 else [hidden]:
        for rows in layer[: plan.n_tokens].split(CHUNK_ROWS):
            noise = torch.randn(rows.shape, generator=on_gpu, dtype=rows.dtype, device=rows.device)
            rows.add_(noise, alpha=std)
    return hidden
