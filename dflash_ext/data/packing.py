"""Batch plans: everything of a batch that is an index, worked out on the CPU.

Names: T = data.token_budget, A anchors, K block size, R rows of the lm_head, W drafters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dflash_ext.config import DataConfig, TrainConfig, UserError
from dflash_ext.data.anchors import (
    anchor_budget,
    sample_anchors,
    sample_prefixes,
    valid_anchors,
)
from dflash_ext.data.buckets import EpochBatches, fill_batches, seeded_generator
from dflash_ext.data.corpus import Corpus, Example
from dflash_ext.layout import ROW_ALIGN, BlockLayout

Kind = Literal["train", "eval"]
_EVAL_ANCHOR_MULTIPLE = 8
_MOST_EPOCHS = 8  # whose shapes are looked at before a run


@dataclass(slots=True)
class BatchPlan:
    """One batch. "Packed index" counts the T rows that hold the documents one after the other.

    Shapes: input_ids [B, S] right-padded with 0; lengths [B]; src_index [T] = row * S + position,
    -1 = no token; doc_start [T] = packed index of the document's first token (of a padding row:
    its own); anchors [A] ascending packed indices; ctx_start, ctx_end [A]: the context that an
    anchor's block sees; prefix [A]: its clean tokens; labels, weights, teacher_index [A, K]; rows
    [R] flat indices (a * K + k) of the n_rows slots with weight > 0, in block order, then 0.

    Padding anchors: anchors = ctx_start = ctx_end = T, prefix 1, labels and weights 0.
    teacher_index is clamped to [0, T - 1] where a slot has no weight. `weight_sum` is the loss
    denominator: of the whole optimizer step in a plan from `step_plans`, else of this batch.
    All integers are int64, weights and weight_sum float32.
    """

    batch_id: int
    epoch: int
    kind: Kind
    input_ids: Tensor
    lengths: Tensor
    src_index: Tensor
    doc_start: Tensor
    n_tokens: int
    anchors: Tensor
    ctx_start: Tensor
    ctx_end: Tensor
    prefix: Tensor
    labels: Tensor
    weights: Tensor
    rows: Tensor
    n_rows: Tensor
    teacher_index: Tensor
    weight_sum: Tensor
    doc_ids: list[int]
    doc_ranges: list[tuple[int, int]]

    def to(self, device: torch.device | str) -> BatchPlan:
        """The same plan with its tensors on `device`; copies from pinned memory do not wait."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> BatchPlan:
        """The same plan in page-locked memory."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> BatchPlan:
        plan = copy.copy(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                setattr(plan, field.name, change(value))
        return plan


class BatchPlanner:
    """Plans every batch of a run as a pure function of (data.seed, epoch, batch id).

    Args:
        examples: training examples, at least one.
        data_cfg: token_budget and seed.
        train_cfg: steps, epochs, grad_accum, max_anchors, gamma, prefix_weight_base, dpace_alpha.
        layout: what the slots of a block predict.
        world: drafters of all machines together.
        eval_examples: held-out examples.
        start: (optimizer steps, batches) that are done: a run that goes on with another number of
            drafters goes on with the next batch.

    Raises:
        UserError: there are no examples, an epoch takes less than one, or one is longer than
            data.token_budget.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        data_cfg: DataConfig,
        train_cfg: TrainConfig,
        layout: BlockLayout,
        world: int,
        eval_examples: Sequence[Example] | None = None,
        start: tuple[int, int] = (0, 0),
    ) -> None:
        if not examples:
            raise UserError("data.train: found no examples, want at least one")
        self._data = _Documents(examples, data_cfg.token_budget)
        self._eval_data = _Documents(eval_examples or [], data_cfg.token_budget)
        self._token_budget = data_cfg.token_budget
        self._seed = data_cfg.seed
        self._train, self._data_cfg = train_cfg, data_cfg
        self._layout = layout
        self.world = world
        self.batches_per_step = train_cfg.grad_accum * world
        self._start_step, self._start_batch = start
        weights = examples.weights if isinstance(examples, Corpus) else ()
        if weights and (taken := sum(count * weight for count, weight in weights)) < 1:
            raise UserError(
                f"data.train: found weights that take {taken:.2g} examples in an epoch, "
                "want at least 1"
            )
        self._batches = EpochBatches(self._data.lengths, self._token_budget, self._seed, weights)
        self._label_offsets = layout.label_offsets().numpy()
        self._predecessor_offsets = layout.predecessor_offsets().numpy()
        self._loss_slots = layout.loss_slots().numpy()

    def batch(self, batch_id: int) -> BatchPlan:
        """The plan of one batch; its weight_sum counts this batch alone."""
        epoch, docs = self._batches.locate(batch_id)
        packed = self._data.pack(docs)
        generator = seeded_generator(self._seed, epoch, batch_id)
        budget = anchor_budget(self._train, self._data_cfg)
        anchors = sample_anchors(packed.mask, packed.document, budget, generator)
        return self._plan(packed, anchors, budget, batch_id, epoch, "train", generator)

    def step_plans(self, step: int) -> list[BatchPlan]:
        """The grad_accum * W plans of optimizer step `step`, with the step's weight_sum.

        With D-PACE the weights are only known on the device; the denominator is then the number
        of supervised slots.
        """
        first = self.first_batch(step)
        plans = [self.batch(first + i) for i in range(self.batches_per_step)]
        weight_sum = torch.tensor(sum(map(self._weight_sum, plans)), dtype=torch.float32)
        return [replace(plan, weight_sum=weight_sum) for plan in plans]

    def first_batch(self, step: int) -> int:
        """The first batch id of optimizer step `step`: how many are done before it."""
        return self._start_batch + (step - self._start_step) * self.batches_per_step

    def total_steps(self) -> int:
        """train.steps, or the steps that go through all batches of train.epochs epochs.

        If those do not divide evenly, the last step takes its missing batches from the epoch
        after, so that nothing is dropped.
        """
        if self._train.steps is not None:
            return self._train.steps
        left = self._batches.first_id(self._train.epochs) - self._start_batch
        return self._start_step + -(-left // self.batches_per_step)

    def schedule_shift(self) -> Fraction:
        """What to add to a step to get its place in the schedule of the learning rate.

        With train.epochs a schedule follows the data: its unit is a step of as many drafters as
        there are now. With train.steps, and where their number never changed, it is 0.
        """
        if self._train.steps is not None:
            return Fraction(0)
        return Fraction(self._start_batch, self.batches_per_step) - self._start_step

    def iter_eval_plans(self) -> Iterator[BatchPlan]:
        """Plans of the held-out examples: every valid anchor, weight 1 on supervised slots.

        A is the number of anchors, rounded up to a multiple of 8. Made one at a time: they are
        large.
        """
        lengths = self._eval_data.lengths
        order = np.argsort(lengths, kind="stable")
        for i, docs in enumerate(fill_batches(order, lengths, self._token_budget)):
            yield self._eval_plan(i, docs)

    def input_shapes(self, train: bool = True) -> set[tuple[int, int]]:
        """The shapes [B, S] of the target's inputs: of evaluation and, with `train`, of training.

        Every epoch cuts its batches anew; those of 8 are looked at, if the run has as many.
        """
        lengths = self._eval_data.lengths
        order = np.argsort(lengths, kind="stable")
        groups = [lengths[docs] for docs in fill_batches(order, lengths, self._token_budget)]
        if train:
            first = self._batches.epoch(0)
            epochs = -(-self.first_batch(self.total_steps()) // max(1, len(first)))
            later = (self._batches.epoch(epoch) for epoch in range(1, min(epochs, _MOST_EPOCHS)))
            groups += [self._data.lengths[docs] for docs in chain(first, *later)]
        return {(len(group), int(group.max())) for group in groups}

    def padding_share(self) -> float:
        """Share of padding in the target's input [B, S], over epoch 0."""
        groups = [self._data.lengths[docs] for docs in self._batches.epoch(0)]
        cells = sum(len(lengths) * int(lengths.max()) for lengths in groups)
        return 1 - sum(int(lengths.sum()) for lengths in groups) / max(1, cells)

    def _eval_plan(self, batch_id: int, docs: np.ndarray) -> BatchPlan:
        packed = self._eval_data.pack(docs)
        anchors = valid_anchors(packed.mask, packed.document)
        padded = max(1, -(-len(anchors) // _EVAL_ANCHOR_MULTIPLE)) * _EVAL_ANCHOR_MULTIPLE
        return self._plan(packed, anchors, padded, batch_id, 0, "eval")

    def _plan(
        self,
        packed: _Packed,
        anchors: np.ndarray,
        num_anchors: int,
        batch_id: int,
        epoch: int,
        kind: Kind,
        generator: torch.Generator | None = None,
    ) -> BatchPlan:
        budget, block = self._token_budget, self._layout.size
        n, count = len(packed.ids), len(anchors)

        start_of_anchor = packed.starts[packed.document[anchors]]
        end_of_anchor = start_of_anchor + packed.lengths[packed.document[anchors]]
        target = anchors[:, None] + self._label_offsets
        inside = target < end_of_anchor[:, None]
        target = np.minimum(target, n - 1)
        labels = np.zeros((num_anchors, block), dtype=np.int64)
        labels[:count] = packed.ids[target] * inside
        supervised = (packed.mask[target] != 0) & inside & self._loss_slots
        prefix = self._prefixes(supervised, num_anchors, generator)
        weights = np.zeros((num_anchors, block), dtype=np.float32)
        weights[:count] = supervised
        if kind == "train":
            weights *= self._layout.decay(self._train.gamma, torch.from_numpy(prefix)).numpy()

        padded_anchors = _padded(anchors, num_anchors, budget)
        teacher_index = (padded_anchors[:, None] + self._predecessor_offsets).clip(0, budget - 1)
        found = np.flatnonzero(weights > 0)
        num_rows = num_anchors * self._layout.num_proposals
        rows = _padded(found, -(-num_rows // ROW_ALIGN) * ROW_ALIGN, 0)

        doc_start = np.arange(budget)
        doc_start[:n] = packed.starts[packed.document]
        width = int(packed.lengths.max())
        cell = packed.document * width + np.arange(n) - doc_start[:n]
        input_ids = np.zeros(len(packed.lengths) * width, dtype=np.int64)
        input_ids[cell] = packed.ids
        ends = packed.starts + packed.lengths
        plan = BatchPlan(
            batch_id=batch_id,
            epoch=epoch,
            kind=kind,
            input_ids=torch.from_numpy(input_ids).view(-1, width),
            lengths=torch.from_numpy(packed.lengths),
            src_index=torch.from_numpy(_padded(cell, budget, -1)),
            doc_start=torch.from_numpy(doc_start),
            n_tokens=n,
            anchors=torch.from_numpy(padded_anchors),
            ctx_start=torch.from_numpy(_padded(start_of_anchor, num_anchors, budget)),
            ctx_end=torch.from_numpy(padded_anchors.copy()),
            prefix=torch.from_numpy(prefix),
            labels=torch.from_numpy(labels),
            weights=torch.from_numpy(weights),
            rows=torch.from_numpy(rows),
            n_rows=torch.tensor(len(found)),
            teacher_index=torch.from_numpy(teacher_index),
            weight_sum=torch.zeros(()),
            doc_ids=packed.docs.tolist(),
            doc_ranges=list(zip(packed.starts.tolist(), ends.tolist(), strict=True)),
        )
        plan.weight_sum = torch.tensor(self._weight_sum(plan), dtype=torch.float32)
        return plan

    def _prefixes(
        self, supervised: np.ndarray, num_anchors: int, generator: torch.Generator | None
    ) -> np.ndarray:
        """Clean tokens of each block, from the slots [anchors, K] that can carry a loss."""
        prefix = np.full(num_anchors, self._layout.prefix)
        if generator is not None and self._train.prefix_weight_base is not None:
            last = self._layout.size - 1 - np.argmax(supervised[:, ::-1], axis=1)
            prefix[: len(last)] = sample_prefixes(last, self._train.prefix_weight_base, generator)
        return prefix

    def _weight_sum(self, plan: BatchPlan) -> float:
        if plan.kind == "train" and self._train.dpace_alpha is not None:
            return float(plan.n_rows)
        return float(plan.weights.sum(dtype=torch.float64))


@dataclass(slots=True)
class _Packed:
    """Documents one after the other: ids, mask, document [n]; docs, starts, lengths [B]."""

    ids: np.ndarray
    mask: np.ndarray
    document: np.ndarray
    docs: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


class _Documents:
    """All examples and their lengths; a batch reads only its own."""

    def __init__(self, examples: Sequence[Example], token_budget: int) -> None:
        if isinstance(examples, Corpus):
            self.lengths = examples.lengths
        else:
            self.lengths = np.asarray([len(example) for example in examples], dtype=np.int64)
        if len(self.lengths) and self.lengths.max() > token_budget:
            longest = int(self.lengths.argmax())
            raise UserError(
                f"data.token_budget: found {token_budget}, want at least "
                f"{self.lengths[longest]}, the length of {examples[longest].source}"
            )
        self._examples = examples

    def pack(self, docs: np.ndarray) -> _Packed:
        chosen = [self._examples[doc] for doc in docs.tolist()]
        lengths = self.lengths[docs]
        return _Packed(
            ids=np.concatenate([example.input_ids for example in chosen]).astype(np.int64),
            mask=np.concatenate([example.loss_mask for example in chosen]),
            document=np.repeat(np.arange(len(docs)), lengths),
            docs=docs,
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
        )


def _padded(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    out = np.full(size, fill, dtype=np.int64)
    out[: len(values)] = values
    return out


@dataclass(frozen=True, slots=True)
class Ticket:
    """A batch on its way: which drafter (global rank) trains it, as its seq-th, in which step."""

    plan: BatchPlan
    drafter: int
    seq: int
    step: int


class BatchPrefetcher:
    """Issues the tickets of a run in order. Runs in one thread; the planner may be shared."""

    def __init__(self, planner: BatchPlanner) -> None:
        self._planner = planner

    def tickets(self, start_step: int, eval_steps: Collection[int]) -> Iterator[Ticket]:
        """Steps start_step ... total_steps - 1, each preceded by the evaluation plans if it is in
        `eval_steps`; the evaluation plans close the run if total_steps is in `eval_steps`.

        `seq` counts each drafter's tickets from 0 in this call's order.
        """
        next_seq = [0] * self._planner.world

        def ticket(plan: BatchPlan, drafter: int, step: int) -> Ticket:
            next_seq[drafter] += 1
            return Ticket(plan, drafter, next_seq[drafter] - 1, step)

        total = self._planner.total_steps()
        for step in range(start_step, total + 1):
            if step in eval_steps:
                for plan in self._planner.iter_eval_plans():
                    yield ticket(plan, 0, step)
            if step < total:
                for plan in self._planner.step_plans(step):
                    yield ticket(plan, plan.batch_id % self._planner.world, step)
