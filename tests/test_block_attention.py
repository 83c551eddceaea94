"""block_attention against its specification in fp64, and the specification against SDPA."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from block_attention_cases import MASKS, NAMES, error, errors, make_case, sdpa
from torch import Tensor

from dflash_ext.ops import block_attention
from dflash_ext.ops.block_attention.naive import block_attention_naive, visible_keys
from dflash_ext.ops.block_attention.portable import portable_backward, portable_forward, runs

SHAPES = [
    (9, 5, (6, 2), 24, 100),
    (5, 8, (9, 3), 64, 70),
    (3, 16, (4, 1), 80, 40),
    (4, 17, (3, 3), 7, 50),
    (1, 1, (1, 1), 1, 1),
    (2, 32, (8, 2), 128, 33),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_matches_naive_in_fp64(
    shape: tuple, mask: dict, dtype: torch.dtype, limit: float, nan_poison: None
) -> None:
    case = make_case(*shape, dtype)
    wanted = case.run(block_attention_naive, torch.float64, **mask)
    found = errors(case.run(block_attention, dtype, **mask), wanted)
    assert max(found.values()) <= limit, found


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_naive_is_sdpa_with_a_mask(mask: dict) -> None:
    case = make_case(7, 5, (6, 2), 16, 60, torch.float64)
    found = errors(
        case.run(block_attention_naive, torch.float64, **mask),
        case.run(sdpa, torch.float64, **mask),
    )
    assert max(found.values()) <= 1e-12, found


@pytest.mark.parametrize("mask", [{}, {"window": 7}], ids=str)
def test_bf16_is_as_good_as_plain_torch(mask: dict) -> None:
    case = make_case(6, 8, (9, 3), 64, 120, torch.bfloat16)
    wanted = case.run(block_attention_naive, torch.float64, **mask)
    found = errors(case.run(block_attention, torch.bfloat16, **mask), wanted)
    plain = errors(case.run(sdpa, torch.bfloat16, **mask), wanted)
    for name in NAMES:
        assert found[name] <= 2 * plain[name], (name, found, plain)


@pytest.mark.parametrize("mask", [{}, {"window": 3}, {"window": 2, "causal": True}], ids=str)
def test_gradcheck(mask: dict) -> None:
    case = make_case(3, 3, (4, 2), 5, 12, torch.float64)

    def attend(*tensors: Tensor) -> Tensor:
        return block_attention(*tensors, case.ctx_start, case.ctx_end, scale=0.3, **mask)

    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in case.tensors])


@pytest.mark.parametrize("blocks", [0, 1, 3])
@pytest.mark.parametrize("mask", [{}, {"window": 3, "causal": True}], ids=str)
def test_opcheck(blocks: int, mask: dict) -> None:
    case = make_case(blocks, 4, (4, 2), 8, 20)
    ranges = (case.ctx_start, case.ctx_end)
    ops, options = torch.ops.dflash_ext, {"scale": 0.3, **mask}
    out, lse = ops.block_attention(*case.tensors, *ranges, **options)
    inputs = [x.requires_grad_() for x in case.tensors]
    torch.library.opcheck(ops.block_attention.default, (*inputs, *ranges), options)
    buffers = [torch.randn(20, 2, 8) for _ in range(2)]
    fixed = [x.detach() for x in case.tensors]
    args = (case.grad_out, *fixed, out, lse, *ranges, *buffers)
    torch.library.opcheck(ops.block_attention_backward.default, args, options)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_log_sum_exp(mask: dict) -> None:
    case = make_case(5, 4, (4, 2), 8, 60)
    args = (*case.tensors, case.ctx_start, case.ctx_end)
    _, lse = torch.ops.dflash_ext.block_attention(*args, scale=0.3, **mask)
    _, wanted = block_attention_naive(*(x.double() for x in args[:5]), *args[5:], scale=0.3, **mask)
    assert error(lse, wanted) <= 1e-6


def test_visible_keys_by_hand() -> None:
    for window, causal in itertools.product((None, 2, 4), (False, True)):
        seen = visible_keys(torch.tensor([5]), 3, 6, window, causal)[0]
        for k, key in itertools.product(range(3), range(9)):
            # Keys 0..4 are the context, 5 is beyond it, 6..8 are the block's slots 5..7.
            position, query = (key if key < 6 else key - 1), 5 + k
            wanted = key != 5
            if causal:
                wanted &= position <= query
            if window is not None:
                wanted &= abs(query - position) < window
            assert seen[k, key] == wanted, (window, causal, k, key)


def test_no_block_sees_beyond_its_range() -> None:
    case = make_case(4, 6, (4, 2), 16, 90)
    case.ctx_start, case.ctx_end = torch.tensor([3, 3, 40, 90]), torch.tensor([20, 37, 61, 90])
    wanted = case.run(block_attention, torch.float32)
    unseen = torch.ones(90, dtype=torch.bool)
    unseen[3:37] = unseen[40:61] = False
    for x in case.tensors[1:3]:
        x[unseen] = float("nan")
    found = case.run(block_attention, torch.float32)
    for name in NAMES:
        assert found[name].equal(wanted[name]), name
    assert found["k_ctx"][unseen].count_nonzero() == 0
    assert found["v_ctx"][unseen].count_nonzero() == 0


def test_padded_anchors_are_finite_and_leave_the_context_alone() -> None:
    case = make_case(4, 6, (4, 2), 16, 30)
    case.ctx_start = case.ctx_end = torch.full((4,), 30)
    found = case.run(block_attention, torch.float32)
    assert all(x.isfinite().all() for x in found.values())
    assert found["k_ctx"].count_nonzero() == 0 and found["v_ctx"].count_nonzero() == 0
    assert found["v_blk"].count_nonzero() > 0


def test_no_context_at_all() -> None:
    case = make_case(3, 6, (4, 2), 16, 0)
    wanted = case.run(block_attention_naive, torch.float64)
    found = errors(case.run(block_attention, torch.float32), wanted)
    assert max(found.values()) <= 1e-5, found


def test_no_blocks() -> None:
    case = make_case(0, 6, (4, 2), 16, 10)
    found = case.run(block_attention, torch.float32)
    assert found["out"].shape == (0, 6, 4, 16)
    assert found["k_ctx"].shape == (10, 2, 16) and found["k_ctx"].count_nonzero() == 0


def test_backward_adds_to_its_buffers() -> None:
    """Groups of anchors sum into the same buffers."""
    case = make_case(6, 4, (4, 2), 16, 50)
    wanted = case.run(block_attention, torch.float32)
    q, k_ctx, v_ctx, k_blk, v_blk = case.tensors
    buffers = [torch.zeros(50, 2, 16) for _ in range(2)]
    parts = []
    for group in (slice(0, 2), slice(2, 6)):
        args = [q[group], k_ctx, v_ctx, k_blk[group], v_blk[group]]
        ranges = [case.ctx_start[group], case.ctx_end[group]]
        out, lse = torch.ops.dflash_ext.block_attention(*args, *ranges, scale=0.25)
        parts.append(
            torch.ops.dflash_ext.block_attention_backward(
                case.grad_out[group], *args, out, lse, *ranges, *buffers, scale=0.25
            )
        )
    found = [torch.cat(x) for x in zip(*parts, strict=True)]
    for name, x in zip(("q", "k_blk", "v_blk"), found, strict=True):
        assert x.equal(wanted[name]), name
    assert error(buffers[0], wanted["k_ctx"]) <= 1e-6
    assert error(buffers[1], wanted["v_ctx"]) <= 1e-6


def test_bits_do_not_depend_on_threads_or_repetition() -> None:
    case = make_case(40, 8, (9, 3), 64, 300)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            results.append(case.run(block_attention, torch.float32))
    finally:
        torch.set_num_threads(before)
    for found, name in itertools.product(results[1:], NAMES):
        assert found[name].equal(results[0][name]), name


def test_strided_views() -> None:
    case = make_case(5, 4, (4, 2), 16, 50)
    wanted = case.run(block_attention, torch.float32)
    q, k_ctx, v_ctx, k_blk, v_blk = (x.clone() for x in case.tensors)
    kv_ctx = torch.cat([k_ctx, v_ctx], -1).requires_grad_()
    heads_first = q.transpose(1, 2).contiguous().requires_grad_()
    dim_first = k_blk.permute(3, 0, 1, 2).contiguous().requires_grad_()
    out = block_attention(
        heads_first.transpose(1, 2),
        *kv_ctx.chunk(2, -1),
        dim_first.permute(1, 2, 3, 0),
        v_blk,
        case.ctx_start,
        case.ctx_end,
        scale=0.25,
    )
    out.backward(case.grad_out.transpose(1, 2).contiguous().transpose(1, 2))
    assert out.equal(wanted["out"])
    assert heads_first.grad is not None and dim_first.grad is not None and kv_ctx.grad is not None
    assert heads_first.grad.transpose(1, 2).equal(wanted["q"])
    assert dim_first.grad.permute(1, 2, 3, 0).equal(wanted["k_blk"])
    assert kv_ctx.grad.equal(torch.cat([wanted["k_ctx"], wanted["v_ctx"]], -1))


def test_long_context() -> None:
    case = make_case(3, 4, (2, 1), 32, 5000)
    case.ctx_start[0], case.ctx_end[0] = 0, 5000
    wanted = case.run(block_attention_naive, torch.float64)
    found = errors(case.run(block_attention, torch.float32), wanted)
    assert max(found.values()) <= 1e-5, found


def test_large_scores() -> None:
    """Scores in the hundreds: their own rounding is all the error there is."""
    case = make_case(6, 4, (4, 2), 32, 60)
    case.tensors[0] *= 100
    wanted = case.run(block_attention_naive, torch.float64)
    found = errors(case.run(block_attention, torch.float32), wanted)
    plain = errors(case.run(block_attention_naive, torch.float32), wanted)
    for name in NAMES:
        assert found[name] <= 2 * plain[name], (name, found, plain)


def test_wrong_arguments_are_refused() -> None:
    case = make_case(3, 4, (4, 2), 8, 20)

    def attend(start: Tensor = case.ctx_start, end: Tensor = case.ctx_end, **options) -> Tensor:
        return block_attention(*case.tensors, start, end, scale=0.3, **options)

    with pytest.raises(RuntimeError, match="window: found 0, want >= 1"):
        attend(window=0)
    with pytest.raises(IndexError, match="want a range in 0 to 20"):
        attend(end=torch.full((3,), 21))
    with pytest.raises(IndexError, match=r"found \[5, 4\) of block 0"):
        attend(start=torch.full((3,), 5), end=torch.full((3,), 4))
    with pytest.raises(RuntimeError, match="found 4 heads, want a multiple of the 3"):
        three = [torch.randn(20, 3, 8)] * 2 + [torch.randn(3, 4, 3, 8)] * 2
        block_attention(case.tensors[0], *three, case.ctx_start, case.ctx_end, scale=0.3)


def test_baseline_instruction_set() -> None:
    """The kernels that a processor without AVX2 runs pass the comparison too."""
    selected = f"{__file__}::test_matches_naive_in_fp64"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", selected]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("most_scores", [1, 3000, 2**25])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_portable_path_matches_naive(shape: tuple, mask: dict, most_scores: int) -> None:
    """What other devices run, here on a CPU; in runs of one block, of some, of all."""
    case = make_case(*shape)
    wanted = case.run(block_attention_naive, torch.float64, **mask)
    options = {"scale": shape[3] ** -0.5, "window": None, "causal": False, **mask}
    options["most_scores"] = most_scores
    unseen = torch.ones(shape[4], dtype=torch.bool)
    for start, end in zip(case.ctx_start.tolist(), case.ctx_end.tolist(), strict=True):
        unseen[start:end] = False
    for x in case.tensors[1:3]:
        x[unseen] = float("nan")
    ranges = [case.ctx_start, case.ctx_end]
    out, lse = portable_forward(case.tensors, ranges, **options)
    before = [torch.randn_like(x) for x in case.tensors[1:3]]
    after = [x.clone() for x in before]
    dq, dk_blk, dv_blk = portable_backward(
        case.grad_out, case.tensors, lse, ranges, *after, **options
    )
    for x, y in zip(before, after, strict=True):
        assert x[unseen].equal(y[unseen])
    dk_ctx, dv_ctx = (y - x for x, y in zip(before, after, strict=True))
    values = (out, dq, dk_ctx, dv_ctx, dk_blk, dv_blk)
    found = errors(dict(zip(NAMES, values, strict=True)), wanted)
    assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("most_scores", [1, 64, 2**25])
def test_runs_cover_every_block_in_bounded_memory(most_scores: int) -> None:
    start = torch.tensor([0, 0, 7, 30, 30, 9])
    end = torch.tensor([4, 6, 7, 30, 38, 12])
    next_block = 0
    for blocks, keys in runs(start, end, 2, most_scores):
        assert blocks.start == next_block
        next_block = blocks.stop
        count = blocks.stop - blocks.start
        assert count == 1 or count * 2 * (keys.stop - keys.start) <= most_scores
        for a in range(blocks.start, blocks.stop):
            assert start[a] == end[a] or (keys.start <= start[a] and end[a] <= keys.stop)
    assert next_block == 6
