"""Optimizer: AdamW by the book, fp32 masters, skipped steps, schedules and exact resume."""

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from dflash_ext.config import TrainConfig, UserError
from dflash_ext.optim import BETAS, EPS, DrafterOptimizer, build_optimizer, global_norm, lr_at

DTYPES = [torch.float32, torch.bfloat16]


class Model(nn.Module):
    """Matrices, a norm, an odd size and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(7))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.first = nn.Parameter(torch.randn(5, 7) * 0.3)
        self.second = nn.Parameter(torch.randn(4, 5) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh((x * self.norm) @ self.first.T) @ self.second.T
        return (hidden.float() ** 2).mean()


def model_of(dtype: torch.dtype) -> Model:
    torch.manual_seed(1)
    return Model().to(dtype)


def inputs(dtype: torch.dtype, start: int = 0) -> Iterator[Tensor]:
    for step in range(start, 1000):
        yield torch.randn(6, 7, generator=torch.Generator().manual_seed(step)).to(dtype)


def optimizer_of(model: nn.Module, steps: int = 20, **fields: object) -> DrafterOptimizer:
    cfg = TrainConfig(**{"lr": 1e-2, "weight_decay": 0.1, **fields})  # type: ignore[arg-type]
    return build_optimizer(model.named_parameters(), cfg, steps)


def train(model: Model, optimizer: DrafterOptimizer, first: int, last: int) -> list[Tensor]:
    dtype = model.first.dtype
    norms = []
    for step, x in zip(range(first, last), inputs(dtype, first), strict=False):
        model(x).backward()
        norms.append(optimizer.step(step))
    return norms


def snapshot(model: nn.Module, optimizer: DrafterOptimizer) -> dict[str, Tensor]:
    tensors = {**model.state_dict(), **optimizer.state_tensors()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_identical(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


# the update


def test_update_is_adamw_with_clipping() -> None:
    """Against the formulas of Loshchilov & Hutter (2019), alg. 2, in fp64."""
    model = model_of(torch.float32)
    optimizer = optimizer_of(model, max_grad_norm=0.05)
    reference = {k: v.detach().double() for k, v in model.named_parameters()}
    first = {k: torch.zeros_like(v) for k, v in reference.items()}
    second = {k: torch.zeros_like(v) for k, v in reference.items()}
    clipped = 0
    for step, x in zip(range(8), inputs(torch.float32), strict=False):
        model(x).backward()
        grads = {k: p.grad.double() for k, p in model.named_parameters() if p.grad is not None}
        norm = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
        clipped += norm > 0.05
        lr = optimizer.lr_at(step)
        for name, grad in grads.items():
            grad = grad * min(1.0, 0.05 / (norm + 1e-6))
            first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * grad
            second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * grad * grad
            m = first[name] / (1 - BETAS[0] ** (step + 1))
            v = second[name] / (1 - BETAS[1] ** (step + 1))
            decay = 0.0 if name == "norm" else 0.1
            reference[name] = reference[name] * (1 - lr * decay) - lr * m / (v.sqrt() + EPS)
        found = optimizer.step(step)
        assert found.item() == pytest.approx(norm, rel=1e-5)
    assert clipped >= 4  # else clipping was not tested
    for name, p in model.named_parameters():
        error = (p.double() - reference[name]).norm() / reference[name].norm()
        assert error <= 1e-6, name


def test_a_norm_that_is_known_is_not_taken_again() -> None:
    models = [model_of(torch.float32) for _ in range(3)]
    for model, known in zip(models, (None, 1.0, 8.0), strict=True):
        optimizer = optimizer_of(model, max_grad_norm=0.01, warmup_ratio=0.0)
        for factor in (1.0, 3.0):  # AdamW's first step alone does not depend on the scale
            model(next(inputs(torch.float32)) * factor).backward()
            norm = global_norm([p.grad for p in optimizer.params])
            optimizer.step(0, None if known is None else norm * (known if factor == 1.0 else 1.0))
    assert torch.equal(models[0].first, models[1].first)
    assert not torch.equal(models[0].first, models[2].first)


def test_norms_are_not_decayed_and_frozen_parameters_stay() -> None:
    model = model_of(torch.float32)
    optimizer = optimizer_of(model, weight_decay=0.5, warmup_ratio=0.0)
    before = copy.deepcopy(model.state_dict())
    for p in optimizer.params:
        p.grad = torch.zeros_like(p)
    optimizer.step(0)
    assert torch.equal(model.norm, before["norm"]) and torch.equal(model.frozen, before["frozen"])
    assert torch.allclose(model.first, before["first"] * (1 - 1e-2 * 0.5), rtol=1e-6)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("names", [["norm"], ["first"]])
def test_only_vectors_or_only_matrices(names: list[str]) -> None:
    model = model_of(torch.float32)
    params = [(n, p) for n, p in model.named_parameters() if n in names]
    optimizer = build_optimizer(params, TrainConfig(lr=0.1), 3)
    before = snapshot(model, optimizer)
    model(next(inputs(torch.float32))).backward()
    optimizer.step(0)
    changed = [n for n, v in model.state_dict().items() if not torch.equal(v, before[n])]
    assert changed == names


def test_a_parameter_without_gradient_is_an_error() -> None:
    model = model_of(torch.float32)
    optimizer = optimizer_of(model)
    model.norm.grad = torch.zeros_like(model.norm)
    with pytest.raises(RuntimeError, match="no gradient for first"):
        optimizer.step(0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_global_norm_is_accumulated_in_fp32(dtype: torch.dtype) -> None:
    tensors = [torch.full((1000, 3), 0.1).to(dtype), torch.randn(17).to(dtype), torch.zeros(0)]
    wanted = math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors))
    norm = global_norm(tensors)
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(wanted, rel=1e-6)


# masters


def test_fp32_parameters_are_their_own_masters() -> None:
    optimizer = optimizer_of(model_of(torch.float32))
    assert all(m is p for m, p in zip(optimizer.masters, optimizer.params, strict=True))
    assert not any(name.endswith(".master") for name in optimizer.state_tensors())


def test_bf16_parameters_are_rounded_fp32_masters() -> None:
    model = model_of(torch.bfloat16)
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, 5)
    for p, master in zip(optimizer.params, optimizer.masters, strict=True):
        assert p.dtype == torch.bfloat16 and master.dtype == torch.float32
        assert torch.equal(p, master.to(torch.bfloat16))
        assert not torch.equal(p.float(), master)


def test_updates_below_bf16_resolution_add_up() -> None:
    """100 updates of 1e-4 at weight 1, where bf16 has steps of 2^-7 upwards and 2^-8 downwards."""
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    cfg = TrainConfig(lr=1e-4, schedule="constant", warmup_ratio=0.0)
    optimizer = build_optimizer([("w", weight)], cfg, 100)
    for step in range(100):
        weight.grad = torch.ones(4, 4)
        optimizer.step(step)
    assert optimizer.masters[0].mean().item() == pytest.approx(0.99, abs=1e-5)
    assert weight[0, 0].item() == torch.tensor(0.99).to(torch.bfloat16).item() < 1.0


def test_bf16_gradients_accumulate_in_fp32() -> None:
    """256 + 1 + 1 + ... stays 256 in bf16."""
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    build_optimizer([("w", weight)], TrainConfig(), 10)
    for scale in [256.0] + [1.0] * 10:
        (weight * scale).sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, torch.full((2, 2), 266.0))


# steps that are not finite


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_step_changes_nothing_but_the_count(dtype: torch.dtype, value: float) -> None:
    model = model_of(dtype)
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, 2)
    before = snapshot(model, optimizer)
    for step, (total, in_a_row) in zip((2, 3), ((1, 1), (2, 2)), strict=True):
        model(next(inputs(dtype))).backward()
        assert model.second.grad is not None
        model.second.grad[1, 2] = value
        assert not torch.isfinite(optimizer.step(step))
        assert optimizer.nonfinite.tolist() == [total, in_a_row]
        after = snapshot(model, optimizer)
        assert_identical({**after, "nonfinite": before["nonfinite"]}, before)
        assert all(p.grad is None for p in model.parameters())
    train(model, optimizer, 4, 5)
    assert optimizer.nonfinite.tolist() == [2, 0]
    assert not torch.equal(model.first, before["first"])
    assert optimizer.taken.unique().tolist() == [3.0]


def test_step_reads_nothing_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(torch.bfloat16)
    optimizer = optimizer_of(model)
    model(next(inputs(torch.bfloat16))).backward()

    def refuse(self: Tensor, *args: object) -> None:
        raise AssertionError("the host waits here")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, refuse)
    optimizer.step(0)


# schedule


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("ratio", [0.0, 0.04, 0.5, 1.0])
@pytest.mark.parametrize("total", [1, 2, 7, 1000])
def test_schedule_edges(schedule: str, ratio: float, total: int) -> None:
    cfg = TrainConfig(lr=3.0, schedule=schedule, warmup_ratio=ratio)  # type: ignore[arg-type]
    rates = [lr_at(step, total, cfg) for step in range(total)]
    assert all(0.0 < rate <= 3.0 for rate in rates)
    assert max(rates) == 3.0
    peak = rates.index(3.0)
    assert peak == max(0, int(ratio * total) - 1)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert 0.0 <= lr_at(total + 5, total, cfg) <= rates[-1]


def test_schedule_values() -> None:
    cfg = TrainConfig(lr=1.0, warmup_ratio=0.2)
    assert [lr_at(s, 10, cfg) for s in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert lr_at(6, 10, cfg) == pytest.approx(0.5)
    assert lr_at(9, 10, cfg) == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert lr_at(10, 10, cfg) == pytest.approx(0.0, abs=1e-15)
    linear = TrainConfig(lr=1.0, warmup_ratio=0.2, schedule="linear")
    assert [lr_at(s, 10, linear) for s in (4, 9)] == pytest.approx([0.75, 0.125])


# state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [0, 1, 6])
def test_resume_is_bit_exact(dtype: torch.dtype, cut: int) -> None:
    whole = model_of(dtype)
    whole_optimizer = optimizer_of(whole)
    norms = train(whole, whole_optimizer, 0, cut)
    saved, saved_model = (
        {k: v.clone() for k, v in whole_optimizer.state_tensors().items()},
        copy.deepcopy(whole.state_dict()),
    )
    norms += train(whole, whole_optimizer, cut, 12)

    resumed = Model()
    resumed.load_state_dict(saved_model)
    resumed.to(dtype)
    optimizer = optimizer_of(resumed)
    optimizer.load_state_tensors(saved)
    again = train(resumed, optimizer, cut, 12)
    assert_identical(snapshot(resumed, optimizer), snapshot(whole, whole_optimizer))
    assert torch.equal(torch.stack(again), torch.stack(norms[cut:]))


def test_loading_masters_sets_the_parameters() -> None:
    model = model_of(torch.bfloat16)
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, 3)
    fresh = Model().to(torch.bfloat16)
    other = optimizer_of(fresh)
    other.load_state_tensors(optimizer.state_tensors())
    assert torch.equal(fresh.first, model.first)
    other.masters[0].add_(1.0)
    assert not torch.equal(other.masters[0], optimizer.masters[0])  # a copy, not an alias


def test_foreign_states_are_refused() -> None:
    optimizer = optimizer_of(model_of(torch.float32))
    state = optimizer.state_tensors()
    with pytest.raises(UserError, match="found extra only in the checkpoint"):
        optimizer.load_state_tensors({**state, "extra": torch.zeros(1)})
    with pytest.raises(UserError, match="found taken only in the drafter"):
        optimizer.load_state_tensors({k: v for k, v in state.items() if k != "taken"})
    with pytest.raises(UserError, match=r"found first.exp_avg \[5, 8\] .* want \[5, 7\]"):
        optimizer.load_state_tensors({**state, "first.exp_avg": torch.zeros(5, 8)})
    with pytest.raises(UserError, match="torch.float64, want .* torch.float32"):
        optimizer.load_state_tensors({**state, "first.exp_avg": torch.zeros(5, 7).double()})


def test_other_optimizers_are_refused() -> None:
    cfg = TrainConfig(optimizer="sgd")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="train.optimizer: found 'sgd', want adamw or muon"):
        build_optimizer(Model().named_parameters(), cfg, 10)
