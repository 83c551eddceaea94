"""`python -m dflash_ext.export` on a run: what it writes, checks and refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_drafter
import torch
from export_cases import edit_config, edit_tensors, transform

from dflash_ext import wheels, zlab
from dflash_ext.checkpoint import CheckpointManager
from dflash_ext.command import run_command
from dflash_ext.config import CheckpointConfig, Config, UserError, to_dict
from dflash_ext.data.corpus import Example
from dflash_ext.export import main, read_config
from dflash_ext.export_check import ExportError, check_export
from dflash_ext.zlab import compare_logits


@pytest.fixture(scope="module")
def bench(tiny_target_dir: Path) -> tiny_drafter.Bench:
    return tiny_drafter.bench(tiny_target_dir)


@pytest.fixture
def run_dir(bench: tiny_drafter.Bench, tiny_jsonl: Callable[..., Path], tmp_path: Path) -> Path:
    """A run with checkpoints of step 10 (weights of zero) and 20 (the bench's drafter)."""
    cfg = Config()
    cfg.model.target, cfg.model.dtype = str(bench.folder), "float32"
    cfg.data.train = [str(tiny_jsonl(n=2))]
    manager = CheckpointManager(tmp_path / "run" / "checkpoints", CheckpointConfig())
    for step in (10, 20):
        state = bench.drafter.state_dict()
        tensors = {f"model.{name}": t * (step // 20) for name, t in state.items()}
        tensors["optimizer.exp_avg.0"] = torch.zeros(3)
        meta = {"drafter": bench.drafter.spec.to_hf_config(), "config": to_dict(cfg)}
        manager.save(step, tensors, meta, score=float(step))
    manager.close()
    return tmp_path / "run"


def command(*arguments: object) -> int:
    return run_command(lambda: main([str(a) for a in arguments]))


def test_the_newest_step_is_exported_and_checked(run_dir, bench, tmp_path, capsys):
    assert command("--run", run_dir, "--out", tmp_path / "x", "--check") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "at step 20" in lines[0]
    checks = [line for line in lines if line.startswith("ok: ")]
    assert len(checks) == 6
    assert "36 tensors" in checks[0] and "z-lab, vLLM, SGLang" in checks[1]
    assert "logits on real text" in checks[5] and "dflash==0.1.0" in checks[5]
    check_export(tmp_path / "x", bench.drafter)


def test_a_step_and_a_dtype_can_be_chosen(run_dir, tmp_path, capsys):
    arguments = ("--run", run_dir, "--step", 10, "--out", tmp_path / "x", "--dtype", "bfloat16")
    assert command(*arguments) == 0
    assert "at step 10" in capsys.readouterr().out
    assert read_config(tmp_path / "x")["dtype"] == "bfloat16"


def test_bfloat16_is_checked_too(run_dir, tmp_path, capsys):
    arguments = ("--run", run_dir, "--out", tmp_path / "x", "--dtype", "bfloat16", "--check")
    assert command(*arguments) == 0
    assert capsys.readouterr().out.count("ok: ") == 6


def test_a_drafter_of_zeros_does_not_pass(run_dir, tmp_path, capsys):
    assert command("--run", run_dir, "--step", 10, "--out", tmp_path / "x", "--check") == 1
    assert "found only zeros" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("error", ["run", "step", "out", "out holds a model", "out is a file"])
def test_mistakes_are_one_line_and_code_2(error, run_dir, tmp_path, capsys):
    other = tmp_path / "model"
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    arguments = {
        "run": ("--run", tmp_path / "none", "--out", tmp_path / "x"),
        "step": ("--run", run_dir, "--step", 11, "--out", tmp_path / "x"),
        "out": ("--run", run_dir, "--out", run_dir),
        "out holds a model": ("--run", run_dir, "--out", other),
        "out is a file": ("--run", run_dir, "--out", other / "config.json"),
    }[error]
    assert command(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert not (tmp_path / "x").exists() and (other / "config.json").exists()


@pytest.mark.parametrize("step", ["x", "-1", "1.5", ""])
def test_a_step_that_is_none(step, run_dir, tmp_path, capsys):
    assert command("--run", run_dir, "--out", tmp_path / "x", f"--step={step}") == 2
    assert "want a whole number or best" in capsys.readouterr().err


def test_the_folder_of_a_run_is_no_drafter(tmp_path):
    (tmp_path / "run" / "export").mkdir(parents=True)
    with pytest.raises(UserError, match=r"want the drafter in .*run/export"):
        read_config(tmp_path / "run")


def test_a_checkpoint_without_a_drafter_is_one_line(tmp_path, capsys):
    manager = CheckpointManager(tmp_path / "run" / "checkpoints", CheckpointConfig())
    manager.save(5, {"model.x": torch.zeros(1)}, {})
    assert command("--run", tmp_path / "run", "--out", tmp_path / "x") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_a_network_the_wheel_is_asked_for(run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert command("--run", run_dir, "--out", tmp_path / "x", "--check") == 2
    captured = capsys.readouterr()
    assert captured.out.count("ok: ") == 5
    (line,) = captured.err.splitlines()
    assert "--check: pip download dflash==0.1.0 failed: " in line and "want a network once" in line


def test_another_wheel_of_that_name_is_refused(tmp_path, monkeypatch):
    def another(command, **kwargs):
        Path(command[command.index("--dest") + 1], "dflash-0.1.0-py3-none-any.whl").write_text("x")
        return wheels.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    monkeypatch.setattr(wheels.subprocess, "run", another)
    with pytest.raises(wheels.UserError, match="found SHA-256 2d711642"):
        zlab.zlab_model_module()


def text(bench: tiny_drafter.Bench) -> list[Example]:
    ids = torch.tensor(bench.texts[0], dtype=torch.int32).numpy()
    return [Example(ids, (ids >= 0).astype("uint8"), "text:1")]


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 9000.0, "rope_parameters": {"rope_theta": 9000.0}},
        {"sliding_window": 3},
        {"is_causal": False, "causal": False},
        {"rms_norm_eps": 1e-2},
        {"output_multiplier": 1.01},
        {"input_embedding_scale": 0.9},
        {"mask_token_id": 259},
        {"target_layer_ids": [1, 2, 4]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_logits_show_what_z_lab_reads_otherwise(changes, bench, tmp_path, monkeypatch):
    """z-lab gets a changed config, our reading stays as trained: the comparison must notice."""
    bench.drafter.save_pretrained(tmp_path / "x")
    trained = bench.drafter
    edit_config(tmp_path / "x", **changes)
    monkeypatch.setattr(zlab.DFlashDraftModel, "from_pretrained", lambda folder: trained)
    with pytest.raises(ExportError, match=r"found (logits that differ|other states)"):
        compare_logits(tmp_path / "x", bench.target, text(bench))


def test_logits_show_changed_weights(bench, tmp_path, monkeypatch):
    bench.drafter.save_pretrained(tmp_path / "x")
    trained = bench.drafter
    edit_tensors(tmp_path / "x", transform("layers.0.mlp.up_proj.weight", lambda w: w * 1.01))
    monkeypatch.setattr(zlab.DFlashDraftModel, "from_pretrained", lambda folder: trained)
    with pytest.raises(ExportError, match="found logits that differ"):
        compare_logits(tmp_path / "x", bench.target, text(bench))


def test_scales_and_soft_cap_are_compared(bench, tmp_path):
    bench.drafter.save_pretrained(tmp_path / "x")
    scales = {"input_embedding_scale": 1.5, "output_multiplier": 0.5}
    edit_config(tmp_path / "x", **scales, final_logit_softcapping=3.0, logit_scale=0.5)
    assert json.loads((tmp_path / "x" / "config.json").read_text())["logit_scale"] == 0.5
    assert "logits on real text" in compare_logits(tmp_path / "x", bench.target, text(bench))
