"""swiglu in plain torch: the specification, in any dtype.

Shazeer, GLU Variants Improve Transformer (2020).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_ext.ops.dtypes import accumulate_dtype


def swiglu_naive(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the two halves of the last dimension, rounded once."""
    gate, up = gate_up.to(accumulate_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def swiglu_backward_naive(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of gate_up, in its dtype."""
    wide = accumulate_dtype(gate_up.dtype)
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    grad = grad.to(wide)
    d_gate = torch.ops.aten.silu_backward(grad * up, gate)
    return torch.cat([d_gate, grad * F.silu(gate)], dim=-1).to(gate_up.dtype)
