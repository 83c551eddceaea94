"""A disk that takes no more, in every kind of write: RLIMIT_FSIZE cuts files off for real."""

import contextlib
import errno
import json
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_run import TinyRun

from dflash_ext import checkpoint, evaluate, greedy_text
from dflash_ext.command import run_command
from dflash_ext.data.text_settings import write_settings
from dflash_ext.files import naming, replace_file

SHORT = ("--data.eval=[]", "--train.steps=2", "--log.every=2")
CONFIG, EXPORT = 1_000, 300_000  # bytes: below the size of config.yaml, of the drafter


@contextlib.contextmanager
def no_file_beyond(size: int) -> Iterator[Callable[[], None]]:
    """Writes past `size` bytes of a file fail until the end, or until the yielded call."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def lift() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield lift
    finally:
        lift()
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def run(
    tiny_target_dir: Path,
    tiny_jsonl: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> TinyRun:
    monkeypatch.setattr(checkpoint, "SAVE_AGAIN_S", 0.0)
    return TinyRun(tiny_target_dir, tiny_jsonl, tmp_path)


def test_the_last_checkpoint_is_tried_again_until_there_is_room(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with no_file_beyond(EXPORT) as lift:
        monkeypatch.setattr(checkpoint, "time", SimpleNamespace(sleep=lambda _: lift()))
        # Its export fails, too: that is written by --resume
        assert run("a", *SHORT) == 1
        assert run.steps("a") == [2]
    err = capsys.readouterr().err
    assert f"error: {run.folder / 'a' / 'export'}: " in err and "--resume writes it" in err
    assert "Traceback" not in err
    assert run("a", "--resume", *SHORT) == 0
    assert (run.folder / "a" / "export" / "model.safetensors").exists()


def test_the_drafter_is_exported_though_its_checkpoint_cannot_be_saved(
    run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    with no_file_beyond(2 * EXPORT):
        assert run("a", *SHORT) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    last = captured.err.splitlines()[-1]
    assert last.startswith(f"error: {run.folder}/a/checkpoints: the last checkpoint, of step 2,")
    assert f"wrote    {run.folder}/a/export" in captured.out
    assert load_file(run.folder / "a" / "export" / "model.safetensors")


def test_a_configuration_that_cannot_be_written_is_one_line_and_harms_no_older_one(
    run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = run.folder / "a" / "config.yaml"
    for flags in ([], ["--resume", "--train.steps=3"]):
        with no_file_beyond(CONFIG):
            assert run("a", *SHORT, *flags) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {saved}: File too large") and err.count("\n") == 1
        if not flags:
            assert not saved.exists()
            assert run("a", *SHORT) == 0  # nothing was begun
            capsys.readouterr()
    assert yaml.safe_load(saved.read_text())["train"]["steps"] == 2
    assert not list(run.folder.glob("a/*.tmp"))


def test_files_are_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    replace_file(path, "old")
    with no_file_beyond(CONFIG), pytest.raises(OSError) as error:
        replace_file(path, "new" * 1000)
    assert error.value.filename == str(path)
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"] and path.read_text() == "old"


def test_outputs_of_the_other_commands_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(evaluate, "evaluate", lambda *_, **__: {"x": [0.5] * 1000})
    monkeypatch.setattr(evaluate, "report_lines", lambda _: ["done"])
    options = ["--drafter", "x", "--target", "x", "--data", "x", "--json", str(out)]
    with no_file_beyond(CONFIG):
        assert evaluate.main(options) == 2
        assert run_command(lambda: write_settings(out, {"model": "x" * 2000})) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"error: {out}: File too large, want a usable path",
        f"error: {out}.settings.yaml: File too large, want a usable path",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_kept_greedy_text_that_cannot_be_written_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = list(range(1000))
    monkeypatch.setattr(greedy_text, "greedy_tokens", lambda *_: iter(answer))
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(1))
    model.config = type("Config", (), {"to_dict": lambda self: {}})()
    cache = greedy_text.GreedyTextCache(tmp_path, model, ())
    with no_file_beyond(CONFIG):
        assert cache.get([1], 1000) == answer
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert cache.get([1], 1000) == answer
    assert json.loads(cache.path([1]).read_text())["tokens"] == answer


def test_only_errors_of_the_system_get_the_name_of_the_file(tmp_path: Path) -> None:
    for error, filename in (
        (OSError(errno.ENOSPC, "no room"), str(tmp_path)),
        (OSError(errno.ENOSPC, "no room", "other"), "other"),
        (OSError("cannot write mode F as PNG"), None),
    ):
        with pytest.raises(OSError) as caught, naming(tmp_path):
            raise error
        assert caught.value is error and error.filename == filename
