"""The training objective of a batch: from block tokens to a loss and gradients.

Letters: A anchors, K slots, T packed tokens, L captured layers, H hidden, R projected rows.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dflash_ext.config import TrainConfig
from dflash_ext.drafter.context import ContextSums, TrainContext
from dflash_ext.drafter.live_rows import live_rows
from dflash_ext.drafter.model import ContextKV, DFlashDraftModel, FrozenHead
from dflash_ext.drafter.overlap import BackwardSync
from dflash_ext.layout import ROW_ALIGN, BlockLayout
from dflash_ext.ops.draft_loss import CHUNK_BYTES, default_chunk_rows, draft_loss_stats
from dflash_ext.ops.draft_loss.teacher import chunk_index, most_teachers
from dflash_ext.ops.metric_add import metric_add

if TYPE_CHECKING:
    from dflash_ext.data.packing import BatchPlan

LIVE_GRAIN = 2048  # rows: each number of grains that hold the live ones has CUDA graphs of its own
TEACHER_GRAIN = 128  # the same of different teachers


class LossStats(NamedTuple):
    """A loss with its gradient, and what the same pass over the logits saw of each slot.

    With a variable prefix, slot k is the k-th behind the block's last clean token.
    """

    loss: Tensor  # []
    terms: Tensor  # [A, K, 4]: loss, ce, kl, cap, unweighted
    rank: Tensor  # [A, K] int64
    weights: Tensor  # [A, K]: those that multiplied the terms


class TeacherChunks(NamedTuple):
    """Rows of logits at a time, and how many different teachers they have at most."""

    rows: int
    most: int


class Objective:
    """Loss = sum of w (ce_weight CE + kl_weight KL + cap_lambda CAP) / weight_sum.

    weight_sum is that of the whole optimizer step, so the losses of its batches, of its drafters
    and of groups of anchors add up to the step's loss.
    """

    def __init__(self, train: TrainConfig, layout: BlockLayout) -> None:
        self.train = train
        self.layout = layout

    def __call__(
        self,
        model: DFlashDraftModel,
        head: FrozenHead,
        ctx_kv: ContextKV,
        plan: "BatchPlan",
        *,
        last_hidden: Tensor | None = None,
        acc: Tensor | None = None,
        compute_metrics: bool = True,
        group: slice | None = None,
    ) -> Tensor:
        """Loss [] of the plan's blocks, or of those in `group`.

        With `acc`, the batch is added to the metric accumulator: all its values if
        `compute_metrics`, else only its loss. Loss and gradient have the same bits either way.
        """
        if group is not None:
            plan = plan_group(plan, *group.indices(plan.anchors.shape[0])[:2])
        stats = self.stats(model, head, ctx_kv, plan, last_hidden)
        if acc is not None:
            add_metrics(acc, [stats], compute_metrics)
        return stats.loss

    def stats(
        self,
        model: DFlashDraftModel,
        head: FrozenHead,
        ctx_kv: ContextKV | list[ContextSums],
        plan: "BatchPlan",
        last_hidden: Tensor | None = None,
        teachers: TeacherChunks | None = None,
    ) -> LossStats:
        """Run the plan's blocks; `last_hidden` [T, H] is the teacher of the KL term.

        With `teachers` (`teacher_chunks`) a GPU projects a teacher that several slots have once.
        """
        # A slot's label is the token that sits there, which a clean slot shows.
        block_ids = self.layout.input_ids(plan.labels, model.spec.mask_token_id, plan.prefix)
        train = self.train
        # Without a variable prefix all blocks have as many clean tokens.
        clean = self.layout.prefix if train.prefix_weight_base is None else None
        blocks, size = block_ids.shape
        live = None
        if plan.rows.shape[0] < blocks * size:
            live = live_rows(plan.rows, plan.n_rows, blocks, size)
        hidden = model(
            head.embed(block_ids),
            ctx_kv,
            plan.ctx_start,
            plan.ctx_end,
            clean=clean,
            live=live,
        )
        loss, terms, rank, _, weights = draft_loss_stats(
            hidden,
            head.head_weight,
            plan.labels,
            plan.weights,
            plan.weight_sum,
            plan.rows,
            plan.n_rows,
            teacher_hidden=last_hidden if train.kl_weight else None,
            teacher_index=plan.teacher_index if train.kl_weight else None,
            ce_weight=train.ce_weight,
            kl_weight=train.kl_weight,
            kl=train.kl,
            cap_lambda=train.cap_lambda,
            dpace_alpha=train.dpace_alpha,
            softcap=head.softcap,
            logit_scale=head.logit_scale,
            chunk_rows=train.loss_chunk_rows if teachers is None else teachers.rows,
            most_teachers=None if teachers is None else teachers.most,
            valid_vocab=head.valid_vocab,
        )
        stats = LossStats(loss, terms, rank, weights)
        return stats if train.prefix_weight_base is None else behind_prefix(stats, plan.prefix)


def behind_prefix(stats: LossStats, prefix: Tensor) -> LossStats:
    """The same with each block's slots moved left by prefix - 1, so that proposals start at slot 1
    as the metrics count them; what comes round to the end is clean and has weight 0."""
    slots = torch.arange(stats.rank.shape[1], device=prefix.device)
    source = (slots + prefix[:, None] - 1) % slots.shape[0]
    return stats._replace(
        terms=stats.terms.gather(1, source[..., None].expand_as(stats.terms)),
        rank=stats.rank.gather(1, source),
        weights=stats.weights.gather(1, source),
    )


def add_metrics(acc: Tensor, groups: list[LossStats], measured: bool) -> None:
    """Count one batch, given in groups of anchors, in the metric accumulator."""
    terms = torch.cat([g.terms for g in groups])
    weights = torch.cat([g.weights for g in groups])
    rank = torch.cat([g.rank for g in groups])
    metric_add(acc, rank if measured else rank.new_empty(0, 0), terms.float(), weights.float())


def plan_group(plan: "BatchPlan", start: int, stop: int) -> "BatchPlan":
    """The plan with only anchors [start, stop): same context, same weight_sum, its own rows.

    Shapes depend on the group's size alone, and nothing is read back from the device.
    """
    count, slots = stop - start, plan.labels.shape[1]
    supervised = (plan.weights[start:stop] > 0).flatten()
    per_anchor = min(slots, plan.rows.shape[0] // max(plan.anchors.shape[0], 1))
    capacity = -(-count * per_anchor // ROW_ALIGN) * ROW_ALIGN
    rows = torch.nonzero_static(supervised, size=capacity, fill_value=0)[:, 0]
    return dataclasses.replace(
        plan,
        anchors=plan.anchors[start:stop],
        ctx_start=plan.ctx_start[start:stop],
        ctx_end=plan.ctx_end[start:stop],
        prefix=plan.prefix[start:stop],
        labels=plan.labels[start:stop],
        weights=plan.weights[start:stop],
        teacher_index=plan.teacher_index[start:stop],
        rows=rows,
        n_rows=supervised.sum(),
    )


def plan_parts(plan: "BatchPlan", group: int | None, bound: int | None) -> Iterator["BatchPlan"]:
    """The plan in groups of anchors, each with its first `bound` rows at most."""
    total = plan.anchors.shape[0]
    group = total if group is None else group
    for start in range(0, total, group):
        stop = min(start + group, total)
        part = plan if stop - start == total else plan_group(plan, start, stop)
        yield part if bound is None else dataclasses.replace(part, rows=part.rows[:bound])


def teacher_chunks(
    plan: "BatchPlan",
    train: TrainConfig,
    head: FrozenHead,
    group: int | None,
    bound: int | None = None,
) -> TeacherChunks | None:
    """How to cut the rows of a plan on the host for `Objective.stats`, if that is of use.

    group, bound: as in `plan_parts`.
    """
    weight, limit = head.head_weight, train.loss_chunk_rows
    if not train.kl_weight or weight.device.type != "cuda":
        return None
    if limit is None:
        vocab, itemsize = weight.shape[0], weight.element_size()
        limit = default_chunk_rows("cuda", vocab, itemsize, teacher=False)
        budget = CHUNK_BYTES // (vocab * itemsize)
    else:
        budget = 2 * limit
    return count_teachers(list(plan_parts(plan, group, bound)), limit, budget)


def equal_chunk_rows(rows: int, limit: int) -> int:
    """Rows of each of as few equal chunks of `rows` as have at most `limit`, up to ROW_ALIGN."""
    even = -(-rows // max(1, -(-rows // limit)))
    return max(1, min(limit, -(-even // ROW_ALIGN) * ROW_ALIGN))


def count_teachers(parts: list["BatchPlan"], limit: int, budget: int) -> TeacherChunks | None:
    """As few equal chunks of at most `limit` rows as have `budget` rows with their teachers, if
    such chunks have fewer teachers than rows."""
    capacity = max(part.rows.shape[0] for part in parts)
    while True:
        rows = equal_chunk_rows(capacity, limit)
        found = 0
        for part in parts:
            tokens = part.doc_start.shape[0]
            index = chunk_index(part.teacher_index, part.rows, part.n_rows, tokens, rows)
            found = max(found, most_teachers(index, tokens))
        most = max(1, -(-found // TEACHER_GRAIN)) * TEACHER_GRAIN
        if rows + most <= budget or rows <= ROW_ALIGN:
            return TeacherChunks(rows, most) if most < rows else None
        limit = (rows - 1) // ROW_ALIGN * ROW_ALIGN


def live_grain(train: TrainConfig) -> int:
    """Rows of a unit in which rows without a weight are left out. Chunks may be longer: the last
    one of a batch is cut."""
    return min(train.loss_chunk_rows or LIVE_GRAIN, LIVE_GRAIN)


def live_chunks(plan: "BatchPlan", group: int | None, grain: int) -> int:
    """Runs of `grain` rows (`live_grain`) that hold all those with a weight, for each group of
    `group` anchors; a bound for `forward_backward`. For a plan on the host: of one on a GPU it
    waits for the device."""
    live = (plan.weights > 0).sum(1)
    most = max(int(part.sum()) for part in live.split(group or live.shape[0]))
    return max(1, -(-most // grain))


def dead_row_share(plans: Iterable["BatchPlan"], group: int | None, grain: int) -> float:
    """Share of rows without a weight among those that a GPU projects of these plans (on the host).

    A CPU projects rows with a weight alone.
    """
    projected = live = 0
    for plan in plans:
        bound = live_chunks(plan, group, grain) * grain
        size = group or plan.anchors.shape[0]
        for start in range(0, plan.anchors.shape[0], size):
            part = plan_group(plan, start, min(start + size, plan.anchors.shape[0]))
            projected += min(bound, part.rows.shape[0])
            live += int(part.n_rows)
    return 1 - live / max(1, projected)


def train_batch(
    model: DFlashDraftModel,
    head: FrozenHead,
    plan: "BatchPlan",
    hidden: Tensor,
    *,
    objective: Objective,
    last_hidden: Tensor | None = None,
    group: int | None = None,
    teachers: TeacherChunks | None = None,
    overlap: BackwardSync | None = None,
) -> Tensor:
    """`forward_backward` of one batch; returns the loss []."""
    stats = forward_backward(
        model,
        head,
        plan,
        hidden,
        objective=objective,
        last_hidden=last_hidden,
        group=group,
        teachers=teachers,
        overlap=overlap,
    )
    return torch.stack([s.loss for s in stats]).sum()


def forward_backward(
    model: DFlashDraftModel,
    head: FrozenHead,
    plan: "BatchPlan",
    hidden: Tensor,
    *,
    objective: Objective,
    last_hidden: Tensor | None = None,
    group: int | None = None,
    chunks: int | None = None,
    teachers: TeacherChunks | None = None,
    overlap: BackwardSync | None = None,
) -> list[LossStats]:
    """Add a batch's gradients to the parameters' .grad or main_grad; what each group's loss was.

    hidden: captured states [T, L*H] or [L, T, H]. With `group`, that many anchors are worked off
    at a time and memory is bounded by one group; the context's keys and values are computed once,
    their gradients added up over the groups, and the gradients are the same up to summation order.
    `chunks` (`live_chunks` of `live_grain` rows) bounds the rows that the head and, behind its
    attention, the last layer multiply. `teachers`: as `teacher_chunks` found them for these groups
    and this bound.
    `overlap` begins to sum gradients over the drafters as they become final; its `finish` is still
    to be called. Only for the last batch of an optimizer step.
    """
    positions = torch.arange(plan.doc_start.shape[0], device=plan.doc_start.device) - plan.doc_start
    context = TrainContext(model, hidden, positions)
    bound = None if chunks is None else chunks * live_grain(objective.train)
    left = plan.anchors.shape[0]
    stats = []
    for part in plan_parts(plan, group, bound):
        left -= part.anchors.shape[0]
        with overlap.watching() if overlap is not None and left == 0 else nullcontext():
            found = objective.stats(model, head, context.layers, part, last_hidden, teachers)
            found.loss.backward()
        stats.append(found._replace(loss=found.loss.detach()))
    context.backward(overlap.begin_projected if overlap is not None else None)
    return stats
