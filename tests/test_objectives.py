"""Every objective of the README's table against its formula in plain torch, and in training.

The formulas are written from the sources that the table names, with whole probabilities, and share
nothing with the package: p the target's distribution of a slot, q the drafter's, y its label.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from drafter_cases import HIDDEN, random_examples, random_hidden, random_model, small_spec
from torch import Tensor

from dflash_ext.config import DataConfig, TrainConfig
from dflash_ext.data.packing import BatchPlanner
from dflash_ext.drafter import FrozenHead
from dflash_ext.drafter.loss import Objective, train_batch
from dflash_ext.ops.draft_loss.naive import divergence

GAMMA = 3.0
README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCK = 6


def cross_entropy(log_p: Tensor, log_q: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(log_q.flatten(0, 1), y.flatten(), reduction="none").view_as(y)


def forward_kl(log_p: Tensor, log_q: Tensor, y: Tensor) -> Tensor:
    return torch.distributions.kl_divergence(*categorical(log_p, log_q))


def reverse_kl(log_p: Tensor, log_q: Tensor, y: Tensor) -> Tensor:
    return torch.distributions.kl_divergence(*categorical(log_q, log_p))


def jensen_shannon(log_p: Tensor, log_q: Tensor, y: Tensor) -> Tensor:
    """As a difference of entropies: H((p + q) / 2) - (H(p) + H(q)) / 2."""
    p, q = categorical(log_p, log_q)
    mixture = torch.distributions.Categorical(probs=(p.probs + q.probs) / 2)
    return mixture.entropy() - (p.entropy() + q.entropy()) / 2


def total_variation(log_p: Tensor, log_q: Tensor, y: Tensor) -> Tensor:
    """1 - the probability that speculative sampling accepts a proposal."""
    return 1 - torch.minimum(log_p.exp(), log_q.exp()).sum(-1)


def confidence(log_p: Tensor, log_q: Tensor, y: Tensor) -> Tensor:
    entropy = torch.distributions.Categorical(logits=log_q).entropy()
    return entropy * (log_q.argmax(-1) == y)


def categorical(*logits: Tensor) -> list[torch.distributions.Categorical]:
    return [torch.distributions.Categorical(logits=x) for x in logits]


KL_ALONE = {"ce_weight": 0.0, "kl_weight": 1.0}
Term = Callable[[Tensor, Tensor, Tensor], Tensor]
OBJECTIVES: dict[str, tuple[dict, Term]] = {
    "cross entropy": ({}, cross_entropy),
    "D-PACE": ({"dpace_alpha": 0.5}, cross_entropy),
    "forward KL": (KL_ALONE, forward_kl),
    "reverse KL": (KL_ALONE | {"kl": "reverse"}, reverse_kl),
    "Jensen-Shannon": (KL_ALONE | {"kl": "js"}, jensen_shannon),
    "total variation": (KL_ALONE | {"kl": "tv"}, total_variation),
    "confidence (CAP)": (
        {"cap_lambda": 2.0},
        lambda *x: cross_entropy(*x) + 2 * confidence(*x),
    ),
    "variable prefix": ({"prefix_weight_base": 0.9}, cross_entropy),
}
each_objective = pytest.mark.parametrize("name", OBJECTIVES)


class Case:
    """A plan, and drafter states that are given instead of computed."""

    def __init__(self, name: str, lengths=(21, 13, 17), vocab: int = 96) -> None:
        self.name, (changes, self.term) = name, OBJECTIVES[name]
        self.train = TrainConfig(**({"max_anchors": 15, "gamma": GAMMA} | changes))
        self.spec = small_spec(block_size=BLOCK, vocab_size=vocab)
        data = DataConfig(token_budget=64)
        examples = random_examples(lengths)
        planner = BatchPlanner(examples, data, self.train, self.spec.layout, 1)
        self.plan = planner.step_plans(0)[0]
        self.hidden = 2 * torch.randn(15, BLOCK, HIDDEN)
        self.table = torch.randn(vocab, HIDDEN) / HIDDEN**0.5 * 2
        right = (self.hidden @ self.table.T).argmax(-1)  # half the labels, so that CAP counts
        even = torch.arange(BLOCK) % 2 == 0
        self.plan.labels = torch.where(even & (self.plan.weights > 0), right, self.plan.labels)
        self.last = 2 * torch.randn(64, HIDDEN)

    def found(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Loss and gradient of the states, by the trainer's own objective."""
        hidden = self.hidden.to(dtype, copy=True).requires_grad_()
        stub = type("Stub", (), {"spec": self.spec, "__call__": lambda *_, **__: hidden})()
        head = FrozenHead(self.table.to(dtype), self.table.to(dtype))
        last = self.last.to(dtype)
        stats = Objective(self.train, self.spec.layout).stats(stub, head, [], self.plan, last)
        stats.loss.backward()
        return stats.loss.detach().double(), hidden.grad.double()

    def wanted(self, dtype: torch.dtype, given: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same by the formula in `dtype`, of what `given` holds of the inputs."""
        hidden, table, last = (x.to(given).to(dtype) for x in (self.hidden, self.table, self.last))
        hidden.requires_grad_()
        log_q = torch.log_softmax((hidden @ table.T).to(wide(dtype)), -1)
        teacher = (last @ table.T)[self.plan.teacher_index].to(wide(dtype))
        term = self.term(torch.log_softmax(teacher, -1), log_q, self.plan.labels)
        weights, denominator = self.weights(log_q)
        loss = torch.where(weights > 0, weights * term, 0.0).sum() / denominator
        loss.backward()
        return loss.detach().double(), hidden.grad.double()

    def weights(self, log_q: Tensor) -> tuple[Tensor, Tensor]:
        supervised = self.plan.weights > 0
        slots = torch.arange(BLOCK)
        if self.train.dpace_alpha is None:
            decay = torch.exp(-(slots - self.plan.prefix[:, None]) / GAMMA).to(log_q)
            weights = torch.where(supervised, decay, 0.0)
            return weights, weights.sum()
        right = log_q.detach().exp().gather(-1, self.plan.labels[..., None])[..., 0]
        weights = torch.zeros_like(right)
        for a in range(weights.shape[0]):
            product, products = 1.0, []
            for k in slots[supervised[a]].tolist():
                product *= 0.5 * right[a, k].item() + 0.5
                products.append((k, product))
            for j, _ in products:
                weights[a, j] = math.fsum(c for k, c in products if k >= j)
        return weights, supervised.sum()


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


@each_objective
@pytest.mark.parametrize("vocab", [96, 1027])
def test_follows_its_formula(name: str, vocab: int) -> None:
    case = Case(name, vocab=vocab)
    found, wanted = case.found(torch.float32), case.wanted(torch.float64, torch.float32)
    for x, y in zip(found, wanted, strict=True):
        assert y.norm() > 0 and error(x, y) <= 1e-5


@each_objective
def test_bf16_is_as_good_as_plain_torch(name: str) -> None:
    case = Case(name, vocab=1027)
    exact = case.wanted(torch.float64, torch.bfloat16)
    plain = case.wanted(torch.bfloat16, torch.bfloat16)
    found = case.found(torch.bfloat16)
    assert error(found[0], exact[0]) <= max(2 * error(plain[0], exact[0]), 1e-6)
    assert error(found[1], exact[1]) <= 2 * error(plain[1], exact[1])


@each_objective
def test_one_row_and_none(name: str) -> None:
    case = Case(name, lengths=(3,))
    assert case.plan.n_rows == 1
    found, wanted = case.found(torch.float32), case.wanted(torch.float64, torch.float32)
    for x, y in zip(found, wanted, strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm() + 1e-7
    case.plan.weights.zero_(), case.plan.n_rows.zero_()
    loss, gradient = case.found(torch.float32)
    assert loss == 0 and gradient.count_nonzero() == 0


def test_divergences_of_known_pairs() -> None:
    """p = (1/2, 1/2), q = (1/4, 3/4), by hand; equal ones are 0, opposite ones at their bounds."""
    p, q = torch.tensor([[0.5, 0.5]]).double(), torch.tensor([[0.25, 0.75]]).double()
    wanted = {
        "forward": math.log(4 / 3) / 2,
        "reverse": math.log(27 / 16) / 4,
        "js": math.log(16 / 15) / 4 + (math.log(2 / 3) + 3 * math.log(6 / 5)) / 8,
        "tv": 0.25,
    }
    one, other = torch.tensor([[0.0, -800.0]]).double(), torch.tensor([[-800.0, 0.0]]).double()
    bound = {"forward": 800.0, "reverse": 800.0, "js": math.log(2), "tv": 1.0}
    for kl, value in wanted.items():
        assert divergence(kl, p.log(), q.log()).item() == pytest.approx(value, rel=1e-12)
        assert divergence(kl, p.log(), p.log()).item() == pytest.approx(0, abs=1e-15)
        assert divergence(kl, one, other).item() == pytest.approx(bound[kl], rel=1e-12)
    with pytest.raises(ValueError, match="kl: found 'both', want forward, reverse, js or tv"):
        divergence("both", p, q)


@each_objective
def test_training_lowers_it(name: str) -> None:
    case = Case(name)
    model = random_model(case.spec)
    model.init_weights(0)
    head = FrozenHead(torch.randn(96, HIDDEN), torch.randn(96, HIDDEN) / 4)
    hidden = random_hidden(case.plan, case.spec)
    objective = Objective(case.train, case.spec.layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        model.zero_grad()
        loss = train_batch(
            model, head, case.plan, hidden, objective=objective, last_hidden=case.last
        )
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0], (losses[0], losses[-1])


def test_the_readmes_table_has_a_row_for_each_with_its_test() -> None:
    table = README.split("## Objectives")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(OBJECTIVES)
    for row, (changes, _) in zip(rows, OBJECTIVES.values(), strict=True):
        for field in changes:
            assert f"`{field}" in row or f"{field}:" in row, (row, field)
        assert re.search(r"`test_objectives.py::test_follows_its_formula`", row), row
