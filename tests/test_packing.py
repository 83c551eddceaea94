"""Batch plans: purity, coverage, anchor budgets, every index against a loop over tokens."""

import math
import threading
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ext.config import DataConfig, TrainConfig, UserError
from dflash_ext.data.buckets import EpochBatches
from dflash_ext.data.corpus import Example
from dflash_ext.data.packing import BatchPlan, BatchPlanner, BatchPrefetcher
from dflash_ext.layout import BlockLayout

LAYOUT = BlockLayout(4)
BUDGET = 96


def make_examples(count: int, *, longest: int = 40, seed: int = 0) -> list[Example]:
    """Documents of 3 tokens and more whose masks have gaps; token ids are unique in a document."""
    rng = np.random.default_rng(seed)
    examples = []
    for i in range(count):
        length = int(rng.integers(3, longest + 1))
        mask = (rng.random(length) < 0.7).astype(np.uint8)
        mask[-2:] = 1
        ids = (1 + 1000 * i + np.arange(length)).astype(np.int32)
        examples.append(Example(ids, mask, f"data.jsonl:{i + 1}"))
    return examples


def make_planner(
    examples: list[Example] | None = None,
    *,
    world: int = 1,
    layout: BlockLayout = LAYOUT,
    eval_examples: list[Example] | None = None,
    budget: int = BUDGET,
    seed: int = 0,
    **train: object,
) -> BatchPlanner:
    train_cfg = TrainConfig(**{"max_anchors": 12, "gamma": 3.0, **train})
    data_cfg = DataConfig(token_budget=budget, seed=seed)
    examples = make_examples(23) if examples is None else examples
    return BatchPlanner(examples, data_cfg, train_cfg, layout, world, eval_examples)


def assert_same(a: BatchPlan, b: BatchPlan, ignore: tuple[str, ...] = ()) -> None:
    for name in {field.name for field in fields(BatchPlan)} - set(ignore):
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype and torch.equal(x, y), name
        else:
            assert x == y, name


def differ(a: BatchPlan, b: BatchPlan) -> bool:
    return a.doc_ids != b.doc_ids or not torch.equal(a.anchors, b.anchors)


def epoch_plans(planner: BatchPlanner, epochs: int) -> list[list[BatchPlan]]:
    """The plans of the first epochs, found by walking the batch ids."""
    plans: list[list[BatchPlan]] = [[]]
    batch_id = 0
    while True:
        plan = planner.batch(batch_id)
        if plan.epoch == epochs:
            return plans
        if plan.epoch == len(plans):
            plans.append([])
        assert plan.epoch == len(plans) - 1
        plans[-1].append(plan)
        batch_id += 1


# Every index of a plan, against a loop over tokens.


@pytest.mark.parametrize("layout", [LAYOUT, BlockLayout(7), BlockLayout(3, shift=1)], ids=str)
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_a_plan_agrees_with_a_loop_over_tokens(layout, kind):
    examples = make_examples(23)
    planner = make_planner(examples, layout=layout, eval_examples=examples)
    plans = epoch_plans(planner, 1)[0] if kind == "train" else list(planner.iter_eval_plans())
    decay = layout.decay(3.0) if kind == "train" else layout.loss_slots().float()
    assert len(plans) > 3
    for plan in plans:
        check_packing(plan, examples)
        check_blocks(plan, examples, layout, decay)


def check_packing(plan: BatchPlan, examples: list[Example]) -> None:
    lengths = [len(examples[i]) for i in plan.doc_ids]
    assert plan.lengths.tolist() == lengths
    assert plan.input_ids.shape == (len(lengths), max(lengths))
    assert plan.n_tokens == sum(lengths) <= BUDGET
    t = 0
    for row, i in enumerate(plan.doc_ids):
        ids = examples[i].input_ids.tolist()
        assert plan.doc_ranges[row] == (t, t + len(ids))
        assert plan.input_ids[row].tolist() == ids + [0] * (max(lengths) - len(ids))
        for position in range(len(ids)):
            assert plan.src_index[t + position] == row * max(lengths) + position
            assert plan.doc_start[t + position] == t
        t += len(ids)
    assert plan.src_index[t:].tolist() == [-1] * (BUDGET - t)
    assert plan.doc_start[t:].tolist() == list(range(t, BUDGET))


def check_blocks(
    plan: BatchPlan, examples: list[Example], layout: BlockLayout, decay: torch.Tensor
) -> None:
    ids = [x for i in plan.doc_ids for x in examples[i].input_ids.tolist()]
    mask = [x for i in plan.doc_ids for x in examples[i].loss_mask.tolist()]
    rows = []
    last = -1
    for j, a in enumerate(plan.anchors.tolist()):
        if a == BUDGET:
            assert plan.ctx_start[j] == plan.ctx_end[j] == BUDGET
            assert not plan.labels[j].any() and not plan.weights[j].any()
            last = BUDGET
            continue
        assert last < a
        last = a
        start, end = next(r for r in plan.doc_ranges if r[0] <= a < r[1])
        assert a + 1 < end and mask[a] and mask[a + 1]
        assert (plan.ctx_start[j], plan.ctx_end[j]) == (start, a)
        for k in range(layout.size):
            target = a + k + layout.shift
            counts = target < end and mask[target] and bool(layout.loss_slots()[k])
            assert plan.labels[j, k] == (ids[target] if target < end else 0)
            assert plan.weights[j, k] == (decay[k] if counts else 0)
            if counts:
                assert plan.teacher_index[j, k] == target - 1
                rows.append(j * layout.size + k)
    if layout.shift == 0:
        real = plan.anchors < BUDGET
        assert plan.labels[real, 0].tolist() == [ids[a] for a in plan.anchors[real].tolist()]
    assert plan.teacher_index.min() >= 0 and plan.teacher_index.max() < BUDGET
    assert plan.n_rows.item() == len(rows) and plan.n_rows.shape == ()
    size = len(plan.anchors) * layout.num_proposals
    assert len(plan.rows) == -(-size // 128) * 128
    assert plan.rows.tolist() == rows + [0] * (len(plan.rows) - len(rows))
    total = math.fsum(plan.weights.flatten().tolist())
    assert plan.weight_sum.item() == np.float32(total)


def test_types_and_shapes_do_not_depend_on_the_batch():
    planner = make_planner()
    for plan in epoch_plans(planner, 1)[0]:
        tensors = {f.name: getattr(plan, f.name) for f in fields(BatchPlan) if "Tensor" in f.type}
        assert len(tensors) == 14
        for name, tensor in tensors.items():
            is_float = name in ("weights", "weight_sum")
            assert tensor.dtype == (torch.float32 if is_float else torch.int64), name
            assert tensor.is_contiguous(), name
        assert plan.anchors.shape == plan.ctx_start.shape == plan.ctx_end.shape == (12,)
        assert plan.prefix.tolist() == [1] * 12
        assert plan.labels.shape == plan.weights.shape == plan.teacher_index.shape == (12, 4)
        assert plan.src_index.shape == plan.doc_start.shape == (BUDGET,)
        assert plan.rows.shape == (128,)
        assert plan.weight_sum.shape == ()


def test_a_batch_depends_on_seed_epoch_and_id_alone():
    forwards, backwards, other = make_planner(), make_planner(), make_planner(seed=1)
    ids = range(30)
    plans = [forwards.batch(i) for i in ids]
    for i in reversed(ids):
        assert_same(plans[i], backwards.batch(i))
        assert_same(plans[i], forwards.batch(i))
    assert any(differ(plans[i], other.batch(i)) for i in range(3))


def test_planning_leaves_the_global_generators_alone():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    planner = make_planner(eval_examples=make_examples(5))
    first = planner.batch(3)
    list(planner.iter_eval_plans())
    assert torch.equal(torch_state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])
    torch.manual_seed(99)
    assert_same(first, planner.batch(3))


def test_threads_may_share_a_planner():
    wanted = [make_planner().batch(i) for i in range(40)]
    shared = make_planner()
    found: dict[tuple[int, int], BatchPlan] = {}

    def work(thread: int) -> None:
        order = np.random.default_rng(thread).permutation(40)
        for i in order.tolist():
            found[thread, i] = shared.batch(i)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 160
    for (_, i), plan in found.items():
        assert_same(plan, wanted[i])


def test_every_example_once_an_epoch_and_another_order_in_each():
    epochs = epoch_plans(make_planner(), 4)
    orders = [tuple(doc for plan in plans for doc in plan.doc_ids) for plans in epochs]
    assert all(sorted(order) == list(range(23)) for order in orders)
    assert len(set(orders)) == 4
    ids = [plan.batch_id for plans in epochs for plan in plans]
    assert ids == list(range(len(ids)))


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 1000),  # up to about 8 windows
    seed=st.integers(0, 1000),
    budget=st.integers(50, 120),
    epoch=st.integers(0, 5),
)
def test_batches_partition_the_examples_within_the_budget(count, seed, budget, epoch):
    lengths = np.random.default_rng(seed).integers(1, 51, count)
    batches = EpochBatches(lengths, budget, seed=3).epoch(epoch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert all(0 < lengths[docs].sum() <= budget for docs in batches)
    # Greedy filling: only few batches are under half full.
    assert len(batches) <= 2 * lengths.sum() / (budget - 49) + 1


def test_anchors_are_drawn_anew_in_each_epoch():
    examples = make_examples(1, longest=90, seed=5)
    planner = make_planner(examples, max_anchors=5)
    anchors = {tuple(planner.batch(i).anchors.tolist()) for i in range(20)}
    assert [planner.batch(i).epoch for i in (0, 7)] == [0, 7]
    assert len(anchors) > 15


def test_buckets_keep_padding_small():
    rng = np.random.default_rng(0)
    examples = [
        Example(np.ones(n, np.int32), np.ones(n, np.uint8), f"x:{i}")
        for i, n in enumerate(rng.integers(10, 400, 3000))
    ]
    planner = make_planner(examples, budget=4096)
    assert 0 < planner.padding_share() < 0.06  # about 0.48 in random order
    cells = sum(p.input_ids.numel() for p in epoch_plans(planner, 1)[0])
    tokens = sum(len(e) for e in examples)
    assert planner.padding_share() == pytest.approx(1 - tokens / cells)


# Optimizer steps, drafters, tickets.


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_number_of_drafters_changes_no_batch(world):
    alone, planner = make_planner(), make_planner(world=world)
    for i in range(30):
        assert_same(alone.batch(i), planner.batch(i))
    for ticket in BatchPrefetcher(planner).tickets(0, set()):
        assert ticket.drafter == ticket.plan.batch_id % world
        assert_same(ticket.plan, alone.batch(ticket.plan.batch_id), ignore=("weight_sum",))


@pytest.mark.parametrize(("world", "grad_accum"), [(1, 1), (1, 2), (2, 1), (3, 1), (2, 3)])
def test_a_step_is_consecutive_ids_and_epochs_run_into_each_other(world, grad_accum):
    planner = make_planner(world=world, grad_accum=grad_accum, epochs=3)
    per_step = world * grad_accum
    epochs = epoch_plans(make_planner(), 3)
    batches = sum(map(len, epochs))
    assert planner.total_steps() == math.ceil(batches / per_step)

    ids = []
    for step in range(planner.total_steps()):
        plans = planner.step_plans(step)
        ids += [plan.batch_id for plan in plans]
        values = [w for plan in plans for w in plan.weights.flatten().tolist()]
        for plan in plans:
            assert plan.weight_sum.item() == np.float32(math.fsum(values))
            assert plan.weight_sum.dtype == torch.float32
    assert ids == list(range(planner.total_steps() * per_step))
    seen = [doc for i in ids[:batches] for doc in planner.batch(i).doc_ids]
    assert sorted(seen) == sorted([*range(23)] * 3)


def test_a_step_may_span_two_epochs():
    planner = make_planner(world=3)
    steps = [planner.step_plans(step) for step in range(20)]
    assert any(plans[0].epoch != plans[-1].epoch for plans in steps)
    for plans in steps:
        assert [plan.batch_id % 3 for plan in plans] == [0, 1, 2]


def test_grad_accum_and_drafters_share_one_denominator():
    accumulated, parallel = make_planner(grad_accum=2), make_planner(world=2)
    for step in range(5):
        pairs = zip(accumulated.step_plans(step), parallel.step_plans(step), strict=True)
        for a, b in pairs:
            assert_same(a, b)


def test_with_dpace_the_denominator_counts_supervised_slots():
    planner = make_planner(grad_accum=2, dpace_alpha=0.5)
    plans = planner.step_plans(1)
    count = sum(int((plan.weights > 0).sum()) for plan in plans)
    assert all(plan.weight_sum.item() == count for plan in plans)


def test_steps_beat_epochs():
    assert make_planner(steps=7, epochs=3).total_steps() == 7


@pytest.mark.parametrize("world", [1, 2, 3])
def test_tickets_in_order_with_evaluation_between_steps(world):
    eval_examples = make_examples(9, seed=7)
    planner = make_planner(world=world, steps=5, eval_examples=eval_examples)
    evals = len(list(planner.iter_eval_plans()))
    assert evals > 1
    tickets = list(BatchPrefetcher(planner).tickets(0, {0, 3, 5}))

    wanted = []
    for step in range(6):
        if step in (0, 3, 5):
            wanted += [("eval", step, i, 0) for i in range(evals)]
        if step < 5:
            first = step * world
            wanted += [("train", step, first + r, r) for r in range(world)]
    assert [(t.plan.kind, t.step, t.plan.batch_id, t.drafter) for t in tickets] == wanted
    for drafter in range(world):
        seqs = [t.seq for t in tickets if t.drafter == drafter]
        assert seqs == list(range(len(seqs)))


def test_resuming_and_evaluating_leave_the_training_plans_alone():
    planner = make_planner(world=2, steps=6, eval_examples=make_examples(9, seed=7))
    plain = [t.plan for t in BatchPrefetcher(planner).tickets(0, set())]
    evaluated = BatchPrefetcher(planner).tickets(0, {0, 2, 6})
    for a, b in zip(plain, (t.plan for t in evaluated if t.plan.kind == "train"), strict=True):
        assert_same(a, b)
    resumed = list(BatchPrefetcher(make_planner(world=2, steps=6)).tickets(4, set()))
    assert [t.seq for t in resumed] == [0, 0, 1, 1]
    for a, b in zip(plain[8:], (t.plan for t in resumed), strict=True):
        assert_same(a, b)
    assert list(BatchPrefetcher(planner).tickets(6, set())) == []


# Evaluation plans.


def test_evaluation_takes_every_valid_anchor_of_every_example():
    examples = make_examples(9, seed=7)
    plans = list(make_planner(eval_examples=examples).iter_eval_plans())
    assert sorted(doc for plan in plans for doc in plan.doc_ids) == list(range(9))
    for plan in plans:
        assert (plan.kind, plan.epoch) == ("eval", 0)
        wanted = [
            start + a
            for (start, _), doc in zip(plan.doc_ranges, plan.doc_ids, strict=True)
            for a in range(len(examples[doc]) - 1)
            if examples[doc].loss_mask[a] and examples[doc].loss_mask[a + 1]
        ]
        assert plan.anchors[: len(wanted)].tolist() == wanted
        assert len(plan.anchors) == -(-len(wanted) // 8) * 8
        assert set(plan.weights.unique().tolist()) == {0.0, 1.0}


def test_no_evaluation_examples_no_evaluation_plans():
    planner = make_planner(steps=1)
    assert list(planner.iter_eval_plans()) == []
    assert [t.plan.kind for t in BatchPrefetcher(planner).tickets(0, {0, 1})] == ["train"]


def test_bad_examples_are_refused():
    too_long = make_examples(3, longest=40)
    with pytest.raises(UserError, match=r"data.token_budget: found 10, want at least \d+, .*jsonl"):
        make_planner(too_long, budget=10)
    with pytest.raises(UserError, match="data.train: found no examples"):
        make_planner([])
    with pytest.raises(UserError, match="data.token_budget"):
        make_planner(eval_examples=make_examples(3, longest=300), budget=40)


def test_to_moves_every_tensor():
    plan = make_planner().batch(0)
    moved = plan.to("meta")
    for field in fields(BatchPlan):
        value = getattr(moved, field.name)
        if isinstance(value, torch.Tensor):
            assert value.device.type == "meta"
        else:
            assert value == getattr(plan, field.name)
    assert plan.anchors.device.type == "cpu"
