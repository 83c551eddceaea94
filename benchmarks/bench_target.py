"""A hybrid target's forward pass with fused modules beside transformers' own, and where it goes.

Both run the same gated delta rule and the same convolution; weights are random and shared.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

from benchmarks import median_seconds
from benchmarks.step_parts import Record, profiled
from dflash_ext.config import UserError
from dflash_ext.fast_gdn import (
    bind_convolution,
    check_convolution,
    find_gdn_kernels,
)
from dflash_ext.target_fast import fuse_target
from dflash_ext.target_shape import QWEN3_5_27B

ROUNDS = {"cpu": 1, "cuda": 5}  # profiled forward passes
CHECKED_TOKENS = 256
# The first group whose pattern a kernel's or its operator's name matches.
GROUPS = (
    (
        "attention and GDN",
        re.compile(
            r"delta_rule|chunk_|flash|fmha|attention|recompute_w_u|l2norm|cumsum|triangular", re.I
        ),
    ),
    ("convolution", re.compile(r"conv", re.I)),
    ("products", re.compile(r"aten::(add)?b?mm|gemm|cutlass|nvjet|cublas", re.I)),
)


@dataclass(frozen=True)
class Size:
    name: str
    rows: int
    columns: int
    dtype: torch.dtype
    config: dict[str, Any]


SIZES = {
    "cpu": Size(
        "toy",
        2,
        70,
        torch.float32,
        {
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "cuda": Size(
        "27B, 8 of 64 layers",
        4,
        2048,
        torch.bfloat16,
        {**QWEN3_5_27B, "num_hidden_layers": 8},
    ),
}


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows of `benchmarks.run`: the two forward passes, then the groups of each one's kernels.

    Raises AssertionError if the fused hidden states err more than twice as much as the others.
    """
    size = SIZES[device.type]
    start = {"op": "target", "shape": f"{size.name}, {size.rows} x {size.columns}"}
    torch.manual_seed(0)
    with device:
        own = Qwen3_5TextModel(Qwen3_5TextConfig(**size.config)).to(size.dtype)
    own.eval().requires_grad_(False)
    modeling = sys.modules[type(own).__module__]
    kernels = None
    if device.type == "cuda":
        try:
            kernels = find_gdn_kernels()
            check_convolution(kernels, device)
        except UserError as missing:
            yield {**start, "peer": "transformers", "error": str(missing)}
            return
        bind_convolution(modeling, kernels)
        yield {**start, "peer": "both", "note": kernels.line()}
    fused = copy.deepcopy(own, {id(p): p for p in own.parameters()})
    fuse_target(fused, kernels)
    generator = torch.Generator().manual_seed(1)
    vocabulary = size.config["vocab_size"]
    ids = torch.randint(vocabulary, (size.rows, size.columns), generator=generator).to(device)
    errors = check(own, fused, ids[:1, :CHECKED_TOKENS])
    note = f"error of the hidden states {errors[0]:.1e}, fused {errors[1]:.1e}"
    yield {**start, "peer": "transformers", "note": note}

    sides = {
        "fused": lambda: hidden(fused, ids),
        "transformers": lambda: hidden(own, ids),
    }
    mine, peer = median_seconds((sides["fused"], sides["transformers"]), device)
    weights = sum(p.numel() for name, p in own.named_parameters() if "embed" not in name)
    flops = 2 * weights * ids.numel()
    yield {
        **start,
        "us": mine * 1e6,
        "peer": "transformers",
        "peer_us": peer * 1e6,
        "speedup": peer / mine,
        "flops": flops,
        "rate": f"{flops / mine / 1e12:.2f} TFLOP/s",
    }
    for name, run in sides.items():
        rounds = ROUNDS[device.type]
        parts = groups(profiled(run, run, device, rounds=rounds))
        text = ", ".join(f"{what} {s / rounds * 1e3:.2f} ms" for what, s in parts.items())
        yield {**start, "peer": name, "note": text, "seconds": parts}


@torch.no_grad()
def hidden(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).last_hidden_state


def check(own: nn.Module, fused: nn.Module, ids: Tensor) -> tuple[float, float]:
    """Errors of both against transformers' modules with the same weights in fp32."""
    wide = copy.deepcopy(own).float()
    with torch_functions(sys.modules[type(own).__module__]):
        want = hidden(wide, ids)
    theirs, ours = (
        float((hidden(model, ids).float() - want).norm() / want.norm()) for model in (own, fused)
    )
    assert ours <= max(2 * theirs, 1e-5), f"fused hidden states: error {ours}, own {theirs}"
    return theirs, ours


@contextlib.contextmanager
def torch_functions(modeling: Any) -> Iterator[None]:
    """torch's functions of a GatedDeltaNet in a module of transformers, whatever it has bound."""

    def causal_conv1d_fn(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        channels, width = weight.shape
        out = F.conv1d(x, weight[:, None], padding=width - 1, groups=channels)
        return F.silu(out[..., : x.shape[-1]])

    rule = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)
    plain = {"causal_conv1d_fn": causal_conv1d_fn, "torch_chunk_gated_delta_rule": rule}
    bound = {name: getattr(modeling, name) for name in plain}
    try:
        vars(modeling).update(plain)
        yield
    finally:
        vars(modeling).update(bound)


def groups(records: list[Record]) -> dict[str, float]:
    """Seconds of each group of kernels."""
    seconds: Counter[str] = Counter()
    for record in records:
        text = f"{record.name} {record.op}"
        found = (name for name, pattern in GROUPS if pattern.search(text))
        seconds[next(found, "the rest")] += record.seconds
    return {name: seconds[name] for name in (*(name for name, _ in GROUPS), "the rest")}
