"""Checkpoints of recognisable contents."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_ext.checkpoint import CheckpointManager
from dflash_ext.config import CheckpointConfig


def tensors_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 3, generator=generator)
    return {
        "weight": weight,
        "bf16": weight.to(torch.bfloat16),
        "transposed": weight.t(),
        "tied": weight,
        "row": weight[1],
        "count": torch.tensor(seed),
        "flags": torch.tensor([True, False]),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "empty": torch.zeros(0, 4),
        "also_empty": torch.zeros(0),
    }


def assert_identical(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        as_bytes = found[name].contiguous().view(torch.uint8) if tensor.ndim else found[name]
        wanted_bytes = tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor
        assert torch.equal(as_bytes, wanted_bytes), name


def manager(folder: Path, **fields: Any) -> CheckpointManager:
    return CheckpointManager(folder / "checkpoints", CheckpointConfig(**fields))


def saved(folder: Path, *steps: int, **fields: Any) -> CheckpointManager:
    checkpoints = manager(folder, **fields)
    for step in steps:
        checkpoints.save(step, tensors_of(step), {"tokens": 10 * step})
    checkpoints.close()
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "checkpoints"))
