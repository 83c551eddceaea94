"""Faults injected into whole runs, and the proof that each mechanism against them is needed."""

import json
import multiprocessing
import os
import re
import signal
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_child
import torch
from fault_switches import MECHANISMS, found
from safetensors.torch import load_file
from tiny_run import TinyRun

from dflash_ext.data.packing import BatchPlanner
from dflash_ext.drafter.loop import DrafterTrainLoop
from dflash_ext.drafter.loss import Objective
from dflash_ext.supervisor import Supervisor
from dflash_ext.target_loop import TargetForwardLoop

TESTS = Path(__file__).parent


HERE = "dflash_ext"
BOUND_S = 60  # of a run whose faults nothing ends


class Runs(TinyRun):
    """Runs that end by themselves, or are ended; ``supervisors`` of all, the last one last."""

    supervisors: list[Supervisor]


@pytest.fixture
def run(
    tiny_target_dir: Path, tiny_jsonl: Callable[..., Path], tmp_path: Path, monkeypatch
) -> Runs:
    runs = Runs(tiny_target_dir, tiny_jsonl, tmp_path)
    runs.supervisors = []
    init = Supervisor.__init__

    def bounded(self: Supervisor, *args: Any) -> None:
        init(self, *args)
        runs.supervisors.append(self)
        timer = threading.Timer(BOUND_S, self.stop.set)
        timer.daemon = True
        timer.start()

    monkeypatch.setattr(Supervisor, "__init__", bounded)
    return runs


def rows(run: Runs, name: str = "a") -> list[dict]:
    text = (run.folder / name / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def weights(run: Runs, name: str) -> dict[str, torch.Tensor]:
    return load_file(run.folder / name / "export" / "model.safetensors")


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def at_call(patch: pytest.MonkeyPatch, place: str, number: int, act: Callable[[], None]) -> None:
    """act() before call `number` (from 1) of what is at `place` (see fault_switches)."""
    owner, name = found(place)
    original, calls = getattr(owner, name), []

    def patched(*args: Any, **kwargs: Any) -> Any:
        calls.append(time.monotonic())
        if len(calls) == number:
            act()
        return original(*args, **kwargs)

    patch.setattr(owner, name, patched)


def raises(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


# Each worker at its odd moments: (place, call, who and where the message says it was).
MOMENTS = {
    "prefetcher at the start": ("data.packing:BatchPrefetcher.tickets", 1, "prefetcher (starting)"),
    "target in evaluation": (
        "target_loop:TargetForwardLoop._forward",
        1,
        "target 0 (step 0, batch",
    ),
    "target in training": ("target_loop:TargetForwardLoop._forward", 4, "target 0 (step "),
    "target at hand-over": ("hs_queue:BufferedHSQueue.publish", 3, "target 0 (step "),
    "drafter at the start": ("grad_sync:GradSync.connect", 1, "drafter 0 (starting)"),
    "drafter in evaluation": ("drafter.loop:evaluate_plan", 1, "drafter 0 (step 0, evaluation"),
    "drafter in the last one": ("drafter.loop:evaluate_plan", 2, "drafter 0 (step 6, eval"),
    "drafter in the update": (
        "optim:DrafterOptimizer.update",
        3,
        "drafter 0 (step 2, batches",
    ),
    "drafter saving": ("pipeline:Pipeline._save", 1, "drafter 0 (step "),
    "monitor at the start": ("monitor:Monitor._collect", 1, "monitor (logging)"),
    "monitor in a row": ("logger:RunLogger.progress", 2, "monitor (logging)"),
    "writer, noticed later": ("checkpoint:save_file", 1, "drafter 0 (step "),
    "writer, noticed at the end": ("checkpoint:save_file", 3, ""),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_that_raises_at_any_moment_ends_the_run(
    moment: str, run: Runs, monkeypatch, capsys
) -> None:
    place, call, said = MOMENTS[moment]
    at_call(monkeypatch, f"dflash_ext.{place}", call, raises(ZeroDivisionError("injected")))
    assert run("a", "--checkpoint.every=2", "--checkpoint.async_save=true") == 1
    line = last_line(capsys)
    assert line.startswith(f"error: {said}") and line.endswith(": ZeroDivisionError: injected")
    assert (run.folder / "a" / "export").exists() == (not said)  # the weights were there by then


def test_a_target_that_stalls_ends_the_run(run: Runs, monkeypatch, capsys) -> None:
    monkeypatch.setattr("dflash_ext.supervisor.JOIN_S", 0.2)
    ended = threading.Event()
    at_call(monkeypatch, "dflash_ext.target_loop:TargetForwardLoop._forward", 1, ended.wait)
    monkeypatch.setattr(f"{__name__}.BOUND_S", 15)
    assert run("a", "--train.stall_timeout_s=1.5", "--data.eval=[]") == 1
    line = last_line(capsys)
    ended.set()
    assert "watchdog: TimeoutError: no progress for 1.5 s" in line and "target 0: step 0" in line


# -- non-finite steps --------------------------------------------------------------------------


def poison(patch: pytest.MonkeyPatch, what: str, batches: set[int]) -> None:
    """NaN or infinity in what these training batches make."""
    fill, stats = TargetForwardLoop._fill, Objective.stats

    def filled(self: Any, slot: Any, ticket: Any) -> None:
        fill(self, slot, ticket)
        if ticket.plan.kind == "train" and ticket.plan.batch_id in batches:
            slot.hidden[0, 0] = torch.nan

    def with_loss(self: Any, model: Any, head: Any, kv: Any, plan: Any, *rest: Any) -> Any:
        found = stats(self, model, head, kv, plan, *rest)
        if plan.batch_id in batches and what == "gradient":
            found.loss.register_hook(lambda grad: grad * torch.inf)
        elif plan.batch_id in batches:
            found = found._replace(loss=found.loss * torch.nan)
        return found

    if what == "hidden states":
        patch.setattr(TargetForwardLoop, "_fill", filled)
    else:
        patch.setattr(Objective, "stats", with_loss)


@pytest.mark.parametrize(
    ("what", "named"), [("hidden states", [2]), ("loss", [2]), ("gradient", [2, 3])]
)
def test_a_step_that_is_not_finite_is_skipped_counted_and_named(
    what: str, named: list[int], run: Runs, monkeypatch, capsys
) -> None:
    """Batch 2 is the first one of step 1; only its gradient does not say whose it was."""
    poison(monkeypatch, what, {2})
    publish, states = DrafterTrainLoop._publish, {}

    def keep(self: DrafterTrainLoop, done: int, stopping: bool = False) -> None:
        states[self.rank, done] = torch.cat([p.detach().flatten() for p in self.params])
        publish(self, done, stopping)

    monkeypatch.setattr(DrafterTrainLoop, "_publish", keep)
    assert run("a", "--data.eval=[]", "--train.steps=4", "--topology.drafters=[cpu, cpu]") == 0
    for rank in (0, 1):
        one, two, three = (states[rank, done] for done in (1, 2, 3))
        assert torch.equal(one, two) and torch.isfinite(three).all() and not torch.equal(two, three)
    first, second = rows(run)
    assert first["nonfinite_steps"] == 1 and first["nonfinite_batches"] == named
    assert second["nonfinite_steps"] == 0 and "nonfinite_batches" not in second
    shown = ", ".join(map(str, named))
    assert f"skipped without a finite gradient: step 1 (batch {shown})" in capsys.readouterr().out


def test_nonfinite_steps_in_a_row_end_the_run_and_leave_their_batch(
    run: Runs, monkeypatch, capsys
) -> None:
    """Three in a row, although no row of the log has three; two before them do not count."""
    poison(monkeypatch, "loss", {1, 2, 5, 6, 7, 8, 9})
    step_plans, planned = BatchPlanner.step_plans, {}

    def kept(self: BatchPlanner, step: int) -> list:
        plans = step_plans(self, step)
        return [planned.setdefault(plan.batch_id, plan) for plan in plans]

    monkeypatch.setattr(BatchPlanner, "step_plans", kept)
    flags = ["--data.eval=[]", "--train.steps=500", "--train.max_nonfinite_steps=3"]
    assert run("a", *flags) == 1
    folder = run.folder / "a" / "nonfinite"
    assert last_line(capsys).endswith(
        "train.max_nonfinite_steps: found 3 steps in a row without a finite gradient, 5 to 7, "
        f"want fewer than 3; step 5 failed with the batches 5, see {folder}"
    )
    assert sorted(path.name for path in folder.iterdir()) == ["batch_5.safetensors", "batches.json"]
    tensors, plan = load_file(folder / "batch_5.safetensors"), planned[5]
    assert {"input_ids", "lengths", "src_index", "anchors", "labels", "weights"} <= tensors.keys()
    assert all(torch.equal(tensor, getattr(plan, name)) for name, tensor in tensors.items())
    about = json.loads((folder / "batches.json").read_text())
    assert about["steps"] == [5, 6, 7]
    (batch,) = about["batches"]
    assert batch["batch"] == 5 and len(batch["examples"]) == len(plan.doc_ids) > 0
    assert all(re.search(r"train\.jsonl:\d+$", source) for source in batch["examples"])


# -- signals -----------------------------------------------------------------------------------

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_while_loading_ends_the_command(signum: int, run: Runs, monkeypatch, capsys):
    at_call(monkeypatch, "dflash_ext.pipeline:load_target", 1, lambda: os.kill(os.getpid(), signum))
    assert run("a") == 128 + signum
    said = capsys.readouterr()
    assert "stopped by signal before the first step; nothing was saved" in said.out
    assert said.err == "" and [path.name for path in (run.folder / "a").iterdir()] == ["lock"]


@pytest.fixture(scope="module")
def whole(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The run that nothing interrupts."""
    from conftest import tiny_chats

    folder = tmp_path_factory.mktemp("whole")

    def jsonl(n: int, name: str = "train.jsonl") -> Path:
        (folder / name).write_text("\n".join(map(json.dumps, tiny_chats(n))) + "\n")
        return folder / name

    runs = Runs(tiny_target_dir, jsonl, folder)
    assert runs("whole", *SAVING) == 0
    return runs


SAVING = ("--checkpoint.every=2", "--train.eval_every=3")
ODD_MOMENTS = {
    "first evaluation": ("drafter.loop:evaluate_plan", 1),
    "second evaluation": ("drafter.loop:evaluate_plan", 2),
    "saving": ("checkpoint:save_file", 1),
    "between tensors and name": ("checkpoint:_write_synced", 3),
    "forward pass": ("target_loop:TargetForwardLoop._forward", 4),
}


@pytest.mark.parametrize("moment", ODD_MOMENTS)
def test_a_signal_at_an_odd_moment_is_a_saved_stop(
    moment: str, run: Runs, whole: Runs, monkeypatch
) -> None:
    place, call = ODD_MOMENTS[moment]
    signum = SIGNALS[len(moment) % 2]

    def send() -> None:
        os.kill(os.getpid(), signum)
        deadline = time.monotonic() + 10
        while run.supervisors[-1].signum is None and time.monotonic() < deadline:
            time.sleep(0.01)  # the handler runs in the main thread

    with monkeypatch.context() as patch:
        at_call(patch, f"dflash_ext.{place}", call, send)
        assert run("a", *SAVING) == 128 + signum
    assert not (run.folder / "a" / "export").exists()
    assert run("a", *SAVING, "--resume") == 0
    one, two = weights(whole, "whole"), weights(run, "a")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert rows(run)[-1]["eval_accept_len"] == rows(whole, "whole")[-1]["eval_accept_len"]


# -- memory ------------------------------------------------------------------------------------

CUDA = (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 1.50 GiB.\nMore.")
CPU = (RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory: 12 bytes")
LOSS = "torch:ops.dflash_ext.draft_loss.default"
MEMORY = {
    "target": (f"{HERE}.target:Target.forward_capture", CUDA, "the target", "data.token_budget"),
    "loss": (LOSS, CUDA, "the loss", "train.loss_chunk_rows (null, that is up to 4096) or train"),
    "anchors": (
        *(f"{HERE}.drafter.model:DraftLayer.forward", CPU, "the drafter's activations"),
        "train.anchor_group (null, that is 12) or train.max_anchors (12)",
    ),
    "optimizer": (f"{HERE}.optim:adamw", CUDA, "the optimizer", "drafter.num_layers (2)"),
    "evaluation": (
        f"{HERE}.drafter.model:DFlashDraftModel.context",
        CPU,
        "the evaluation",
        "data.token_budget (200)",
    ),
    "plans": (f"{HERE}.data.packing:_Documents.pack", (MemoryError, ""), "the plans", "data."),
}


@pytest.mark.parametrize("stage", MEMORY)
def test_out_of_memory_names_the_plan_and_the_field_to_lower(
    stage: str, run: Runs, monkeypatch, capsys
) -> None:
    place, (kind, said), named, fields = MEMORY[stage]
    at_call(monkeypatch, place, 1, raises(kind(said)))
    assert run("a", *(["--data.eval=[]"] if stage != "evaluation" else [])) == 1
    line = last_line(capsys)
    assert said.partition("\n")[0] in line
    assert f"; {named} ran out of memory: lower {fields}" in line
    assert re.search(r"; planned: cpu \d+\.\d MiB \(.*slots \d.*\)$", line)


def test_slots_that_are_too_large_for_this_machine(run: Runs, capsys) -> None:
    assert run("a", "--data.token_budget=1000000000000") == 1
    fields = "topology.slots_per_drafter (2) or data.token_budget (1000000000000)"
    assert f"; the slots ran out of memory: lower {fields}; planned: cpu " in last_line(capsys)
    assert [path.name for path in (run.folder / "a").iterdir()] == ["lock"]


# -- the switches ------------------------------------------------------------------------------


def function(test: str) -> str:
    """FILE::NAME of FILE::NAME[CASE]."""
    return test.partition("[")[0]


@pytest.mark.parametrize("name", MECHANISMS)
def test_switches_name_tests_that_are_there_and_change_something(name: str) -> None:
    for test in map(function, MECHANISMS[name].tests):
        file, _, test_name = test.partition("::")
        assert f"\ndef {test_name}(" in (TESTS / file).read_text(encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        MECHANISMS[name].off(patch)
        changed = [(owner, attr, old) for owner, attr, old in patch._setattr]
        assert changed
        for owner, attr, old in changed:
            assert getattr(owner, attr) is not old


@pytest.fixture(scope="module")
def children() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest_child"])
    return context


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_without_its_mechanism_every_fault_test_fails(
    name: str, children: Any, tmp_path: Path
) -> None:
    """They fail by themselves: no error while they are set up, no time-out."""
    report, output = tmp_path / "report.xml", tmp_path / "output"
    # Native tracebacks: pytest's own fail behind a recursion that was too deep.
    arguments = ["-q", "-p", "no:cacheprovider", "--timeout=200", "--tb=native"]
    arguments += [f"--fault-off={name}", f"--junitxml={report}"]
    arguments += [str(TESTS / test) for test in MECHANISMS[name].tests]
    child = children.Process(target=pytest_child.main, args=(arguments, output))
    child.start()
    child.join(1500)
    child.kill()
    assert report.exists(), output.read_text()
    cases = list(ET.parse(report).iter("testcase"))
    assert len(cases) >= len(MECHANISMS[name].tests)
    passed = [case.get("name") for case in cases if not case.findall("failure")]
    assert passed == [], output.read_text()
    for case in cases:
        messages = [failure.get("message") or "" for failure in case]
        assert case.findall("error") == [] and not any("Timeout (>" in said for said in messages)
