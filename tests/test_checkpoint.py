"""Checkpoints: exact contents, and what a load finds after every kind of damage."""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import assert_identical, manager, names, saved, tensors_of
from safetensors import safe_open

from dflash_ext import checkpoint
from dflash_ext.config import UserError

FILES = ["manifest.json", "meta.json", "tensors.safetensors"]


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
