"""block_attention on GPUs, against its specification in fp64."""

import dataclasses
import threading

import pytest
import torch
from block_attention_cases import MASKS, NAMES, Case, error, errors, make_case, sdpa
from cuda_waits import no_syncs
from torch import Tensor

from dflash_ext.ops import block_attention
from dflash_ext.ops.block_attention.naive import block_attention_naive

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("cuda_by_default"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")

SLEEP_CYCLES = 500_000_000  # a quarter of a second, or more
SHAPES = [
    # blocks, slots, (query heads, KV heads), head size, context, and the longest context
    (40, 16, (32, 8), 128, 3000, 1500),
    (30, 16, (9, 3), 64, 2000, 900),
    (3, 16, (4, 1), 80, 40, 40),
    (4, 17, (3, 3), 7, 50, 40),
    (11, 2, (5, 1), 72, 200, 100),
    (1, 1, (1, 1), 1, 1, 1),
    (6, 32, (8, 2), 128, 333, 200),
    (5, 4, (4, 2), 256, 300, 200),
    (3, 16, (40, 2), 128, 100, 60),
    (3, 3, (130, 2), 64, 100, 60),
]
# Masks by what of them is compiled in; most of a test's time goes into compilation, so a test takes
# all that one serves.
KINDS = [
    [{}],
    [{"causal": True}],
    [{"window": 7}, {"window": 1}, {"window": 1000}],
    [{"window": 3, "causal": True}],
]
EVERY_KIND = [(shape, kind) for shape in SHAPES[:2] for kind in KINDS]
FP32_CASES = EVERY_KIND + [(shape, KINDS[3]) for shape in SHAPES[2:]]
BF16_CASES = FP32_CASES + [(shape, KINDS[0]) for shape in SHAPES[2:]]
HALF_CASES = [("own", torch.bfloat16, *case) for case in BF16_CASES]
HALF_CASES += [("own", torch.float16, shape, KINDS[3]) for shape in SHAPES[:4]]
HALF_CASES += [("triton", torch.bfloat16, *case) for case in EVERY_KIND]
HALF_CASES += [("small", torch.bfloat16, s, k) for s in SHAPES[:2] for k in (KINDS[0], KINDS[2])]
FP32_DIM = 16  # without tensor cores, a kernel for heads of 128 compiles for ten seconds


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's own; all in Triton, as where Hopper's do not fit; with little shared memory."""
    from dflash_ext.ops.block_attention import triton

    if request.param == "triton" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU: its own are these")
    own = triton.config_for
    others = {
        "triton": lambda q: dataclasses.replace(own(q), hopper=False),
        "small": lambda q: triton.choose_config(q.dtype, q.shape[3], 99 * 1024),
    }
    monkeypatch.setattr(triton, "config_for", others.get(request.param, own))


both_kernels = pytest.mark.parametrize("kernels", ["own", "triton"], indirect=True)
every_path = pytest.mark.parametrize(
    "kernels, dtype, dim",
    [
        ("own", torch.bfloat16, 128),
        ("own", torch.bfloat16, 64),
        ("triton", torch.bfloat16, 128),
        ("own", torch.float32, FP32_DIM),
    ],
    indirect=["kernels"],
    ids=str,
)


def ordered(case: Case) -> Case:
    """The same with its blocks in ascending order, as a batch has them."""
    order = case.ctx_end.argsort()
    return dataclasses.replace(case, ctx_start=case.ctx_start[order], ctx_end=case.ctx_end[order])


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in NAMES:
        assert a[name].equal(b[name]), name


def shown(x: object) -> str:
    return str(x).replace(" ", "")


def assert_fp32(case: Case, mask: dict) -> None:
    wanted = case.run(block_attention_naive, torch.float64, **mask)
    found = case.run(block_attention, torch.float32, **mask)
    for name in NAMES:
        # A softmax of one key: the gradients of its score are 0, so nothing to be relative to.
        one_key = mask.get("window") == 1 and name in ("q", "k_blk")
        reference = case.grad_out if one_key else wanted[name]
        size = reference.double().norm().clamp_min(1e-2)
        assert (found[name].double() - wanted[name].double()).norm() <= 1e-5 * size, (name, mask)


@pytest.mark.parametrize("shape, kind", FP32_CASES, ids=shown)
def test_fp32_matches_fp64(shape: tuple, kind: list[dict], nan_poison: None) -> None:
    case = make_case(*shape[:3], min(shape[3], FP32_DIM), shape[4], longest=shape[5])
    for mask in kind:
        assert_fp32(case, mask)
        assert_fp32(ordered(case), mask)


@pytest.mark.parametrize("dim", [128, 256])
def test_fp32_of_large_heads(dim: int, nan_poison: None) -> None:
    assert_fp32(make_case(5, 4, (4, 2), dim, 300, longest=200), {"window": 7, "causal": True})


@pytest.mark.parametrize("kernels, dtype, shape, kind", HALF_CASES, indirect=["kernels"], ids=shown)
def test_half_precision_is_as_good_as_plain_torch(
    kernels: None, dtype: torch.dtype, shape: tuple, kind: list[dict], nan_poison: None
) -> None:
    case = make_case(*shape[:5], dtype, longest=shape[5])
    for mask in kind:
        wanted = case.run(block_attention_naive, torch.float64, **mask)
        found = case.run(block_attention, dtype, **mask)
        assert_no_worse(found, case.run(sdpa, dtype, **mask), wanted, case)


@pytest.mark.parametrize("shape", SHAPES, ids=shown)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_hopper_forward(shape: tuple, dtype: torch.dtype, nan_poison: None) -> None:
    """The CUDA kernel itself, its logarithms of sums too."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    kernel = torch.ops.dflash_ext.block_attention_forward_hopper
    heads = (min(shape[2][0], 64 * shape[2][1]), shape[2][1])
    case = make_case(*shape[:2], heads, 128, shape[4], dtype, longest=shape[5])
    exact = [x.double() for x in case.tensors]
    unseen = torch.ones(shape[4], dtype=torch.bool)
    for start, end in zip(case.ctx_start.tolist(), case.ctx_end.tolist(), strict=True):
        unseen[start:end] = False
    for x in case.tensors[1:3]:
        x[unseen] = float("nan")
    for mask in MASKS:
        for blocks in (case, ordered(case)):
            ranges, options = (blocks.ctx_start, blocks.ctx_end), {"scale": 128**-0.5, **mask}
            wanted, wanted_lse = block_attention_naive(*exact, *ranges, **options)
            out, lse = kernel(*case.tensors, *ranges, **options)
            assert error(lse, wanted_lse) <= 1e-5, mask
            assert error(out, wanted) <= torch.finfo(dtype).eps, mask


def assert_no_worse(found: dict, plain: dict, wanted: dict, case: Case) -> None:
    """Errors at most twice those of plain torch, or of one rounding of the inputs' dtype."""
    rounding = torch.finfo(case.grad_out.dtype).eps / 2
    for name in NAMES:
        size = wanted[name].double().norm().clamp_min(1e-2 * case.grad_out.double().norm())
        mine, others = (
            ((x[name].double() - wanted[name].double()).norm() / size).item()
            for x in (found, plain)
        )
        assert mine <= 2 * max(others, rounding / 2), (name, mine, others)


@pytest.mark.parametrize("shape", SHAPES[1:3], ids=shown)
def test_fp64_and_negative_scale_take_the_portable_path(shape: tuple) -> None:
    case = make_case(*shape[:5], torch.float64, longest=shape[5])
    wanted = case.run(block_attention_naive, torch.float64)
    found = errors(case.run(block_attention, torch.float64), wanted)
    assert max(found.values()) <= 1e-12, found
    args = (*(x.float() for x in case.tensors), case.ctx_start, case.ctx_end)
    want, _ = block_attention_naive(*args, scale=-0.1)
    assert error(block_attention(*args, scale=-0.1), want) <= 1e-5


@every_path
@pytest.mark.parametrize("mask", [{}, {"window": 300}], ids=str)
def test_repeats_are_equal(kernels: None, dtype: torch.dtype, dim: int, mask: dict) -> None:
    case = ordered(make_case(100, 16, (8, 2), dim, 4000, dtype, longest=2000))
    first = case.run(block_attention, dtype, **mask)
    for _ in range(100):
        assert_same_bits(case.run(block_attention, dtype, **mask), first)


@every_path
@pytest.mark.parametrize("mask", [{}, {"window": 200}], ids=str)
def test_no_block_sees_beyond_its_range(
    kernels: None, dtype: torch.dtype, dim: int, mask: dict
) -> None:
    case = make_case(4, 16, (8, 2), dim, 900, dtype)
    case.ctx_start = torch.tensor([30, 30, 400, 900])
    case.ctx_end = torch.tensor([200, 377, 613, 900])
    wanted = case.run(block_attention, dtype, **mask)
    unseen = torch.ones(900, dtype=torch.bool)
    unseen[30:377] = unseen[400:613] = False
    for x in case.tensors[1:3]:
        x[unseen] = float("nan")
    found = case.run(block_attention, dtype, **mask)
    assert_same_bits(found, wanted)
    assert found["k_ctx"][unseen].count_nonzero() == 0
    assert found["v_ctx"][unseen].count_nonzero() == 0
    for x in case.tensors[1:3]:
        x[200:377] = 77.0  # the second block's alone
    other = case.run(block_attention, dtype, **mask)
    for block in (0, 2, 3):
        assert other["out"][block].equal(wanted["out"][block])
        assert other["q"][block].equal(wanted["q"][block])


@every_path
def test_padded_blocks_see_themselves(kernels: None, dtype: torch.dtype, dim: int) -> None:
    case = make_case(5, 16, (8, 2), dim, 300, dtype)
    case.ctx_start = case.ctx_end = torch.full((5,), 300)
    found = case.run(block_attention, dtype)
    assert all(x.isfinite().all() for x in found.values())
    assert found["k_ctx"].count_nonzero() == 0 and found["v_ctx"].count_nonzero() == 0
    assert found["v_blk"].count_nonzero() > 0


def test_empty() -> None:
    no_context = make_case(3, 16, (8, 2), 128, 0, torch.bfloat16)
    wanted = no_context.run(block_attention_naive, torch.float64)
    assert max(errors(no_context.run(block_attention, torch.bfloat16), wanted).values()) <= 1e-2
    no_blocks = make_case(0, 16, (8, 2), 128, 10, torch.bfloat16)
    found = no_blocks.run(block_attention, torch.bfloat16)
    assert found["out"].shape == (0, 16, 8, 128)
    assert found["k_ctx"].shape == (10, 2, 128) and found["k_ctx"].count_nonzero() == 0


@every_path
def test_backward_adds_to_its_buffers(kernels: None, dtype: torch.dtype, dim: int) -> None:
    case = ordered(make_case(30, 16, (8, 2), dim, 1000, dtype, longest=500))
    wanted = case.run(block_attention, dtype)
    q, k_ctx, v_ctx, k_blk, v_blk = case.tensors
    buffers = [torch.zeros(1000, 2, dim) for _ in range(2)]
    for group in (slice(0, 13), slice(13, 30)):
        args = [q[group], k_ctx, v_ctx, k_blk[group], v_blk[group]]
        ranges = [case.ctx_start[group], case.ctx_end[group]]
        out, lse = torch.ops.dflash_ext.block_attention(*args, *ranges, scale=dim**-0.5)
        dq, _, _ = torch.ops.dflash_ext.block_attention_backward(
            case.grad_out[group], *args, out, lse, *ranges, *buffers, scale=dim**-0.5
        )
        assert error(dq, wanted["q"][group]) <= 4e-3
    limit = 1e-5 if dtype == torch.float32 else 4e-3
    assert error(buffers[0], wanted["k_ctx"]) <= limit
    assert error(buffers[1], wanted["v_ctx"]) <= limit


@both_kernels
def test_strided_views(kernels: None) -> None:
    dtype = torch.bfloat16
    case = make_case(8, 16, (8, 2), 128, 500, dtype, longest=200)
    wanted = case.run(block_attention, dtype)
    q, k_ctx, v_ctx, k_blk, v_blk = case.tensors
    kv_ctx = torch.cat([k_ctx, v_ctx], -1).requires_grad_()
    heads_first = q.transpose(1, 2).contiguous().requires_grad_()
    dim_first = k_blk.permute(3, 0, 1, 2).contiguous().requires_grad_()
    tensors = [heads_first.transpose(1, 2), *kv_ctx.chunk(2, -1), dim_first.permute(1, 2, 3, 0)]
    out = block_attention(*tensors, v_blk, case.ctx_start, case.ctx_end, scale=128**-0.5)
    out.backward(case.grad_out.transpose(1, 2).contiguous().transpose(1, 2))
    assert out.equal(wanted["out"])
    assert heads_first.grad is not None and dim_first.grad is not None and kv_ctx.grad is not None
    assert heads_first.grad.transpose(1, 2).equal(wanted["q"])
    assert dim_first.grad.permute(1, 2, 3, 0).equal(wanted["k_blk"])
    assert kv_ctx.grad.equal(torch.cat([wanted["k_ctx"], wanted["v_ctx"]], -1))


def test_contexts_that_tma_cannot_read() -> None:
    """Not aligned to 16 bytes, or one head for all."""
    dtype = torch.bfloat16
    case = make_case(8, 16, (8, 2), 128, 500, dtype, longest=200)
    q, k_ctx, v_ctx, k_blk, v_blk = case.tensors
    shifted = torch.empty(v_ctx.numel() + 1, dtype=dtype)[1:].view_as(v_ctx).copy_(v_ctx)
    shared = k_ctx[:, :1].expand(-1, 2, -1)
    results = []
    for keys, values in ((shared, shifted), (shared.contiguous(), v_ctx)):
        leaves = [x.detach().requires_grad_() for x in (q, keys, values, k_blk, v_blk)]
        out = block_attention(*leaves, case.ctx_start, case.ctx_end, scale=128**-0.5)
        out.backward(case.grad_out)
        results.append([out.detach(), *(x.grad for x in leaves)])
    for found, wanted in zip(*results, strict=True):
        assert found is not None and wanted is not None
        assert error(found, wanted) <= 8e-3


@pytest.mark.parametrize("dtype, dim", [(torch.bfloat16, 128), (torch.float32, FP32_DIM)], ids=str)
@pytest.mark.parametrize("mask", [{}, {"window": 3, "causal": True}], ids=str)
def test_opcheck(dtype: torch.dtype, dim: int, mask: dict) -> None:
    case = make_case(3, 4, (4, 2), dim, 20, dtype)
    ranges = (case.ctx_start, case.ctx_end)
    ops, options = torch.ops.dflash_ext, {"scale": 0.3, **mask}
    out, lse = ops.block_attention(*case.tensors, *ranges, **options)
    inputs = [x.requires_grad_() for x in case.tensors]
    torch.library.opcheck(ops.block_attention.default, (*inputs, *ranges), options)
    buffers = [torch.randn(20, 2, dim) for _ in range(2)]
    fixed = [x.detach() for x in case.tensors]
    args = (case.grad_out, *fixed, out, lse, *ranges, *buffers)
    torch.library.opcheck(ops.block_attention_backward.default, args, options)


def test_side_stream_is_used() -> None:
    case = make_case(8, 16, (8, 2), 128, 500, torch.bfloat16, longest=200)
    wanted = case.run(block_attention, torch.bfloat16)
    good = [x.clone() for x in case.tensors]
    for x in case.tensors:
        x.fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        for x, y in zip(case.tensors, good, strict=True):
            x.copy_(y)
        found = case.run(block_attention, torch.bfloat16)
    stream.synchronize()
    assert_same_bits(found, wanted)


def test_no_sync_and_captured_in_a_graph() -> None:
    case = make_case(8, 16, (8, 2), 128, 500, torch.bfloat16, longest=200)
    wanted = case.run(block_attention, torch.bfloat16)
    with no_syncs():
        case.run(block_attention, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    good = [x.clone() for x in case.tensors]
    with torch.cuda.graph(graph):
        found = case.run(block_attention, torch.bfloat16)
    for x in case.tensors:
        x.zero_()
    graph.replay()
    for x, y in zip(case.tensors, good, strict=True):
        x.copy_(y)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(found, wanted)


def test_threads_race_to_the_first_launch() -> None:
    """Shapes nothing else here has, compiled by four threads at once."""
    case = make_case(5, 7, (14, 2), 96, 130, torch.float16)
    barrier = threading.Barrier(4)
    results: list[dict] = []

    def work() -> None:
        torch.set_default_device("cuda")
        barrier.wait()
        results.append(case.run(block_attention, torch.float16, window=50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for found in results:
        assert_same_bits(found, results[0])


@two_gpus
def test_wrong_current_device() -> None:
    case = make_case(8, 16, (8, 2), 128, 500, torch.bfloat16, longest=200)
    wanted = case.run(block_attention, torch.bfloat16)
    moved = Case(
        [x.to("cuda:1") for x in case.tensors],
        *(x.to("cuda:1") for x in (case.ctx_start, case.ctx_end, case.grad_out)),
    )
    found = moved.run(block_attention, torch.bfloat16)
    for name in NAMES:
        assert found[name].device == torch.device("cuda:1")
        assert found[name].cpu().equal(wanted[name].cpu()), name


def test_wrong_arguments_are_refused() -> None:
    case = make_case(3, 4, (4, 2), 8, 20)
    ranges = (case.ctx_start, case.ctx_end)
    with pytest.raises(RuntimeError, match="window: found 0, want >= 1"):
        block_attention(*case.tensors, *ranges, scale=0.3, window=0)
    with pytest.raises(RuntimeError, match="ctx_end: found .*cpu, want .*cuda"):
        block_attention(*case.tensors, ranges[0], ranges[1].cpu(), scale=0.3)
    with pytest.raises(RuntimeError, match="v_ctx: found .*float64"):
        wrong = [*case.tensors[:2], case.tensors[2].double(), *case.tensors[3:]]
        block_attention(*wrong, *ranges, scale=0.3)
    with pytest.raises(RuntimeError, match="found 4 heads, want a multiple of the 3"):
        three = [torch.randn(20, 3, 8)] * 2 + [torch.randn(3, 4, 3, 8)] * 2
        block_attention(case.tensors[0], *three, *ranges, scale=0.3)


@both_kernels
def test_ranges_beyond_the_context_are_cut(kernels: None) -> None:
    """They stay on the device, so nobody can refuse them; nothing beyond the context is read."""
    case = make_case(3, 16, (8, 2), 128, 100, torch.bfloat16)
    case.ctx_start, case.ctx_end = torch.tensor([-5, 20, 300]), torch.tensor([30, 10**12, 400])
    found = case.run(block_attention, torch.bfloat16)
    case.ctx_start, case.ctx_end = torch.tensor([0, 20, 100]), torch.tensor([30, 100, 100])
    assert_same_bits(found, case.run(block_attention, torch.bfloat16))
