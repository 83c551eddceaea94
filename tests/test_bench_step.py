"""bench_step at toy size: nothing is timed unchecked, nothing that is missing goes unsaid."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import bench_step, step_anchors, step_peers, step_two
from benchmarks.step_check import CheckFailed, Reference, kind_errors
from benchmarks.step_floor import Floor, made_gemms, step_gemms
from benchmarks.step_parts import PARTS, Record, breakdown, part_of, profiled
from benchmarks.step_problem import CE, KL, KL_CE, SHAPES, Problem, Terms, make_problem
from benchmarks.step_reference import reference_step
from dflash_ext.drafter.loss import TeacherChunks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(SHAPES["toy"], CPU, torch.float32)


@pytest.fixture(scope="module")
def reference(problem: Problem) -> Reference:
    return Reference(problem)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_step.MIN_SECONDS, "cpu", 0.0)
    monkeypatch.setitem(bench_step.MIN_ROUNDS, "cpu", 1)


def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise ImportError(f"{package} is not installed")

    monkeypatch.setattr(step_peers, "version", missing)


def timed(rows: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(row["shape"], row["peer"]) for row in rows if "peer_us" in row}


def refused(rows: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    return {(row["shape"], row["peer"]): row["error"] for row in rows if "error" in row}


def test_step_is_checked_and_timed_beside_its_floor(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_peers(monkeypatch)
    rows = list(bench_step.measure(CPU))
    assert [row["shape"] for row in rows if row["op"] == "check"] == [
        "toy CE",
        "toy KL",
        "toy KL + CE",
    ]
    floors = {("toy CE", "its products in cuBLAS"), ("toy KL + CE", "its products in cuBLAS")}
    assert timed(rows) == floors
    assert all(row["us"] > row["peer_us"] > 0 for row in rows if "peer_us" in row)
    assert refused(rows) == {
        ("toy CE", "SpecForge"): "missing: specforge is not installed",
        ("toy KL", "speculators, eager loss"): "missing: speculators is not installed",
        ("toy CE", "speculators, eager loss"): "missing: speculators is not installed",
        ("toy N59 CE", "Liger"): "missing: liger-kernel is not installed",
    }


def test_wrong_step_is_refused_and_the_floor_still_timed(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_peers(monkeypatch)
    right = bench_step.Step.gradients

    def wrong(step: bench_step.Step) -> dict[str, torch.Tensor]:
        gradients = right(step)
        gradients["layers.1.mlp.up_proj.weight"] *= 1.5
        return gradients

    monkeypatch.setattr(bench_step.Step, "gradients", wrong)
    rows = list(bench_step.measure(CPU))
    assert not any(row["op"] == "check" for row in rows)
    assert refused(rows)["toy CE", "this step"].startswith("failed its check: loss ")
    assert "worst mlp.up_proj" in refused(rows)["toy CE", "this step"]
    assert all(row["us"] is None for row in rows if "peer_us" in row)


def fake_peer(problem: Problem, terms: Terms, scale: float) -> step_peers.Peer:
    """A trainer that follows the reference with 1 / scale times its loss."""
    params = {n: torch.nn.Parameter(p.detach()) for n, p in problem.model.named_parameters()}
    loss, gradients = reference_step(problem, terms, torch.float32)

    def forward() -> torch.Tensor:
        parts = [(p * gradients[n]).sum() for n, p in params.items()]
        total = torch.stack(parts).sum()
        return (total - total.detach() + loss) / scale

    return step_peers.Peer("Fake 1.0", params, forward, loss_scale=scale)


@pytest.mark.parametrize("claimed", [1.0, 1.01])
def test_peers_are_held_to_the_same_loss(
    quick: None, monkeypatch: pytest.MonkeyPatch, claimed: float
) -> None:
    no_peers(monkeypatch)

    def make(problem: Problem, terms: Terms, losses: str) -> step_peers.Peer:
        peer = fake_peer(problem, terms, 2.5)
        peer.loss_scale *= claimed
        return peer

    monkeypatch.setattr(step_peers, "speculators", make)
    rows = list(bench_step.measure(CPU))
    theirs = {("toy CE", "Fake 1.0"), ("toy KL", "Fake 1.0")}
    assert theirs <= timed(rows) if claimed == 1.0 else not theirs & timed(rows)
    if claimed != 1.0:
        assert refused(rows)["toy KL", "speculators, eager loss"].startswith(
            "failed its check: loss 1.0e-02"
        )


def test_reference_is_the_step(problem: Problem, reference: Reference) -> None:
    step = bench_step.Step(problem)
    for terms in (CE, KL, KL_CE):
        errors = reference.check(terms, step.run(terms), step.gradients())
        assert errors.loss < 1e-5
        assert errors.gradient < 1e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(
    problem: Problem, reference: Reference, value: float
) -> None:
    step = bench_step.Step(problem)
    loss = step.run(CE)
    with pytest.raises(CheckFailed):
        reference.check(CE, torch.tensor(value), step.gradients())
    gradients = step.gradients()
    gradients["fc.weight"][0, 0] = value
    with pytest.raises(CheckFailed):
        reference.check(CE, loss, gradients)
    del gradients["fc.weight"]
    with pytest.raises(CheckFailed, match=r"no gradient for fc\.weight"):
        reference.check(CE, loss, gradients)


def test_errors_are_pooled_over_layers() -> None:
    wanted = {"layers.0.mlp.up_proj.weight": torch.tensor([3.0]), "fc.weight": torch.tensor([1.0])}
    wanted["layers.1.mlp.up_proj.weight"] = torch.tensor([4.0])
    found = {name: value + (0.5 if "1" in name else 0.0) for name, value in wanted.items()}
    errors = kind_errors(found, wanted)
    assert errors["mlp.up_proj"] == pytest.approx(0.1)
    assert errors["fc"] == 0.0
    assert errors["all"] == pytest.approx(0.5 / 26**0.5)


def test_floor_is_the_steps_products(problem: Problem) -> None:
    spec, plan = problem.spec, problem.plan
    context, block = plan.doc_start.shape[0], plan.labels.numel()
    size = {n: p.numel() for n, p in problem.model.named_parameters() if p.dim() > 1}
    layers = sum(n for name, n in size.items() if name != "fc.weight")
    kv = sum(n for name, n in size.items() if ".k_proj" in name or ".v_proj" in name)
    head = problem.rows * spec.vocab_size * spec.hidden_size
    flops = 6 * block * layers + 6 * context * kv + 4 * context * size["fc.weight"]
    floor = Floor(problem, step_gemms(problem, CE))
    assert sum(floor.flops.values()) == flops + 4 * head
    with_teacher = Floor(problem, step_gemms(problem, KL_CE))
    assert sum(with_teacher.flops.values()) == flops + 6 * head
    assert floor.flops["loss"] == 4 * head
    kinds = [(g.kind, g.weight) for g in step_gemms(problem, KL)]
    assert ("dx", "fc") not in kinds and ("dw", "head") not in kinds
    assert kinds.count(("forward", "head")) == 2


def test_floor_makes_the_products_it_counts(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    mm = torch.mm

    def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        made.append(2 * a.shape[0] * a.shape[1] * b.shape[1])
        return mm(a, b)

    floor = Floor(problem, step_gemms(problem, CE))
    monkeypatch.setattr(torch, "mm", counted)
    floor.run()
    assert sum(made) == sum(floor.flops.values())


@pytest.fixture
def lean(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> bench_step.Step:
    """A step that leaves out all rows that it can, as on a GPU."""
    flat = functools.partial(bench_step.DrafterOptimizer, flat=True)
    monkeypatch.setattr(bench_step, "DrafterOptimizer", flat)
    problem = make_problem(SHAPES["toy"], CPU, torch.float32)
    rows = problem.plan.rows[: problem.rows + 3]
    return bench_step.Step(
        dataclasses.replace(problem, plan=dataclasses.replace(problem.plan, rows=rows))
    )


class Products(TorchDispatchMode):
    """Counts the operations of matrix products; those within other operators are not seen."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


def test_made_products_are_those_of_a_step(lean: bench_step.Step) -> None:
    problem = lean.problem
    with Products() as found:
        lean.run(CE)
    floor = Floor(problem, made_gemms(problem, CE, None))
    assert found.flops == floor.flops["projections"] + floor.flops["mlp"]
    plain = Floor(problem, step_gemms(problem, CE))
    assert floor.flops["loss"] == plain.flops["loss"] and found.flops < sum(plain.flops.values())
    # 62 rows in chunks of 24, 24 and 14, of which each has 15 different teachers at most.
    (kl,) = [g.rows for g in made_gemms(problem, KL, TeacherChunks(24, 15)) if g.rows == 44]
    assert kl == 15 + 15 + 14


def test_both_floors_are_timed_where_they_differ(quick: None, lean: bench_step.Step) -> None:
    step = functools.partial(lean.run, CE)
    rows = list(bench_step._measure_floors(lean, CE, step))
    names = ["its products in cuBLAS", "the products it makes, in cuBLAS"]
    assert [row["peer"] for row in rows] == names
    assert rows[1]["flops"] < rows[0]["flops"] and all(row["us"] > 0 for row in rows)


def records() -> Iterator[tuple[str, Record]]:
    spec = SHAPES["27b"].spec()
    rows, hidden, inner, vocab = 8192, spec.hidden_size, spec.intermediate_size, spec.vocab_size
    yield "projections", Record("nvjet_tst", "aten::mm", [[rows, hidden], [hidden, 4096]], 1.0)
    yield "projections", Record("nvjet_tst", "aten::mm", [[rows, 5 * hidden], [25600, hidden]], 1.0)
    yield "mlp", Record("nvjet_tst", "aten::mm", [[inner, rows], [rows, hidden]], 1.0)
    yield "mlp", Record("swiglu_forward", "", [], 1.0)
    yield "loss", Record("nvjet_tst", "aten::mm", [[7680, hidden], [hidden, vocab]], 1.0)
    yield "loss", Record("draft_loss_rows", "", [], 1.0)
    yield "loss", Record("loss_scale_kernel", "", [], 1.0)
    yield "attention", Record("block_attention_fwd", "BlockAttention", [], 1.0)
    yield "norms and rope", Record("rms_norm_kernel", "", [], 1.0)
    yield "optimizer", Record("adamw_kernel", "", [], 1.0)
    yield "other", Record("Memset", "", [], 1.0)


@pytest.mark.parametrize(("part", "record"), list(records()))
def test_kernels_find_their_part(part: str, record: Record) -> None:
    assert part_of(record, SHAPES["27b"].spec()) == part


def test_breakdown_keeps_every_second() -> None:
    found = breakdown([record for _, record in records()], SHAPES["27b"].spec())
    assert set(found.seconds) == set(PARTS)
    assert found.total == len(list(records()))
    assert found.largest_others == [("Memset", 1.0)]


def test_what_runs_between_leaves_no_record() -> None:
    x = torch.randn(8, 8)
    found = profiled(lambda: x @ x, lambda: torch.bmm(x[None], x[None]), CPU, rounds=3)
    names = [record.name for record in found]
    assert names.count("aten::mm") == 3
    assert "aten::bmm" not in names


def test_parts_at_toy_size(problem: Problem) -> None:
    rows = bench_step.measure_parts(problem, KL_CE)
    assert [row["part"] for row in rows] == list(PARTS)
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
    for part in ("projections", "mlp", "attention", "loss", "optimizer"):
        assert rows[PARTS.index(part)]["ms"] > 0


def test_two_drafters_keep_equal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("default", "bucket_mib=1", "none", "meet", "late", "copies,dtype=bfloat16")
    variants = [step_two.Variant.of(word) for word in words]
    kept: list[int] = []
    found = step_two.rate(
        "toy", [CPU, CPU], 1, 1, variants, variants[:1], lambda x: kept.append(len(x["variants"]))
    )
    assert tuple(found["variants"]) == words and kept == [1, 2, 3, 4, 5, 6, 6]
    assert found["timelines"] == {"default": {}}  # of GPUs alone
    assert found["drafter 0"] == found["variants"]["default"]["drafter 0"]
    for variant in found["variants"].values():
        for rank in range(2):
            drafter = variant[f"drafter {rank}"]
            assert drafter["rows"] == 80 and drafter["share_of_alone"] > 0
    with pytest.raises(ValueError, match="variant"):
        step_two.Variant.of("blocks=3")

    class Wrong(step_two.GradSync):
        def start(self, grads: Sequence[torch.Tensor]) -> None:
            grads[0].add_(1e-3 * self.rank)
            super().start(grads)

        def finish(self, ended: object = None) -> None:
            first = self._started[0][1][0]
            super().finish(ended)
            first.add_(1e-3 * self.rank)

    monkeypatch.setattr(step_two, "GradSync", Wrong)
    demand_equal = step_two.demand_equal
    for what in ("gradients", "weights"):
        monkeypatch.setattr(
            step_two, "demand_equal", lambda who, x, what=what: x == what and demand_equal(who, x)
        )
        with pytest.raises(RuntimeError, match=f"{what} differ after 4 steps"):
            step_two.rate("toy", [CPU, CPU], steps=1, rounds=1)


def test_drafter_that_fails_stops_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    train = step_two.Drafter.train

    def failing(drafter: step_two.Drafter, steps: int, *, together: bool = True) -> None:
        if drafter.rank == 1:
            raise ZeroDivisionError("broken")
        train(drafter, steps, together=together)

    monkeypatch.setattr(step_two.Drafter, "train", failing)
    with pytest.raises(RuntimeError, match=r"drafter 1: ZeroDivisionError\('broken'\)"):
        step_two.rate("toy", [CPU, CPU], steps=1, rounds=1)


def test_cold_starts_count_failures() -> None:
    found = step_two.cold("toy", [CPU, CPU], starts=1, jobs=1)
    assert found["failures"] == [] and len(found["digests"]) == 1
    found = step_two.cold("toy", [CPU, torch.device("cuda:99")], starts=1, jobs=1)
    assert len(found["failures"]) == 1 and found["digests"] == []


def test_numbers_of_anchors_over_one_context() -> None:
    shape = dataclasses.replace(SHAPES["toy"], documents=3, tokens=60)
    rows = step_anchors.measure_anchors(shape, [48, 12], 12, CPU)
    assert [row["query_rows"] for row in rows] == [192, 48]
    assert all(row["context_tokens"] == 180 and row["rows_per_s"] > 0 for row in rows)
