"""The folder of a run: locked, not mixed with another run, found unusable before the work."""

import errno
import fcntl
import os
import signal
from pathlib import Path

import pytest
from tiny_run import TinyRun

from dflash_ext.config import UserError
from dflash_ext.drafter.loop import DrafterTrainLoop
from dflash_ext.run_folder import claim


def no_load(*args: object, **kwargs: object) -> None:
    raise AssertionError("began to load")


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_one_training_at_a_time(tmp_path: Path) -> None:
    with claim(tmp_path, resume=False):
        for resume in (True, False):
            with (
                pytest.raises(UserError, match=rf"under way in .* \(process {os.getpid()} on "),
                claim(tmp_path, resume),
            ):
                pass
    with claim(tmp_path, resume=True):
        pass


def test_a_second_training_is_locked_out_before_it_loads_or_writes(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dflash_ext.pipeline.load_target", no_load)
    with claim(run.folder / "a", resume=False):
        for flags in ([], ["--resume"]):
            assert run("a", *flags) == 2
            assert "log.name: found a training under way in " in one_line(capsys)
    assert os.listdir(run.folder / "a") == ["lock"]


def test_a_lock_that_is_a_link_is_not_followed(
    run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = run.folder / "precious"
    precious.write_text("text")
    (run.folder / "a").mkdir()
    (run.folder / "a" / "lock").symlink_to(precious)
    assert run("a") == 2
    found = f"error: {run.folder / 'a' / 'lock'}: Too many levels of symbolic links, want a usable"
    assert one_line(capsys).startswith(found)
    assert precious.read_text() == "text"


def test_a_killed_training_frees_its_folder(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with claim(tmp_path, resume=False):
            os.write(writing, b"!")
            signal.pause()
    os.read(reading, 1)
    try:
        with pytest.raises(UserError, match=f"process {child} on "), claim(tmp_path, resume=False):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with claim(tmp_path, resume=False):
        pass


def test_a_file_system_without_locks_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with claim(tmp_path, resume=False):
        pass


@pytest.mark.parametrize("place", ["mkdir", "open"])
def test_a_read_only_folder_is_found_before_anything_is_loaded(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    owner = {"mkdir": Path, "open": os}[place]
    original = getattr(owner, place)

    def refuse(path: str | Path, *args: object, **kwargs: object) -> object:
        if Path(path).is_relative_to(run.folder / "a"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr("dflash_ext.pipeline.load_target", no_load)
    monkeypatch.setattr(owner, place, refuse)
    assert run("a") == 2
    name = {"mkdir": "a", "open": "a/lock"}[place]
    path = run.folder / name
    assert one_line(capsys) == f"error: {path}: Read-only file system, want a usable path"


def test_checkpoints_of_another_run_are_not_mixed_with_this_one(
    run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.folder / "a" / "checkpoints" / "step_00000007").mkdir(parents=True)
    assert run("a") == 2
    assert "log.name: found a run in " in one_line(capsys)


def test_a_run_that_died_before_its_first_checkpoint_begins_again(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(DrafterTrainLoop, "_train_step", lambda *_: 1 / 0)
        assert run("a", "--train.gamma=3") == 1
    capsys.readouterr()
    assert run("a", "--train.gamma=3") == 2
    assert "--resume" in one_line(capsys)
    assert run("a", "--resume") == 2
    assert "train.gamma: found 10.0, want 3" in one_line(capsys)
    assert run("a", "--resume", "--train.gamma=3") == 0
    assert "found no checkpoint yet: from the beginning" in capsys.readouterr().out
    assert run.steps("a") == [6] and sorted(run.scores("a")) == [0, 6]
