from pathlib import Path

import pytest
import torch

from dflash_ext import ops
from dflash_ext.config_check import MAX_BLOCK_SIZE
from dflash_ext.ops.metric_add import MAX_BLOCK, NUM_WORDS, SCALE, WORD, new_accumulator
from dflash_ext.ops.metric_add.naive import metric_add_naive

UNMEASURED = torch.empty(0, 0, dtype=torch.int64)
NAN, INF = float("nan"), float("inf")


def make_batch(blocks, block_size, seed=0):
    """(rank, terms, weights) with a few misses, unsupervised slots and empty blocks."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.randint(0, 12, (blocks, block_size), generator=generator)
    rank[torch.rand(rank.shape, generator=generator) < 0.6] = 0
    terms = torch.rand(blocks, block_size, 4, generator=generator) * 9
    weights = torch.rand(blocks, block_size, generator=generator)
    weights[torch.rand(weights.shape, generator=generator) < 0.1] = 0
    weights[:, :1] = 0
    weights[::5] = 0
    return rank, terms, weights


@pytest.fixture
def add(device):
    """metric_add on the device, of tensors of the host, to a new accumulator."""

    def add(rank, terms, weights):
        acc = new_accumulator(device)
        ops.metric_add(acc, *(x.to(device) for x in (rank, terms, weights)))
        return acc.cpu()

    return add


def words(acc):
    return {name: acc[i].item() for name, i in WORD.items() if not name.startswith("slot_")}


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize(
    ("blocks", "block_size"), [(0, 16), (1, 1), (1, 2), (33, 16), (7, 5), (129, 32), (3000, 16)]
)
def test_equals_naive_bit_for_bit(blocks, block_size, measured, device):
    mine, naive = new_accumulator(device), new_accumulator()
    for seed in range(3):
        rank, terms, weights = make_batch(blocks, block_size, seed)
        if blocks > 2:
            terms[1, -1, 0] = NAN
            terms[2, 1, 3] = INF
            weights[1:3, 1:] = 0.5
        seen = rank if measured else UNMEASURED
        ops.metric_add(mine, *(x.to(device) for x in (seen, terms, weights)))
        metric_add_naive(naive, seen, terms, weights)
    assert torch.equal(mine.cpu(), naive)
    assert mine[WORD["batches"]] == 3


def test_layout_covers_every_word_once():
    assert MAX_BLOCK == MAX_BLOCK_SIZE
    spans = sorted((i, MAX_BLOCK if n.startswith("slot_") else 1) for n, i in WORD.items())
    covered = [w for start, length in spans for w in range(start, start + length)]
    assert covered == list(range(NUM_WORDS))


def test_layout_is_the_one_of_the_header():
    header = (Path(__file__).parent.parent / "csrc" / "metric_layout.h").read_text()
    body = header.split("enum MetricWord : int64_t {")[1].split("}")[0]
    names = [line.split("=")[0].strip(" ,")[1:] for line in body.splitlines() if line.strip()]
    expected = ["".join(part.capitalize() for part in name.split("_")) for name in WORD]
    assert names == [*expected, "NumWords"]


def test_values_of_a_small_batch(add):
    rank = torch.tensor([[9, 0, 0, 3, 0], [9, 5, 0, 0, 0], [0, 0, 0, 0, 0]])
    weights = torch.tensor([[0, 1.0, 0.5, 0.25, 0.125], [0, 1.0, 1.0, 0, 1.0], [0.0] * 5])
    terms = torch.zeros(3, 5, 4)
    terms[..., 0] = torch.arange(5.0)
    terms[..., 1:] = torch.tensor([2.0, 4.0, 8.0])
    got = words(add(rank, terms, weights))
    loss = 1 + 0.5 * 2 + 0.25 * 3 + 0.125 * 4 + 1 + 2 + 4
    assert got["loss_sum"] == loss * SCALE
    assert got["loss_weight"] == got["term_weight"] == 4.875 * SCALE
    assert got["ce_sum"] == 2 * 4.875 * SCALE
    assert got["kl_sum"] == 4 * 4.875 * SCALE
    assert got["cap_sum"] == 8 * 4.875 * SCALE
    assert (got["slots"], got["blocks"]) == (7, 2)
    assert (got["top1"], got["top4"], got["top8"]) == (5, 6, 7)
    # Block 0: 0 0 | 3 ends a streak below 1; block 1: 5 ends it at once, the gap later on.
    assert (got["streak1"], got["streak4"], got["streak8"]) == (2, 4, 4 + 2)
    assert (got["batches"], got["measured_batches"], got["nonfinite_values"]) == (1, 1, 0)
    assert (got["nonfinite_steps"], got["tokens"]) == (0, 0)


def test_slot_counters(add):
    rank, terms, weights = make_batch(40, 16)
    acc = add(rank, terms, weights)
    supervised = weights > 0
    n, hit = acc[WORD["slot_n"] :][:16], acc[WORD["slot_hit"] :][:16]
    assert torch.equal(n, supervised.sum(0))
    assert torch.equal(hit, (supervised & (rank == 0)).sum(0))
    assert n.sum() == acc[WORD["slots"]]
    assert not acc[WORD["slot_n"] + 16 : WORD["slot_hit"]].any()


def test_streak_by_hand(add):
    rank, terms, weights = make_batch(200, 8)
    got = words(add(rank, terms, weights))
    for width in (1, 4, 8):
        total = 0
        for block, weight in zip(rank.tolist(), weights.tolist(), strict=True):
            for r, w in zip(block[1:], weight[1:], strict=True):
                if w == 0 or r >= width:
                    break
                total += 1
        assert got[f"streak{width}"] == total


def test_supervised_slot_0_starts_the_streak(add):
    got = words(add(torch.tensor([[0, 0, 5]]), torch.zeros(1, 3, 4), torch.ones(1, 3)))
    assert (got["streak1"], got["streak8"], got["slots"]) == (2, 3, 3)


def test_unmeasured_adds_the_loss_only(add):
    rank, terms, weights = make_batch(33, 16)
    terms[3, 4, 2] = NAN
    weights[3] = 1
    full, part = words(add(rank, terms, weights)), words(add(UNMEASURED, terms, weights))
    for name in ("loss_sum", "loss_weight", "nonfinite_values", "batches"):
        assert part.pop(name) == full[name] != 0
    assert not any(part.values())


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30, -3e9])
@pytest.mark.parametrize("term", range(4))
def test_non_finite_slot_is_counted_and_not_added(value, term, add):
    rank, terms, weights = torch.zeros(1, 4).long(), torch.ones(1, 4, 4), torch.ones(1, 4)
    terms[0, 2, term] = value
    got = words(add(rank, terms, weights))
    assert got["nonfinite_values"] == 1
    assert got["loss_sum"] == got["cap_sum"] == got["loss_weight"] == 3 * SCALE
    assert (got["slots"], got["top1"], got["streak1"], got["blocks"]) == (3, 3, 2, 1)


def test_non_finite_values_of_unsupervised_slots_do_not_count(add):
    terms = torch.full((2, 3, 4), NAN)
    got = words(add(torch.zeros(2, 3).long(), terms, torch.zeros(2, 3)))
    assert got.pop("batches") == got.pop("measured_batches") == 1
    assert not any(got.values())


@pytest.mark.parametrize("weight", [NAN, -1.0])
def test_weights_that_are_not_positive_are_not_supervised(weight, add):
    got = words(add(torch.zeros(1, 2).long(), torch.ones(1, 2, 4), torch.full((1, 2), weight)))
    assert got["slots"] == got["nonfinite_values"] == got["loss_weight"] == 0


def test_infinite_weight_is_non_finite(add):
    got = words(add(torch.zeros(1, 2).long(), torch.ones(1, 2, 4), torch.full((1, 2), INF)))
    assert (got["slots"], got["nonfinite_values"]) == (0, 8)


def test_strided_inputs(add, device):
    rank, terms, weights = make_batch(10, 16)
    expected = add(rank[:, :8].clone(), terms[:, :8].clone(), weights[:, :8].clone())
    acc = new_accumulator(device)
    ops.metric_add(acc, *(x.to(device)[:, :8] for x in (rank, terms, weights)))
    assert torch.equal(acc.cpu(), expected)


def test_any_order_gives_the_same_bits(add):
    rank, terms, weights = make_batch(300, 16)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    permuted = add(rank[order], terms[order], weights[order])
    assert torch.equal(add(rank, terms, weights), permuted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"acc": torch.zeros(5, dtype=torch.int64)}, f"acc: found shape [5], want [{NUM_WORDS}]"),
        ({"acc": torch.zeros(NUM_WORDS)}, "acc: found Float, want Long"),
        ({"rank": torch.zeros(2, 4).long()}, "rank: found shape [2, 4], want [2, 3]"),
        ({"terms": torch.zeros(2, 3, 3)}, "terms: found shape [2, 3, 3], want [2, 3, 4]"),
        ({"terms": torch.zeros(2, 3, 4).double()}, "terms: found Double, want Float"),
        ({"weights": torch.zeros(6)}, "weights: found 1 dimensions, want 2"),
        ({"weights": torch.zeros(2, 33)}, "weights: found blocks of 33, want 1 to 32"),
    ],
)
def test_rejects(change, message):
    good = {
        "acc": new_accumulator(),
        "rank": torch.zeros(2, 3).long(),
        "terms": torch.zeros(2, 3, 4),
        "weights": torch.zeros(2, 3),
    }
    with pytest.raises(RuntimeError) as error:
        ops.metric_add(**(good | change))
    assert message in str(error.value)


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("blocks", [0, 1, 5])
def test_opcheck(blocks, measured, device):
    rank, terms, weights = make_batch(blocks, 7)
    inputs = (rank if measured else UNMEASURED, terms, weights)
    arguments = (new_accumulator(device), *(x.to(device) for x in inputs))
    torch.library.opcheck(torch.ops.dflash_ext.metric_add.default, arguments)
