"""draft_loss on GPUs: graphs, streams, devices, memory."""

import dataclasses

import pytest
import torch
from cuda_waits import no_syncs
from draft_loss_cases import (
    Case,
    arguments,
    gradient,
    make_case,
)
from torch import Tensor

from dflash_ext.ops import draft_loss
from dflash_ext.ops.metric_add import new_accumulator

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("cuda_by_default"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")

SLEEP_CYCLES = 500_000_000  # a quarter of a second, or more


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_graph_without_syncs(dtype):
    """A replay works off the rows that are live then; nothing waits for the device."""
    case = make_case(16, 8, 64, 3000, dtype)
    hidden = case.hidden.clone().requires_grad_()
    acc = new_accumulator("cuda")
    teacher = {"teacher_hidden": case.teacher_hidden, "teacher_index": case.teacher_index}
    args = arguments(case, hidden)
    options = {"kl_weight": 0.5, "dpace_alpha": 0.5, "chunk_rows": 40, "metrics": acc, **teacher}

    def step() -> tuple[Tensor, Tensor]:
        loss = draft_loss(*args, **options)
        (gradient,) = torch.autograd.grad(loss, hidden)
        return loss.detach(), gradient

    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
        with no_syncs():
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss, gradient = step()
    full = case.n_rows.item()
    for live in (full, 50, 1, 0):
        case.n_rows.fill_(live)
        case.weights.view(-1)[case.rows[live:full]] = 0
        graph.replay()
        wanted = step()
        assert loss.equal(wanted[0]) and gradient.equal(wanted[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_side_stream(dtype):
    case = make_case(16, 8, 64, 3000, dtype)
    wanted = gradient(case)
    late = dataclasses.replace(case, hidden=torch.zeros_like(case.hidden))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        late.hidden.copy_(case.hidden)
        found = gradient(late)
    stream.synchronize()
    assert found[0].equal(wanted[0]) and found[1].equal(wanted[1])


@two_gpus
def test_other_device_than_the_current_one():
    case = make_case(16, 8, 64, 3000, torch.bfloat16)
    wanted = gradient(case)
    moved = {f.name: getattr(case, f.name).to("cuda:1") for f in dataclasses.fields(case)}
    with torch.cuda.device(0):
        found = gradient(Case(**moved))
    assert found[0].device.index == 1
    assert found[0].cpu().equal(wanted[0].cpu()) and found[1].cpu().equal(wanted[1].cpu())


def test_wrong_devices_are_refused():
    case = make_case(3, 4, 8, 50, torch.bfloat16)
    with pytest.raises(RuntimeError, match="rows: found a tensor on cpu, want cuda:0"):
        draft_loss(*arguments(dataclasses.replace(case, rows=case.rows.cpu())))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [41, 64])
def test_scaling_of_the_gradient_is_that_of_torch(dtype, width):
    case = make_case(7, 5, width, 90, dtype)
    grads = []
    for factor in (1.0, 0.37):
        hidden = case.hidden.detach().clone().requires_grad_()
        (draft_loss(*arguments(case, hidden)) * factor).backward()
        grads.append(hidden.grad)
    assert torch.equal(grads[1], (grads[0].float() * 0.37).to(dtype))


@pytest.mark.parametrize("with_teacher", [False, True])
def test_memory(with_teacher):
    """One chunk of logits (two with a teacher), its states and the gradient of all rows in fp32."""
    case = make_case(512, 16, 256, 50_000, torch.bfloat16)
    hidden = case.hidden.requires_grad_()
    options = {}
    if with_teacher:
        options = {
            "kl_weight": 1.0,
            "teacher_hidden": case.teacher_hidden,
            "teacher_index": case.teacher_index,
        }
    draft_loss(*arguments(case, hidden), chunk_rows=1024, **options)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    draft_loss(*arguments(case, hidden), chunk_rows=1024, **options)
    peak = torch.cuda.max_memory_allocated() - before
    logits = 1024 * 50_048 * 2 * (2 if with_teacher else 1)
    states = 4 * case.rows.numel() * 256 + 2 * hidden.numel() + 2 * 2 * 1024 * 256
    assert peak < logits + states + (4 << 20)
