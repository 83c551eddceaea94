"""The optimizer on flat buffers, as on a GPU: same rule, same checkpoints; Muon on both."""

import copy

import pytest
import torch
from test_optim import DTYPES, Model, assert_identical, inputs, model_of, snapshot
from torch import Tensor, nn

from dflash_ext.config import TrainConfig
from dflash_ext.flat_params import FlatParams, flat_view, merged_view
from dflash_ext.optim import DrafterOptimizer, MuonOptimizer, global_norm

KINDS = [DrafterOptimizer, MuonOptimizer]


def optimizer_of(
    model: nn.Module, flat: bool, kind: type[DrafterOptimizer] = DrafterOptimizer, **fields: object
) -> DrafterOptimizer:
    cfg = TrainConfig(**{"lr": 1e-2, "weight_decay": 0.1, **fields})  # type: ignore[arg-type]
    return kind(model.named_parameters(), cfg, 20, flat=flat)


def pair_of(dtype: torch.dtype, device: str, kind: type[DrafterOptimizer]) -> list:
    """The same model under both storages."""
    model = model_of(dtype).to(device)
    twin = copy.deepcopy(model)
    return [(m, optimizer_of(m, flat, kind)) for m, flat in ((model, False), (twin, True))]


def run(model: Model, optimizer: DrafterOptimizer, first: int, last: int) -> None:
    for step, x in zip(range(first, last), inputs(model.first.dtype, first), strict=False):
        model(x.to(model.first.device)).backward()
        optimizer.step(step)


# the buffers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parameters_become_neighbours(dtype: torch.dtype, device: str) -> None:
    model = model_of(dtype).to(device)
    before = copy.deepcopy(model.state_dict())
    optimizer = optimizer_of(model, flat=True)
    flat = optimizer.flat
    assert optimizer.names == ["first", "second", "norm"] and flat is not None
    assert_identical(model.state_dict(), before)
    assert (flat.weight is flat.master) == (dtype == torch.float32)
    model.first.data.fill_(3.0)
    assert flat.weight[:35].eq(3).all() and not flat.weight[35:].eq(3).any()
    assert model.first.main_grad.shape == (5, 7) and model.first.main_grad.dtype == torch.float32
    model.second.main_grad.fill_(2.0)
    assert flat.grad.sum() == 40.0 and model.second.grad is model.second.main_grad


def test_merged_view_is_one_matrix() -> None:
    params = [nn.Parameter(torch.randn(rows, 6, dtype=torch.bfloat16)) for rows in (4, 2, 2)]
    wanted = torch.cat([p.detach() for p in params])
    FlatParams(params)
    merged = merged_view(params)
    assert torch.equal(merged, wanted) and not merged.requires_grad
    merged_view([p.main_grad for p in params])[5] = 1.0
    assert params[1].main_grad[1].eq(1).all() and params[0].main_grad.eq(0).all()
    with pytest.raises(ValueError, match="found tensors apart"):
        merged_view([params[0], params[2]])
    with pytest.raises(ValueError, match="found tensors apart"):
        merged_view([params[1], params[0]])
    with pytest.raises(ValueError, match="of one C"):
        merged_view([params[0], torch.zeros(2, 5)])
    with pytest.raises(ValueError, match="with gaps"):
        flat_view([torch.zeros(4, 4).T])


def test_one_dtype_only() -> None:
    with pytest.raises(ValueError, match="torch.bfloat16 .* beside torch.float32"):
        FlatParams([nn.Parameter(torch.zeros(2, dtype=d)) for d in DTYPES])


# the rule


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("max_norm", [1e9, 0.05])
def test_same_weights_as_with_single_tensors(
    dtype: torch.dtype, max_norm: float, kind: type[DrafterOptimizer], device: str
) -> None:
    (model, single), (twin, flat) = pair_of(dtype, device, kind)
    for optimizer in (single, flat):
        optimizer.cfg.max_grad_norm = max_norm
    for step in range(8):
        gradients = [torch.randn_like(m) for m in single.masters]
        for optimizer in (single, flat):
            for p, g in zip(optimizer.params, gradients, strict=True):
                p.grad = g.clone() if optimizer is single else p.main_grad.copy_(g)
        norms = single.step(step), flat.step(step)
        torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
    one, other = (snapshot(m, o) for m, o in ((model, single), (twin, flat)))
    assert one.keys() == other.keys()
    for name in one:
        # The last bits of fp32: torch multiplies and adds in other places.
        limit = 1e-6 if one[name].dtype != torch.bfloat16 else 8e-3
        if kind is MuonOptimizer and name.endswith(".master"):
            limit = 1e-3  # its iteration is bf16
        torch.testing.assert_close(other[name], one[name], rtol=limit, atol=limit)


@pytest.mark.parametrize("kind", KINDS)
def test_autograd_adds_to_the_flat_gradients(kind: type[DrafterOptimizer], device: str) -> None:
    (model, single), (twin, flat) = pair_of(torch.bfloat16, device, kind)
    for x in [x for _, x in zip(range(3), inputs(torch.bfloat16), strict=False)]:
        for m in (model, twin):
            m(x.to(device)).backward()
    for p, q in zip(single.params, flat.params, strict=True):
        assert torch.equal(p.grad, q.main_grad) and q.grad is q.main_grad
    flat.zero_grads = False
    flat.step(0)
    assert global_norm([flat.flat.grad]) > 0
    flat.zero_grads = True
    flat.step(1)
    assert global_norm([flat.flat.grad]) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("flat", [True, False])
def test_nonfinite_step_changes_nothing(
    flat: bool, dtype: torch.dtype, kind: type[DrafterOptimizer], device: str
) -> None:
    model = model_of(dtype).to(device)
    optimizer = optimizer_of(model, flat, kind)
    for first in (0, 2):  # also as the very first step
        before = snapshot(model, optimizer)
        model(next(inputs(dtype)).to(device)).backward()
        model.second.grad[1, 2] = float("nan")
        assert not torch.isfinite(optimizer.step(first))
        after = snapshot(model, optimizer)
        assert_identical({**after, "nonfinite": before["nonfinite"]}, before)
        run(model, optimizer, first + 1, first + 2)
        assert not torch.equal(model.first, before["first"])
    assert optimizer.nonfinite.tolist() == [2, 0] and optimizer.taken.unique().tolist() == [2.0]


# checkpoints


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("flat", [True, False])
def test_resume_is_bit_exact(
    flat: bool, dtype: torch.dtype, kind: type[DrafterOptimizer], device: str
) -> None:
    whole = model_of(dtype).to(device)
    optimizer = optimizer_of(whole, flat, kind)
    run(whole, optimizer, 0, 5)
    saved = {k: v.cpu().clone() for k, v in optimizer.state_tensors().items()}
    weights = copy.deepcopy(whole.state_dict())
    run(whole, optimizer, 5, 9)
    resumed = Model().to(device, dtype)
    resumed.load_state_dict(weights)
    again = optimizer_of(resumed, flat, kind)
    again.load_state_tensors(saved)
    run(resumed, again, 5, 9)
    assert_identical(snapshot(resumed, again), snapshot(whole, optimizer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checkpoints_fit_both_storages(
    dtype: torch.dtype, kind: type[DrafterOptimizer], device: str
) -> None:
    (model, single), (twin, flat) = pair_of(dtype, device, kind)
    run(model, single, 0, 3)
    twin.load_state_dict(model.state_dict())
    flat.load_state_tensors(single.state_tensors())
    assert_identical(snapshot(twin, flat), snapshot(model, single))
    assert merged_view(flat.params[:1]).data_ptr() == flat.flat.weight.data_ptr()


# muon


@pytest.mark.parametrize("flat", [True, False])
def test_muon_is_torchs(flat: bool) -> None:
    model = model_of(torch.float32)
    twin = copy.deepcopy(model)
    schedule = {"schedule": "constant", "warmup_ratio": 0.0, "max_grad_norm": 1e9}
    optimizer = optimizer_of(model, flat, MuonOptimizer, **schedule)
    muon = torch.optim.Muon(
        [twin.first, twin.second], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    others = torch.optim.AdamW([twin.norm], lr=1e-2, weight_decay=0.0)
    for step, x in zip(range(6), inputs(torch.float32), strict=False):
        model(x).backward()
        optimizer.step(step)
        twin(x).backward()
        for other in (muon, others):
            other.step()
            other.zero_grad()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-4, msg=name)


def test_muon_keeps_one_moment_of_matrices() -> None:
    state = optimizer_of(model_of(torch.bfloat16), False, MuonOptimizer).state_tensors()
    assert {name for name in state if name.startswith("first")} == {
        "first.master",
        "first.momentum",
    }
    assert {name for name in state if name.startswith("norm")} == {
        "norm.master",
        "norm.exp_avg",
        "norm.exp_avg_sq",
    }


# graphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_replayed_updates_are_those_of_steps(kind: type[DrafterOptimizer]) -> None:
    models = [model_of(torch.bfloat16).cuda() for _ in range(2)]
    eager, graphed = (optimizer_of(m, True, kind) for m in models)
    gradient = torch.randn_like(eager.flat.grad)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for optimizer in (eager, graphed):  # compiles, and warms the allocator up
            optimizer.flat.grad.copy_(gradient)
            optimizer.step(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        graphed.update()
    for step in (1, 2, 3):
        scale = float("nan") if step == 2 else 1.0 + step
        for optimizer in (eager, graphed):
            optimizer.flat.grad.copy_(gradient * scale)
        eager.step(step)
        graphed.set_lr(step)
        graph.replay()
    assert_identical(snapshot(models[1], graphed), snapshot(models[0], eager))
    assert eager.nonfinite.tolist() == [1, 0]


def test_main_grads_of_a_copy_are_its_own() -> None:
    model = model_of(torch.float32)
    optimizer_of(model, flat=True)
    twin = copy.deepcopy(model)
    optimizer_of(twin, flat=True)
    twin.first.main_grad.fill_(1.0)
    assert model.first.main_grad.eq(0).all() and isinstance(twin.first.grad, Tensor)
