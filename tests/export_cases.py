"""Drafters of every kind of layer mix, and ways to change what was exported."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drafter_cases import MIXES, small_spec
from safetensors.torch import load_file, save_file
from torch import Tensor

SPECS = {
    "full": small_spec(MIXES["full"]),
    "sliding": small_spec(MIXES["sliding"]),
    "mixed": small_spec(MIXES["mixed"]),
    "all_sliding_bidirectional": small_spec(MIXES["sliding"], causal=False),
    "all_causal": small_spec(MIXES["full"], causal=True),
    "scaled": small_spec(MIXES["full"], embed_scale=5.5, logit_scale=0.25, softcap=30.0),
}

TensorChange = Callable[[dict[str, Tensor]], object]


def edit_config(folder: Path, **changes: Any) -> None:
    """Set values where they stand: in dflash_config, or at the top level."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        place = config["dflash_config"] if name in config["dflash_config"] else config
        place[name] = value
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: TensorChange) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def drop(name: str) -> TensorChange:
    return lambda tensors: tensors.pop(name)


def rename(old: str, new: str) -> TensorChange:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def transform(name: str, function: Callable[[Tensor], Tensor]) -> TensorChange:
    return lambda tensors: tensors.update({name: function(tensors[name]).contiguous()})
