"""Random cases of draft_loss, run through it or through its specification."""

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_ext.ops import draft_loss

EVERYTHING = {
    "kl_weight": 0.7,
    "cap_lambda": 0.5,
    "dpace_alpha": 0.3,
    "softcap": 4.0,
    "logit_scale": 0.5,
    "valid_vocab": 777,
}
OPTIONS = [
    {},
    {"ce_weight": 0.0, "kl_weight": 1.0},
    {"cap_lambda": 0.5},
    {"kl_weight": 0.7, "cap_lambda": 2.0},
    {"softcap": 3.0},
    {"softcap": 3.0, "kl_weight": 0.7},
    {"dpace_alpha": 0.5},
    {"dpace_alpha": 0.0, "chunk_rows": 5},
    {"logit_scale": 0.25, "valid_vocab": 991},
    EVERYTHING,
    {"ce_weight": 0.0, "kl_weight": 1.0, "kl": "reverse"},
    {"kl_weight": 0.7, "kl": "js", "cap_lambda": 2.0},
    {"kl_weight": 0.7, "kl": "tv", "softcap": 3.0},
    EVERYTHING | {"kl": "reverse"},
    EVERYTHING | {"kl": "js"},
]


@dataclasses.dataclass
class Case:
    """Arguments of draft_loss; about 1 in 5 slots is not supervised, 2 in 5 labels are right."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    weights: Tensor
    rows: Tensor
    n_rows: Tensor
    teacher_hidden: Tensor
    teacher_index: Tensor

    def run(self, function: Callable, dtype: torch.dtype, **options) -> dict[str, Tensor]:
        """Values and gradient of a stats function with inputs in `dtype`, as fp64."""
        hidden = self.hidden.detach().to(dtype, copy=True).requires_grad_()
        if options.get("kl_weight"):
            options["teacher_hidden"] = self.teacher_hidden.to(dtype)
            options["teacher_index"] = self.teacher_index
        values = function(
            hidden,
            self.weight.to(dtype),
            self.labels,
            self.weights,
            self.weights.sum(),
            self.rows,
            self.n_rows,
            **options,
        )
        values[0].backward()
        named = dict(zip(("loss", "terms", "rank", "lse", "used"), values, strict=True))
        named["gradient"] = hidden.grad
        return {name: value.detach().double() for name, value in named.items()}


def make_case(
    blocks: int, slots: int, width: int, vocab: int, dtype: torch.dtype, valid: int | None = None
) -> Case:
    valid = vocab if valid is None else valid
    hidden = (2 * torch.randn(blocks, slots, width)).to(dtype)
    weight = (2 * torch.randn(vocab, width) / width**0.5).to(dtype)
    best = (hidden.double() @ weight[:valid].double().T).argmax(-1)
    labels = torch.where(torch.rand(blocks, slots) < 0.4, best, torch.randint(valid, best.shape))
    weights = torch.rand(blocks, slots) * (torch.rand(blocks, slots) < 0.8)
    weights[:, 0] = 0
    rows = (weights > 0).flatten().nonzero()[:, 0]
    padding = torch.zeros(7, dtype=torch.int64)
    return Case(
        hidden,
        weight,
        labels,
        weights,
        torch.cat([rows, padding]),
        torch.tensor(rows.numel()),
        (2 * torch.randn(50, width)).to(dtype),
        torch.randint(50, (blocks, slots)),
    )


def error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|; a NaN is infinitely wrong."""
    ratio = (found - wanted).norm() / wanted.norm().clamp_min(1e-30)
    return float("inf") if ratio.isnan() else ratio.item()


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    return {name: error(found[name], wanted[name]) for name in wanted}


def arguments(case: Case, hidden: Tensor | None = None) -> tuple[Tensor, ...]:
    hidden = case.hidden if hidden is None else hidden
    weight_sum = case.weights.sum()
    return hidden, case.weight, case.labels, case.weights, weight_sum, case.rows, case.n_rows


def gradient(case: Case, factor: float = 1.0, **options) -> tuple[Tensor, Tensor]:
    hidden = case.hidden.detach().clone().requires_grad_()
    loss = draft_loss(*arguments(case, hidden), **options)
    (loss * factor).backward()
    assert hidden.grad is not None
    return loss.detach(), hidden.grad


def plain_16bit(case: Case) -> Tensor:
    """Gradient of the weighted cross entropy as plain torch makes it from 16-bit logits."""
    hidden = case.hidden.detach().clone().requires_grad_()
    logits = hidden @ case.weight.T
    ce = F.cross_entropy(logits.flatten(0, 1).float(), case.labels.flatten(), reduction="none")
    ((ce * case.weights.flatten()).sum() / case.weights.sum()).backward()
    assert hidden.grad is not None
    return hidden.grad.double()
