"""The walk, the n-gram baseline, and evaluation plans against one document at a time."""

import math
from pathlib import Path

import numpy as np
import pytest
import tiny_drafter
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_ext.acceptance import (
    accept_len,
    accept_len_pooled,
    accept_lengths,
    evaluate_plan,
    histogram,
    prompt_lookup_lengths,
    propose,
    text_end,
    walk,
)
from dflash_ext.config import DataConfig, TrainConfig
from dflash_ext.data.corpus import Example
from dflash_ext.data.packing import BatchPlanner
from dflash_ext.layout import BlockLayout
from dflash_ext.measure import Answer, Text, measure_text


def test_accept_lengths_stop_at_the_first_wrong_proposal() -> None:
    rows = [[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 0, 0]]
    assert accept_lengths(torch.tensor(rows) == 1).tolist() == [3, 1, 0, 2, 0]
    assert accept_lengths(torch.zeros(0, 3, dtype=torch.bool)).tolist() == []


def test_walk_visits_what_a_server_visits() -> None:
    accepted = {10: 2, 13: 0, 14: 3, 18: 7}
    # 18 accepts seven, but only two tokens are left.
    assert walk(10, 20, accepted.__getitem__) == [3, 1, 4, 2]
    assert walk(10, 10, accepted.__getitem__) == []


@given(st.lists(st.integers(0, 15), min_size=1, max_size=60))
def test_walk_gives_out_every_token_once(accepted: list[int]) -> None:
    lengths = walk(0, len(accepted), accepted.__getitem__)
    assert sum(lengths) == len(accepted)
    anchors = np.cumsum([0, *lengths[:-1]])
    assert all(n == accepted[a] + 1 for n, a in zip(lengths[:-1], anchors, strict=False))


def test_text_ends_at_its_first_stop_token() -> None:
    assert text_end([5, 6, 7], ()) == 2
    assert text_end([5, 6, 7, 6], (6, 9)) == 1
    assert text_end([9, 6], (6, 9)) == 0


def test_means() -> None:
    per_prompt = [[1, 3], [], [2, 2, 8]]
    assert accept_len(per_prompt) == pytest.approx((2 + 4) / 2)
    assert accept_len_pooled(per_prompt) == pytest.approx(16 / 5)
    assert histogram(per_prompt, 8) == [1, 2, 1, 0, 0, 0, 0, 1]
    assert math.isnan(accept_len([[]])) and math.isnan(accept_len_pooled([]))


@pytest.mark.parametrize(
    ("text", "prompt_len", "lengths"),
    [
        ("abcdefghij", 4, [1, 1, 1, 1, 1]),  # nothing said twice
        ("abcdabcdabcdabcd", 5, [4, 4, 2]),  # all said before; the last step is clipped
        ("xabyzzabyzqz", 7, [3, 1]),  # "ab" went on with "yzz"
        ("xbcRabcQQ.abcQQ", 12, [2]),  # the match of "abc" proposes, not the earlier one of "bc"
        ("abQQcabRRdabQQ", 11, [2]),  # of two matches of "ab", the earlier one proposes
        ("aaaaaaaaaaaa", 1, [2, 2, 4, 2]),  # a proposal ends where the text so far ends
        ("ab", 1, []),
    ],
)
def test_prompt_lookup(text: str, prompt_len: int, lengths: list[int]) -> None:
    assert prompt_lookup_lengths(text.encode(), prompt_len, block_size=4) == lengths


@pytest.fixture(scope="module")
def bench(tiny_target_dir: Path) -> tiny_drafter.Bench:
    return tiny_drafter.bench(tiny_target_dir)


def test_a_packed_plan_equals_documents_one_by_one(bench: tiny_drafter.Bench) -> None:
    target, texts, drafter, head = bench.target, bench.texts, bench.drafter, bench.head
    stop = texts[1][len(tiny_drafter.PROMPTS[1]) + 12]
    examples, answers = [], []
    for prompt, text in zip(tiny_drafter.PROMPTS, texts, strict=True):
        mask = np.zeros(len(text), np.uint8)
        first = len(prompt)
        # Two answers, and an unsupervised tail that the second must not run into.
        spans = [(first, first + 15), (first + 17, len(text) - 2)]
        for start, end in spans:
            mask[start:end] = 1
        examples.append(Example(np.array(text, np.int32), mask, "test:1"))
        answers.append([Answer(a, a + text_end(text[a:b], (stop,)), limit=10**6) for a, b in spans])
    planner = BatchPlanner(
        examples,
        DataConfig(token_budget=160, max_length=80),
        TrainConfig(),
        BlockLayout(drafter.spec.block_size),
        world=1,
        eval_examples=examples,
    )
    plans = list(planner.iter_eval_plans())
    assert any(len(plan.doc_ranges) > 1 for plan in plans)
    seen = []
    for plan in plans:
        width = len(drafter.spec.target_layer_ids) * drafter.spec.hidden_size
        hidden = torch.zeros(len(plan.src_index), width)
        for doc, (start, end) in zip(plan.doc_ids, plan.doc_ranges, strict=True):
            ids = torch.tensor(texts[doc][: end - start])
            hidden[start:end] = tiny_drafter.capture(target, drafter.spec.target_layer_ids, ids)
        lengths = evaluate_plan(drafter, head, hidden, plan, group=7, stop_token_ids=(stop,))
        assert len(lengths) == len(plan.doc_ids)
        for doc, found in zip(plan.doc_ids, lengths, strict=True):
            alone = Text(texts[doc], answers[doc])
            assert found == measure_text(target, drafter, head, alone, budgets=()).lengths
            seen += found
    assert len(set(seen)) > 2


def test_proposals_do_not_depend_on_the_group(bench: tiny_drafter.Bench) -> None:
    drafter, ids = bench.drafter, torch.tensor(bench.texts[0])
    hidden = tiny_drafter.capture(bench.target, drafter.spec.target_layer_ids, ids)
    with torch.no_grad():
        ctx_kv = drafter.context(hidden, torch.arange(len(ids)))
    anchors = torch.arange(1, 30)
    args = (drafter, bench.head, ctx_kv, ids[anchors])
    one = propose(*args, torch.zeros_like(anchors), anchors, k=2, group=1)
    many = propose(*args, torch.zeros_like(anchors), anchors, k=2, group=64)
    assert one.indices.shape == (29, drafter.spec.block_size - 1, 2)
    assert torch.equal(one.indices, many.indices)
    torch.testing.assert_close(one.values, many.values)
    torch.testing.assert_close(one.logsumexp, many.logsumexp)
