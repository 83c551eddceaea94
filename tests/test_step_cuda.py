"""The training step on a GPU: gradients, groups, graphs, two slots, and nothing that waits."""

import re
import time

import pytest
import torch
from cuda_waits import no_syncs
from step_cases import SPEC, TOKENS, build_loop, hidden_states, run
from torch import Tensor

from dflash_ext.acceptance import propose
from dflash_ext.drafter.fused import RowBlocks, linear, request_blocks, split_linear
from dflash_ext.drafter.loop import DrafterTrainLoop
from dflash_ext.flat_params import FlatParams
from dflash_ext.metrics import summarise
from dflash_ext.supervisor import Worker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SLEEP_CYCLES = 1_000_000_000  # half a second, or more
# A copy to pinned memory, as that of the metrics, waits for nothing.
FORBIDDEN = re.compile(
    r"Synchronize|cudaMalloc|cudaFree|cudaHost|Pageable|cudaMemcpy$"
    r"|Memcpy DtoH(?! \(Device -> Pinned\))"
)
OBJECTIVES = {"ce": {}, "kl+cap": {"kl_weight": 0.5, "cap_lambda": 0.1}}


def gradients(loop: DrafterTrainLoop) -> dict[str, Tensor]:
    """Of the first batch, in fp32 on the CPU."""
    slot = loop.hs_queue.get()
    loop.world = 2  # so that no update follows
    assert loop._train_batch(slot, 0) is None
    grads = {n: p.grad for n, p in loop.model.named_parameters()}
    return {n: g.detach().float().cpu().clone() for n, g in grads.items() if g is not None}


def errors(found: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of each kind of parameter, all layers together."""
    sums: dict[str, list[float]] = {}
    for name, reference in want.items():
        kind = sums.setdefault(re.sub(r"layers\.\d+\.", "", name), [0.0, 0.0])
        kind[0] += float((found[name] - reference).square().sum())
        kind[1] += float(reference.square().sum())
    return {kind: (error / size) ** 0.5 for kind, (error, size) in sums.items()}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("group", [None, 16])
def test_gradients_are_as_near_to_fp32_as_those_of_plain_bf16(objective, group) -> None:
    train = OBJECTIVES[objective]
    want = gradients(build_loop("cpu", torch.float32, **train))
    plain = errors(gradients(build_loop("cpu", torch.bfloat16, **train)), want)
    fused = errors(gradients(build_loop("cuda", torch.bfloat16, anchor_group=group, **train)), want)
    assert all(fused[kind] <= 2 * plain[kind] for kind in plain), (fused, plain)


# Groups of 7 leave one of 5, and plans that do not start at multiples of 16 bytes.
@pytest.mark.parametrize(
    ("group", "split_fc"), [(None, False), (None, True), (7, False), (16, True)]
)
def test_fp32_gradients_are_those_of_the_cpu(group, split_fc) -> None:
    want = gradients(build_loop("cpu", torch.float32))
    loop = build_loop("cuda", torch.float32, anchor_group=group, split_fc=split_fc)
    assert max(errors(gradients(loop), want).values()) < 2e-4  # TF32 stays off


def assert_same(one: tuple, two: tuple) -> None:
    (tensors, words), (others, other_words) = one, two
    assert tensors.keys() == others.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []
    assert words == other_words


def test_recompute_changes_no_bit() -> None:
    runs = [run(build_loop("cuda", torch.bfloat16, recompute=r)) for r in (False, True)]
    assert_same(*runs)


def test_two_runs_are_the_same_bits() -> None:
    assert_same(*(run(build_loop("cuda", torch.bfloat16, anchor_group=16)) for _ in range(2)))


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize(
    "train",
    [
        {},
        {"grad_accum": 3, "anchor_group": 16},
        {"recompute": True, "kl_weight": 0.3, "noise_std": 0.05},
        {"metrics_every": 1, "dpace_alpha": 0.5, "optimizer": "adamw"},
    ],
    ids=["plain", "accumulated groups", "recompute, kl, noise", "dpace"],
)
def test_graphs_change_no_bit(train, slots) -> None:
    eager = run(build_loop("cuda", torch.bfloat16, slots=slots, steps=12, **train))
    loop = build_loop("cuda", torch.bfloat16, slots=slots, steps=12, cuda_graph=True, **train)
    assert_same(run(loop), eager)
    assert loop.graphs is not None
    variants = 1 if "grad_accum" not in train else 3
    # Three batches have fewer different teachers than the others; two of them run eagerly.
    few = 1 if "kl_weight" in train else 0
    want = slots * variants // (1 if slots < 3 or variants == 1 else 3) + few
    assert len(loop.graphs._graphs) == want


def test_shared_teachers_in_graphs_change_no_bit() -> None:
    train = {"steps": 12, "kl_weight": 0.3}
    eager = run(build_loop("cuda", torch.bfloat16, **train))
    loop = build_loop("cuda", torch.bfloat16, cuda_graph=True, **train)
    assert_same(run(loop), eager)
    assert loop.graphs is not None and all(key[0][3] is not None for key in loop.graphs._graphs)


def test_evaluation_between_replays_changes_no_bit() -> None:
    loops = [build_loop("cuda", torch.bfloat16, steps=10, cuda_graph=True) for _ in range(2)]
    head, drafts = loops[0].head, []

    def evaluate(done: int) -> None:
        model = loops[0].model
        hidden = torch.randn(TOKENS, 3 * SPEC.hidden_size, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            ctx_kv = model.context(hidden, torch.arange(TOKENS, device="cuda"))
        ends = torch.arange(10, 60, device="cuda")
        drafts.append(propose(model, head, ctx_kv, ends, ends * 0, ends).indices.cpu())

    assert_same(run(loops[0], evaluate), run(loops[1]))
    assert len(drafts) == 10


def test_graphs_see_new_plans_and_states() -> None:
    """Replays of one graph are not the first batch over and over."""
    loop = build_loop("cuda", torch.bfloat16, slots=1, steps=12, cuda_graph=True, lr=1e-9)
    _, words = run(loop)
    losses = [summarise(w, SPEC.block_size)["loss"] for w in words]
    assert len(set(losses)) == 12


def warmed_up(cuda_graph: bool, **train) -> tuple[DrafterTrainLoop, torch.cuda.Stream]:
    """A loop in the middle of its steps; everything is compiled, captured and allocated."""
    loop = build_loop("cuda", torch.bfloat16, steps=40, cuda_graph=cuda_graph, **train)
    source = loop.hs_queue
    states = [
        hidden_states(plan, 3 * SPEC.hidden_size, 5).to("cuda", torch.bfloat16)
        for plan in source.planner.step_plans(0)
    ]

    def fill(slot, plan) -> None:  # no copies from the host, which would wait
        slot.wait_free()
        slot.hidden.copy_(states[0])
        slot.set_ready()

    source.fill = fill  # type: ignore[method-assign]
    if cuda_graph:
        from dflash_ext.drafter.graph import GraphedCalls

        loop.graphs = GraphedCalls()
    torch.cuda.synchronize()  # the steps' stream does not wait for this one
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for step in range(8):
            one_step(loop, step)
    torch.cuda.synchronize()
    return loop, stream


def one_step(loop: DrafterTrainLoop, step: int) -> None:
    loop._train_step(step, Worker("drafter", loop.run))
    loop._publish(step + 1)


MODES = pytest.mark.parametrize(
    ("cuda_graph", "train"),
    [(False, {}), (True, {}), (False, {"anchor_group": 16}), (True, {"noise_std": 0.1})],
    ids=["eager", "graph", "groups", "graph, noise"],
)


@MODES
def test_the_step_does_not_wait(cuda_graph, train) -> None:
    loop, stream = warmed_up(cuda_graph, **train)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        begin = time.perf_counter()
        one_step(loop, 8)  # more would fill the queue of launches
        host = time.perf_counter() - begin
    torch.cuda.synchronize()
    assert host < (time.perf_counter() - begin) / 3


@MODES
def test_profile_of_a_step_has_no_sync(cuda_graph, train) -> None:
    from torch.profiler import ProfilerActivity, profile, record_function

    loop, stream = warmed_up(cuda_graph, **train)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as prof, torch.cuda.stream(stream):
        with no_syncs(), record_function("the steps"):
            for step in range(8, 14):
                one_step(loop, step)
        torch.cuda.synchronize()
    events = prof.events()
    span = next(event for event in events if event.name == "the steps").time_range
    inside = [e.name for e in events if span.start <= e.time_range.start <= span.end]
    assert sum("Launch" in name for name in inside) >= 6, set(inside)
    assert sorted({name for name in inside if FORBIDDEN.search(name)}) == []


def test_200_steps_end_where_the_fp32_reference_ends() -> None:
    """The fused bf16 step with graphs against the CPU's fp32 step, same batches, same start."""
    settings = {"steps": 200, "lr": 6e-5, "metrics_every": 50}
    _, reference = run(build_loop("cpu", torch.float32, **settings))
    _, fused = run(build_loop("cuda", torch.bfloat16, cuda_graph=True, **settings))

    def losses(words: list[list[int]]) -> list[float]:
        return [float(summarise(w, SPEC.block_size)["loss"]) for w in words]

    want, found = losses(reference), losses(fused)
    assert sum(want[-20:]) < 0.8 * sum(want[:20])  # it has learnt something
    assert sum(found[-20:]) == pytest.approx(sum(want[-20:]), rel=0.01)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rows", [250, 256])
def test_gradient_in_blocks_of_rows_is_that_of_one_product(rows: int, split: bool) -> None:
    """Of integers, so that no order of additions rounds."""
    generator = torch.Generator("cuda").manual_seed(rows)

    def integers(*shape: int) -> Tensor:
        found = torch.randint(-4, 5, shape, generator=generator, device="cuda")
        return found.to(torch.bfloat16)

    weight = torch.nn.Parameter(integers(rows, 384))
    FlatParams([weight])
    made: list[Tensor] = []
    request_blocks(weight, RowBlocks(4, made.append))
    x, wanted = integers(3, 96, 128), torch.zeros(rows, 384, device="cuda")
    flat = x.transpose(0, 1).reshape(96, 384)
    for _ in range(2):
        grad_out = integers(96, rows)
        out = split_linear(x, weight) if split else linear(flat, weight)
        out.backward(grad_out)
        wanted += (grad_out.double().T @ flat.double()).float()
        assert torch.equal(torch.cat(made), wanted) and len(made) == 4
        made.clear()
