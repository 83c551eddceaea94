"""In what dtype operators compute and add up."""

from __future__ import annotations

import torch


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64; every other input is computed and added up in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
