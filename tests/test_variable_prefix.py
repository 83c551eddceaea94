"""Blocks that show several clean tokens: how many, what carries a loss, what a block sees."""

import dataclasses

import numpy as np
import pytest
import torch
from drafter_cases import (
    block_outputs,
    random_examples,
    random_head,
    random_hidden,
    random_model,
    small_spec,
)

from dflash_ext.config import Config, DataConfig, DrafterConfig, TrainConfig, UserError, validate
from dflash_ext.data.anchors import sample_prefixes
from dflash_ext.data.packing import BatchPlan, BatchPlanner, BatchPrefetcher
from dflash_ext.drafter.loss import (
    LossStats,
    Objective,
    add_metrics,
    behind_prefix,
    forward_backward,
)
from dflash_ext.layout import BlockLayout
from dflash_ext.ops.metric_add import WORD, new_accumulator

BASE, GAMMA, BUDGET = 0.6, 3.0, 64
LAYOUT = BlockLayout(6)


def planner(examples=None, *, base=BASE, layout=LAYOUT, **train) -> BatchPlanner:
    settings = {"max_anchors": 24, "gamma": GAMMA, "prefix_weight_base": base} | train
    examples = random_examples((21, 13, 17, 30, 9)) if examples is None else examples
    data = DataConfig(token_budget=BUDGET)
    return BatchPlanner(examples, data, TrainConfig(**settings), layout, 1, examples)


def drawn(last: np.ndarray, base: float, seed: int = 0) -> np.ndarray:
    return sample_prefixes(last, base, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("base", [0.5, 0.9, 1.0, 1.5])
@pytest.mark.parametrize("last", [2, 3, 15, 31])
def test_lengths_follow_the_truncated_geometric_distribution(base: float, last: int) -> None:
    count = 40_000
    found = np.bincount(drawn(np.full(count, last), base), minlength=last + 1) / count
    wanted = np.array([0.0, 0.0] + [base**k for k in range(2, last + 1)])
    wanted /= wanted.sum()
    assert (np.abs(found - wanted) <= 5 * np.sqrt(wanted / count)).all()


def test_each_block_has_its_own_limit() -> None:
    last = np.array([1, 2, 5, 1, 3, 31] * 200)
    found = drawn(last, 0.9)
    assert (found <= np.maximum(last, 1)).all() and found.dtype == np.int64
    assert ((found >= 2) | (last == 1)).all()
    assert (found[last == 1] == 1).all()
    assert len(drawn(np.zeros(0, dtype=np.int64), 0.9)) == 0
    assert (drawn(last, 0.9) == found).all() and not (drawn(last, 0.9, seed=1) == found).all()


def check_plan(plan: BatchPlan, plain: BatchPlan) -> None:
    """`plain` is the same batch with one clean token."""
    rows = []
    for a, prefix in enumerate(plan.prefix.tolist()):
        can_learn = (plain.weights[a] > 0).tolist()
        last = max((k for k, yes in enumerate(can_learn) if yes), default=1)
        assert prefix == 1 if last == 1 else 2 <= prefix <= last
        for k in range(LAYOUT.size):
            learns = can_learn[k] and k >= prefix
            wanted = np.exp(np.float32(prefix - k) / np.float32(GAMMA)) if learns else 0
            np.testing.assert_allclose(plan.weights[a, k].item(), wanted, rtol=1e-6)
            if learns:
                rows.append(a * LAYOUT.size + k)
    assert plan.rows[: plan.n_rows].tolist() == rows
    assert not plan.rows[plan.n_rows :].any()
    torch.testing.assert_close(plan.weight_sum, plan.weights.sum())


def test_a_plan_is_the_plain_one_but_for_prefixes_weights_and_rows() -> None:
    seen = set()
    for batch_id in range(5):
        plan, plain = planner().batch(batch_id), planner(base=None).batch(batch_id)
        for field in dataclasses.fields(BatchPlan):
            found, wanted = getattr(plan, field.name), getattr(plain, field.name)
            if field.name in ("prefix", "weights", "rows", "n_rows", "weight_sum"):
                assert found.dtype == wanted.dtype and found.shape == wanted.shape, field.name
            elif isinstance(wanted, torch.Tensor):
                assert found.equal(wanted), field.name
            else:
                assert found == wanted, field.name
        assert plain.prefix.tolist() == [1] * 24
        check_plan(plan, plain)
        seen |= set(plan.prefix.tolist())
    assert seen == {1, 2, 3, 4, 5}


def test_a_batch_depends_on_seed_epoch_and_id_alone() -> None:
    """So a resumed run draws the same prefixes, and the next epoch others."""
    first = [planner().batch(i).prefix for i in range(8)]
    again = planner()
    for i in (5, 0, 3, 7):
        assert again.batch(i).prefix.equal(first[i])
    tickets = list(BatchPrefetcher(planner(steps=6)).tickets(0, {0, 3}))
    resumed = list(BatchPrefetcher(planner(steps=6)).tickets(3, {3}))
    for old, new in zip(tickets[-len(resumed) :], resumed, strict=True):
        assert old.plan.prefix.equal(new.plan.prefix)
        assert old.plan.weights.equal(new.plan.weights)
    epochs = [planner().batch(i).epoch for i in range(8)]
    second = epochs.index(1)
    assert not all(first[i].equal(first[second + i]) for i in range(second))


def test_evaluation_shows_the_anchor_alone() -> None:
    found, wanted = list(planner().iter_eval_plans()), list(planner(base=None).iter_eval_plans())
    for a, b in zip(found, wanted, strict=True):
        assert a.prefix.tolist() == [1] * len(a.anchors)
        assert a.weights.equal(b.weights) and a.rows.equal(b.rows)


def test_dpace_counts_the_slots_behind_the_prefix() -> None:
    plan = planner(dpace_alpha=0.5).step_plans(0)[0]
    assert plan.weight_sum == plan.n_rows == (plan.weights > 0).sum()


@pytest.mark.parametrize("layers", ["full_attention", "sliding_attention"])
def test_a_block_sees_its_prefix_and_nothing_later(layers: str) -> None:
    """Change one token at a time behind an anchor; hidden states from the anchor on are noise."""
    spec = small_spec((layers, layers), block_size=LAYOUT.size, causal=False)
    examples = random_examples()
    plan = planner(examples).batch(0)
    model, head, hidden = random_model(spec), random_head(), random_hidden(plan, spec)

    def outputs(plan: BatchPlan, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return block_outputs(model, head, plan, hidden)

    wanted = outputs(plan, hidden)
    long = [a for a in range(24) if plan.prefix[a] >= 3 and plan.anchors[a] < BUDGET]
    assert len(long) > 2
    for a in long[:4]:
        start, anchor, prefix = plan.ctx_start[a], int(plan.ctx_end[a]), int(plan.prefix[a])
        document = plan.doc_ids[[begin for begin, _ in plan.doc_ranges].index(int(start))]
        for offset in range(min(LAYOUT.size, len(examples[document]) - anchor + int(start))):
            edited = [dataclasses.replace(e, input_ids=e.input_ids.copy()) for e in examples]
            ids = edited[document].input_ids
            ids[anchor - start + offset] = 3 + (ids[anchor - start + offset] + 5) % 90
            other = planner(edited).batch(0)
            assert other.prefix.equal(plan.prefix) and other.anchors.equal(plan.anchors)
            assert torch.equal(outputs(other, hidden)[a], wanted[a]) is (offset >= prefix)
        noise = hidden.clone()
        noise[anchor:] = torch.randn_like(noise[anchor:])
        assert torch.equal(outputs(plan, noise)[a], wanted[a])


def test_the_objective_feeds_each_block_its_clean_tokens() -> None:
    spec, head = small_spec(block_size=LAYOUT.size), random_head()
    plan, fed = planner().batch(0), []

    def forward(_, embeds: torch.Tensor, *context, clean: None, live: None) -> torch.Tensor:
        fed.append(embeds)
        return torch.zeros_like(embeds, requires_grad=True)

    stub = type("Stub", (), {"spec": spec, "__call__": forward})()
    Objective(TrainConfig(prefix_weight_base=BASE), LAYOUT).stats(stub, head, [], plan)
    tokens = plan.input_ids.new_tensor(
        [t for row, n in zip(plan.input_ids, plan.lengths, strict=True) for t in row[:n]]
    )
    for a in (plan.anchors < BUDGET).nonzero()[:, 0].tolist():
        clean = tokens[plan.anchors[a] : plan.anchors[a] + plan.prefix[a]].tolist()
        block = clean + [spec.mask_token_id] * (LAYOUT.size - len(clean))
        assert torch.equal(fed[0][a], head.embed(torch.tensor(block)))


@pytest.mark.parametrize("group", [5, 12])
def test_groups_of_anchors_add_up_to_the_batch(group: int) -> None:
    spec, head = small_spec(block_size=LAYOUT.size), random_head()
    model, plan = random_model(spec), planner().batch(0)
    hidden = random_hidden(plan, spec)
    objective = Objective(TrainConfig(prefix_weight_base=BASE), LAYOUT)
    results = []
    for size in (None, group):
        model.zero_grad()
        acc = new_accumulator()
        stats = forward_backward(model, head, plan, hidden, objective=objective, group=size)
        add_metrics(acc, stats, measured=True)
        loss = torch.stack([part.loss for part in stats]).sum()
        results.append((loss, acc, [p.grad.clone() for p in model.parameters()]))
    (loss, acc, wanted), (found, other, grads) = results
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
    for name in ("slots", "blocks", "streak4", "streak8", "top8"):
        assert acc[WORD[name]] == other[WORD[name]], name
    for grad, want in zip(grads, wanted, strict=True):
        assert (grad - want).norm() <= 1e-5 * want.norm()


def test_metrics_count_from_the_first_proposal() -> None:
    """Block 0 has 3 clean tokens, then hits, hit, miss; block 1 one, then hit, miss, and so on."""
    prefix = torch.tensor([3, 1, 5])
    supervised = torch.tensor(
        [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]], dtype=torch.bool
    )
    rank = torch.full((3, 6), 50)
    rank[0, 3:5] = 0
    rank[1, [1, 3]] = 0
    rank[2, 5] = 6
    weights = supervised.float()
    stats = LossStats(torch.zeros(()), weights[..., None].expand(-1, -1, 4) * 2, rank, weights)
    moved = behind_prefix(stats, prefix)
    assert moved.weights.tolist() == [[0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0]]
    assert torch.equal(moved.terms[..., 0], 2 * moved.weights)
    acc = new_accumulator()
    add_metrics(acc, [moved], measured=True)
    assert acc[WORD["blocks"]] == 3 and acc[WORD["slots"]] == 9
    assert acc[WORD["streak1"]] == 2 + 1 + 0
    assert acc[WORD["streak8"]] == 2 + 1 + 1
    hits = acc[WORD["slot_hit"] : WORD["slot_hit"] + 6].tolist()
    assert hits == [0, 2, 1, 1, 0, 0]


def test_blocks_too_short_for_two_clean_tokens_are_refused() -> None:
    cfg = Config(drafter=DrafterConfig(block_size=2), train=TrainConfig(prefix_weight_base=0.9))
    cfg.model.target, cfg.data.train = "x", ["x.jsonl"]
    with pytest.raises(UserError, match=r"drafter.block_size: found 2 .* want at least 3"):
        validate(cfg, devices=False)
