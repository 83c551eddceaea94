"""Small drafters, documents and plans for the tests of model, objective and export."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_ext.config import DataConfig, TrainConfig
from dflash_ext.config_check import FULL, SLIDING
from dflash_ext.data.corpus import Example
from dflash_ext.data.packing import BatchPlan, BatchPlanner
from dflash_ext.drafter import DFlashDraftModel, DrafterSpec, FrozenHead

HIDDEN, VOCAB, MASK = 32, 96, 95
MIXES = {
    "full": (FULL, FULL),
    "sliding": (SLIDING, SLIDING),
    "mixed": (SLIDING, FULL, SLIDING),
}


def small_spec(layer_types: Sequence[str] = MIXES["mixed"], **changes: Any) -> DrafterSpec:
    """A drafter with grouped heads and blocks of 4; the window (6) is shorter than documents."""
    fields: dict[str, Any] = dict(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_layers=len(layer_types),
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        rope_theta=3000.0,
        max_position_embeddings=512,
        block_size=4,
        mask_token_id=MASK,
        target_layer_ids=(0, 2),
        num_target_layers=4,
        layer_types=tuple(layer_types),
        sliding_window=6 if SLIDING in layer_types else None,
        causal=None if SLIDING in layer_types else False,
        eos_token_ids=(1, 2),
        pad_token_id=0,
    )
    return DrafterSpec(**(fields | changes))


def random_model(
    spec: DrafterSpec, seed: int = 0, dtype: torch.dtype = torch.float32
) -> DFlashDraftModel:
    """Weights large enough that every part of the model matters to the output."""
    model = DFlashDraftModel(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.2 * noise)
    return model.to(dtype)


def random_head(seed: int = 1, dtype: torch.dtype = torch.float32, **fields: Any) -> FrozenHead:
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    head = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    return FrozenHead(embed, head, **fields)


def random_examples(lengths: Sequence[int] = (21, 13, 17), seed: int = 2) -> list[Example]:
    """Documents of random tokens whose first third is the prompt."""
    rng = np.random.default_rng(seed)
    examples = []
    for i, length in enumerate(lengths):
        mask = np.zeros(length, dtype=np.uint8)
        mask[length // 3 :] = 1
        ids = rng.integers(3, MASK, length).astype(np.int32)
        examples.append(Example(ids, mask, f"random:{i}"))
    return examples


def make_plan(
    examples: Sequence[Example], spec: DrafterSpec, *, budget: int = 64, **train: Any
) -> BatchPlan:
    """Batch 0 of the examples: by default 12 anchors, a few of them padding in small batches."""
    settings = {"max_anchors": 12, "gamma": 3.0} | train
    data = DataConfig(token_budget=budget)
    planner = BatchPlanner(examples, data, TrainConfig(**settings), spec.layout, 1)
    return planner.batch(0)


def random_hidden(plan: BatchPlan, spec: DrafterSpec, seed: int = 3) -> Tensor:
    """Captured states [T, L*H]; the rows beyond the documents are finite, too."""
    generator = torch.Generator().manual_seed(seed)
    width = len(spec.target_layer_ids) * spec.hidden_size
    return torch.randn(plan.doc_start.shape[0], width, generator=generator)


def positions(plan: BatchPlan) -> Tensor:
    return torch.arange(plan.doc_start.shape[0]) - plan.doc_start


def block_outputs(
    model: DFlashDraftModel, head: FrozenHead, plan: BatchPlan, hidden: Tensor
) -> Tensor:
    """Drafter states [A, K, H] of every block of a plan."""
    ids = model.spec.layout.input_ids(plan.labels, model.spec.mask_token_id, plan.prefix)
    ctx_kv = model.context(hidden, positions(plan))
    return model(head.embed(ids), ctx_kv, plan.ctx_start, plan.ctx_end)
