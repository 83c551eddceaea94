"""A drafter that has learnt part of a tiny target's greedy text, so that it accepts something."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from dflash_ext.drafter import DFlashDraftModel, DrafterSpec, FrozenHead
from dflash_ext.greedy_text import greedy_tokens
from dflash_ext.layout import BlockLayout
from dflash_ext.target import Target, load_target

PROMPTS = [list(b"Count from 3."), list(b"What is the time?"), list(b"ab")]
MAX_NEW_TOKENS = 60


@dataclass(frozen=True)
class Bench:
    """Target, its greedy text after each of PROMPTS (prompt included), and the drafter."""

    folder: Path
    target: Target
    texts: list[list[int]]
    drafter: DFlashDraftModel

    @property
    def head(self) -> FrozenHead:
        return FrozenHead(self.target.embed_weight, self.target.head_weight)


@functools.cache
def bench(tiny_target_dir: Path) -> Bench:
    """Made once for all test files, beside the tiny target."""
    target = load_target(str(tiny_target_dir), dtype=torch.float32, device="cpu")
    texts = [p + list(greedy_tokens(target.model, p, MAX_NEW_TOKENS, ())) for p in PROMPTS]
    spec = tiny_spec(target)
    assert not any(spec.mask_token_id in text for text in texts)
    return Bench(tiny_target_dir, target, texts, train_on(target, spec, texts, loss_below=1.3))


def tiny_spec(target: Target) -> DrafterSpec:
    """Three layers, full and sliding mixed; the window is shorter than the texts."""
    info = target.info
    return DrafterSpec(
        hidden_size=info.hidden_size,
        intermediate_size=96,
        num_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=info.vocab_size,
        rms_norm_eps=1e-5,
        rope_theta=7000.0,
        max_position_embeddings=512,
        block_size=8,
        mask_token_id=260,
        target_layer_ids=(0, 2, 4),
        num_target_layers=info.num_layers,
        layer_types=("full_attention", "sliding_attention", "full_attention"),
        sliding_window=11,
    )


def capture(target: Target, layer_ids: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
    """Hidden states [n, L*H] of one text."""
    layers: list[torch.Tensor] = []
    target.forward_capture(
        ids[None], layer_ids, lambda index, hidden: layers.append(hidden[0]), need_last=False
    )
    return torch.cat(layers, dim=-1)


def train_on(
    target: Target, spec: DrafterSpec, texts: Sequence[Sequence[int]], loss_below: float
) -> DFlashDraftModel:
    """Plain cross-entropy over every anchor of the texts, in turn, until it is low enough."""
    model = DFlashDraftModel(spec)
    model.init_weights(seed=3)
    head = FrozenHead(target.embed_weight, target.head_weight)
    layout = BlockLayout(spec.block_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    inputs = []
    for text in texts:
        ids = torch.tensor(text)
        inputs.append((ids, capture(target, spec.target_layer_ids, ids)))
    for _ in range(200):
        losses = []
        for ids, hidden in inputs:
            anchors = torch.arange(1, len(ids) - spec.block_size)
            labels = ids[anchors[:, None] + layout.label_offsets()][:, 1:]
            ctx_kv = model.context(hidden, torch.arange(len(ids)))
            embeds = head.embed(layout.input_ids(ids[anchors], spec.mask_token_id))
            out = model(embeds, ctx_kv, torch.zeros_like(anchors), anchors)[:, 1:]
            loss = F.cross_entropy((out @ head.head_weight.T).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if sum(losses) / len(losses) < loss_below:
            return model.eval()
    raise AssertionError(f"losses after training: {losses}")
