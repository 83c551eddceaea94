import resource

import pytest
import torch
from head_cases import check_against_fp64, make_head

from dflash_ext import ops
from dflash_ext.ops.lm_head_topk import MAX_K
from dflash_ext.ops.lm_head_topk.naive import lm_head_topk_naive

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
cpu_only = pytest.mark.parametrize("device", ["cpu"], indirect=True)


@pytest.fixture(autouse=True)
def default_device(device):
    """Tensors of these tests are made on the CPU, then on a GPU."""
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


def rows_of(*rows):
    """(hidden, weight) whose logits are exactly `rows`."""
    logits = torch.tensor(rows)
    return torch.eye(len(rows)), logits.T.contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab", "width"),
    [(1, 1, 1), (1, 64, 8), (5, 257, 33), (7, 63, 1), (33, 1000, 48), (2, 65, 128)],
)
def test_against_fp64(nan_poison, rows, vocab, width, dtype):
    hidden, weight, labels = make_head(rows, vocab, width, dtype)
    check_against_fp64(hidden, weight, 8, labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [1, 2, 7, 16, 17, 32, 33, 64, 255, 1023, 1024])
@pytest.mark.parametrize("vocab", [300, 1024, 2049])
def test_every_k(nan_poison, k, vocab, dtype):
    hidden, weight, labels = make_head(3, vocab, 16, dtype)
    check_against_fp64(hidden, weight, k, labels)


@pytest.mark.parametrize("options", [
    {"softcap": 30.0},
    {"softcap": 0.5},
    {"logit_scale": 0.0625},
    {"logit_scale": -1.5},
    {"valid_vocab": 97},
    {"valid_vocab": 1},
    {"valid_vocab": 100, "softcap": 5.0, "logit_scale": 0.3},
])  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options(nan_poison, options, dtype):
    hidden, weight, labels = make_head(9, 130, 24, dtype)
    check_against_fp64(hidden, weight, 8, labels, **options)


def test_many_chunks_of_rows_and_of_a_converted_head():
    # 700 rows of 2^14 logits are more than one 32 MiB chunk, and 2^14 fp32 head rows more than one
    # 16 MiB part.
    hidden, weight, labels = make_head(700, 2**14, 300, torch.bfloat16)
    values, indices, lse, rank, label_logit = ops.lm_head_topk(hidden, weight, 4, labels)
    z = hidden.float() @ weight.float().T
    assert (z.gather(1, indices) - values).abs().max() < 1e-3
    assert (z.topk(4).values - values).abs().max() < 1e-3
    assert (torch.logsumexp(z, 1) - lse).abs().max() < 1e-3
    mine = z.gather(1, labels[:, None])
    assert (mine[:, 0] - label_logit).abs().max() < 1e-3
    assert (rank >= (z > mine + 1e-3).sum(1)).all()
    assert (rank < (z > mine - 1e-3).sum(1)).all()


@cpu_only
def test_memory_is_bounded():
    hidden, weight, labels = make_head(4096, 2**15, 8)
    ops.lm_head_topk(hidden[:8], weight, 8, labels[:8])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ops.lm_head_topk(hidden, weight, 8, labels)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 64, "all logits together are 512 MiB"


def test_no_rows():
    hidden, weight, labels = make_head(0, 10, 4)
    outputs = ops.lm_head_topk(hidden, weight, 3, labels)
    assert [list(x.shape) for x in outputs] == [[0, 3], [0, 3], [0], [0], [0]]


def test_no_width_gives_zero_logits():
    outputs = ops.lm_head_topk(torch.empty(2, 0), torch.empty(5, 0), 2, torch.tensor([0, 3]))
    assert outputs[1].tolist() == [[0, 1], [0, 1]]
    assert outputs[3].tolist() == [0, 3]
    assert torch.allclose(outputs[2], torch.tensor(5.0).log().expand(2))


def test_without_labels():
    hidden, weight, labels = make_head(4, 50, 8)
    with_labels = ops.lm_head_topk(hidden, weight, 5, labels)
    without = ops.lm_head_topk(hidden, weight, 5)
    assert all(torch.equal(a, b) for a, b in zip(with_labels[:3], without[:3], strict=True))
    assert [list(x.shape) for x in without[3:]] == [[0], [0]]


def test_strided_inputs():
    wide = torch.randn(14, 40)
    head = torch.randn(30, 120)
    labels = torch.randint(0, 60, (14,))[::2]
    hidden, weight = wide[::2, 10:20], head.reshape(60, 60)[:, ::6]
    strided = ops.lm_head_topk(hidden, weight, 5, labels)
    dense = ops.lm_head_topk(hidden.contiguous(), weight.contiguous(), 5, labels.contiguous())
    for a, b in zip(strided, dense, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("vocab", [10, 64, 200, 5000])
@pytest.mark.parametrize("k", [1, 8, 100])
def test_ties_go_to_the_lowest_index(vocab, k):
    """Small integers: every product and sum is exact, and most logits occur many times."""
    hidden = torch.randint(-2, 3, (6, 5)).float()
    weight = torch.randint(-1, 2, (vocab, 5)).float()
    hidden[0] = 0
    labels = torch.randint(0, vocab, (6,))
    for got, want in zip(
        ops.lm_head_topk(hidden, weight, k, labels),
        lm_head_topk_naive(hidden.double(), weight.double(), k, labels),
        strict=True,
    ):
        assert torch.allclose(got.double(), want.double(), rtol=0, atol=2e-6)


def test_duplicated_head_rows_tie_for_the_rank():
    hidden, weight = (torch.randint(-99, 99, (n, 33)) / 16 for n in (20, 700))  # exact sums
    weight[500:] = weight[300:500]
    low, high = torch.randint(300, 500, (2, 20))
    high = low + 200
    rank_low = ops.lm_head_topk(hidden, weight, 1, low)[3]
    rank_high = ops.lm_head_topk(hidden, weight, 1, high)[3]
    assert torch.equal(rank_high, rank_low + 1)


@pytest.mark.parametrize("k", [1, 8, 300])
def test_constant_ascending_and_descending_rows(k):
    ramp = torch.arange(1000.0)
    hidden, weight = rows_of([3.0] * 1000, ramp.tolist(), (-ramp).tolist())
    values, indices, _, rank, _ = ops.lm_head_topk(hidden, weight, k, torch.tensor([7, 7, 7]))
    assert indices[0].tolist() == indices[2].tolist() == list(range(k))
    assert indices[1].tolist() == list(range(999, 999 - k, -1))
    assert rank.tolist() == [7, 992, 7]


def test_negative_zero_equals_zero():
    # A zero row of weights times -1 is -0.
    hidden, weight = torch.tensor([[-1.0]]), torch.tensor([[0.0], [-0.0], [1.0], [0.0]])
    _, indices, _, rank, _ = ops.lm_head_topk(hidden, weight, 4, torch.tensor([1]))
    assert indices.tolist() == [[0, 1, 3, 2]]
    assert rank.tolist() == [1]


def test_label_is_in_the_top_k_exactly_if_its_rank_is_below_k():
    hidden, weight, labels = make_head(500, 50, 12)
    values, indices, _, rank, label_logit = ops.lm_head_topk(hidden, weight, 8, labels)
    place = (indices == labels[:, None]).int()
    inside = place.any(1)
    assert torch.equal(inside, rank < 8)
    assert torch.equal(place.argmax(1)[inside], rank[inside])
    assert torch.equal(values[place.bool()], label_logit[inside])


def test_fewer_ids_than_k():
    hidden, weight, labels = make_head(4, 5, 3)
    values, indices, *_ = ops.lm_head_topk(hidden, weight, 8, labels)
    assert (indices[:, 5:] == -1).all()
    assert (values[:, 5:] == -INF).all()
    assert torch.equal(indices[:, :5].sort(1).values, torch.arange(5).expand(4, 5))


def test_masked_vocabulary():
    hidden, weight, _ = make_head(3, 20, 6)
    weight[15:] = NAN
    labels = torch.tensor([0, 15, 19])
    values, indices, lse, rank, label_logit = ops.lm_head_topk(
        hidden, weight, 18, labels, valid_vocab=15
    )
    assert (indices[:, 15:] == -1).all()
    assert indices.max() == 14
    assert torch.allclose(lse, torch.logsumexp(hidden @ weight[:15].T, 1), atol=1e-5)
    assert rank[1:].tolist() == [15, 19]
    assert label_logit[1:].tolist() == [-INF, -INF]


def test_nan_is_the_largest_value():
    hidden, weight = torch.ones(1, 1), torch.tensor([[1.0], [NAN], [INF], [5.0], [NAN], [-INF]])
    values, indices, lse, rank, label_logit = ops.lm_head_topk(hidden, weight, 6, torch.tensor([3]))
    assert indices.tolist() == [[1, 4, 2, 3, 0, 5]]
    assert values[0, :2].isnan().all()
    assert values[0, 2:].tolist() == [INF, 5, 1, -INF]
    assert lse.isnan().all()
    assert rank.tolist() == [3]
    assert ops.lm_head_topk(hidden, weight, 1, torch.tensor([4]))[3].tolist() == [1]
    assert ops.lm_head_topk(hidden, weight, 1, torch.tensor([2]))[3].tolist() == [2]


@pytest.mark.parametrize("k", [3, 70])
def test_more_nans_than_k(k):
    logits = torch.arange(500.0)
    logits[7::5] = NAN
    _, indices, _, rank, _ = ops.lm_head_topk(
        torch.ones(1, 1), logits[:, None], k, torch.tensor([12])
    )
    assert indices[0].tolist() == list(range(7, 7 + 5 * k, 5))
    assert rank.tolist() == [1]


def test_infinite_rows():
    hidden = torch.ones(1, 1)
    minus = ops.lm_head_topk(hidden, torch.full((5, 1), -INF), 2, torch.tensor([3]))
    assert (minus[1].tolist(), minus[2].tolist(), minus[3].tolist()) == ([[0, 1]], [-INF], [3])
    plus = ops.lm_head_topk(hidden, torch.tensor([[0.0], [INF], [INF]]), 2, torch.tensor([2]))
    assert (plus[1].tolist(), plus[2].tolist(), plus[3].tolist()) == ([[1, 2]], [INF], [1])


def test_logsumexp_of_far_apart_logits():
    hidden, weight = rows_of([0.0, -80.0, -200.0], [1000.0, 999.0, -1000.0], [-500.0, -500, -900])
    lse = ops.lm_head_topk(hidden, weight, 1)[2]
    assert torch.allclose(lse, torch.logsumexp(weight.T.double(), 1).float(), rtol=1e-6)


@cpu_only
def test_same_ids_whatever_the_number_of_threads():
    hidden, weight, labels = make_head(64, 3000, 32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = ops.lm_head_topk(hidden, weight, 8, labels)
        torch.set_num_threads(2)
        two = ops.lm_head_topk(hidden, weight, 8, labels)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one[1], two[1])
    assert torch.equal(one[3], two[3])


def test_no_gradient_and_inputs_that_want_one():
    hidden, weight, labels = make_head(3, 20, 4)
    hidden.requires_grad_()
    outputs = ops.lm_head_topk(hidden, weight, 3, labels)
    assert not any(x.requires_grad for x in outputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3)}, "hidden: found 1 dimensions, want 2"),
        ({"hidden": torch.zeros(3, 4).double()}, "weight: found Float, want Double like hidden"),
        ({"weight": torch.zeros(9, 5)}, "weight: found shape [9, 5], want [9, 4]"),
        ({"weight": torch.zeros(0, 4)}, "weight: found 0 rows"),
        ({"k": 0}, "k: found 0, want 1 to 1024"),
        ({"k": MAX_K + 1}, "k: found 1025"),
        ({"labels": torch.tensor([0, 1])}, "labels: found shape [2], want [3]"),
        ({"labels": torch.zeros(3)}, "labels: found Float, want Long"),
        ({"valid_vocab": 0}, "valid_vocab: found 0, want 1 to 9"),
        ({"valid_vocab": 10}, "valid_vocab: found 10"),
        ({"softcap": 0.0}, "softcap: found 0, want > 0"),
    ],
)
def test_rejects(change, message, device):
    good = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(9, 4)}
    for name, value in change.items():
        good[name] = value.to(device) if isinstance(value, torch.Tensor) else value
    with pytest.raises(RuntimeError) as error:
        ops.lm_head_topk(**good)
    assert message in str(error.value)


@cpu_only
@pytest.mark.parametrize(
    ("labels", "message"),
    [([0, 9, 1], "labels: found 9 at 1, want 0 to 8"), ([-1, 0, 1], "labels: found -1 at 0")],
)
def test_rejects_labels_out_of_range(labels, message):
    with pytest.raises(RuntimeError) as error:
        ops.lm_head_topk(torch.zeros(3, 4), torch.zeros(9, 4), 1, torch.tensor(labels))
    assert message in str(error.value)


def test_rejects_fp64():
    with pytest.raises(RuntimeError, match="hidden: found Double, want float, bfloat16 or half"):
        ops.lm_head_topk(torch.zeros(3, 4).double(), torch.zeros(9, 4).double())


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(rows, labelled, dtype):
    hidden, weight, labels = make_head(rows, 33, 7, dtype)
    torch.library.opcheck(
        torch.ops.dflash_ext.lm_head_topk.default,
        (hidden, weight, 4, labels if labelled else None),
        {"valid_vocab": 31, "softcap": 20.0},
    )
