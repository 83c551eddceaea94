"""Whole training steps of a small drafter, driven as the pipeline drives them, on any device."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dflash_ext.config import Config, DataConfig, LogConfig, TrainConfig
from dflash_ext.config_check import FULL, SLIDING
from dflash_ext.data.corpus import Example
from dflash_ext.data.packing import BatchPlan, BatchPlanner, Ticket
from dflash_ext.drafter import DFlashDraftModel, DrafterSpec, FrozenHead
from dflash_ext.drafter.loop import DrafterTrainLoop
from dflash_ext.drafter.loss import Objective
from dflash_ext.grad_sync import GradSync
from dflash_ext.hs_queue import Slot
from dflash_ext.metrics import MetricStream
from dflash_ext.optim import DrafterOptimizer
from dflash_ext.supervisor import Supervisor, Worker

SPEC = DrafterSpec(
    hidden_size=256,
    intermediate_size=448,
    num_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=1003,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=1024,
    block_size=8,
    mask_token_id=1002,
    target_layer_ids=(0, 2, 3),
    num_target_layers=5,
    layer_types=(SLIDING, FULL, SLIDING),
    sliding_window=50,
)
TOKENS, ANCHORS = 384, 40


def build_model(seed: int = 0) -> DFlashDraftModel:
    """Weights at which attention and MLP matter, norms away from 1; fp32, on the CPU."""
    model = DFlashDraftModel(SPEC)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.1 * noise if p.dim() == 1 else 0.04 * noise)
    return model


def build_head(seed: int = 1) -> FrozenHead:
    generator = torch.Generator().manual_seed(seed)
    shape = (SPEC.vocab_size, SPEC.hidden_size)
    embed, head = (torch.randn(shape, generator=generator) for _ in range(2))
    return FrozenHead(embed, head * 0.1, valid_vocab=SPEC.vocab_size - 3)


def build_examples(count: int = 12, seed: int = 2) -> list[Example]:
    """Documents of 40 to 200 tokens; the last three quarters are the answer."""
    rng = np.random.default_rng(seed)
    examples = []
    for i in range(count):
        length = int(rng.integers(40, 200))
        mask = np.ones(length, dtype=np.uint8)
        mask[: length // 4] = 0
        ids = rng.integers(0, 1000, length).astype(np.int32)
        examples.append(Example(ids, mask, f"random:{i}"))
    return examples


def build_config(**train: object) -> Config:
    defaults = {"steps": 8, "lr": 1e-3, "max_anchors": ANCHORS, "gamma": 4.0, "metrics_every": 2}
    settings = defaults | train
    return Config(
        train=TrainConfig(**settings),  # type: ignore[arg-type]
        data=DataConfig(token_budget=TOKENS),
        log=LogConfig(every=1, grad_norm=True),
    )


def hidden_states(plan: BatchPlan, width: int, seed: int) -> Tensor:
    """Captured states [T, width] of a batch: a function of its documents."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(plan.doc_ids))
    hidden = torch.randn(TOKENS, width, generator=generator)
    hidden[plan.n_tokens :] = 0
    return hidden


class Source:
    """In place of a target and its queue: hands out the drafter's batches in order."""

    def __init__(
        self, cfg: Config, device: torch.device, dtype: torch.dtype, slots: int, split_fc: bool
    ) -> None:
        self.planner = BatchPlanner(build_examples(), cfg.data, cfg.train, SPEC.layout, 1)
        self.cfg, self.device, self.dtype, self.split_fc = cfg, device, dtype, split_fc
        self.slots = [
            Slot(
                TOKENS,
                len(SPEC.target_layer_ids),
                SPEC.hidden_size,
                dtype=dtype,
                device=device,
                with_last=cfg.train.kl_weight > 0,
                split_fc=split_fc,
            )
            for _ in range(slots)
        ]
        plans = [p for step in range(cfg.train.steps or 0) for p in self.planner.step_plans(step)]
        if device.type == "cuda":  # as the prefetcher does
            plans = [plan.pin_memory() for plan in plans]
        accum = cfg.train.grad_accum
        self.tickets = [Ticket(p, 0, i, i // accum) for i, p in enumerate(plans)]
        self.count = 0

    def get(self) -> Slot:
        slot = self.slots[self.count % len(self.slots)]
        slot.ticket = self.tickets[self.count]
        self.count += 1
        self.fill(slot, slot.ticket.plan)
        return slot

    def fill(self, slot: Slot, plan: BatchPlan) -> None:
        hidden = hidden_states(plan, len(SPEC.target_layer_ids) * SPEC.hidden_size, 5)
        if self.split_fc:
            hidden = torch.stack(hidden.chunk(len(SPEC.target_layer_ids), dim=1))
        slot.wait_free()
        slot.hidden.copy_(hidden.to(self.dtype))
        if slot.last_hidden is not None:
            slot.last_hidden.copy_(hidden_states(plan, SPEC.hidden_size, 6).to(self.dtype))
        slot.set_ready()

    def release(self, slot: Slot) -> None:
        pass


def build_loop(
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    slots: int = 2,
    split_fc: bool = False,
    flat: bool | None = None,
    **train: object,
) -> DrafterTrainLoop:
    """A drafter thread's loop over the batches of `Source`; flat: as in DrafterOptimizer."""
    device, cfg = torch.device(device), build_config(**train)
    model = build_model().to(device, dtype)
    model.recompute = cfg.train.recompute
    head = build_head()
    tables = {n: getattr(head, n).to(device, dtype) for n in ("embed_weight", "head_weight")}
    steps = cfg.train.steps or 0
    return DrafterTrainLoop(
        cfg,
        rank=0,
        world=1,
        model=model,
        head=dataclasses.replace(head, **tables),
        objective=Objective(cfg.train, SPEC.layout),
        optimizer=DrafterOptimizer(model.named_parameters(), cfg.train, steps, flat=flat),
        hs_queue=Source(cfg, device, dtype, slots, split_fc),  # type: ignore[arg-type]
        grad_sync=GradSync(0, 1),
        stream=MetricStream(device),
        supervisor=Supervisor(60.0),
        steps=range(steps),
        eval_steps=set(),
        num_eval_plans=0,
        stop_token_ids=(),
        save=None,
        best_score=-math.inf,
        cpu_threads=torch.get_num_threads(),
        eval_threads=1,
    )


def run(
    loop: DrafterTrainLoop, between: Callable[[int], None] | None = None
) -> tuple[dict[str, Tensor], list[list[int]]]:
    """(weights and optimizer state, words of each step) at the end of all steps."""
    if between is not None:
        publish = loop._publish

        def published(done: int, stopping: bool = False) -> None:
            publish(done, stopping)
            between(done)

        loop._publish = published  # type: ignore[method-assign]
    if loop.device.type == "cuda":
        torch.cuda.synchronize()  # the loop's stream does not wait for this one
    loop.run(Worker("drafter", loop.run))
    state = {**loop.model.state_dict(), **loop.optimizer.state_tensors()}
    words = [record for _, record in loop.stream.drain()]
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}, words
