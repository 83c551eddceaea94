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


@settings(max_examples=300, deadline=None)
@given(
    valid=st.lists(st.integers(0, 60), min_size=1, max_size=30).map(np.asarray),
    budget=st.integers(0, 600),
)
def test_quotas_are_equal_up_to_what_a_document_has(valid, budget):
    quotas = anchor_quotas(valid, budget)
    assert quotas.sum() == min(budget, valid.sum())
    assert (quotas >= 0).all() and (quotas <= valid).all()
    open_ = quotas[quotas < valid]  # could take more: all the same, the earliest one more
    assert len(open_) == 0 or quotas.max() - open_.min() <= 1
    assert (np.diff(quotas[valid > quotas.max()]) <= 0).all()


def test_quotas_by_hand():
    def quotas(valid, budget):
        return anchor_quotas(np.asarray(valid), budget).tolist()

    assert quotas([9, 19, 29], 6) == [2, 2, 2]
    assert quotas([9, 9, 9], 4) == [2, 1, 1]  # the earliest document
    assert quotas([3, 9, 9], 13) == [3, 5, 5]  # full: the rest goes to the others
    assert quotas([3, 4, 9], 15) == [3, 4, 8]
    assert quotas([0, 4], 3) == [0, 3]  # a document without a valid anchor
    assert quotas([4, 4], 100) == [4, 4]
    assert quotas([4, 4], 0) == [0, 0]


def test_anchors_of_a_batch_follow_the_quotas():
    """The shares of long and short documents, which a draw over the batch would not keep."""
    lengths = [200, 4, 20, 20]
    document = np.repeat(np.arange(4), lengths)
    mask = np.ones(244, dtype=np.uint8)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        anchors = sample_anchors(mask, document, 26, generator)
        assert np.bincount(document[anchors], minlength=4).tolist() == [8, 3, 8, 7]
        assert (np.diff(anchors) > 0).all()


def test_every_valid_position_of_a_document_is_drawn_equally_often():
    mask = np.ones(11, dtype=np.uint8)
    document = np.repeat([0, 1], [6, 5])
    counts = np.zeros(11)
    draws = 3000
    for seed in range(draws):
        counts[sample_anchors(mask, document, 3, torch.Generator().manual_seed(seed))] += 1
    assert counts[5] == counts[10] == 0  # the last token of a document is no anchor
    # 3 anchors: one each, the remainder to the first document.
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
