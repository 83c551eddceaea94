"""What a resumed run goes on with: from nothing, from step 0, with other numbers of drafters."""

import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import TinyRun, change_a_weight

from dflash_ext import checkpoint, monitor, train
from dflash_ext.command import run_command
from dflash_ext.config import DataConfig, TrainConfig
from dflash_ext.data.corpus import Example
from dflash_ext.data.packing import BatchPlanner
from dflash_ext.drafter.loop import DrafterTrainLoop
from dflash_ext.layout import BlockLayout
from dflash_ext.optim import lr_at


def rows(run: TinyRun, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / name / "metrics.jsonl").open()]


def send(loop: DrafterTrainLoop, signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)
    while loop.supervisor.signum is None:  # the handler runs in the main thread
        time.sleep(0.001)


def signalled_in_evaluation(step: int, patch: pytest.MonkeyPatch) -> None:
    """SIGTERM once the evaluation before `step` has begun (its end, if it is the last one)."""
    evaluate = DrafterTrainLoop._maybe_evaluate

    def patched(self: DrafterTrainLoop, at: int, worker: Any) -> None:
        if at == step == self.steps.stop:
            send(self, signal.SIGTERM)
        evaluate(self, at, worker)
        if at == step < self.steps.stop:
            send(self, signal.SIGTERM)

    patch.setattr(DrafterTrainLoop, "_maybe_evaluate", patched)


def test_a_run_killed_before_its_first_checkpoint_starts_anew(run, tmp_path, capsys) -> None:
    assert run("whole") == 0
    killed = tmp_path / "a"
    killed.mkdir()
    (killed / "config.yaml").write_text((tmp_path / "whole" / "config.yaml").read_text())
    (killed / "metrics.jsonl").write_text('{"step": 0, "eval_accept_len": 9.0}\n{"step": 2, "lo')
    (killed / "checkpoints" / "step_00000002.tmp").mkdir(parents=True)
    assert run("a") == 2
    assert "--resume" in capsys.readouterr().err
    flags = ["--log.dir", str(tmp_path), "--log.name", "a", "--resume"]
    assert run_command(lambda: train.main(flags)) == 0
    out = capsys.readouterr().out
    said = "resume   found no checkpoint yet: from the beginning; checkpoint.every 0 saves only at "
    assert said in out and f"rows of before are kept in {killed / 'metrics.1.jsonl'}\n" in out
    assert (killed / "metrics.1.jsonl").read_text().startswith('{"step": 0, "eval_accept_len": 9.0')
    losses = [[row.get("loss") for row in rows(run, name)] for name in ("whole", "a")]
    assert losses[0] == losses[1]


def test_a_target_that_changed_in_place_is_refused(
    run: TinyRun, tiny_target_dir: Path, tmp_path: Path, capsys
) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_target_dir, target)
    assert run("a", f"--model.target={target}") == 0
    assert run("a", f"--model.target={target}", "--resume", "--train.steps=7") == 0
    change_a_weight(target)
    assert run("a", f"--model.target={target}", "--resume", "--train.steps=8") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: model.target: found weights with checksum ")
    assert error.endswith("as in the checkpoint of step 7")


def test_a_mistyped_name_does_not_start_the_default_run(tmp_path: Path, capsys) -> None:
    flags = ["--log.dir", str(tmp_path), "--log.name", "typo", "--resume"]
    assert run_command(lambda: train.main(flags)) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: --resume: found no run in {tmp_path}/typo, want ")
    assert err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_every_example_once_an_epoch_with_any_numbers_of_drafters(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    trained: list[tuple[int, int, list[int]]] = []
    train_batch = DrafterTrainLoop._train_batch

    def record(self: DrafterTrainLoop, slot: Any, index: int) -> Any:
        plan = slot.ticket.plan
        trained.append((plan.batch_id, plan.epoch, plan.doc_ids))
        return train_batch(self, slot, index)

    monkeypatch.setattr(DrafterTrainLoop, "_train_batch", record)
    flags = ["--data.eval=[]", "--train.grad_accum=2"]
    assert run("a", *flags, "--train.steps=1") == 0  # batches 0, 1
    more = [*flags, "--resume", "--topology.drafters=[cpu, cpu, cpu]"]
    assert run("a", *more, "--train.steps=2") == 0  # 2 ... 7
    assert "1 drafters before, 3 now: goes on with the next batch" in capsys.readouterr().out
    more = [*flags, "--resume", "--topology.drafters=[cpu, cpu]"]
    assert run("a", *more, "--train.steps=null", "--train.epochs=4") == 0
    assert sorted(batch for batch, _, _ in trained) == list(range(len(trained)))
    seen = Counter((epoch, doc) for _, epoch, docs in trained for doc in docs)
    assert {(epoch, doc) for epoch in range(4) for doc in range(9)} <= seen.keys()
    assert set(seen.values()) == {1}
    tokens = [row["tokens"] for row in rows(run, "a") if "tokens" in row]
    assert tokens == sorted(tokens)


def planner(world: int, epochs: int | None, start: tuple[int, int]) -> BatchPlanner:
    cfg = TrainConfig(grad_accum=2, max_anchors=4, epochs=epochs or 1)
    cfg.steps = None if epochs else 30
    ids, mask = np.arange(1, 9, dtype=np.int32), np.ones(8, dtype=np.uint8)
    examples = [Example(ids, mask, "data.jsonl:1")] * 60  # each of them alone in a batch
    data = DataConfig(token_budget=8)
    return BatchPlanner(examples, data, cfg, BlockLayout(4), world, None, start)


def test_the_schedule_follows_the_data_when_the_number_of_drafters_changes() -> None:
    cfg = TrainConfig(warmup_ratio=0.1)
    one = planner(1, 2, (0, 0))  # 60 steps of 2 batches
    assert one.total_steps() == 60 and one.schedule_shift() == 0
    more = planner(3, 2, (20, 40))  # 80 of 120 batches are left: 14 steps of 6
    assert more.total_steps() == 34 and more.first_batch(21) == 46
    shift = more.schedule_shift()
    assert shift == Fraction(40, 6) - 20
    before = lr_at(20, 60, cfg)
    assert lr_at(20 + shift, 34 + shift, cfg) == pytest.approx(before, rel=0.02)
    # Exactly the same in a run that goes on once more.
    again = planner(3, 2, (27, more.first_batch(27)))
    assert again.schedule_shift() == shift and again.total_steps() == 34
    assert planner(3, None, (20, 40)).schedule_shift() == 0  # train.steps: by the step


def test_rows_are_in_the_log_before_a_checkpoint_counts(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "POLL_S", 1.0)  # it would come too late by itself
    found = []
    fsync = checkpoint._fsync

    def look(path: Path) -> None:
        fsync(path)
        if path.name == "checkpoints":  # a checkpoint has got its name
            steps = [int(p.name[5:]) for p in path.glob("step_????????")]
            found.append((max(steps), rows(run, "a")[-1]["step"]))

    monkeypatch.setattr(checkpoint, "_fsync", look)
    assert run("a", "--checkpoint.every=3", "--checkpoint.async_save=true") == 0
    assert {step for step, _ in found} == {3, 6} and all(step <= row for step, row in found)
    assert [row["step"] for row in rows(run, "a")] == [0, 2, 3, 4, 6]  # one ends at each checkpoint


def test_a_signal_behind_the_first_evaluation_keeps_its_row(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signalled_in_evaluation(0, patch)
        assert run("a", "--train.steps=2") == 128 + signal.SIGTERM
    assert run("a", "--resume", "--train.steps=2") == 0
    assert "eval_accept_len" in rows(run, "a")[0]


def test_a_signal_in_the_last_evaluation_leaves_it_to_the_resumed_run(
    run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patch:
        signalled_in_evaluation(2, patch)
        assert run("a", "--train.steps=2") == 128 + signal.SIGTERM
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before
    assert not (tmp_path / "a" / "summary.json").exists()
    assert run("a", "--resume", "--train.steps=2") == 0
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["accept_len_after"] >= 1
    assert [row["step"] for row in rows(run, "a")] == [0, 2]


def test_a_run_outside_of_the_main_thread_trains(run: TinyRun) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run("a", "--train.steps=1")))
    thread.start()
    thread.join()
    assert codes == [0]


def test_a_failed_run_waits_for_the_checkpoint_under_way(
    run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file = checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", lambda *a: (time.sleep(0.5), save_file(*a))[1])
    train_step = DrafterTrainLoop._train_step

    def failing(self: DrafterTrainLoop, step: int, worker: Any) -> None:
        if step == 2:
            raise ValueError("injected")
        train_step(self, step, worker)

    monkeypatch.setattr(DrafterTrainLoop, "_train_step", failing)
    flags = ["--checkpoint.every=2", "--checkpoint.async_save=true", "--data.eval=[]"]
    assert run("a", *flags) == 1
    assert not [t.name for t in threading.enumerate() if t.name == "checkpoint"]
    assert run.steps("a") == [2] and not list((tmp_path / "a" / "checkpoints").glob("*.tmp"))
