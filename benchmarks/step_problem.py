"""The drafter step that bench_step times: sizes, weights, one batch, objectives.

Letters: B documents of S tokens, A anchors, K slots, L captured layers, H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_ext.config import DataConfig, TrainConfig
from dflash_ext.data.corpus import Example
from dflash_ext.data.packing import BatchPlan, BatchPlanner
from dflash_ext.drafter import DFlashDraftModel, DrafterSpec, FrozenHead
from dflash_ext.drafter.loss import Objective

GAMMA = 7.0  # SpecForge's decay of the slot weights
TEACHER_LOGIT = 13.0  # of the next token: its probability is about one half at V = 248,320


@dataclass(frozen=True)
class StepShape:
    """Sizes of a drafter and of its batch: ``documents`` of ``tokens``, anchors in each."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int = 5
    captured: int = 5
    block: int = 16
    documents: int = 4
    tokens: int = 2048
    anchors: int = 128

    def spec(self) -> DrafterSpec:
        return DrafterSpec(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            rms_norm_eps=1e-6,
            rope_theta=1e7,
            max_position_embeddings=262144,
            block_size=self.block,
            mask_token_id=self.vocab - 1,
            target_layer_ids=tuple(range(1, 1 + self.captured)),
            num_target_layers=self.captured + 2,
            layer_types=("full_attention",) * self.layers,
            causal=False,
        )


SHAPES = {
    "27b": StepShape("27b", 5120, 17408, 32, 8, 128, 248320),  # Qwen3.5-27B
    "8b": StepShape("8b", 4096, 12288, 32, 8, 128, 151936),  # Qwen3-8B
    "small": StepShape("small", 1024, 3072, 8, 2, 128, 32000, layers=2, captured=2, tokens=512),
    "toy": StepShape(
        "toy", 64, 96, 6, 2, 16, 503, layers=2, captured=2, block=4, tokens=40, anchors=5
    ),
}


@dataclass(frozen=True)
class Terms:
    """What the loss adds up: weights of the cross entropy and of KL(teacher || drafter)."""

    name: str
    ce: float
    kl: float


CE, KL, KL_CE = Terms("CE", 1.0, 0.0), Terms("KL", 0.0, 1.0), Terms("KL + CE", 1.0, 1.0)


@dataclass
class Problem:
    """A drafter and a batch on one device; the target's tables are tied and frozen.

    ``raw_last`` [T, H] is the target's last hidden state before its final norm (of weight 1),
    ``last`` after it; the teacher's best token is the next token of the text.
    """

    shape: StepShape
    train: TrainConfig
    model: DFlashDraftModel
    head: FrozenHead
    plan: BatchPlan
    hidden: Tensor  # [T, L * H]
    raw_last: Tensor
    last: Tensor

    @property
    def spec(self) -> DrafterSpec:
        return self.model.spec

    @property
    def rows(self) -> int:
        """Weighted rows, the only ones that the head has to see."""
        return int(self.plan.n_rows)

    def objective(self, terms: Terms) -> Objective:
        train = dataclasses.replace(self.train, ce_weight=terms.ce, kl_weight=terms.kl)
        return Objective(train, self.spec.layout)


def make_problem(shape: StepShape, device: torch.device, dtype: torch.dtype) -> Problem:
    generator = torch.Generator(device).manual_seed(0)

    def randn(*size: int, std: float = 1.0) -> Tensor:
        values = torch.empty(size, device=device, dtype=dtype)
        return values.normal_(0.0, std, generator=generator)

    train = TrainConfig(max_anchors=shape.documents * shape.anchors, gamma=GAMMA)
    plan = make_plan(shape, train).to(device)
    table = randn(shape.vocab, shape.hidden, std=0.02 * (5120 / shape.hidden) ** 0.5)
    raw_last = teacher_states(plan, table, randn(shape.documents * shape.tokens, shape.hidden))
    return Problem(
        shape=shape,
        train=train,
        model=make_model(shape.spec(), randn),
        head=FrozenHead(table, table),
        plan=plan,
        hidden=randn(shape.documents * shape.tokens, shape.captured * shape.hidden),
        raw_last=raw_last,
        last=F.rms_norm(raw_last, raw_last.shape[-1:], eps=1e-6),
    )


def make_plan(shape: StepShape, train: TrainConfig) -> BatchPlan:
    """Documents of random tokens; no block reaches a document's end, where trainers differ."""
    rng = np.random.default_rng(0)
    mask = np.ones(shape.tokens, dtype=np.uint8)
    mask[-shape.block :] = 0
    examples = [
        Example(rng.integers(0, shape.vocab - 1, shape.tokens, dtype=np.int32), mask, f"random:{i}")
        for i in range(shape.documents)
    ]
    data = DataConfig(token_budget=shape.documents * shape.tokens)
    return BatchPlanner(examples, data, train, shape.spec().layout, 1).batch(0)


def teacher_states(plan: BatchPlan, table: Tensor, noise: Tensor) -> Tensor:
    """States [T, H] whose best logit is that of the document's next token."""
    following = F.normalize(table[plan.input_ids.roll(-1, 1).flatten()], dim=-1)
    scale = table.shape[1] ** 0.5
    share = min(0.9, TEACHER_LOGIT / (scale * float(table[0].float().norm())))
    return share * scale * following + (1 - share**2) ** 0.5 * noise


def make_model(spec: DrafterSpec, randn: Callable[..., Tensor]) -> DFlashDraftModel:
    """A drafter with random weights, norms around 1, made on the device."""
    with torch.device("meta"):
        model = DFlashDraftModel(spec)
    weights = {}
    std = 0.02 * (5120 / spec.hidden_size) ** 0.5
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() > 1
        value = randn(*parameter.shape, std=std if matrix else 0.1)
        weights[name] = value if matrix else value + 1
    model.load_state_dict(weights, assign=True)
    return model
