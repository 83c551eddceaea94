"""Who calls lm_head_topk, how often: once a group of anchors, whatever the number of budgets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tiny_drafter
import torch
from torch import Tensor

from dflash_ext import evaluate, ops, train
from dflash_ext.acceptance import evaluate_plan, propose
from dflash_ext.config import DataConfig, TrainConfig
from dflash_ext.data.corpus import Example
from dflash_ext.data.packing import BatchPlan, BatchPlanner
from dflash_ext.drafter import loop
from dflash_ext.layout import BlockLayout
from dflash_ext.measure import DDTREE_BUDGETS, Answer, Text, measure_text

MAX_NEW_TOKENS = 60


@dataclass(frozen=True)
class Call:
    rows: int
    k: int
    labelled: bool = False


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """The calls of the operator so far, of all threads."""
    seen: list[Call] = []
    operator = ops.lm_head_topk

    def counted(
        hidden: Tensor, weight: Tensor, k: int = 8, labels: Tensor | None = None, **options
    ) -> tuple[Tensor, ...]:
        seen.append(Call(hidden.shape[0], k, labels is not None))
        return operator(hidden, weight, k, labels, **options)

    monkeypatch.setattr(ops, "lm_head_topk", counted)
    return seen


@pytest.fixture(scope="module")
def bench(tiny_target_dir: Path) -> tiny_drafter.Bench:
    return tiny_drafter.bench(tiny_target_dir)


def eval_plan(bench: tiny_drafter.Bench) -> BatchPlan:
    mask = np.ones(len(bench.texts[0]), np.uint8)
    mask[: len(tiny_drafter.PROMPTS[0])] = 0
    example = Example(np.array(bench.texts[0], np.int32), mask, "test:1")
    planner = BatchPlanner(
        [example],
        DataConfig(token_budget=160, max_length=80),
        TrainConfig(),
        BlockLayout(bench.drafter.spec.block_size),
        world=1,
        eval_examples=[example],
    )
    (plan,) = planner.iter_eval_plans()
    return plan


def test_evaluation_plan(bench: tiny_drafter.Bench, calls: list[Call]) -> None:
    plan, slots = eval_plan(bench), bench.drafter.spec.block_size - 1
    hidden = tiny_drafter.capture(
        bench.target, bench.drafter.spec.target_layer_ids, plan.input_ids[0, : plan.n_tokens]
    )
    padded = hidden.new_zeros(len(plan.src_index), hidden.shape[1])
    padded[: plan.n_tokens] = hidden
    evaluate_plan(bench.drafter, bench.head, padded, plan, group=25)
    seen = list(calls)
    with torch.no_grad():
        ctx_kv = bench.drafter.context(padded, torch.arange(len(padded)))
    real = slice(MAX_NEW_TOKENS - 1)
    labels, weights, ends = plan.labels[real], plan.weights[real], plan.ctx_end[real]
    found = propose(bench.drafter, bench.head, ctx_kv, labels[:, 0], plan.ctx_start[real], ends)
    supervised = (weights[:, 1:] > 0).long().cumprod(1)
    right = (found.indices[..., 0] == labels[:, 1:]).long().cumprod(1)
    # A slot is a row of its group's call where it is supervised and all slots before it are right.
    asked = supervised * torch.cat([torch.ones_like(right[:, :1]), right[:, :-1]], 1)
    rows = [asked[begin : begin + 25].sum(0) for begin in (0, 25, 50)]
    assert seen == [Call(int(n), 1) for group in rows for n in group if n > 0]
    assert len(seen) > 3 and sum(call.rows for call in seen) < slots * len(labels)


def test_evaluation_in_training(
    tiny_target_dir: Path,
    tiny_jsonl: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: list[Call],
) -> None:
    plans: list[BatchPlan] = []
    rows: list[list[int]] = []

    def recorded(model, head, hidden, plan, **options):
        before = len(calls)
        lengths = evaluate_plan(model, head, hidden, plan, **options)
        plans.append(plan)
        rows.append([call.rows for call in calls[before:]])
        return lengths

    monkeypatch.setattr(loop, "evaluate_plan", recorded)
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
model: {{target: {tiny_target_dir}, dtype: float32}}
drafter: {{num_layers: 1, block_size: 4}}
data: {{train: [{tiny_jsonl(n=4)}], eval: [{tiny_jsonl(n=4, name="eval.jsonl")}]}}
topology: {{targets: [cpu], drafters: [cpu], cpu_threads: 1}}
train: {{steps: 2, max_anchors: 12, eval_every: 1}}
log: {{dir: {tmp_path}}}
"""
    )
    flags = ["--data.token_budget=200", "--data.max_length=200"]
    assert train.main(["--config", str(config), *flags]) == 0
    anchors = [int((plan.ctx_end < len(plan.src_index)).sum()) for plan in plans]
    assert len(plans) % 3 == 0 and len(plans) > 3  # before, between and after the steps
    assert max(anchors) <= 256  # one group of a plan
    # With labels it is the check of the training text, before the first step.
    drafts = [call for call in calls if not call.labelled]
    assert calls[-len(drafts) :] == drafts and {call.k for call in drafts} == {1}
    assert sum(rows, []) == [call.rows for call in drafts]
    for n, group in zip(anchors, rows, strict=True):
        # All anchors for the first slot; for the others those that were right so far.
        assert group[0] == n and group == sorted(group, reverse=True) and len(group) <= 3


def text_of(bench: tiny_drafter.Bench, limit: int) -> Text:
    ids, first = bench.texts[0], len(tiny_drafter.PROMPTS[0])
    return Text(ids, [Answer(first, len(ids) - 1, limit)])


def test_draft_trees_of_all_budgets(bench: tiny_drafter.Bench, calls: list[Call]) -> None:
    slots, anchors = bench.drafter.spec.block_size - 1, MAX_NEW_TOKENS - 1
    text = text_of(bench, limit=10**6)
    measure_text(bench.target, bench.drafter, bench.head, text, budgets=(4, 16, 32), group=40)
    check = Call(MAX_NEW_TOKENS, 2, labelled=True)  # whether the text is the target's greedy one
    assert calls == [Call(40 * slots, 32), Call((anchors - 40) * slots, 32), check]


def test_command(
    bench: tiny_drafter.Bench,
    tiny_jsonl: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: list[Call],
) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    bench.drafter.save_pretrained(tmp_path / "export")
    rows = [
        {"input_ids": prompt + [1, 2, 3], "loss_mask": [0] * len(prompt) + [1] * 3}
        for prompt in tiny_drafter.PROMPTS
    ]
    evaluate.evaluate(
        tmp_path / "export",
        str(bench.folder),
        tiny_jsonl(rows),
        max_new_tokens=MAX_NEW_TOKENS,
    )
    size, k = bench.drafter.spec.block_size, max(DDTREE_BUDGETS)
    # Whole blocks, then the shortened ones next to the length limit, one anchor of each size.
    whole = Call((MAX_NEW_TOKENS - size + 1) * (size - 1), k)
    shortened = [Call(slots, k) for slots in range(size - 2, 0, -1)]
    one_prompt = [whole, *shortened, Call(MAX_NEW_TOKENS, 2, labelled=True)]
    assert calls == one_prompt * len(rows)
