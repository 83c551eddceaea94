"""adamw in plain torch: the specification, operation by operation in fp32.

Loshchilov & Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def adamw_naive(
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
    """Updates master, weight and both moments in place, unless scalars say to skip the step."""
    live, clip, decay, step_size, root_bias2 = scalars.unbind()
    skip = live == 0
    clipped = grad * clip
    decayed = master.clone()
    decayed[:num_decayed] -= decayed[:num_decayed] * decay
    first = exp_avg + (clipped - exp_avg) * (1 - beta1)
    second = exp_avg_sq + (clipped * clipped - exp_avg_sq) * (1 - beta2)
    stepped = decayed - step_size * (first / (second.sqrt() / root_bias2 + eps))
    for old, new in ((exp_avg, first), (exp_avg_sq, second), (master, stepped)):
        old.copy_(torch.where(skip, old, new))
    if weight is not None:
        weight.copy_(torch.where(skip, weight, master.to(weight.dtype)))
