"""Accidents while a checkpoint is saved, saving in the background, and the order of writes."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_cases import assert_identical, manager, names, saved, tensors_of

from dflash_ext import checkpoint
from dflash_ext.checkpoint import MAX_FAILED_SAVES, SaveError


def test_leftovers_are_ignored_and_swept_by_the_next_save(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step_00000001", folder / "step_00000002.tmp")
    shutil.copytree(folder / "step_00000001", folder / "step_00000003.old.tmp")
    (folder / "latest.tmp").write_text("step_0")
    (folder / "notes.txt").write_text("mine")
    checkpoints = manager(tmp_path)
    assert checkpoints.steps() == [1] and checkpoints.load()[1]["step"] == 1
    assert (folder / "step_00000002.tmp").exists()  # a running training may be writing it
    checkpoints.save(4, tensors_of(4), {})
    assert names(tmp_path) == ["latest", "notes.txt", "step_00000001", "step_00000004"]


# Saves steps 1 and 2 in a fresh folder for every file operation of the second save, in a child
# process that dies right before that operation. Prints how many operations there are.
CRASH = """
import os, shutil, sys, torch
from pathlib import Path
from dflash_ext import checkpoint
from dflash_ext.config import CheckpointConfig
import fault_switches

fault_switches.turn_off_in_child()
calls = 0

def dying(function, stop_at):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == stop_at:
            os._exit(9)
        return function(*args, **kwargs)
    return call

def save_twice(folder, stop_at):
    manager = checkpoint.CheckpointManager(folder, CheckpointConfig(keep=1))
    manager.save(1, {"w": torch.full((3,), 1.0)}, {})
    for owner, name in ((checkpoint, "_fsync"), (checkpoint, "save_file"), (os, "rename"),
                        (Path, "mkdir"), (Path, "rename"), (Path, "replace"),
                        (Path, "write_text"), (shutil, "rmtree")):
        setattr(owner, name, dying(getattr(owner, name), stop_at))
    manager.save(2, {"w": torch.full((3,), 2.0)}, {})
    os._exit(0)

stop_at, status = 0, 9
while status == 9:
    stop_at += 1
    pid = os.fork()
    if pid == 0:
        save_twice(f"{sys.argv[1]}/{stop_at}/checkpoints", stop_at)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(stop_at, status)
"""


def test_a_crash_at_any_point_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CRASH, str(tmp_path)]
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=here)
    count, status = map(int, done.stdout.split())
    assert status == 0 and count > 15
    found = []
    for stop_at in range(1, count + 1):
        folder = tmp_path / str(stop_at)
        tensors, meta = manager(folder).load()
        assert torch.equal(tensors["w"], torch.full((3,), float(meta["step"])))
        found.append(meta["step"])
        saved(folder, 3, keep=5)
        assert not [name for name in names(folder) if name.endswith(".tmp")]
    assert found[0] == 1 and found[-1] == 2 and found == sorted(found)


def test_a_step_that_is_saved_again_stays_until_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    rmtree, kept = shutil.rmtree, []

    def checked(path: Path, **options: bool) -> None:
        kept.append(manager(tmp_path).load()[1]["step"])
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", checked)
    saved(tmp_path, 1)
    assert kept == [1] and names(tmp_path) == ["latest", "step_00000001"]


def fail_with(error: BaseException) -> Any:
    def failing(*args: object, **kwargs: object) -> None:
        raise error

    return failing


@pytest.mark.parametrize("async_save", [False, True])
def test_full_disk_is_survived_a_few_times(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    async_save: bool,
) -> None:
    checkpoints = manager(tmp_path, async_save=async_save)
    checkpoints.save(1, tensors_of(1), {})
    checkpoints._join()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    for step in range(2, 1 + MAX_FAILED_SAVES):
        checkpoints.save(step, tensors_of(step), {})
    checkpoints._join()
    assert len(caplog.messages) == MAX_FAILED_SAVES - 1 and "found 0.0 MiB free" in caplog.text
    assert names(tmp_path) == ["latest", "step_00000001"]
    with pytest.raises(SaveError, match="step 4 not saved") as error:
        checkpoints.save(4, tensors_of(4), {})
        checkpoints.close()
    assert isinstance(error.value.__cause__, OSError)
    assert error.value.__cause__.errno == errno.ENOSPC

    monkeypatch.undo()
    checkpoints.save(10, tensors_of(10), {})
    checkpoints.close()
    assert checkpoints.load()[1]["step"] == 10


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("tries", [1, MAX_FAILED_SAVES, MAX_FAILED_SAVES + 1])
def test_the_last_save_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool, tries: int
) -> None:
    waits: list[float] = []
    write, full = checkpoint.save_file, OSError(errno.ENOSPC, "No space left on device")

    def save_file(*args: Any) -> None:
        if len(waits) < tries:
            raise full
        write(*args)

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(sleep=waits.append))
    checkpoints = manager(tmp_path, async_save=async_save)
    checkpoints.save(8, tensors_of(8), {}, last=True)
    if tries > MAX_FAILED_SAVES:
        with pytest.raises(SaveError, match="the last checkpoint, of step 8, was not saved"):
            checkpoints.close()
        assert names(tmp_path) == []
    else:
        checkpoints.close()
        assert_identical(checkpoints.load()[0], tensors_of(8))
        assert waits == [checkpoint.SAVE_AGAIN_S] * tries


def test_old_checkpoints_that_cannot_be_removed_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = saved(tmp_path, 1, keep=1)
    monkeypatch.setattr(shutil, "rmtree", fail_with(OSError(errno.EIO, "Input/output error")))
    checkpoints.save(2, tensors_of(2), {})
    checkpoints.close()
    assert "older checkpoints not removed" in caplog.text and checkpoints.load()[1]["step"] == 2


def test_real_file_size_limit(tmp_path: Path) -> None:
    """The operating system refuses the write half way through a file."""
    code = (
        "import resource, signal, sys, torch\n"
        "from dflash_ext import checkpoint\n"
        "from dflash_ext.checkpoint import CheckpointManager\n"
        "from dflash_ext.config import CheckpointConfig\n"
        "manager = CheckpointManager(sys.argv[1], CheckpointConfig())\n"
        "manager.save(1, {'w': torch.zeros(10)}, {})\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "manager.save(2, {'w': torch.zeros(100_000)}, {})\n"
        "print(manager.load()[1]['step'])\n"
        "checkpoint.SAVE_AGAIN_S = 0.0\n"
        "manager.close()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "checkpoints")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "1\n" and done.returncode == 1
    assert "checkpoint of step 2 not saved" in done.stderr
    assert "the last checkpoint, of step 2, was not saved" in done.stderr
    assert names(tmp_path) == ["latest", "step_00000001"]


# Saving in the background


def test_async_save_copies_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), checkpoint.save_file

    def slow_save(*args: Any) -> None:
        assert go.wait(10)
        write(*args)

    monkeypatch.setattr(checkpoint, "save_file", slow_save)
    checkpoints = manager(tmp_path, async_save=True)
    tensors = {"w": torch.zeros(4), "row": torch.zeros(2, 4)[1]}
    checkpoints.save(1, tensors, {})
    assert checkpoints.steps() == []
    for tensor in tensors.values():
        tensor.fill_(7.0)
    go.set()
    checkpoints.close()
    loaded = checkpoints.load()[0]
    assert torch.equal(loaded["w"], torch.zeros(4)) and torch.equal(loaded["row"], torch.zeros(4))


def test_one_async_save_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, write = 0, 0, checkpoint.save_file

    def counting_save(*args: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        write(*args)
        running -= 1

    monkeypatch.setattr(checkpoint, "save_file", counting_save)
    checkpoints = saved(tmp_path, *range(1, 9), async_save=True)
    assert most == 1 and checkpoints.steps() == [7, 8]


@pytest.mark.parametrize("surfaces_in", ["save", "close"])
def test_async_errors_surface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surfaces_in: str
) -> None:
    checkpoints = manager(tmp_path, async_save=True)
    monkeypatch.setattr(checkpoint, "save_file", fail_with(ValueError("a bug")))
    checkpoints.save(1, tensors_of(1), {})
    with pytest.raises(ValueError, match="a bug"):
        if surfaces_in == "save":
            checkpoints.save(2, tensors_of(2), {})
        else:
            checkpoints.close()
    assert names(tmp_path) == []
    monkeypatch.undo()
    checkpoints.save(3, tensors_of(3), {})
    checkpoints.close()
    assert checkpoints.latest() == 3


def test_meta_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        manager(tmp_path).save(1, tensors_of(1), {"tensor": torch.zeros(1)})
    assert not (tmp_path / "checkpoints").exists()


def test_order_of_writes_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents reach the disk before the name does, and the name before the pointer."""
    events: list[str] = []
    fsync, rename = checkpoint._fsync, Path.rename

    def logged_fsync(path: Path) -> None:
        events.append(f"sync {path.name}")
        fsync(path)

    def logged_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {target.name}")
        return rename(path, target)

    monkeypatch.setattr(checkpoint, "_fsync", logged_fsync)
    monkeypatch.setattr(Path, "rename", logged_rename)
    saved(tmp_path, 1)
    assert events == [
        "sync tensors.safetensors",
        "sync meta.json",
        "sync manifest.json",
        "sync step_00000001.tmp",
        "rename step_00000001",
        "sync checkpoints",
        "sync latest.tmp",
        "sync checkpoints",
    ]
