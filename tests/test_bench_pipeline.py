"""bench_pipeline at toy size: its phases, its figures, its profile and the picture of it."""

import threading
import time
from pathlib import Path

import pytest
import torch

from benchmarks import bench_pipeline, bench_target, pipeline_figures, pipeline_table, trace
from benchmarks.pipeline_figures import Balance, metrics_cost, rate, work_of
from benchmarks.pipeline_phases import Batch, Phase, Schedule, Timed
from dflash_ext import balance
from dflash_ext.balance import Work
from dflash_ext.data.packing import Ticket
from dflash_ext.hs_queue import Slot
from dflash_ext.target_loop import TargetForwardLoop

PHASE = Phase("any", 4, 8, 1)


def batch(end: float, *, busy: float = 1.0, tokens: int = 10, measured: bool = True) -> Timed:
    found = Batch(0, PHASE, tokens, rows=5, measured=measured, first=0, last=1)
    return Timed(found, [(end - busy, end)])


def test_toy_run_measures_every_phase(tmp_path: Path) -> None:
    options = bench_pipeline.Options(
        seconds=0, probes=(2, 8), settle=1, alone=1, trace=tmp_path / "trace.json.gz"
    )
    flags = [*bench_pipeline.TOY_FLAGS, "--topology.targets", "[cpu,cpu]"]
    flags += ["--topology.drafters", "[cpu,cpu]"]
    report = bench_pipeline.run_bench(flags, options, bench_pipeline.TOY)

    assert report["equal_weights"] is True
    assert report["waiting_calls"] == {}
    assert 0 < report["padding"] < 0.5
    assert report["one target alone"]["tokens_per_s"] != 0
    assert report["target alone"]["target"]["batches"] >= 2
    assert "drafter" not in report["target alone"]
    for name in bench_pipeline.SHARES:
        found = report[name]
        assert found["tokens_per_s"] > 0
        assert found["target"]["batches"] > 0
        assert found["drafter"]["exposed_sum_share"] > 0  # two drafters sum their gradients
        assert "target" not in found["drafter_alone"]
        assert found["memory"]["rss_gib"] > 0.05
    few, many = (report[name]["anchors"] for name in ("target-bound", "drafter-bound"))
    assert few <= many

    words = pipeline_table.markdown([report])
    assert f"| cpu cpu -> cpu cpu | target-bound | {few} |" in words
    assert "the weights of all drafters are equal bit for bit" in words
    assert "calls that wait, in three profiled steps: none" in words
    shortened = {key: value for key, value in report.items() if key in ("conditions", "kernels")}
    assert "target-bound" not in pipeline_table.markdown([shortened])  # of a run that was cut short

    profile = trace.load(tmp_path / "trace.json.gz")
    found_lanes = trace.lanes(profile)
    for lane in ("target 0  target forward", "target 0  pack", "drafter 1  drafter backward"):
        assert tuple(lane.split("  ")) in found_lanes
    assert ("drafter 0", "optimizer") in found_lanes
    trace.draw(profile, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_five_targets_and_three_drafters_with_what_the_monitor_recommends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = TargetForwardLoop._forward

    def slow(self: TargetForwardLoop, slot: Slot, ticket: Ticket) -> None:
        time.sleep(0.15)  # the slower side: more anchors are recommended
        forward(self, slot, ticket)

    monkeypatch.setattr(TargetForwardLoop, "_forward", slow)
    monkeypatch.setattr(balance, "ANCHOR_STEP", 1)
    phases = ("configured", "recommended")
    options = bench_pipeline.Options(seconds=0, probes=(2, 8), settle=1, alone=1, phases=phases)
    flags = [*bench_pipeline.TOY_FLAGS, "--topology.targets", "[cpu,cpu,cpu,cpu,cpu]"]
    flags += ["--topology.drafters", "[cpu,cpu,cpu]", "--topology.slots_per_drafter", "4"]
    flags += ["--train.max_anchors", "6"]
    report = bench_pipeline.run_bench(flags, options, bench_pipeline.TOY)

    assert report["equal_weights"] is True and "target-bound" not in report
    first, second = (report[name] for name in phases)
    assert first["anchors"] == 6
    assert 0.3 < first["of_single_targets"] < 1.2
    assert second["anchors"] == first["monitor"]["max_anchors"] > 0
    for name in phases:
        found = report[name]
        workers = [found[stage]["per_worker"] for stage in ("target", "drafter")]
        assert [len(each) for each in workers] == [5, 3]
        assert sum(workers[1]) == pytest.approx(found["tokens_per_s"])
        for stage in ("target", "drafter"):
            waits = found["monitor"][f"{stage}_wait"]
            assert found[stage]["waits"] == pytest.approx(waits, abs=0.2)

    words = pipeline_table.markdown([report])
    assert "| recommended |" in words and "x as many targets, each by itself" in words
    assert f"monitor, configured: {first['monitor']['line']}" in words


def test_phases_follow_each_other_and_the_last_goes_on() -> None:
    first, second = (Phase(name, steps, 8, 1) for name, steps in (("first", 2), ("second", 1)))
    schedule = Schedule(first)
    names = [schedule.plan(step).name for step in range(3)]
    schedule.add(second, first)
    names += [schedule.plan(step).name for step in range(3, 6)]
    assert names == ["first"] * 3 + ["second", "first", "first"]
    assert schedule.of(3) is second


def test_a_stage_alone_is_measured_by_the_work_of_a_phase_not_by_its_tokens() -> None:
    full = {"tokens_per_s": 100.0, "rows_per_s": 400.0}
    # Half of the batches are half full, and take as long: 75 tokens in 300 rows at this speed.
    phase = {"tokens_per_s": 67.5, "rows_per_s": 360.0}
    assert pipeline_figures.alone_rate(full, phase) == pytest.approx(75.0)


def test_rate_starts_behind_the_skipped_batches() -> None:
    timed = [batch(end) for end in (5.0, 7.0, 9.0, 10.0)]
    found = rate([timed, timed], skip=2)
    assert found.tokens_per_s == pytest.approx(2 * 20 / 3)
    assert found.busy == pytest.approx(2 / 3)
    assert found.waits == pytest.approx(1 / 3)
    assert (found.step_s, found.longest_s) == (pytest.approx(1.5), 2)
    assert found.batches == 4
    assert rate([timed], skip=1, skip_last=1).step_s == pytest.approx(2.0)
    with pytest.raises(RuntimeError, match="want at least 5"):
        rate([timed], skip=3, skip_last=1)


def drafter_steps(*backward: tuple[float, float], update: float) -> list[Timed]:
    """Steps of 10 s: a backward pass, a gap, and half a second of update."""
    return [
        Timed(
            Batch(step, PHASE, tokens=30, rows=5, measured=True, first=0, last=2),
            [(10 * step + a, 10 * step + b), (10 * step + update, 10 * step + update + 0.5)],
        )
        for step, (a, b) in enumerate(backward)
    ]


def test_a_drafter_waits_for_the_others_inside_a_step() -> None:
    # The first one's backward passes end 3 s before the second one's, whose sums take 0.2 s.
    early = drafter_steps(*[(0.0, 5.0)] * 3, update=8.2)
    late = drafter_steps(*[(1.0, 8.0)] * 3, update=8.2)
    found = rate([early, late])
    assert found.exposed_s == pytest.approx(0.2)
    assert found.waits == pytest.approx(1 - (5 + 7 + 2 * 0.7) / 20)
    assert rate([early]).exposed_s == 0  # alone it sums nothing


def test_the_monitors_figures_of_a_phase() -> None:
    drafters = [drafter_steps(*[(0.0, b)] * 4, update=8.2) for b in (5.0, 7.0)]
    targets = [[batch(end, busy=4.0, tokens=20) for end in (9.0, 20.0, 28.0, 40.0)]] * 5
    found = work_of(targets, drafters, skip=1, skip_last=1)  # from 8.7 to 28.7 s
    assert found == Work(
        time=pytest.approx(20.0),
        steps=2,
        tokens=120,
        busy_s=pytest.approx(2 * (5.5 + 7.5)),
        target_tokens=208,  # 5 x (0.3 s of a batch of 4 s, and two whole ones)
        target_busy_s=pytest.approx(5 * 8.3),
    )


def test_balance_is_a_line_through_two_phases() -> None:
    balance = Balance.through((1024, 0.6), (8192, 3.2))
    assert balance.seconds(1024) == pytest.approx(0.6)
    anchors = balance.anchors(4.9, at_least=1, at_most=49152)
    assert anchors % 64 == 0
    assert balance.seconds(anchors) == pytest.approx(4.9, abs=0.02)
    assert balance.anchors(0.1, at_least=12, at_most=20) == 12
    assert balance.anchors(99.0, at_least=12, at_most=20) == 20


def test_cost_of_metrics_compares_neighbours() -> None:
    timed = [batch(i, busy=1.01 if i % 2 else 1.0, measured=bool(i % 2)) for i in range(12)]
    found = metrics_cost([timed])
    assert found["extra"] == pytest.approx(0.01)
    assert found["standard_error"] == pytest.approx(0, abs=1e-9)
    assert metrics_cost([timed[::2]]) == {}


def test_memory_compares_quarters() -> None:
    def sample(rss: int, reserved: int) -> pipeline_figures.Sample:
        gib = pipeline_figures.GIB
        return pipeline_figures.Sample(
            0.0, "any", rss * gib, {"cuda:0": reserved * gib}, {"cuda:0": 0}
        )

    found = pipeline_figures.memory([sample(n, 10 + n) for n in range(8)])
    assert found["rss_gib"] == 7
    assert found["rss_quarters_gib"] == [0.5, 6.5]
    assert found["gpus"]["cuda:0"]["reserved_quarters_gib"] == [11, 17]


def event(cat: str, name: str, tid: int = 0, **args: int) -> trace.Event:
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, "ts": 0, "dur": 5, "args": args}


def gpu_profile() -> trace.Profile:
    events = [
        event("cuda_runtime", "cudaLaunchKernel", 1, correlation=1),
        event("kernel", "nvjet_tst", device=0, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 1, correlation=2),
        event("kernel", "pack_hidden_rows", device=0, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 2, correlation=3),
        event("kernel", "nvjet_tst", device=1, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 3, correlation=4),
        event("kernel", "nvjet_tst", device=1, correlation=4),
        event("cuda_runtime", "cudaLaunchKernel", 2, correlation=5),
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", device=1, correlation=5),
        event("cuda_runtime", "cudaStreamSynchronize", 9),
        event("cuda_runtime", "cudaMemcpyAsync", 2, correlation=6),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", device=1, correlation=6),
        event("cuda_runtime", "cudaEventQuery", 2),
        event("kernel", "nvjet_tst", device=2, correlation=0),  # launched before the profile
    ]
    return trace.Profile({1: "target 0", 2: "drafter 0", 9: "monitor"}, events)


def test_kernels_are_sorted_by_the_thread_that_launched_them() -> None:
    assert list(trace.lanes(gpu_profile())) == [
        ("GPU 0", "target forward"),
        ("GPU 0", "pack"),
        ("GPU 1", "drafter forward"),
        ("GPU 1", "drafter backward"),
        ("GPU 1", "all-reduce"),
        ("GPU 1", "metrics and copies"),
    ]


def test_waiting_calls_are_counted_by_thread() -> None:
    profile = gpu_profile()
    own = [event("user_annotation", trace.END), event("cuda_runtime", "cudaDeviceSynchronize")]
    profile.events += [e | {"ts": 7} for e in own]  # of the profiler
    assert profile.waiting_calls() == {
        "drafter 0": {"Memcpy DtoH (Device -> Pageable)": 1},
        "monitor": {"cudaStreamSynchronize": 1},
    }


def test_threads_are_known_by_each_of_their_ids() -> None:
    names = trace.thread_names()
    ident = threading.get_ident() & 0xFFFFFFFF
    assert names[threading.get_native_id()] == "MainThread"
    assert names[ident] == names[ident - (ident >> 31 << 32)] == "MainThread"


def test_spans_that_nearly_touch_are_one() -> None:
    assert trace.joined([(0, 1), (1.1, 2), (1.5, 1.8), (3, 4)], 0.2) == [(0, 2), (3, 4)]


def test_weights_of_the_random_target_keep_hidden_states_finite(tmp_path: Path) -> None:
    from benchmarks.random_target import check_finite, random_target, write_target

    hybrid = {"model_type": "qwen3_5_text", **bench_target.SIZES["cpu"].config}
    config = write_target(tmp_path, hybrid)
    target = random_target(config, torch.device("cpu"), torch.float32, fast_gdn=False)
    target.layers[3].mlp.down_proj.weight.data.fill_(torch.inf)
    with pytest.raises(RuntimeError, match="not finite"):
        check_finite(target)
