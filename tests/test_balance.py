"""Which side of a run is the slower one: from figures, and in whole runs."""

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from step_cases import build_model
from tiny_run import TinyRun

from dflash_ext import devices
from dflash_ext.balance import Balance, LoadMeter, Work, drafter_seconds
from dflash_ext.config import Config, load_config
from dflash_ext.config_cli import PROJECT_ROOT
from dflash_ext.drafter.loop import DrafterTrainLoop
from dflash_ext.plan import Plan
from dflash_ext.target import Target

# One target makes 10,000 tokens/s; a drafter takes 1 s and 1 ms an anchor for 49,152 tokens.
SIDES = Balance(
    targets=1,
    drafters=1,
    devices=2,
    target_speed=10_000.0,
    batch_tokens=49_152,
    batch_s=1.0,
    anchor_s=1e-3,
    max_anchors=1024,
    slots=2,
)


def change(**values: float) -> Balance:
    return dataclasses.replace(SIDES, **values)  # type: ignore[arg-type]


def test_the_slower_side_sets_the_pace() -> None:
    assert SIDES.sides == (10_000, pytest.approx(49_152 / 2.024))
    assert (SIDES.slower, SIDES.whole) == ("targets", 10_000)
    assert SIDES.waits() == (0, pytest.approx(1 - 10_000 / (49_152 / 2.024)))
    many = change(max_anchors=8000)
    assert many.slower == "drafters" and many.whole == pytest.approx(49_152 / 9)
    both = change(devices=1)
    assert both.shared and both.whole == pytest.approx(1 / (1e-4 + 2.024 / 49_152))
    assert "the target takes 71% of their time" in both.line()


def test_what_would_balance_the_sides() -> None:
    assert SIDES.balanced_anchors() == 3904  # 49,152 tokens of a target last 4.9152 s
    assert change(max_anchors=3904).sides[1] == pytest.approx(10_000, rel=0.005)
    assert SIDES.advice() == (
        "train.max_anchors 3904 or targets to drafters as 2.4:1 would balance it"
    )
    eight = change(targets=4, drafters=4, devices=8)
    assert eight.balanced_split() == (5, 3)  # 50,000 tokens/s; 6 and 2 make 48,600
    assert change(target_speed=8000.0, targets=4, drafters=4).balanced_split() == (6, 2)
    assert "(of 8: 5 and 3)" in eight.advice()
    assert (
        change(targets=1, drafters=7, devices=8)
        .line()
        .startswith("the targets are the slower side, the drafters wait 94% of the time; ")
    )


def test_advice_that_cannot_work_is_not_given() -> None:
    slow_context = change(batch_s=20.0)
    assert slow_context.balanced_anchors() is None  # even without an anchor
    assert slow_context.advice() == (
        "targets to drafters as 1:4.3 would balance it; no train.max_anchors would"
    )
    assert change(target_speed=100.0).balanced_anchors() is None  # more than a batch has tokens
    stored = change(target_speed=float("inf"))
    assert stored.line() == "the drafters are the slower side: states are stored"


def test_too_few_slots_hold_both_sides_up() -> None:
    # A batch takes 4.9152 s on a target and 2.9 s on a drafter: 7.8 s in a slot, or longer.
    layout = change(targets=5, drafters=3, devices=8, max_anchors=1900)
    assert layout.sides == (50_000, pytest.approx(3 * 49_152 / 2.9))
    assert layout.whole == pytest.approx(6 * 49_152 / (4.9152 + 2.9))
    waits = layout.waits()
    assert waits == (pytest.approx(0.245, abs=2e-3), pytest.approx(0.258, abs=2e-3))
    assert layout.line().startswith(
        "slots hold both sides up: the targets wait 25% of the time, the drafters 26%; "
        "topology.slots_per_drafter 4 instead of 2 would end that; then train.max_anchors 1920 "
        "would balance it; no other split of 8 is faster"
    )
    enough = dataclasses.replace(layout, slots=4)
    assert enough.whole == 50_000
    assert enough.line().startswith("the targets are the slower side, the drafters wait 2% ")
    assert change(max_anchors=3904).slots_needed() == 2  # one to one, balanced
    stored = change(target_speed=float("inf"), slots=1)
    assert stored.whole == stored.sides[1] and stored.slots_needed() == 2
    assert change(targets=7, devices=8, max_anchors=1).slots_needed() == 7


def meter(targets: int = 1, drafters: int = 1, **train: int) -> LoadMeter:
    cfg = Config()
    cfg.model.target, cfg.data.max_length, cfg.data.token_budget = "t", 64, 256
    cfg.topology.targets, cfg.topology.drafters = ["cpu"] * targets, ["cpu"] * drafters
    cfg.model.dtype, cfg.train.max_anchors = "float32", 32
    for name, value in train.items():
        setattr(cfg.train, name, value)
    spec = Plan(load_config(PROJECT_ROOT / "configs" / "smollm2_cpu.yaml")).spec
    return LoadMeter(cfg, spec, targets, drafters, targets + drafters)


# 100 s, 20 of them paused: 10 steps of a batch of 250 tokens.
WORK = Work(
    time=100.0,
    paused_s=20.0,
    steps=10,
    tokens=2500,
    busy_s=20.0,
    target_tokens=2700,
    target_busy_s=76.0,
    planning_s=1.0,
)


def test_measured_shares_and_speeds() -> None:
    assert meter().row(WORK) == pytest.approx(
        {
            "tokens_per_s": 25.0,
            "target_busy": 0.95,
            "drafter_busy": 0.25,
            "target_wait": 0.05,
            "drafter_wait": 0.75,
            "planning_wait": 1 / 80,
            "target_tokens_per_s": 2700 / 76,
            "drafter_tokens_per_s": 125.0,
        }
    )
    row = meter(2, 4).row(WORK)  # the same seconds, spread over more workers
    assert (row["target_busy"], row["drafter_busy"]) == pytest.approx((0.475, 0.0625))
    assert row["drafter_tokens_per_s"] == pytest.approx(500.0)
    idle = meter().row(Work(time=1.0))
    assert idle["target_wait"] == idle["drafter_wait"] == 1
    assert not {"target_tokens_per_s", "drafter_tokens_per_s"} & idle.keys()


def test_measured_sides_use_the_formula_of_the_plan() -> None:
    load = meter(1, 2, grad_accum=2)  # 40 batches
    balance = load.balance(WORK)
    assert balance is not None
    assert balance.batch_tokens == 2500 / 40
    assert balance.batch_s + 32 * balance.anchor_s == pytest.approx(20 / 40)
    batch_s, anchor_s = drafter_seconds(load.cfg, load.spec)
    assert balance.batch_s / balance.anchor_s == pytest.approx(batch_s / anchor_s)
    assert balance.sides == pytest.approx((2700 / 76, 2 * 125.0))
    summary = load.summary(WORK)
    assert summary is not None
    assert summary["line"].startswith(
        "the targets are the slower side and wait 5% of the time, the drafters wait 88% of the "
        "time; "
    )
    assert summary["targets_per_drafter"] == pytest.approx(125 / (2700 / 76), rel=1e-3)
    assert load.summary(dataclasses.replace(WORK, busy_s=0.0)) is None


def test_slow_planning_is_named() -> None:
    waiting = dataclasses.replace(WORK, target_busy_s=40.0, planning_s=30.0)
    summary = meter().summary(waiting)
    assert summary is not None
    assert summary["line"].startswith("planning of batches is the slowest part")
    waiting = dataclasses.replace(waiting, planning_s=10.0)  # the drafters hold the targets up
    assert "slower side" in meter().summary(waiting)["line"]  # type: ignore[index]


WORKERS = {
    "targets": (Target, "forward_capture"),
    "drafters": (DrafterTrainLoop, "_train_batch"),
}


@pytest.fixture
def slow_down(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float], None]:
    """slow_down("targets", seconds of each batch). Clocks then count what a thread alone took: what
    else this machine does makes no side slower."""
    slept = threading.local()

    class Own:
        @staticmethod
        def perf_counter() -> float:
            return time.thread_time() + getattr(slept, "seconds", 0.0)

    monkeypatch.setattr(devices, "time", Own)

    def apply(side: str, seconds: float) -> None:
        owner, method = WORKERS[side]
        work = getattr(owner, method)

        def slowed(self: object, *args: object, **kwargs: object) -> object:
            time.sleep(seconds)
            slept.seconds = getattr(slept, "seconds", 0.0) + seconds
            return work(self, *args, **kwargs)

        monkeypatch.setattr(owner, method, slowed)

    return apply


def balance_of(run: TinyRun, name: str) -> dict[str, Any]:
    return json.loads((run.folder / name / "summary.json").read_text())["balance"]


@pytest.mark.parametrize("slow", ["targets", "drafters"])
def test_a_run_says_which_side_is_slow(
    run: TinyRun,
    slow_down: Callable[[str, float], None],
    capsys: pytest.CaptureFixture[str],
    slow: str,
) -> None:
    slow_down(slow, 0.1)
    assert run("a", "--train.steps=8", "--train.eval_every=4") == 0
    summary = balance_of(run, "a")
    fast = "drafters" if slow == "targets" else "targets"
    assert summary["line"].startswith(f"the {slow} are the slower side and wait "), summary
    assert summary[f"{fast[:-1]}_wait"] > max(0.4, summary[f"{slow[:-1]}_wait"]), summary
    assert f"balance           {summary['line']}" in capsys.readouterr().out
    assert summary[f"{slow[:-1]}_tokens_per_s"] < summary[f"{fast[:-1]}_tokens_per_s"]
    rows = (run.folder / "a" / "metrics.jsonl").read_text().splitlines()
    logged = [row for row in map(json.loads, rows) if "loss" in row]
    assert all(0 <= row[f"{name}_wait"] <= 1 for row in logged for name in ("target", "drafter"))


@pytest.mark.parametrize(
    ("slots", "seconds", "beginning", "advice"),
    [
        (4, (0.2, 0.08), "the targets are the slower side and wait ", "train.max_anchors "),
        (2, (0.2, 0.12), "slots hold both sides up: ", "topology.slots_per_drafter 4 instead of 2"),
    ],
    ids=["targets", "slots"],
)
def test_five_targets_and_three_drafters_are_told_what_holds_them_up(
    run: TinyRun,
    slow_down: Callable[[str, float], None],
    slots: int,
    seconds: tuple[float, float],
    beginning: str,
    advice: str,
) -> None:
    for side, each in zip(WORKERS, seconds, strict=True):
        slow_down(side, each)
    flags = ("--topology.targets=[cpu, cpu, cpu, cpu, cpu]", "--topology.drafters=[cpu, cpu, cpu]")
    flags += (f"--topology.slots_per_drafter={slots}", "--data.eval=[]", "--train.steps=6")
    assert run("a", *flags) == 0
    summary = balance_of(run, "a")
    assert summary["line"].startswith(beginning) and advice in summary["line"], summary
    assert summary["targets_per_drafter"] == pytest.approx(seconds[0] / seconds[1], rel=0.25)


@pytest.mark.parametrize(
    ("targets", "drafters", "shared"),
    [
        (["cuda:0"], ["cuda:1"], False),
        (["cuda:0", "cuda:0"], ["cuda:1"], False),
        (["cuda:0"], ["cuda:0"], True),
        (["cuda:0+cuda:1"], ["cuda:1", "cuda:2"], True),
        (["cpu", "cpu"], ["cpu"], False),
    ],
)
def test_devices_with_both_roles(targets: list[str], drafters: list[str], shared: bool) -> None:
    cfg = load_config(PROJECT_ROOT / "configs" / "smollm2_cpu.yaml")
    cfg.topology.targets, cfg.topology.drafters = targets, drafters
    load = LoadMeter.of_run(cfg, build_model().spec, processes=3)
    assert (load.targets, load.drafters) == (3 * len(targets), 3 * len(drafters))
    assert (load.devices < load.targets + load.drafters) == shared
