"""Noise on hidden states: a function of seed, epoch and batch id, and of nothing else."""

import dataclasses

import pytest
import torch
from drafter_cases import make_plan, random_examples, small_spec

from dflash_ext.drafter.noise import with_noise

STD = 0.5


@pytest.fixture
def plan():
    return make_plan(random_examples(), small_spec(), budget=5000)


@pytest.fixture(params=["side by side", "one by one"])
def zeros(request, device):
    shape = (5000, 6) if request.param == "side by side" else (2, 5000, 3)
    return torch.zeros(shape, device=device)


def tokens(hidden, plan):
    return (hidden if hidden.dim() == 2 else hidden.transpose(0, 1))[: plan.n_tokens]


def test_noise_is_gaussian_and_leaves_the_global_generators_alone(plan, zeros, device) -> None:
    state = torch.get_rng_state()
    plan = dataclasses.replace(plan, n_tokens=4999)
    noise = tokens(with_noise(zeros, plan, STD, 0), plan)
    assert abs(noise.mean()) < 5 * STD / noise.numel() ** 0.5
    assert abs(noise.std() / STD - 1) < 0.02
    assert noise.unique().numel() > 0.99 * noise.numel()  # no chunk repeats another
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_depends_on_seed_epoch_and_batch(plan, zeros) -> None:
    def noise(seed: int = 0, **changes: int) -> torch.Tensor:
        return with_noise(zeros.clone(), dataclasses.replace(plan, **changes), STD, seed)

    first = noise()
    assert torch.equal(noise(), first)
    for other in (noise(seed=1), noise(epoch=1), noise(batch_id=1)):
        assert not torch.isclose(tokens(other, plan), tokens(first, plan)).any(-1).all()


def test_no_noise_is_no_copy(plan, zeros) -> None:
    assert with_noise(zeros, plan, 0.0, 0) is zeros


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_only_rows_with_tokens_change_in_place(plan) -> None:
    hidden = torch.zeros(5000, 6, device="cuda", dtype=torch.bfloat16)
    assert with_noise(hidden, plan, STD, 0) is hidden
    assert (hidden[: plan.n_tokens] != 0).any(1).all()
    assert not hidden[plan.n_tokens :].any()
