"""The drafter's whole training step: against its matrix products alone, and against the trainers.

`measure` is what `python -m benchmarks.run --only step [--peers DIR]` prints: forward and backward
beside its products (step_floor), SpecForge and speculators (step_peers) and, for the loss, Liger.
`python -m benchmarks.bench_step sides --shape 8b` does so for one size, `parts` prints where the
time goes. Every side is compared with fp32 first (step_check); what fails is not timed, but said.
"""

from __future__ import annotations

import functools
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import median_seconds, step_peers
from benchmarks.run import conditions_line, facts, line, write_report
from benchmarks.step_check import CheckFailed, Errors, Reference
from benchmarks.step_floor import Floor, made_gemms, step_gemms
from benchmarks.step_parts import PARTS, breakdown, profiled
from benchmarks.step_problem import CE, KL, KL_CE, SHAPES, Problem, Terms, make_problem
from dflash_ext import ops
from dflash_ext.command import CommandParser, check_output_file, device_of, run_command
from dflash_ext.drafter.fused import mark_gradients
from dflash_ext.drafter.graph import EAGER_RUNS, GraphedCalls
from dflash_ext.drafter.loss import TeacherChunks, teacher_chunks, train_batch
from dflash_ext.drafter.overlap import BackwardSync
from dflash_ext.optim import DrafterOptimizer

MIN_SECONDS = {"cpu": 0.2, "cuda": 4.0}
MIN_ROUNDS = {"cpu": 3, "cuda": 10}
DEFAULT_SHAPES = {"cpu": ("toy",), "cuda": ("27b", "8b")}
SIDES = ("floor", "SpecForge", "speculators", "Liger")
WARM_ROUNDS, PROFILED_ROUNDS = 8, 5
GRADIENT_TOLERANCE = 1e-2  # of Liger's hidden gradient against ours, both in bfloat16

Row = dict[str, Any]


class Step:
    """This package's step on a problem: what a drafter thread does with a batch."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.optimizer = DrafterOptimizer(problem.model.named_parameters(), problem.train, 10**6)
        self.optimizer.zero_grads = False  # the backward pass overwrites
        self.host_plan = problem.plan.to("cpu")
        if problem.hidden.is_cuda:
            torch.cuda.synchronize(problem.hidden.device)  # those copies do not wait
        self.teachers: dict[tuple[Terms, int | None], TeacherChunks | None] = {}
        self.norm: Tensor | None = None  # of the gradients, where their sum has found it

    def run(
        self, terms: Terms, *, group: int | None = None, overlap: BackwardSync | None = None
    ) -> Tensor:
        """Forward and backward; with `overlap` also the sum of the gradients. The loss []."""
        problem = self.problem
        mark_gradients(self.optimizer.params, started=False)
        if self.optimizer.flat is None:
            for parameter in self.optimizer.params:
                parameter.grad = None
        loss = train_batch(
            problem.model,
            problem.head,
            problem.plan,
            problem.hidden,
            objective=problem.objective(terms),
            teachers=self.teachers_of(terms, group),
            last_hidden=problem.last if terms.kl else None,
            group=group,
            overlap=overlap,
        )
        self.norm = overlap.finish() if overlap is not None else None
        return loss

    def teachers_of(self, terms: Terms, group: int | None = None) -> TeacherChunks | None:
        """How the loss shares teachers, if it does; counted once."""
        key, problem = (terms, group), self.problem
        if key not in self.teachers:
            train = problem.objective(terms).train
            self.teachers[key] = teacher_chunks(self.host_plan, train, problem.head, group)
        return self.teachers[key]

    def gradients(self) -> dict[str, Tensor]:
        named = self.problem.model.named_parameters()
        return {name: p.grad for name, p in named if p.grad is not None}


def measure(
    device: torch.device, shapes: Sequence[str] = (), sides: Sequence[str] = SIDES
) -> Iterator[Row]:
    """The rows of the report; a row with "error" in it has no time."""
    on_gpu = device.type == "cuda"
    # As a drafter's thread has it, and as a graph must be captured.
    with torch.cuda.stream(torch.cuda.Stream(device)) if on_gpu else nullcontext():
        for name in shapes or DEFAULT_SHAPES[device.type]:
            problem = problem_on(device, name)
            yield from _measure_step(problem, sides)
            if "Liger" in sides:
                yield from _measure_loss(problem)


def problem_on(device: torch.device, name: str) -> Problem:
    return make_problem(
        SHAPES[name], device, torch.bfloat16 if device.type == "cuda" else torch.float32
    )


def _measure_step(problem: Problem, sides: Sequence[str]) -> Iterator[Row]:
    step, reference = Step(problem), Reference(problem)
    mine: dict[Terms, Callable[[], object]] = {}
    for terms in (CE, KL, KL_CE):
        try:
            loss = step.run(terms)
            errors = reference.check(terms, loss, step.gradients())
        except Exception as failure:  # of any kind: the others are still worth timing
            yield _refused(problem, terms, "this step", failure)
        else:
            yield _checked(problem, terms, "this step", errors)
            mine[terms] = functools.partial(step.run, terms)
    for terms in (CE, KL_CE) if "floor" in sides else ():
        yield from _measure_floors(step, terms, mine.get(terms))
    for who, terms, make in _peers(problem):
        if who.split(",")[0] in sides:
            yield from _measure_peer(problem, reference, mine.get(terms), who, terms, make)


def _measure_floors(step: Step, terms: Terms, mine: Callable[[], object] | None) -> Iterator[Row]:
    """Beside the products of the algorithm as stated, and beside those that are really made."""
    problem, shape = step.problem, f"{step.problem.shape.name} {terms.name}"
    ways = {"step": mine} if mine is not None else {}
    if mine is not None and problem.hidden.is_cuda:
        ways["step, graph"] = _graphed(step, terms)
    floors = {"its products in cuBLAS": step_gemms(problem, terms)}
    made = made_gemms(problem, terms, step.teachers_of(terms))
    if made not in floors.values():
        floors["the products it makes, in cuBLAS"] = made
    for name, gemms in floors.items():
        floor = Floor(problem, gemms)
        *ours, theirs = _medians(problem, *ways.values(), floor.run)
        for op, seconds in zip(ways or ["step"], ours or [None], strict=True):
            yield _row(op, shape, seconds, name, theirs, sum(floor.flops.values()))


def _graphed(step: Step, terms: Terms) -> Callable[[], Tensor]:
    """The step as train.cuda_graph has it; it must leave the same bits."""
    graphs: GraphedCalls[Tensor] = GraphedCalls()

    def replay() -> Tensor:
        return graphs("step", 0, functools.partial(step.run, terms))

    losses = [replay().clone() for _ in range(EAGER_RUNS)]
    wanted = {name: gradient.clone() for name, gradient in step.gradients().items()}
    losses += [replay().clone() for _ in range(2)]
    found = step.gradients()
    if not all(torch.equal(loss, losses[0]) for loss in losses):
        raise CheckFailed(f"losses of the step and of its graph: {[float(x) for x in losses]}")
    if off := [name for name, want in wanted.items() if not torch.equal(found[name], want)]:
        raise CheckFailed(f"gradients that a graph changes: {', '.join(off)}")
    return replay


def _measure_peer(
    problem: Problem,
    reference: Reference,
    mine: Callable[[], object] | None,
    who: str,
    terms: Terms,
    make: Callable[[], step_peers.Peer],
) -> Iterator[Row]:
    try:
        peer = make()
        loss = peer.run()
        grads = {n: p.grad for n, p in peer.params.items() if p.grad is not None}
        errors = reference.check(terms, loss, grads, scale=peer.loss_scale)
    except Exception as failure:
        yield _refused(problem, terms, who, failure)
    else:
        yield _checked(problem, terms, peer.name, errors)
        yield _timed(problem, terms, mine, peer.name, peer.run)


def _peers(
    problem: Problem,
) -> Iterator[tuple[str, Terms, Callable[[], step_peers.Peer]]]:
    yield "SpecForge", CE, lambda: step_peers.specforge(problem, compiled=False)
    if problem.hidden.is_cuda:
        yield "SpecForge, compiled", CE, lambda: step_peers.specforge(problem, compiled=True)
    own = "fused" if problem.hidden.is_cuda else "eager"
    kinds = [(own, KL), (own, CE)] + [("eager", KL)] * (own == "fused")
    for losses, terms in kinds:
        make = functools.partial(step_peers.speculators, problem, terms, losses=losses)
        yield f"speculators, {losses} loss", terms, make


def _timed(
    problem: Problem,
    terms: Terms,
    mine: Callable[[], object] | None,
    name: str,
    other: Callable[[], object],
) -> Row:
    """Our step and another side in turns; the other alone if our step was refused."""
    shape = f"{problem.shape.name} {terms.name}"
    if mine is None:
        return _row("step", shape, None, name, *_medians(problem, other))
    ours, theirs = _medians(problem, mine, other)
    return _row("step", shape, ours, name, theirs)


def _measure_loss(problem: Problem) -> Iterator[Row]:
    """draft_loss with weight 1 on every row, against Liger's fused loss on those rows."""
    plan, table = problem.plan, problem.head.head_weight
    states = torch.randn(*plan.weights.shape, table.shape[1], device=table.device).to(table.dtype)
    states.requires_grad_()
    rows = plan.rows[: problem.rows]
    picked = states.detach().flatten(0, 1)[rows].requires_grad_()
    weights = (plan.weights > 0).float()
    args = (table, plan.labels, weights, weights.sum(), plan.rows, plan.n_rows)

    def ours() -> Tensor:
        states.grad = None
        loss: Tensor = ops.draft_loss(states, *args)
        loss.backward()
        return loss.detach()

    shape = f"{problem.shape.name} N{problem.rows} CE"
    try:
        name, liger = step_peers.liger_loss(picked, table, plan.labels.flatten()[rows])
        loss, theirs = ours(), liger()
        assert states.grad is not None and picked.grad is not None
        mine = states.grad.flatten(0, 1)[rows].float()
        off = float((mine - picked.grad.float()).norm() / mine.norm())
        if not (abs(float(loss / theirs) - 1) <= 1e-3 and off <= GRADIENT_TOLERANCE):
            raise CheckFailed(f"loss {float(loss)} and {float(theirs)}, gradients {off:.1e} apart")
    except Exception as failure:
        yield {"op": "draft_loss", "shape": shape, "peer": "Liger", "error": _words(failure)}
        return
    mine_s, theirs_s = _medians(problem, ours, liger)
    flops = 4 * problem.rows * table.numel()
    yield _row("draft_loss", shape, mine_s, name, theirs_s, flops)


def measure_parts(problem: Problem, terms: Terms) -> list[Row]:
    """Time, share, TFLOP/s and distance to the floor of each part of step and optimizer.

    Kernel times of profiled steps; the floor of each part comes from passes over the products that
    the step makes, in between, under the same load.
    """
    step = Step(problem)
    floor = Floor(problem, made_gemms(problem, terms, step.teachers_of(terms)))
    step_index = 0

    def whole() -> None:
        nonlocal step_index
        step.run(terms)
        step.optimizer.step(step_index)
        step_index += 1

    on_gpu = problem.hidden.is_cuda
    passes: list[dict[str, float]] = []

    def products() -> None:
        if on_gpu:
            passes.append(floor.part_seconds())

    for _ in range(WARM_ROUNDS if on_gpu else 1):
        products()
        whole()
    passes.clear()
    rounds = PROFILED_ROUNDS if on_gpu else 1
    records = profiled(whole, products, problem.hidden.device, rounds=rounds)
    found = breakdown(records, problem.spec).per_call(rounds)
    parts_of = passes[0] if passes else {}
    floors = {part: statistics.median(x[part] for x in passes) for part in parts_of}
    rows = [
        {
            "op": "part",
            "shape": f"{problem.shape.name} {terms.name}",
            "part": part,
            "ms": found.seconds[part] * 1e3,
            "share": found.seconds[part] / found.total,
            "tflops": floor.flops.get(part, 0) / found.seconds[part] / 1e12
            if found.seconds[part]
            else 0.0,
            "floor_ms": floors[part] * 1e3 if part in floors else None,
            "of_floor": found.seconds[part] / floors[part] if part in floors else None,
        }
        for part in PARTS
    ]
    for name, seconds in found.largest_others:
        print(f"  other: {seconds * 1e3:8.3f} ms  {name[:100]}")
    return rows


def _medians(problem: Problem, *calls: Callable[[], object]) -> tuple[float, ...]:
    device = problem.hidden.device
    return median_seconds(
        calls,
        device,
        min_seconds=MIN_SECONDS[device.type],
        min_repeats=MIN_ROUNDS[device.type],
        sustained=True,
    )


def _row(op: str, shape: str, mine: float | None, peer: str, theirs: float, flops: int = 0) -> Row:
    return {
        "op": op,
        "shape": shape,
        "us": None if mine is None else mine * 1e6,
        "peer": peer,
        "peer_us": theirs * 1e6,
        "speedup": None if mine is None else theirs / mine,
        "flops": flops,
    }


def _checked(problem: Problem, terms: Terms, who: str, errors: Errors) -> Row:
    shape = f"{problem.shape.name} {terms.name}"
    return {"op": "check", "shape": shape, "peer": who, "note": str(errors), **vars(errors)}


def _refused(problem: Problem, terms: Terms, who: str, failure: Exception) -> Row:
    shape = f"{problem.shape.name} {terms.name}"
    return {"op": "step", "shape": shape, "peer": who, "error": _words(failure)}


def _words(failure: Exception) -> str:
    if isinstance(failure, ImportError):
        return f"missing: {failure}"
    if not isinstance(failure, CheckFailed):  # unexpected
        traceback.print_exception(failure)
    kind = "failed its check" if isinstance(failure, CheckFailed) else type(failure).__name__
    return f"{kind}: {failure}".splitlines()[0][:300]


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["sides", "parts"], help="against whom, or where it goes")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shape", choices=list(SHAPES), action="append")
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=SIDES, help="only these")
    parser.add_argument("--peers", metavar="DIR", help="folder of unpacked wheels of the trainers")
    parser.add_argument("--seconds", type=float, help="that a comparison takes, at least")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the rows here")
    arguments = parser.parse_args()
    if arguments.json:
        check_output_file("--json", arguments.json)
    if arguments.peers:
        sys.path.insert(0, arguments.peers)
    device = device_of("--device", arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if arguments.seconds is not None:
        MIN_SECONDS[device.type] = arguments.seconds
    conditions, shapes = facts(device), arguments.shape or DEFAULT_SHAPES[device.type]
    print("# " + conditions_line(conditions))
    rows = []
    timed = arguments.what == "sides"
    for row in measure(device, shapes, arguments.sides) if timed else parts(device, shapes):
        print(line(row) if timed else part_line(row), flush=True)
        rows.append(row)
        if arguments.json:
            write_report(arguments.json, conditions, rows)
    return 0


def parts(device: torch.device, shapes: Sequence[str]) -> Iterator[Row]:
    for name in shapes:
        problem = problem_on(device, name)
        for terms in (CE, KL_CE):
            yield from measure_parts(problem, terms)


def part_line(row: Row) -> str:
    floor = f"{row['of_floor']:.3f} x {row['floor_ms']:.2f} ms" if row["of_floor"] else "-"
    return (
        f"{row['shape']:12} {row['part']:15} {row['ms']:9.3f} ms {row['share']:6.1%}"
        f" {row['tflops']:7.1f} TFLOP/s  {floor}"
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
