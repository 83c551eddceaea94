"""Divergences other than forward KL, and bounds of rows, on GPUs: against the specification."""

import dataclasses

import pytest
import torch
from cuda_waits import no_syncs
from draft_loss_cases import arguments, error, gradient, make_case
from torch import Tensor

from dflash_ext.ops import draft_loss
from dflash_ext.ops.draft_loss import draft_loss_stats
from dflash_ext.ops.draft_loss.naive import divergence, draft_loss_stats_naive

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("cuda_by_default"),
]

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # the largest relative error
OTHERS = pytest.mark.parametrize("kl", ["reverse", "js", "tv"])


@OTHERS
@pytest.mark.parametrize("vocab", [1, 7, 2047, 49_152, 248_077])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_matches_naive_in_fp64(nan_poison, kl, vocab, dtype, limit):
    case = make_case(5, 4, 32, vocab, dtype)
    options = {"kl_weight": 0.5, "cap_lambda": 0.5, "softcap": 20.0, "kl": kl}
    wanted = case.run(draft_loss_stats_naive, torch.float64, **options)
    found = case.run(draft_loss_stats, dtype, **options)
    assert found["rank"].equal(wanted["rank"])
    # Differences of logits, which cancel with one id, err by a few roundings of these.
    rounding = 4 * torch.finfo(dtype).eps * wanted["lse"].norm()
    for name in wanted:
        bound = limit * wanted[name].norm() + rounding
        assert (found[name] - wanted[name]).norm() <= bound, name


@OTHERS
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_16_bits_are_as_good_as_plain_torch(kl, dtype):
    case = make_case(16, 16, 256, 50_000, dtype)
    options = {"ce_weight": 0.0, "kl_weight": 1.0, "kl": kl}
    wanted = case.run(draft_loss_stats_naive, torch.float64, **options)
    found = case.run(draft_loss_stats, dtype, **options)
    hidden = case.hidden.detach().clone().requires_grad_()
    log_q = torch.log_softmax((hidden @ case.weight.T).float(), -1)
    teacher = (case.teacher_hidden @ case.weight.T)[case.teacher_index].float()
    term = divergence(kl, torch.log_softmax(teacher, -1), log_q)
    ((term * case.weights).sum() / case.weights.sum()).backward()
    plain = error(hidden.grad.double(), wanted["gradient"])
    assert error(found["gradient"], wanted["gradient"]) <= 2 * plain
    assert error(found["terms"][..., 2], wanted["terms"][..., 2]) <= 2 * ROUNDING[dtype]


@OTHERS
def test_graph_without_syncs(kl):
    case = make_case(16, 8, 64, 3000, torch.bfloat16)
    hidden = case.hidden.clone().requires_grad_()
    teacher = {"teacher_hidden": case.teacher_hidden, "teacher_index": case.teacher_index}
    options = {"kl_weight": 0.5, "kl": kl, "chunk_rows": 40, **teacher}

    def step() -> tuple[Tensor, Tensor]:
        loss = draft_loss(*arguments(case, hidden), **options)
        (grad,) = torch.autograd.grad(loss, hidden)
        return loss.detach(), grad

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = step()
        with no_syncs():
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = step()
    for _ in range(3):
        graph.replay()
        assert found[0].equal(wanted[0]) and found[1].equal(wanted[1])


@OTHERS
def test_what_is_not_finite_shows_in_the_loss(kl):
    case = make_case(4, 4, 32, 500, torch.bfloat16)
    case.teacher_hidden[case.teacher_index.view(-1)[case.rows[0]]] = float("nan")
    options = {"teacher_hidden": case.teacher_hidden, "teacher_index": case.teacher_index}
    loss, _ = gradient(case, kl_weight=1.0, kl=kl, **options)
    assert loss.isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_chunks_without_live_rows_may_be_left_out(dtype):
    case = make_case(64, 16, 64, 3000, dtype)
    wide = torch.cat([case.rows, torch.zeros(300, dtype=torch.int64)])
    wanted = gradient(dataclasses.replace(case, rows=wide), chunk_rows=128)
    chunks = -(-case.n_rows.item() // 128)
    found = gradient(dataclasses.replace(case, rows=wide[: chunks * 128]), chunk_rows=128)
    assert found[0].equal(wanted[0]) and found[1].equal(wanted[1])
