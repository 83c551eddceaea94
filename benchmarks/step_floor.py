"""The floor of a drafter step: its matrix products, timed in cuBLAS.

`step_gemms` are those of the algorithm as stated, all of which SpecForge and speculators make:
forward, input gradient and weight gradient of every projection, those side by side (q, k and v;
gate and up; k and v of the context) as one. Of the head only the weighted rows, without a weight
gradient (it is frozen); of fc no input gradient (its input is the target's). The teacher's head
comes on top where the loss has a KL term. `made_gemms` are those of them that this package makes.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.step_problem import Problem, Terms
from dflash_ext.drafter.fused import has_main_grad
from dflash_ext.drafter.loss import TeacherChunks
from dflash_ext.drafter.shared_slots import COPIES

PARTS = ("projections", "mlp", "loss")
LAYER_WEIGHTS = (
    ("projections", "qkv"),
    ("projections", "o"),
    ("mlp", "gate_up"),
    ("mlp", "down"),
)


@dataclass(frozen=True)
class Gemm:
    """One product [m, k] x [k, n]. kind: "forward" | "dx" | "dw"; weight: which tensor it uses."""

    part: str
    kind: str
    weight: str
    rows: int

    def flops(self, shape: torch.Size) -> int:
        return 2 * self.rows * shape[0] * shape[1]


def step_gemms(problem: Problem, terms: Terms) -> list[Gemm]:
    """The products of one forward and backward pass, in the order in which it makes them."""
    spec, plan = problem.spec, problem.plan
    context, block = plan.doc_start.shape[0], plan.labels.numel()
    layers = [f"layers.{i}" for i in range(spec.num_layers)]

    def both(part: str, weight: str, rows: int) -> list[Gemm]:
        return [Gemm(part, kind, weight, rows) for kind in ("dx", "dw")]

    gemms = [Gemm("projections", "forward", "fc", context)]
    gemms += [Gemm("projections", "forward", f"{name}.kv", context) for name in layers]
    for name in layers:
        for part, weight in LAYER_WEIGHTS:
            gemms.append(Gemm(part, "forward", f"{name}.{weight}", block))
    gemms += [Gemm("loss", "forward", "head", problem.rows)] * (2 if terms.kl else 1)
    gemms.append(Gemm("loss", "dx", "head", problem.rows))
    for name in reversed(layers):
        for part, weight in reversed(LAYER_WEIGHTS):
            gemms += both(part, f"{name}.{weight}", block)
    for name in reversed(layers):
        gemms += both("projections", f"{name}.kv", context)
    gemms.append(Gemm("projections", "dw", "fc", context))
    return gemms


def made_gemms(problem: Problem, terms: Terms, teachers: TeacherChunks | None) -> list[Gemm]:
    """`step_gemms` with the rows that the step is left with: the mask token's slots as one in the
    first layer, rows that the loss looks at behind the last attention, and a teacher that several
    slots of a chunk have (`teachers`, those of the step) once."""
    spec, plan = problem.spec, problem.plan
    blocks, capacity = plan.labels.shape[0], plan.rows.shape[0]
    rows_of = {
        f"layers.{spec.num_layers - 1}.{part}": min(plan.labels.numel(), capacity)
        for part in ("o", "gate_up", "down")
    }
    if has_main_grad(problem.model.fc.weight):
        rows_of["layers.0.qkv"] = blocks * spec.layout.prefix + COPIES
    gemms = step_gemms(problem, terms)
    made = [dataclasses.replace(g, rows=rows_of.get(g.weight, g.rows)) for g in gemms]
    if teachers is not None:
        heads = [i for i, g in enumerate(gemms) if g.weight == "head" and g.kind == "forward"]
        starts = range(0, capacity, teachers.rows)
        shared = sum(min(teachers.most, teachers.rows, capacity - start) for start in starts)
        made[heads[1]] = dataclasses.replace(made[heads[1]], rows=shared)
    return made


def merged_weights(problem: Problem) -> dict[str, Tensor]:
    """The matrices of the products: weights that are used side by side as one [outputs, inputs]."""
    layers = [f"layers.{i}" for i in range(problem.spec.num_layers)]
    params = {name: p.detach() for name, p in problem.model.named_parameters()}
    weights = {"fc": params["fc.weight"], "head": problem.head.head_weight}
    for name in layers:
        q, k, v, o = (params[f"{name}.self_attn.{x}_proj.weight"] for x in "qkvo")
        gate, up, down = (params[f"{name}.mlp.{x}_proj.weight"] for x in ("gate", "up", "down"))
        weights |= {f"{name}.qkv": torch.cat([q, k, v]), f"{name}.kv": torch.cat([k, v])}
        weights |= {f"{name}.o": o, f"{name}.gate_up": torch.cat([gate, up]), f"{name}.down": down}
    return weights


class Floor:
    """Runs products back to back on the step's own weights and on random activations."""

    def __init__(self, problem: Problem, gemms: list[Gemm]) -> None:
        self.gemms = gemms
        self.weights = merged_weights(problem)
        self.device = problem.hidden.device
        self.dtype = problem.hidden.dtype
        self.sets = {key: self._activations(*key) for key in self._sizes()}

    def _sizes(self) -> set[tuple[int, int]]:
        sizes = set()
        for gemm in self.gemms:
            outputs, inputs = self.weights[gemm.weight].shape
            if gemm.kind != "dx":
                sizes.add((gemm.rows, inputs))
            if gemm.kind != "forward":
                sizes.add((gemm.rows, outputs))
        return sizes

    def _activations(self, rows: int, width: int) -> list[Tensor]:
        """Several of the same size, taken in turn, unless one fills any cache many times."""
        count = 1 if rows * width > 2**29 else 3
        return [
            torch.randn(rows, width, device=self.device, dtype=self.dtype) for _ in range(count)
        ]

    @functools.cached_property
    def flops(self) -> dict[str, int]:
        """Operations of each part."""
        totals = dict.fromkeys(PARTS, 0)
        for gemm in self.gemms:
            totals[gemm.part] += gemm.flops(self.weights[gemm.weight].shape)
        return totals

    def run(self) -> None:
        for i, gemm in enumerate(self.gemms):
            self._product(gemm, i)

    def part_seconds(self) -> dict[str, float]:
        """Seconds of each part within one pass over the whole list, on a GPU."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(self.gemms) + 1)]
        marks[0].record()
        for i, (gemm, mark) in enumerate(zip(self.gemms, marks[1:], strict=True)):
            self._product(gemm, i)
            mark.record()
        marks[-1].synchronize()
        totals = dict.fromkeys(PARTS, 0.0)
        for gemm, before, after in zip(self.gemms, marks, marks[1:], strict=False):
            totals[gemm.part] += before.elapsed_time(after) / 1e3
        return totals

    def _product(self, gemm: Gemm, turn: int) -> Tensor:
        weight = self.weights[gemm.weight]

        def activation(width: int) -> Tensor:
            tensors = self.sets[gemm.rows, width]
            return tensors[turn % len(tensors)]

        if gemm.kind == "forward":
            return torch.mm(activation(weight.shape[1]), weight.t())
        if gemm.kind == "dx":
            return torch.mm(activation(weight.shape[0]), weight)
        left, right = activation(weight.shape[0]).t(), activation(weight.shape[1])
        if self.dtype == torch.float32:
            return torch.mm(left, right)
        return torch.mm(left, right, out_dtype=torch.float32)
