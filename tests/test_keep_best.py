"""checkpoint.keep_best: which checkpoints stay, by the acceptance length on held-out text."""

import json
import math
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_ext import export
from dflash_ext.checkpoint import CheckpointManager
from dflash_ext.command import run_command
from dflash_ext.config import CheckpointConfig
from dflash_ext.drafter import loop

FLAGS = ("--checkpoint.keep_best=true", "--checkpoint.keep=1", "--train.eval_every=1")


@pytest.fixture
def fake_scores(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """fake_scores(1.0, 1.5, ...): what the evaluations find, one after the other."""

    def fake(*scores: float) -> None:
        waiting = list(scores)
        monkeypatch.setattr(loop, "accept_len", lambda lengths: waiting.pop(0))

    return fake


def manager(folder: Path) -> CheckpointManager:
    return CheckpointManager(folder / "checkpoints", CheckpointConfig())


def test_a_new_best_is_saved_and_stays(run, fake_scores, tmp_path, capsys):
    fake_scores(1.0, 1.2, 1.9, 1.5, 1.9, 1.1, 1.4)  # before the run and after each of six steps
    assert run("a", *FLAGS) == 0
    assert run.steps("a") == [2, 6]  # an equal one is no new best
    assert manager(tmp_path / "a").scores() == {2: 1.9, 6: 1.4}
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("export the best")]
    out = str(tmp_path / "best")
    arguments = [*line.split("dflash_ext.export ")[1].split(), "--out", out]
    assert run_command(lambda: export.main(arguments)) == 0
    tensors, meta = manager(tmp_path / "a").load(2)
    exported = load_file(tmp_path / "best" / "model.safetensors")
    assert meta["step"] == 2
    assert all(torch.equal(tensors[f"model.{n}"], t) for n, t in exported.items())


def test_it_follows_the_real_evaluations(run, capsys):
    assert run("a", *FLAGS) == 0
    untrained, *scores = run.scores("a").values()
    best = 1 + scores.index(max(scores))
    kept = max(scores) > max(untrained, scores[-1])  # an equal last one replaces it
    assert run.steps("a") == sorted({6} | ({best} if kept else set()))


def test_a_run_that_only_got_worse_keeps_its_last(run, fake_scores, capsys):
    fake_scores(2.0, 1.2, 1.9, 1.5, math.nan, 1.1, 1.4)
    assert run("a", *FLAGS) == 0
    assert run.steps("a") == [6]
    assert "export the best" not in capsys.readouterr().out


def test_regular_checkpoints_and_the_best(run, fake_scores):
    fake_scores(1.0, 1.9, 1.2, 1.5, 1.2, 1.1, 1.4)
    assert run("a", *FLAGS, "--checkpoint.every=2", "--checkpoint.keep=2") == 0
    assert run.steps("a") == [1, 4, 6]


def test_without_it_no_extra_checkpoint_is_saved(run, fake_scores):
    fake_scores(1.0, 1.9, 1.2, 1.5, 1.2, 1.1, 1.4)
    assert run("a", *FLAGS, "--checkpoint.keep_best=false") == 0
    assert run.steps("a") == [6]


def test_a_resumed_run_knows_the_best_of_its_earlier_part(run, fake_scores, monkeypatch):
    begin = loop.Supervisor.begin_step

    def stop_at_3(self, step: int) -> bool:
        if step == 3:
            self.signum = signal.SIGTERM
        return begin(self, step)

    fake_scores(1.0, 1.3, 1.8, 1.2)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Supervisor, "begin_step", stop_at_3)
        assert run("a", *FLAGS) == 128 + signal.SIGTERM
    assert run.steps("a") == [2, 3]
    fake_scores(1.7, 1.6, 1.5)
    assert run("a", *FLAGS, "--resume") == 0
    assert run.steps("a") == [2, 6]


@pytest.mark.parametrize("flag", ["--train.eval_every=0", "--data.eval=[]"])
def test_without_evaluations_it_is_refused(run, flag, capsys):
    assert run("a", *FLAGS, flag) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: checkpoint.keep_best: found true with ")


@pytest.mark.parametrize("score", ["1.5", None, True, [1], math.nan, math.inf, {}])
def test_a_score_that_is_no_number_is_none(tmp_path, score):
    checkpoints = manager(tmp_path)
    checkpoints.save(1, {"x": torch.zeros(1)}, {}, score=1.25)
    checkpoints.save(2, {"x": torch.zeros(1)}, {}, score=1.0)
    meta = tmp_path / "checkpoints" / "step_00000002" / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"score": score}))
    assert checkpoints.scores() == {1: 1.25} and checkpoints.best() == 1


def test_no_score_no_best(tmp_path, capsys):
    checkpoints = manager(tmp_path)
    checkpoints.save(1, {"x": torch.zeros(1)}, {})
    assert checkpoints.best() is None
    arguments = ["--run", str(tmp_path), "--step", "best", "--out", str(tmp_path / "x")]
    assert run_command(lambda: export.main(arguments)) == 2
    assert "found no checkpoint with an acceptance length" in capsys.readouterr().err
