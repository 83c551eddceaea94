"""Checkpoints: exact contents, and what is left after every kind of accident."""

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from dflash_ext import checkpoint
from dflash_ext.checkpoint import MAX_FAILED_SAVES, CheckpointManager
from dflash_ext.config import CheckpointConfig, UserError

FILES = ["manifest.json", "meta.json", "tensors.safetensors"]


def tensors_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 3, generator=generator)
    return {
        "weight": weight,
        "bf16": weight.to(torch.bfloat16),
        "transposed": weight.t(),
        "tied": weight,
        "row": weight[1],
        "count": torch.tensor(seed),
        "flags": torch.tensor([True, False]),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "empty": torch.zeros(0, 4),
        "also_empty": torch.zeros(0),
    }


def assert_identical(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        as_bytes = found[name].contiguous().view(torch.uint8) if tensor.ndim else found[name]
        wanted_bytes = tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor
        assert torch.equal(as_bytes, wanted_bytes), name


def manager(folder: Path, **fields: Any) -> CheckpointManager:
    return CheckpointManager(folder / "checkpoints", CheckpointConfig(**fields))


def saved(folder: Path, *steps: int, **fields: Any) -> CheckpointManager:
    checkpoints = manager(folder, **fields)
    for step in steps:
        checkpoints.save(step, tensors_of(step), {"tokens": 10 * step})
    checkpoints.close()
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "checkpoints"))


def flip_byte(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("async_save", [False, True])
def test_everything_comes_back(tmp_path: Path, async_save: bool) -> None:
    saved(tmp_path, 7, async_save=async_save)
    tensors, meta = manager(tmp_path).load()
    assert_identical(tensors, tensors_of(7))
    assert meta == {"tokens": 70, "step": 7, "score": None, "format_version": 1}
    assert names(tmp_path) == ["latest", "step_00000007"]
    assert sorted(os.listdir(tmp_path / "checkpoints" / "step_00000007")) == FILES
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000007\n"


def test_files_are_plain_safetensors_and_json(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    folder = tmp_path / "checkpoints" / "step_00000001"
    with safe_open(folder / "tensors.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors_of(1))
    manifest = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(manifest) == {"meta.json", "tensors.safetensors"}
    for name, entry in manifest.items():
        assert entry["size"] == (folder / name).stat().st_size and len(entry["sha256"]) == 64


def test_a_particular_step(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2, 3, keep=3)
    assert checkpoints.steps() == [1, 2, 3] and checkpoints.latest() == 3
    assert_identical(checkpoints.load(2)[0], tensors_of(2))
    with pytest.raises(UserError, match="found no checkpoint of step 5, want one of 1, 2, 3$"):
        checkpoints.load(5)


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    for checkpoints in (manager(tmp_path), manager(tmp_path / "gone")):
        assert checkpoints.latest() is None and checkpoints.steps() == []
        with pytest.raises(UserError, match="checkpoints: found no checkpoint, want one to load"):
            checkpoints.load()
    assert not (tmp_path / "checkpoints").exists()  # looking changes nothing


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_newest_are_kept(tmp_path: Path, keep: int) -> None:
    checkpoints = saved(tmp_path, 1, 2, 10, 9, 11, keep=keep)
    # 10 was there when 9 was saved: it is newer, and not this save's to delete.
    assert checkpoints.steps() == {1: [11], 2: [10, 11], 3: [9, 10, 11]}[keep]
    assert checkpoints.latest() == 11


def test_best_is_kept(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep=1, keep_best=True)
    for step, score in ((1, 1.5), (2, 1.9), (3, 1.2), (4, None), (5, 1.9), (6, 0.5)):
        checkpoints.save(step, tensors_of(step), {}, score=score)
    assert checkpoints.steps() == [5, 6] and checkpoints.best() == 5  # the later of two equals
    assert manager(tmp_path).best() == 5
    assert saved(tmp_path / "other", 1, 2, keep_best=True).best() is None


def test_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    checkpoints.save(2, tensors_of(5), {"again": True})
    tensors, meta = checkpoints.load()
    assert_identical(tensors, tensors_of(5))
    assert meta["again"] and names(tmp_path) == ["latest", "step_00000001", "step_00000002"]


# Accidents: what a load finds afterwards


def damage_tensors(folder: Path) -> None:
    flip_byte(folder / "tensors.safetensors", -3)


def damage_header(folder: Path) -> None:
    flip_byte(folder / "tensors.safetensors", 0)


def damage_meta(folder: Path) -> None:
    flip_byte(folder / "meta.json", 5)


def damage_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    at = text.index('"sha256": "') + len('"sha256": "')
    (folder / "manifest.json").write_text(text[:at] + "g" + text[at + 1 :])


def truncate(folder: Path) -> None:
    os.truncate(folder / "tensors.safetensors", 100)


def truncate_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 10)


def remove_tensors(folder: Path) -> None:
    (folder / "tensors.safetensors").unlink()


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def wrong_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


ACCIDENTS = [
    damage_tensors,
    damage_header,
    damage_meta,
    damage_manifest,
    truncate,
    truncate_manifest,
    remove_tensors,
    remove_manifest,
    empty_folder,
    wrong_manifest,
]


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_damage_falls_back_and_says_so(
    accident: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 2)
    accident(tmp_path / "checkpoints" / "step_00000002")
    checkpoints = manager(tmp_path)
    with caplog.at_level(logging.WARNING):
        tensors, meta = checkpoints.load()
    assert meta["step"] == 1
    assert_identical(tensors, tensors_of(1))
    assert len(caplog.messages) == 1
    assert "step_00000002" in caplog.text and "going back to step 1" in caplog.text
    with pytest.raises(UserError, match="step_00000002"):
        checkpoints.load(2)

    # The run goes on from step 1; the damaged one must not outlive the next save.
    checkpoints.save(2, tensors_of(22), {})
    tensors, _ = manager(tmp_path).load()
    assert_identical(tensors, tensors_of(22))


def test_damaged_later_step_goes_with_the_next_save(tmp_path: Path) -> None:
    saved(tmp_path, 1, 9)
    damage_tensors(tmp_path / "checkpoints" / "step_00000009")
    checkpoints = manager(tmp_path)
    checkpoints.load()
    checkpoints.save(5, tensors_of(5), {})
    assert checkpoints.steps() == [1, 5] and checkpoints.load()[1]["step"] == 5


def test_all_damaged(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    for step in (1, 2):
        damage_tensors(tmp_path / "checkpoints" / f"step_{step:08d}")
    with pytest.raises(UserError, match="step_00000002.*SHA-256 differs.*no intact checkpoint"):
        manager(tmp_path).load()


@pytest.mark.parametrize("content", [None, "", "step_00000009\n", "../../etc\n", "\x00\xff"])
def test_lost_pointer(tmp_path: Path, content: str | None) -> None:
    saved(tmp_path, 1, 2)
    latest = tmp_path / "checkpoints" / "latest"
    latest.unlink()
    if content is not None:
        latest.write_bytes(content.encode("latin-1"))
    assert manager(tmp_path).load()[1]["step"] == 2


def test_pointer_decides_among_intact_ones(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "latest").write_text("step_00000001\n")
    assert manager(tmp_path).load()[1]["step"] == 1


def test_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 2)
    saved(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(UserError, match="found checkpoint format 2, want at most 1"):
        manager(tmp_path).load()


def test_truncation_is_named_as_such(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    truncate(tmp_path / "checkpoints" / "step_00000001")
    with pytest.raises(UserError, match="tensors.safetensors: found 100 bytes, want"):
        manager(tmp_path).load()


# Accidents while saving


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
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
    assert len(caplog.messages) == MAX_FAILED_SAVES - 1 and "found 0 MiB free" in caplog.text
    assert names(tmp_path) == ["latest", "step_00000001"]
    with pytest.raises(RuntimeError, match="the last checkpoint was not saved"):
        checkpoints.close()

    with pytest.raises(OSError) as error:
        checkpoints.save(9, tensors_of(9), {})
        checkpoints.close()
    assert error.value.errno == errno.ENOSPC

    monkeypatch.undo()
    checkpoints.save(10, tensors_of(10), {})
    checkpoints.close()
    assert checkpoints.load()[1]["step"] == 10


def test_real_file_size_limit(tmp_path: Path) -> None:
    """The operating system refuses the write half way through a file."""
    code = (
        "import resource, signal, sys, torch\n"
        "from dflash_ext.checkpoint import CheckpointManager\n"
        "from dflash_ext.config import CheckpointConfig\n"
        "manager = CheckpointManager(sys.argv[1], CheckpointConfig())\n"
        "manager.save(1, {'w': torch.zeros(10)}, {})\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "manager.save(2, {'w': torch.zeros(100_000)}, {})\n"
        "print(manager.load()[1]['step'])\n"
        "manager.close()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "checkpoints")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "1\n" and done.returncode == 1
    assert "checkpoint of step 2 not saved" in done.stderr
    assert "the last checkpoint was not saved" in done.stderr
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
