"""The note of steps without a finite gradient, and the batches that such a step leaves."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cuda_waits import no_syncs
from tiny_run import TinyRun

from dflash_ext.drafter.loop import DrafterTrainLoop
from dflash_ext.drafter.loss import Objective
from dflash_ext.nonfinite import KEPT_STEPS, NonfiniteLog, NonfiniteSteps


def poison(patch: pytest.MonkeyPatch, *batches: int) -> None:
    """The loss of these batches is NaN."""
    stats = Objective.stats

    def poisoned(self: Any, model: Any, head: Any, kv: Any, plan: Any, *args: Any) -> Any:
        found = stats(self, model, head, kv, plan, *args)
        return found._replace(loss=found.loss * torch.nan) if plan.batch_id in batches else found

    patch.setattr(Objective, "stats", poisoned)


@contextmanager
def without_syncs(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    with no_syncs():
        yield
    torch.cuda.synchronize()


def note(log: NonfiniteLog, device: torch.device, step: int, losses: list[float], norm: float):
    for index, loss in enumerate(losses):
        log.batch(index, torch.full((), loss, device=device))
    log.step(step, torch.isfinite(torch.full((), norm, device=device)))


def test_steps_and_their_batches_arrive_without_a_sync(device: torch.device) -> None:
    log, nan, inf = NonfiniteLog(device), torch.nan, torch.inf
    torch.zeros((), device=device)  # the device is up
    with without_syncs(device):
        note(log, device, 0, [1.0, 1.0], 1.0)
        note(log, device, 1, [1.0, nan, -inf], nan)
        note(log, device, 2, [1.0, 1.0], inf)  # a gradient alone
        note(log, device, 3, [nan, 1.0], 1.0)  # a loss whose gradient was finite: not skipped
        note(log, device, 4, [1.0] * 40 + [nan], nan)  # more batches than are told apart
        log.send()
    assert log.between(0, 5) == {1: [1, 2], 2: [], 4: [31]}
    assert log.between(2, 4) == {2: []}
    assert log.between(5, 9) == {}


def test_only_the_last_steps_are_kept(device: torch.device) -> None:
    log = NonfiniteLog(device)
    for step in (3, KEPT_STEPS + 2, KEPT_STEPS + 3):
        note(log, device, step, [1.0], 1.0 if step == KEPT_STEPS + 3 else torch.nan)
    log.send()
    if device.type == "cuda":
        torch.cuda.synchronize()
    # Step 3's place has been taken; what lies far behind is not looked for.
    assert log.between(0, KEPT_STEPS + 4) == {KEPT_STEPS + 2: []}


def test_large_step_numbers_leave_room_for_the_batches() -> None:
    log, step = NonfiniteLog("cpu"), 2**30
    note(log, torch.device("cpu"), step, [torch.nan], torch.nan)
    assert log.between(step - 5, step + 1) == {step: [0]}


def test_the_error_says_which_steps() -> None:
    error = NonfiniteSteps([7, 5, 6], {21}, 3)
    assert error.steps == [5, 6, 7] and error.suspects == [21]
    assert "found 3 steps in a row without a finite gradient, 5 to 7, want fewer than 3" in str(
        error
    )


def test_weights_that_overflow_replace_no_checkpoint_and_are_not_exported(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though every gradient is finite: in the last step, as by a rate far too high."""
    flags, train_step = (
        ["--data.eval=[]", "--train.schedule=constant"],
        DrafterTrainLoop._train_step,
    )
    assert run("a", *flags, "--train.steps=2") == 0
    export = (run.folder / "a" / "export" / "model.safetensors").read_bytes()

    def overflow(self: DrafterTrainLoop, *args: Any) -> None:
        train_step(self, *args)
        self.params[-1].data.fill_(torch.inf)

    flags += ["--train.steps=3", "--resume"]
    with monkeypatch.context() as patch:
        patch.setattr(DrafterTrainLoop, "_train_step", overflow)
        assert run("a", *flags) == 1
    found = "error: drafter 0 (step 3, saving): NonfiniteWeights: step 3: "
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(found) and line.endswith(" has non-finite values, want finite weights")
    assert run.steps("a") == [2]
    assert (run.folder / "a" / "export" / "model.safetensors").read_bytes() == export
    assert run("a", *flags) == 0


def test_weights_that_were_saved_so_by_another_version_are_one_line(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dflash_ext.pipeline.check_finite", lambda *args: None)
    flags = ["--data.eval=[]", "--train.warmup_ratio=0", "--train.steps=1", "--train.lr=1e300"]
    for more in ([], ["--resume"]):
        assert run("a", *flags, *more) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: step 1: ") and line.endswith(", want finite weights")
    assert not (run.folder / "a" / "export").exists()


def test_batches_of_a_run_that_goes_on_with_other_drafters(run: TinyRun) -> None:
    """One step of batch 0, then two drafters: step 1 has 1 (drafter 1's) and 2 (drafter 0's)."""
    flags = ["--data.eval=[]", "--topology.drafters=[cpu, cpu]", "--resume"]
    assert run("a", "--data.eval=[]", "--train.steps=1") == 0
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, 1)
        assert run("a", *flags, "--train.steps=2") == 0
    row = json.loads((run.folder / "a" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["nonfinite_steps"] == 1 and row["nonfinite_batches"] == [1]


@pytest.mark.parametrize("accum", [1, 3])
def test_batches_are_named_by_their_ids(accum: int, run: TinyRun) -> None:
    """Of two drafters; the second one's second batch, with grad_accum, is number 3 of its step."""
    bad = {1: 3, 3: 2 * 3 + 3}[accum]  # a batch of step 1
    flags = ["--data.eval=[]", "--train.steps=2", "--topology.drafters=[cpu, cpu]"]
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, bad)
        assert run("a", *flags, f"--train.grad_accum={accum}") == 0
    (row,) = [json.loads(line) for line in (run.folder / "a" / "metrics.jsonl").open()]
    assert row["nonfinite_steps"] == 1 and row["nonfinite_batches"] == [bad]


@pytest.mark.parametrize("drafters", ["[cpu]", "[cpu, cpu]"])
def test_a_run_whose_steps_were_all_skipped_ends_without_an_export(
    drafters: str, run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too few to reach train.max_nonfinite_steps; the count goes on in a resumed run."""
    flags = [f"--topology.drafters={drafters}", "--data.eval=[]"]
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, *range(8))
        assert run("a", *flags, "--train.steps=3") == 1
        found = "error: train.steps: found none of 3 steps with a finite gradient, so no step "
        line, folder = capsys.readouterr().err.splitlines()[-1], run.folder / "a"
        assert line.startswith(found) and line.endswith(f"see {folder / 'nonfinite'}")
        assert not (folder / "export").exists() and not (folder / "summary.json").exists()
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
        assert run.steps("a") == [3]
        assert run("a", *flags, "--resume", "--train.steps=4") == 1
        assert "found none of 4 steps with a finite gradient" in capsys.readouterr().err
    assert run("a", *flags, "--resume", "--train.steps=6") == 0
    assert (folder / "export").exists()
