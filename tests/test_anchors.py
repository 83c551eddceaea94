"""Which positions become anchors, and how a batch's budget is shared among its documents."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ext.config import DataConfig, TrainConfig
from dflash_ext.data.anchors import anchor_quotas, sample_anchors, valid_anchors
from dflash_ext.data.corpus import Example
from dflash_ext.data.packing import BatchPlanner
from dflash_ext.layout import BlockLayout

_COUNTS = st.lists(
    st.tuples(st.integers(0, 60), st.floats(0, 1)).map(
        lambda p: (p[0], int(p[1] * max(0, p[0] - 1)))
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(counts=_COUNTS, budget=st.integers(0, 600))
def test_quotas_are_proportional_to_supervised_tokens(counts, budget):
    supervised, valid = (np.asarray(x, dtype=np.int64) for x in zip(*counts, strict=True))
    quotas = anchor_quotas(supervised, valid, budget)
    assert quotas.sum() == min(budget, valid.sum())
    assert (quotas >= 0).all() and (quotas <= valid).all()

    # Pouring the budget into documents as wide as their supervised tokens and as high as their
    # valid ones: quotas are those levels, rounded.
    low, high = 0.0, 1e3
    for _ in range(100):
        level = (low + high) / 2
        poured = np.minimum(valid, level * supervised)
        low, high = (level, high) if poured.sum() < min(budget, valid.sum()) else (low, level)
    assert (np.abs(quotas - poured) < 1 + 1e-6).all()


@settings(max_examples=200, deadline=None)
@given(supervised=st.lists(st.integers(1, 60), min_size=1, max_size=30), part=st.floats(0, 1))
def test_quotas_without_full_documents_are_the_largest_remainder_rule(supervised, part):
    weight = np.asarray(supervised)
    budget = int(part * weight.sum())
    quotas = anchor_quotas(weight, weight, budget)
    exact = budget * weight / weight.sum()
    assert quotas.sum() == budget
    assert (np.abs(quotas - exact) < 1).all()
    up = quotas > np.floor(exact + 1e-9)
    if up.any() and not up.all():
        remainder = exact - np.floor(exact + 1e-9)
        assert remainder[up].min() >= remainder[~up].max() - 1e-9


def test_quotas_by_hand():
    def quotas(supervised, valid, budget):
        return anchor_quotas(np.asarray(supervised), np.asarray(valid), budget).tolist()

    assert quotas([10, 20, 30], [9, 19, 29], 6) == [1, 2, 3]
    assert quotas([10, 10, 10], [9, 9, 9], 4) == [2, 1, 1]  # ties: the earlier document
    assert quotas([30, 10, 10], [3, 9, 9], 13) == [3, 5, 5]  # full: the rest goes to the others
    assert quotas([30, 10, 10], [3, 4, 9], 15) == [3, 4, 8]  # in two rounds
    assert quotas([5, 5], [0, 4], 3) == [0, 3]  # supervised tokens without a valid anchor
    assert quotas([5, 5], [4, 4], 100) == [4, 4]
    assert quotas([5, 5], [4, 4], 0) == [0, 0]


def test_anchors_of_a_batch_follow_the_quotas():
    """The shares of long and short documents, which a draw over the batch would not keep."""
    lengths = [200, 20, 20, 20]
    document = np.repeat(np.arange(4), lengths)
    mask = np.ones(260, dtype=np.uint8)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        anchors = sample_anchors(mask, document, 26, generator)
        assert np.bincount(document[anchors], minlength=4).tolist() == [20, 2, 2, 2]
        assert (np.diff(anchors) > 0).all()


def test_every_valid_position_of_a_document_is_drawn_equally_often():
    mask = np.ones(11, dtype=np.uint8)
    document = np.repeat([0, 1], [6, 5])
    counts = np.zeros(11)
    draws = 3000
    for seed in range(draws):
        counts[sample_anchors(mask, document, 3, torch.Generator().manual_seed(seed))] += 1
    assert counts[5] == counts[10] == 0  # the last token of a document is no anchor
    # Shares 18/11 and 15/11 of 3 anchors: floors 1 and 1, the remainder to the first document.
    np.testing.assert_allclose(counts[:5] / draws, 2 / 5, atol=0.04)
    np.testing.assert_allclose(counts[6:10] / draws, 1 / 4, atol=0.04)


def test_valid_anchors_stay_inside_a_document_and_an_answer():
    mask = np.asarray([1, 1, 1, 0, 1, 1, 1, 1], dtype=np.uint8)
    document = np.asarray([0, 0, 0, 0, 0, 0, 1, 1])
    assert valid_anchors(mask, document).tolist() == [0, 1, 4, 6]


def test_a_budget_beyond_the_tokens_of_a_batch_costs_nothing() -> None:
    """What a plan takes, and the drafter computes, follows the batch: nothing is lost by it."""
    ids, mask = np.arange(1, 41, dtype=np.int32), np.ones(40, dtype=np.uint8)
    examples = [Example(ids, mask, "data.jsonl:1")] * 4
    few, many = (
        BatchPlanner(
            examples, DataConfig(token_budget=96), TrainConfig(max_anchors=n), BlockLayout(4), 1
        ).batch(0)
        for n in (96, 10**6)
    )
    assert many.anchors.shape == (96,) and many.labels.shape == (96, 4)
    assert int((many.anchors < 96).sum()) == 2 * 39  # all that there are
    for name in ("anchors", "labels", "weights", "rows", "ctx_start"):
        assert torch.equal(getattr(few, name), getattr(many, name))
