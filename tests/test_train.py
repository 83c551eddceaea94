"""Whole runs on a tiny target: files, resume, topology, faults, signals, bad input."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_ext import pipeline, train
from dflash_ext.command import run_command
from dflash_ext.config import load_config
from dflash_ext.data.packing import BatchPlanner
from dflash_ext.drafter.loop import DrafterTrainLoop
from dflash_ext.grad_copies import Board
from dflash_ext.logger import RunLogger
from dflash_ext.plan import Plan
from dflash_ext.target import Target
from dflash_ext.target_loop import TargetForwardLoop

STEPS = 6
NAMES = ("whole", "parts")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export" / "model.safetensors")


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def layout(targets: int, drafters: int) -> tuple[str, str]:
    """Flags for so many threads of each role."""
    devices = [f"[{', '.join(['cpu'] * count)}]" for count in (targets, drafters)]
    return f"--topology.targets={devices[0]}", f"--topology.drafters={devices[1]}"


def assert_same(a: Path, b: Path) -> None:
    one, two = weights(a), weights(b)
    assert one.keys() == two.keys()
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert different == []


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Delivers SIGTERM to the run when drafter 0 has made `step` steps."""
    publish = DrafterTrainLoop._publish

    def patched(self: DrafterTrainLoop, done: int, stopping: bool = False) -> None:
        publish(self, done, stopping)
        if done == step and self.rank == 0 and not stopping:
            os.kill(os.getpid(), signal.SIGTERM)
            while self.supervisor.signum is None:  # the handler runs in the main thread
                time.sleep(0.01)

    monkeypatch.setattr(DrafterTrainLoop, "_publish", patched)


def test_a_run_writes_what_it_promises(run, tmp_path: Path, capsys) -> None:
    assert run("a") == 0
    folder = tmp_path / "a"
    summary = json.loads((folder / "summary.json").read_text())
    assert {
        *("steps", "tokens", "seconds", "tokens_per_s", "loss_first", "loss_last"),
        *("accept_len_before", "accept_len_after", "peak_rss_mib", "peak_gpu_mib", "versions"),
    } <= summary.keys()
    assert summary["steps"] == STEPS
    text = summary["text"]
    assert text["log_prob"] < -1 and 0 <= text["greedy_share"] < 1 and len(text["template"]) == 16
    assert text["enable_thinking"] is None and text["regenerate"] == {}
    assert summary["loss_last"] < summary["loss_first"]
    assert 1 <= summary["accept_len_before"] <= 4 and 1 <= summary["accept_len_after"] <= 4
    logged = rows(folder)
    assert [row["step"] for row in logged] == [0, 2, 4, 6]
    assert "eval_accept_len" in logged[0] and "loss" not in logged[0]
    assert "eval_accept_len" in logged[-1] and "acc" in logged[-1]
    assert summary["tokens"] == logged[-1]["tokens"] > 0
    assert (folder / "config.yaml").exists()
    assert (folder / "checkpoints" / f"step_{STEPS:08d}").is_dir()
    assert (folder / "export" / "config.json").exists()
    out = capsys.readouterr().out
    assert "dflash_ext.evaluate --drafter" in out and "--enable_thinking" not in out
    assert "warning  the text does not look like the target's own" in out


@pytest.mark.parametrize(
    "targets, drafters, settings",
    [
        (1, 1, {"optimizer": "adamw"}),
        (1, 2, {"optimizer": "adamw"}),
        (5, 3, {"optimizer": "adamw"}),
        (1, 1, {"optimizer": "muon"}),
        (1, 1, {"prefix_weight_base": 0.8, "kl_weight": 1, "kl": "js"}),
    ],
)
def test_resume_is_exact(
    run, tmp_path: Path, monkeypatch, targets: int, drafters: int, settings: dict
) -> None:
    flags = [*layout(targets, drafters), "--train.eval_every=2"]
    flags += [f"--train.{name}={value}" for name, value in settings.items()]
    assert run("whole", *flags) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        assert run("parts", *flags) == 128 + signal.SIGTERM
    assert not (tmp_path / "parts" / "export").exists()
    assert run("parts", *flags, "--resume") == 0
    assert_same(tmp_path / "whole", tmp_path / "parts")
    batches = sum(row.get("batches", 0) for row in rows(tmp_path / "parts"))
    assert batches == sum(row.get("batches", 0) for row in rows(tmp_path / "whole"))
    first = [json.loads((tmp_path / n / "summary.json").read_text())["loss_first"] for n in NAMES]
    assert first[0] == first[1]
    steps = [row["step"] for row in rows(tmp_path / "parts")]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS
    whole, parts = rows(tmp_path / "whole")[-1], rows(tmp_path / "parts")[-1]
    for key in ("loss", "tokens", "eval_accept_len", *(["kl"] if "kl" in settings else [])):
        assert whole[key] == parts[key], key


@pytest.mark.parametrize("targets, drafters", [(2, 2), (5, 3)])
def test_targets_and_drafters_in_any_number_and_order(
    run, tmp_path: Path, monkeypatch, targets: int, drafters: int
) -> None:
    seen: dict[str, list] = {}
    forward = Target.forward_capture
    train_batch = DrafterTrainLoop._train_batch
    name = ""

    def jitter(self, *args, **kwargs):
        time.sleep(float(torch.rand(())) * 0.03)
        return forward(self, *args, **kwargs)

    def record(self, slot, index):
        seen.setdefault(name, []).append((self.rank, slot.ticket.plan.batch_id))
        return train_batch(self, slot, index)

    monkeypatch.setattr(Target, "forward_capture", jitter)
    monkeypatch.setattr(DrafterTrainLoop, "_train_batch", record)
    for name, count in [("one", 1), ("many", targets), ("again", targets)]:
        assert run(name, *layout(count, drafters), "--train.grad_accum=2") == 0
    for rank in range(drafters):
        ids = [batch for r, batch in seen["one"] if r == rank]
        assert ids == list(range(rank, STEPS * 2 * drafters, drafters))
        assert ids == [batch for r, batch in seen["many"] if r == rank]
    assert_same(tmp_path / "one", tmp_path / "many")
    assert_same(tmp_path / "many", tmp_path / "again")


@pytest.mark.parametrize("targets, drafters", [(1, 2), (5, 3)])
def test_all_drafters_hold_the_same_weights(
    run, tmp_path: Path, monkeypatch, targets: int, drafters: int
) -> None:
    loops: list[DrafterTrainLoop] = []
    run_loop = DrafterTrainLoop.run
    monkeypatch.setattr(
        DrafterTrainLoop, "run", lambda self, worker: (loops.append(self), run_loop(self, worker))
    )
    boards: list[Board] = []

    def make_board(devices: list[torch.device]) -> Board:
        boards.append(Board(len(devices)))
        return boards[-1]

    flags = layout(targets, drafters)
    for name in ("library", "copies"):
        loops.clear()
        assert run(name, *flags) == 0
        first, *others = (loop.model.state_dict() for loop in loops)
        assert len(others) == drafters - 1
        assert all(torch.equal(first[n], other[n]) for other in others for n in first)
        monkeypatch.setattr(pipeline, "make_board", make_board)
    assert [board.world for board in boards] == [drafters]
    if drafters == 2:
        assert_same(tmp_path / "library", tmp_path / "copies")
        return
    # Gloo's order of addition, and so the last bit, is another: Adam's first steps magnify it.
    library, copies = weights(tmp_path / "library"), weights(tmp_path / "copies")
    for name in library:
        torch.testing.assert_close(library[name], copies[name], rtol=2e-3, atol=2e-5)


def test_evaluation_metrics_and_logging_do_not_touch_training(run, tmp_path: Path) -> None:
    assert run("plain", "--data.eval=[]", "--train.metrics_every=1000") == 0
    assert run("watched", "--train.eval_every=1", "--train.metrics_every=1", "--log.every=1") == 0
    assert_same(tmp_path / "plain", tmp_path / "watched")
    assert all("acc" in row for row in rows(tmp_path / "watched") if row["step"])


def test_kl_cap_accumulation_and_groups_train(run, tmp_path: Path) -> None:
    flags = ["--train.kl_weight=0.5", "--train.cap_lambda=0.1", "--train.grad_accum=2"]
    assert run("a", *flags, "--train.metrics_every=1") == 0
    row = rows(tmp_path / "a")[-1]
    assert row["kl"] > 0 and row["cap"] >= 0
    assert row["loss"] == pytest.approx(row["ce"] + 0.5 * row["kl"] + 0.1 * row["cap"], rel=1e-4)
    assert run("b", *flags, "--train.anchor_group=5") == 0
    one, two = weights(tmp_path / "a"), weights(tmp_path / "b")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=2e-3, atol=2e-5)


FAULTS = {
    "prefetcher": (BatchPlanner, "step_plans"),
    "target 0": (TargetForwardLoop, "_fill"),
    "drafter 0": (DrafterTrainLoop, "_train_batch"),
    "monitor": (RunLogger, "log"),
}


@pytest.mark.parametrize("worker", FAULTS)
@pytest.mark.parametrize("topology", ["[cpu]", "[cpu, cpu]"])
def test_a_fault_ends_the_run_with_its_own_error(
    run, monkeypatch, capsys, worker: str, topology: str
) -> None:
    owner, method = FAULTS[worker]
    original = getattr(owner, method)
    calls = []

    def faulty(self, *args, **kwargs):
        calls.append(time.monotonic())
        if len(calls) == 2:
            raise ZeroDivisionError(f"injected into {worker}")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, faulty)
    flags = (f"--topology.targets={topology}", f"--topology.drafters={topology}")
    assert run("a", *flags, "--train.steps=50") == 1
    assert time.monotonic() - calls[1] < 10
    errors = capsys.readouterr().err
    assert f"ZeroDivisionError: injected into {worker}" in errors
    assert f"error: {worker[:6]}" in errors


def test_a_second_run_in_the_same_folder_is_refused(run, capsys) -> None:
    assert run("a") == 0
    capsys.readouterr()
    assert run("a") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--resume" in err


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--drafter.mask_token_id=264", "drafter.mask_token_id"),
        ("--model.target_layer_ids=[1, 6]", "model.target_layer_ids"),
        ("--model.target_layer_ids=[3, 1]", "model.target_layer_ids"),
        ("--drafter.block_size=1", "drafter.block_size"),
        ("--drafter.intermediate_size=1000000000000", "error: drafter: found num_layers 2, "),
        ("--drafter.num_attention_heads=1000000000", "GiB on cpu, want at most"),
        ("--drafter.head_dim=1000000000000000000", "GiB on cpu, want at most"),
        ("--data.token_budget=20", "data.token_budget"),
        ("--data.train=[missing.jsonl]", "missing.jsonl"),
        ("--train.gama=1", "train.gamma"),
        ("--topology.drafters=[cuda:97]", "topology.drafters"),
        ("--model.target=nowhere/at/all", "model.target"),
        ("--log.name=../up", "log.name"),
        ("--log.dir=/proc/none", "/proc/none"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, capsys, flag: str, expected: str) -> None:
    assert run("a", flag) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert expected in err


def test_resume_with_other_text_is_refused_unless_accepted(run, tiny_jsonl, capsys) -> None:
    assert run("a") == 0
    other = tiny_jsonl(n=4, name="other.jsonl")
    capsys.readouterr()
    flags = ("--resume", f"--data.train=[{other}]", "--train.steps=9")
    assert run("a", *flags) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "data.train: found text with hash" in err
    assert run("a", *flags, "--accept_changed_data") == 0
    assert "warning  data.train: found text with hash" in capsys.readouterr().out
    assert run("a", *flags, "--train.steps=10") == 0  # it is the run's text now


def test_resume_with_another_configuration_is_refused(run, capsys) -> None:
    assert run("a") == 0
    capsys.readouterr()
    assert run("a", "--resume", "--train.gamma=3", "--train.steps=9") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "train.gamma" in err and "10" in err


def test_resume_of_a_finished_run_only_reports(run, tmp_path: Path, capsys) -> None:
    assert run("a") == 0
    before = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert run("a", "--resume") == 0
    assert "resume   all 6 steps are done: nothing is left to train\n" in capsys.readouterr().out
    after = json.loads((tmp_path / "a" / "summary.json").read_text())
    for key in ("steps", "accept_len_before", "accept_len_after", "tokens"):
        assert before[key] == after[key], key
    assert [row["step"] for row in rows(tmp_path / "a")] == [0, 2, 4, 6]


def test_split_fc_trains_the_same_drafter(run, tmp_path: Path) -> None:
    assert run("one") == 0
    assert run("split", "--drafter.split_fc=true") == 0
    one, split = weights(tmp_path / "one"), weights(tmp_path / "split")
    for name in one:
        torch.testing.assert_close(one[name], split[name], rtol=2e-3, atol=2e-5)


def test_the_gradient_norm_is_logged_only_when_wanted(run, tmp_path: Path) -> None:
    assert run("plain") == 0
    assert run("norm", "--log.grad_norm=true", "--topology.drafters=[cpu, cpu]") == 0
    assert all("grad_norm" not in row for row in rows(tmp_path / "plain"))
    assert all(0 < row["grad_norm"] < 1e4 for row in rows(tmp_path / "norm") if row["step"])


def test_steps_without_a_finite_gradient_are_skipped_counted_and_stop_the_run(
    run, tmp_path: Path, monkeypatch, capsys
) -> None:
    forward = Target.forward_capture

    def poisoned(self, input_ids, layer_ids, on_layer, need_last):
        return forward(
            self, input_ids, layer_ids, lambda i, h: on_layer(i, h * torch.nan), need_last
        )

    monkeypatch.setattr(Target, "forward_capture", poisoned)
    flags = ("--data.eval=[]", "--train.steps=40", "--train.max_nonfinite_steps=6")
    assert run("a", *flags) == 1
    assert "train.max_nonfinite_steps: found 6" in capsys.readouterr().err
    logged = rows(tmp_path / "a")
    assert logged[0]["nonfinite_steps"] == 2 and "loss" not in logged[0]


def test_resume_takes_the_configuration_of_the_run(run, tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        assert run("a", "--train.gamma=3") == 128 + signal.SIGTERM
    flags = ["--log.dir", str(tmp_path), "--log.name", "a", "--resume"]
    assert run_command(lambda: train.main(flags)) == 0
    assert "gamma: 3" in (tmp_path / "a" / "config.yaml").read_text()


@pytest.mark.parametrize("field", ["train", "eval"])
def test_text_that_is_not_there_is_found_before_the_target_is_loaded(
    run, monkeypatch, capsys, field: str
) -> None:
    monkeypatch.setattr("dflash_ext.pipeline.load_target", lambda *args, **kwargs: 1 / 0)
    assert run("a", f"--data.{field}=missing.jsonl") == 2
    wanted = (
        "error: missing.jsonl: cannot be read (No such file or directory), want a readable file"
    )
    assert capsys.readouterr().err == wanted + "\n"


def test_the_thinking_switch_goes_on_to_the_evaluation(run, capsys) -> None:
    assert run("a", "--train.steps=1", "--data.enable_thinking=false") == 0
    assert "--enable_thinking false" in capsys.readouterr().out


def test_check_data_shows_what_is_supervised(run, tmp_path: Path, capsys) -> None:
    assert run("a", "--check_data") == 0
    out = capsys.readouterr().out
    assert "[[Answer: 0 0 1 1 2 2 3 3 4 4.<|im_end|>]]" in out
    assert not (tmp_path / "a").exists()


def test_resume_to_fewer_steps_is_refused(run, capsys) -> None:
    assert run("a") == 0
    capsys.readouterr()
    assert run("a", "--resume", "--train.steps=2") == 2
    assert "train.steps: found 2, want at least 6" in capsys.readouterr().err


def test_a_folder_that_the_export_cannot_replace_is_refused_before_training(
    run, tmp_path: Path, capsys
) -> None:
    (tmp_path / "a" / "export").mkdir(parents=True)
    (tmp_path / "a" / "export" / "notes.txt").write_text("mine")
    assert run("a") == 2
    assert "notes.txt" in capsys.readouterr().err
    assert not (tmp_path / "a" / "metrics.jsonl").exists()


@pytest.mark.parametrize("optimizer, each", [("adamw", 16), ("muon", 12)])
def test_the_start_and_the_plan_give_a_drafter_the_same_memory(
    run, tmp_path: Path, capsys, optimizer: str, each: int
) -> None:
    sizes = ("--drafter.intermediate_size=2048", f"--train.optimizer={optimizer}")
    assert run("a", *sizes, "--train.steps=1", "--data.eval=[]") == 0
    plan = Plan(load_config(tmp_path / "a" / "config.yaml"))
    need = plan.spec.num_parameters * each
    assert f"gradients and optimizer {need / 2**20:.0f} MiB" in capsys.readouterr().out
    names = ("masters", "gradients", "moments")
    assert sum(plan.memory["cpu"][name] for name in names) == need
