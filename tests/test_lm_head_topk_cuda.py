"""lm_head_topk on GPUs: what test_lm_head_topk.py cannot ask of every device."""

import threading

import pytest
import torch
from head_cases import check_against_fp64, make_head

from dflash_ext import ops
from dflash_ext.ops.lm_head_topk.naive import lm_head_topk_naive

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("cuda_by_default"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")

NAN, INF = float("nan"), float("inf")
SLEEP_CYCLES = 500_000_000  # a quarter of a second, or more
DTYPES = [torch.bfloat16, torch.float16, torch.float32]  # fp32 takes the path of every GPU


def head_of(logits, dtype):
    """(hidden, weight) whose logits are exactly these integers below 2^14 in size."""
    logits = torch.as_tensor(logits)
    rows, vocab = logits.shape
    high = torch.div(logits, 64, rounding_mode="floor")
    weight = torch.zeros(vocab, -(-2 * rows // 8) * 8)
    hidden = torch.zeros(rows, weight.shape[1])
    for row in range(rows):
        hidden[row, 2 * row], hidden[row, 2 * row + 1] = 64, 1
        weight[:, 2 * row], weight[:, 2 * row + 1] = high[row], logits[row] - 64 * high[row]
    return hidden.to(dtype), weight.to(dtype)


def bits(outputs):
    return [x.view(torch.int32) if x.dtype == torch.float32 else x for x in outputs]


def assert_same_bits(a, b):
    assert all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def assert_exact(hidden, weight, k, labels, **options):
    """Everything but logsumexp equals the naive op in fp64: for logits that fp32 can hold."""
    got = ops.lm_head_topk(hidden, weight, k, labels, **options)
    want = lm_head_topk_naive(hidden.double(), weight.double(), k, labels, **options)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[3], want[3])
    for mine, exact in ((got[0], want[0]), (got[4], want[4])):
        assert torch.allclose(mine.double(), exact, rtol=0, atol=0, equal_nan=True)
    assert torch.allclose(got[2].double(), want[2], rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("vocab", [1, 7, 49_152, 248_077, 248_320])
@pytest.mark.parametrize("rows", [1, 129, 333])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_vocabularies(nan_poison, rows, vocab, dtype):
    hidden, weight, labels = make_head(rows, vocab, 136, dtype)
    check_against_fp64(hidden, weight, 8, labels)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 8, 16, 17, 32])
def test_orders_of_a_row(k, dtype):
    vocab = 16_384
    ramp = torch.arange(vocab)
    rows = [
        ramp,  # raises the threshold at every column
        -ramp,
        torch.full_like(ramp, 3),
        ramp % 2,
        ramp % 251,
        -(ramp % 251),
        (ramp * 7919) % vocab,
        ramp // 8,
        torch.where(ramp == 9999, 5, -5),
    ]
    hidden, weight = head_of(torch.stack(rows), dtype)
    for label in (0, 255, 256, 8000, vocab - 1):
        assert_exact(hidden, weight, k, torch.full((len(rows),), label))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_near_ties(dtype):
    """Logits that differ in the last places of an fp32: 1 + i * 2^-20."""
    vocab = 5000
    weight = torch.zeros(vocab, 8)
    weight[:, 0], weight[:, 1] = 1, torch.randint(0, 200, (vocab,))
    hidden = torch.zeros(3, 8)
    hidden[:, 0], hidden[:, 1] = 1, 2.0**-20
    assert_exact(hidden.to(dtype), weight.to(dtype), 8, torch.tensor([0, 77, 4999]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 8, 32])
def test_masked_by_infinity(k, dtype):
    hidden = torch.ones(4, 8, dtype=dtype)
    weight = torch.randint(-9, 9, (3000, 8)).to(dtype)
    weight[100:2990, 3] = -INF
    assert_exact(hidden, weight, k, torch.tensor([0, 99, 100, 2999]))
    assert_exact(hidden, weight, k, torch.tensor([0, 99, 100, 2999]), valid_vocab=2993)
    weight[:, 3] = -INF
    assert_exact(hidden, weight, k, torch.tensor([0, 99, 100, 2999]))
    weight[5], weight[2100] = INF, INF
    assert_exact(hidden, weight, k, torch.tensor([0, 5, 100, 2999]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 8, 32])
def test_nan(k, dtype):
    hidden = torch.randint(-3, 4, (5, 16)).to(dtype)
    weight = torch.randint(-3, 4, (3000, 16)).to(dtype)
    labels = torch.tensor([5, 700, 701, 2999, 0])
    hidden[1] = NAN  # a whole row
    assert_exact(hidden, weight, k, labels)
    weight[700:2000:3] = NAN  # more than k
    assert_exact(hidden, weight, k, labels)
    weight[700:2000] = 0
    weight[2900] = NAN  # one
    assert_exact(hidden, weight, k, labels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_more_than_2_31_logits(dtype):
    hidden, weight, labels = make_head(8971, 248_320, 32, dtype)
    assert len(hidden) * len(weight) > 2**31
    labels[::2] = 248_319
    outputs = ops.lm_head_topk(hidden, weight, 8, labels)
    some = torch.tensor([0, 1, 4095, 8647, 8649, 8969, 8970])
    exact = lm_head_topk_naive(hidden[some].double(), weight.double(), 8, labels[some])
    for i in (0, 2, 4):
        assert torch.allclose(outputs[i][some].double(), exact[i], rtol=1e-5, atol=1e-4)
    assert (outputs[3][some] - exact[3]).abs().max() <= 2
    assert (outputs[1] >= 0).all()


@pytest.mark.parametrize("k", [8, 32])
def test_a_row_does_not_depend_on_the_split(k):
    """Alone a row's vocabulary is cut into 66 strips on an H200, in a large batch into 8."""
    hidden, weight, labels = make_head(2500, 30_000, 256, torch.bfloat16)
    together = ops.lm_head_topk(hidden, weight, k, labels)
    for rows in (slice(0, 1), slice(700, 1801), slice(2499, 2500)):
        some = ops.lm_head_topk(hidden[rows], weight, k, labels[rows])
        for i in (0, 1, 3, 4):
            assert torch.equal(some[i], together[i][rows])
        assert torch.allclose(some[2], together[2][rows], rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_label_in_the_top_k_has_its_value_there(dtype):
    """The label's logit is computed apart from the others, and has to be the same to the bit."""
    hidden, weight, _ = make_head(3000, 20_000, 1000, dtype)
    best = ops.lm_head_topk(hidden, weight, 8)
    place = torch.randint(0, 8, (3000,))
    row = torch.arange(3000)
    *_, rank, label_logit = ops.lm_head_topk(hidden, weight, 8, best[1][row, place])
    assert torch.equal(label_logit, best[0][row, place])
    assert torch.equal(rank, place)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_thousand_repeats_are_equal(dtype):
    hidden, weight, labels = make_head(300, 20_000, 64, dtype)
    hidden[:100] = torch.randint(-1, 2, (100, 64))
    weight[:9000] = torch.randint(-1, 2, (9000, 64))
    first = ops.lm_head_topk(hidden, weight, 8, labels)
    for _ in range(1000):
        assert_same_bits(ops.lm_head_topk(hidden, weight, 8, labels), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_labels_out_of_range(dtype):
    hidden, weight, _ = make_head(3, 50, 8, dtype)
    *_, rank, label_logit = ops.lm_head_topk(hidden, weight, 2, torch.tensor([-1, 50, 2**40]))
    assert rank.tolist() == [-1, -1, -1]
    assert label_logit.isnan().all()


@pytest.mark.parametrize("k", [8, 32])
def test_memory(k):
    hidden, weight, labels = make_head(16_384, 50_000, 512, torch.bfloat16)
    outputs = ops.lm_head_topk(hidden, weight, k, labels)
    size = sum(x.numel() * x.element_size() for x in outputs)
    del outputs
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.lm_head_topk(hidden, weight, k, labels)
    assert torch.cuda.max_memory_allocated() - before - size < 64 << 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_side_stream(dtype):
    source, weight, labels = make_head(200, 3000, 64, dtype)
    want = ops.lm_head_topk(source, weight, 8, labels)
    hidden = torch.zeros_like(source)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        hidden.copy_(source)
        got = ops.lm_head_topk(hidden, weight, 8, labels)
    assert not stream.query(), "the op waited for the GPU"
    stream.synchronize()
    assert_same_bits(got, want)


def test_graph():
    hidden, weight, labels = make_head(200, 3000, 64, torch.bfloat16)
    ops.lm_head_topk(hidden, weight, 8, labels)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = ops.lm_head_topk(hidden, weight, 8, labels)
    for _ in range(3):
        hidden.normal_()
        graph.replay()
        assert_same_bits(outputs, ops.lm_head_topk(hidden, weight, 8, labels))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rejects_tensors_on_other_devices(dtype):
    hidden, weight, labels = make_head(3, 50, 8, dtype)
    with pytest.raises(RuntimeError, match="weight: found a tensor on cpu, want cuda:0"):
        ops.lm_head_topk(hidden, weight.cpu(), 2)
    with pytest.raises(RuntimeError, match="found a tensor on cpu, want cuda:0"):
        ops.lm_head_topk(hidden, weight, 2, labels.cpu())


@two_gpus
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_current_device(dtype):
    case = make_head(300, 3000, 64, dtype)
    want = ops.lm_head_topk(*case[:2], 8, case[2])
    hidden, weight, labels = (x.to("cuda:1") for x in case)
    assert torch.cuda.current_device() == 0
    got = ops.lm_head_topk(hidden, weight, 8, labels)
    assert got[0].device == torch.device("cuda:1")
    assert_same_bits([x.to("cuda:0") for x in got], want)


@two_gpus
def test_threads_on_two_gpus():
    case = make_head(700, 9000, 64, torch.bfloat16)
    want = ops.lm_head_topk(*case[:2], 8, case[2])
    failed = []

    def work(index):
        hidden, weight, labels = (x.to(f"cuda:{index}") for x in case)
        with torch.cuda.device(index):
            results = [ops.lm_head_topk(hidden, weight, 8, labels) for _ in range(200)]
        for got in results:
            same = zip(bits(x.to("cuda:0") for x in got), bits(want), strict=True)
            failed.extend(index for a, b in same if not torch.equal(a, b))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
