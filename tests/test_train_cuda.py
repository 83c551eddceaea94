"""Whole runs with targets and drafters on GPUs: placement, graphs, resume."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_ext import pipeline, train
from dflash_ext.command import run_command
from dflash_ext.drafter.loop import DrafterTrainLoop
from dflash_ext.hs_queue import Slot
from dflash_ext.target import Target, load_target
from dflash_ext.target_setup import fuse

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")

STEPS = 10
Run = Callable[..., int]


@pytest.fixture
def run(tiny_target_dir: Path, tiny_jsonl: Callable[..., Path], tmp_path: Path) -> Run:
    """run("name", "--section.field=value", ...) -> exit code; the run lies in tmp_path/name."""
    data = tiny_jsonl(n=9)
    heldout = tiny_jsonl(n=3, name="heldout.jsonl")

    def go(name: str, *flags: str) -> int:
        config = tmp_path / "config.yaml"
        config.write_text(
            f"""
model: {{target: {tiny_target_dir}, dtype: bfloat16}}
drafter: {{num_layers: 2, block_size: 4}}
data: {{train: [{data}], eval: [{heldout}], token_budget: 200}}
topology: {{targets: [0], drafters: [0]}}
train: {{steps: {STEPS}, lr: 0.003, max_anchors: 12, metrics_every: 2, stall_timeout_s: 120}}
log: {{dir: {tmp_path}, every: 2}}
"""
        )
        return run_command(
            lambda: train.main(["--config", str(config), f"--log.name={name}", *flags])
        )

    return go


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same(a: Path, b: Path) -> None:
    one, two = (load_file(folder / "export" / "model.safetensors") for folder in (a, b))
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    assert [row.get("loss") for row in rows(a)] == [row.get("loss") for row in rows(b)]


def test_target_and_drafter_on_one_gpu(run: Run, tmp_path: Path) -> None:
    assert run("a", "--train.steps=40") == 0
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["loss_last"] < 0.9 * summary["loss_first"]
    assert summary["peak_gpu_mib"] > 0
    logged = [row for row in rows(tmp_path / "a") if "loss" in row]
    assert all(row["nonfinite_steps"] == 0 and row["dropped_metrics"] == 0 for row in logged)
    for stage in ("drafter_busy", "target_busy"):
        assert 0 < max(row[stage] for row in logged) <= 1


def test_cpu_and_gpu_train_alike_in_fp32(run: Run, tmp_path: Path) -> None:
    flags = ["--model.dtype=float32", "--train.steps=6"]
    assert run("gpu", *flags) == 0
    assert run("cpu", *flags, "--topology.targets=cpu", "--topology.drafters=cpu") == 0
    losses = [[r["loss"] for r in rows(tmp_path / n) if "loss" in r] for n in ("gpu", "cpu")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("flags", [[], ["--train.grad_accum=2", "--train.anchor_group=5"]])
def test_graphs_change_no_bit(run: Run, tmp_path: Path, flags: list[str]) -> None:
    flags = [*flags, "--train.eval_every=3", "--train.noise_std=0.05", "--train.kl_weight=0.3"]
    assert run("eager", *flags) == 0
    assert run("graph", *flags, "--train.cuda_graph=true") == 0
    assert_same(tmp_path / "eager", tmp_path / "graph")


@pytest.mark.parametrize("cuda_graph", ["false", "true"])
def test_resume_is_exact(run: Run, tmp_path: Path, monkeypatch, cuda_graph: str) -> None:
    flags = [f"--train.cuda_graph={cuda_graph}", "--train.eval_every=2"]
    assert run("whole", *flags) == 0
    publish = DrafterTrainLoop._publish

    def stop(self: DrafterTrainLoop, done: int, stopping: bool = False) -> None:
        publish(self, done, stopping)
        if done == 5 and not stopping:
            os.kill(os.getpid(), signal.SIGTERM)
            while self.supervisor.signum is None:
                time.sleep(0.01)

    with monkeypatch.context() as patch:
        patch.setattr(DrafterTrainLoop, "_publish", stop)
        assert run("parts", *flags) == 128 + signal.SIGTERM
    assert run("parts", *flags, "--resume") == 0
    one, two = (
        load_file(tmp_path / n / "export" / "model.safetensors") for n in ("whole", "parts")
    )
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_late_targets_and_poisoned_slots_change_no_bit(
    run: Run, tmp_path: Path, monkeypatch
) -> None:
    """The events of a slot, not luck, keep its reader and its writer apart."""
    assert run("plain") == 0
    delay_layers(monkeypatch)
    assert run("late") == 0
    assert_same(tmp_path / "plain", tmp_path / "late")


@pytest.mark.parametrize("cuda_graph", ["false", "true"])
def test_late_drafters_and_slots_that_come_back_with_nan_change_no_bit(
    run: Run, tmp_path: Path, monkeypatch, cuda_graph: str
) -> None:
    """A target that did not wait for a slot's reader would have NaN written over its states."""
    flags = [f"--train.cuda_graph={cuda_graph}", "--train.kl_weight=0.3"]
    assert run("plain", *flags) == 0
    wait_ready, set_free = Slot.wait_ready, Slot.set_free

    def late(self: Slot) -> None:
        wait_ready(self)
        torch.cuda._sleep(20_000_000)

    def poison(self: Slot) -> None:
        rows = self.ticket.plan.n_tokens  # what lies behind them has to stay zero
        self.hidden[:rows].fill_(torch.nan)
        self.last_hidden[:rows].fill_(torch.nan)
        set_free(self)

    monkeypatch.setattr(Slot, "wait_ready", late)
    monkeypatch.setattr(Slot, "set_free", poison)
    assert run("late", *flags) == 0
    assert_same(tmp_path / "plain", tmp_path / "late")


def delay_layers(monkeypatch) -> None:
    """Every captured layer is first packed as NaN, then again behind a pause of its GPU."""
    forward = Target.forward_capture

    def late(self, input_ids, layer_ids, on_layer, need_last):
        def delayed(index, hidden):
            on_layer(index, torch.full_like(hidden, torch.nan))
            torch.cuda._sleep(20_000_000)
            on_layer(index, hidden)

        return forward(self, input_ids, layer_ids, delayed, need_last)

    monkeypatch.setattr(Target, "forward_capture", late)


def test_the_warm_up_is_said_and_gives_its_memory_back(run: Run, capsys) -> None:
    assert run("a", "--train.steps=2") == 0
    assert "\nwarm-up  cuda:0: " in capsys.readouterr().out


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no FP8"
)
def test_a_target_in_fp8(run: Run, tmp_path: Path) -> None:
    assert run("fp8", "--model.weights=fp8") == 0
    assert run("again", "--model.weights=fp8") == 0
    assert_same(tmp_path / "fp8", tmp_path / "again")
    facts = json.loads((tmp_path / "fp8" / "summary.json").read_text())["fp8"]
    assert facts["linears"] == 42 and facts["argmax_agreement"] > 0.5
    assert all(0.005 < error < 0.2 for error in facts["relative_error"].values())


@needs_two
@pytest.mark.parametrize("drafter", [0, 1])
@pytest.mark.parametrize("late", [False, True])
def test_a_target_spread_over_two_gpus(
    run: Run, tmp_path: Path, monkeypatch, drafter: int, late: bool
) -> None:
    flags = ["--train.kl_weight=0.3", f"--topology.drafters=[{drafter}]"]
    assert run("one", *flags, "--topology.targets=[0]") == 0
    if late:
        delay_layers(monkeypatch)
    assert run("spread", *flags, "--topology.targets=[0+1]") == 0
    assert run("back", *flags, "--topology.targets=[1+0, 0]") == 0
    assert_same(tmp_path / "one", tmp_path / "spread")
    assert_same(tmp_path / "one", tmp_path / "back")


@needs_two
def test_parts_of_a_spread_target_lie_on_both_gpus(tiny_target_dir: Path) -> None:
    whole = load_target(str(tiny_target_dir), dtype="bfloat16", device="cuda:0")
    spread = load_target(str(tiny_target_dir), dtype="bfloat16", device="cuda:0+cuda:1")
    fuse(spread)
    for target in (spread, whole.copy_to("cuda:1+cuda:0"), spread.copy_to("cuda:1").replica()):
        places = [next(layer.parameters()).device.index for layer in target.layers]
        assert set(places) == {device.index for device in target.devices}
        found: list[torch.Tensor] = []
        ids = torch.arange(64, device=target.device).view(4, 16)
        keep = found.append
        target.forward_capture(ids, [0, 4], lambda _, h, keep=keep: keep(h), need_last=False)
        assert torch.cuda.current_device() == 0
        assert [h.device.index for h in found] == [places[0], places[4]]
        assert all(torch.isfinite(h).all() for h in found)


@needs_two
@pytest.mark.parametrize("cuda_graph", ["false", "true"])
def test_target_and_drafter_on_two_gpus(run: Run, tmp_path: Path, cuda_graph: str) -> None:
    flags = [f"--train.cuda_graph={cuda_graph}"]
    assert run("one", *flags) == 0
    assert run("two", *flags, "--topology.targets=0", "--topology.drafters=1") == 0
    assert run("back", *flags, "--topology.targets=1", "--topology.drafters=0") == 0
    assert_same(tmp_path / "one", tmp_path / "two")
    assert_same(tmp_path / "one", tmp_path / "back")


@needs_two
@pytest.mark.parametrize("cuda_graph", ["false", "true"])
@pytest.mark.parametrize("copies", [False, True], ids=["nccl", "copies"])
def test_two_drafters_hold_the_same_weights(
    run: Run, monkeypatch, cuda_graph: str, copies: bool
) -> None:
    if not copies:
        monkeypatch.setattr(pipeline, "make_board", lambda devices: None)
    loops: list[DrafterTrainLoop] = []
    run_loop = DrafterTrainLoop.run
    monkeypatch.setattr(
        DrafterTrainLoop, "run", lambda self, worker: (loops.append(self), run_loop(self, worker))
    )
    flags = ["--topology.targets=[0,1]", "--topology.drafters=[0,1]"]
    assert run("a", *flags, f"--train.cuda_graph={cuda_graph}") == 0
    one, two = (loop.model.state_dict() for loop in loops)
    assert [name for name in one if not torch.equal(one[name].cpu(), two[name].cpu())] == []
