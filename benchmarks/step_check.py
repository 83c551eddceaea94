"""Nothing of bench_step is timed before its loss and gradients were compared with fp32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.step_problem import CE, KL, KL_CE, Problem, Terms
from benchmarks.step_reference import reference_step

LOSS_TOLERANCE = 1e-3
ERROR_FACTOR = 2.0  # of the error that the plain path makes in bfloat16

Gradients = Mapping[str, Tensor]


class CheckFailed(AssertionError):
    """A result differs from the reference by more than its dtype explains."""


@dataclass
class Errors:
    """Relative errors of a step: of its loss, of all gradients, and of each kind of weight as a
    multiple of the plain bfloat16 path's."""

    loss: float
    gradient: float
    gradient_factor: float
    worst_kind: str
    worst_factor: float

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.1e}, gradient {self.gradient:.2e} = {self.gradient_factor:.2f} x "
            f"plain bf16, worst {self.worst_kind} {self.worst_factor:.2f} x"
        )


class Reference:
    """The fp32 loss and gradients of each objective, and the errors of plain bfloat16."""

    def __init__(self, problem: Problem) -> None:
        self.losses: dict[Terms, Tensor] = {}
        self.gradients: dict[Terms, Gradients] = {}
        self.plain: dict[Terms, dict[str, float]] = {}
        plain: dict[Terms, Gradients] = {}
        for terms in (CE, KL):
            self.losses[terms], self.gradients[terms] = reference_step(
                problem, terms, torch.float32
            )
            plain[terms] = reference_step(problem, terms, torch.bfloat16)[1]
        self.losses[KL_CE] = self.losses[CE] + self.losses[KL]
        self.gradients[KL_CE] = _sum(self.gradients[CE], self.gradients[KL])
        plain[KL_CE] = _sum(plain[CE], plain[KL])
        for terms, gradients in plain.items():
            self.plain[terms] = kind_errors(gradients, self.gradients[terms])

    def check(
        self, terms: Terms, loss: Tensor, gradients: Gradients, *, scale: float = 1.0
    ) -> Errors:
        """Errors of ``scale`` times a loss and its gradients.

        Raises:
            CheckFailed: the loss is off by more than 1e-3 of itself, or the error of the gradients,
                of all or of one kind of weight, is more than twice that of plain bfloat16.
        """
        wanted, plain = self.gradients[terms], self.plain[terms]
        missing = wanted.keys() - gradients.keys()
        if missing:
            raise CheckFailed(f"no gradient for {sorted(missing)[0]}")
        errors = kind_errors(gradients, wanted, scale)
        factors = {kind: errors[kind] / plain[kind] for kind in errors}
        worst = max(factors, key=factors.__getitem__)
        reference = float(self.losses[terms])
        found = Errors(
            loss=abs(float(loss) * scale - reference) / abs(reference),
            gradient=errors["all"],
            gradient_factor=factors["all"],
            worst_kind=worst,
            worst_factor=factors[worst],
        )
        # A comparison that is not true also refuses what is not a number.
        if not (found.loss <= LOSS_TOLERANCE and found.worst_factor <= ERROR_FACTOR):
            raise CheckFailed(str(found))
        return found


def kind_errors(found: Gradients, wanted: Gradients, scale: float = 1.0) -> dict[str, float]:
    """||scale * found - wanted|| / ||wanted|| over the weights of one kind in all layers, and over
    "all"; a NaN in any of them is the error of its kind."""
    squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, want in wanted.items():
        difference = found[name].float() * scale - want
        for kind in (_kind(name), "all"):
            squares[kind][0] += float(difference.norm()) ** 2
            squares[kind][1] += float(want.float().norm()) ** 2
    return {kind: (off / size) ** 0.5 for kind, (off, size) in squares.items()}


def _kind(name: str) -> str:
    """ "layers.3.mlp.up_proj.weight" -> "mlp.up_proj"."""
    parts = [part for part in name.split(".") if part not in ("layers", "weight")]
    return ".".join(part for part in parts if not part.isdigit())


def _sum(left: Gradients, right: Gradients) -> Gradients:
    return {name: left[name].float() + right[name].float() for name in left}
