"""Any damage of a run's checkpoints: an intact one is loaded, or one line says what is wrong.

`python -m pytest -m slow` runs it for ten minutes.
"""

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_cases import random_model, small_spec
from fuzzing import DURATIONS, fuzz
from hypothesis import given
from hypothesis import strategies as st

from dflash_ext.checkpoint import META, CheckpointManager
from dflash_ext.config import CheckpointConfig, Config, UserError, to_dict
from dflash_ext.resume import load_resume

STEPS = (3, 7)
FILES = ("tensors.safetensors", "meta.json", "manifest.json")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with checkpoints of two steps, as a run leaves them."""
    folder = tmp_path / "saved"
    manager = CheckpointManager(folder, CheckpointConfig())
    spec = small_spec()
    for step in STEPS:
        states = random_model(spec, seed=step).state_dict()
        meta = {
            "tokens": 5,
            "data_hash": "ab" * 32,
            "world": 1,
            "batches": 1,
            "cpu_threads": 1,
            "config": to_dict(Config()),
            "drafter": spec.to_hf_config(),
            "accept_len_before": 1.0,
        }
        manager.save(step, {f"model.{n}": t for n, t in states.items()}, meta, score=float(step))
    manager.close()
    return folder


def sign_meta(folder: Path) -> None:
    """Lets the manifest fit the meta data; what it says of the tensors stays."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        content = (folder / META).read_bytes()
        file = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest["files"][META] = file
    except (OSError, ValueError, LookupError, TypeError):  # damaged before
        return
    (folder / "manifest.json").write_text(json.dumps(manifest))


def damage(data: st.DataObject, folder: Path) -> None:
    """One damage of one checkpoint, its pointer, or its meta data with a right signature."""
    how = data.draw(
        st.sampled_from(["cut", "change", "insert", "remove", "swap", "pointer", "json", "meta"])
    )
    step = folder / f"step_{data.draw(st.sampled_from(STEPS)):08d}"
    path = step / data.draw(st.sampled_from(FILES))
    if how == "pointer":
        (folder / "latest").write_bytes(data.draw(st.binary(max_size=20)))
    elif not path.is_file():  # taken away by an earlier damage
        return
    elif how == "swap":
        path.write_bytes(data.draw(st.sampled_from(sorted(step.iterdir()))).read_bytes())
    elif how == "remove":
        path.unlink()
    elif how == "json":
        path.write_text(json.dumps(data.draw(JSON)))
    elif how == "meta":
        edit_meta(data, step)
    else:
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, max(len(content) - 1, 0)))
        new = data.draw(st.binary(min_size=1, max_size=4))
        content[place : len(content) if how == "cut" else place + len(new) * (how == "change")] = (
            b"" if how == "cut" else new
        )
        path.write_bytes(content)


def edit_meta(data: st.DataObject, step: Path) -> None:
    """Values of another program, under a manifest that fits them."""
    try:
        meta = json.loads((step / META).read_text())
    except (OSError, ValueError):
        return
    if not isinstance(meta, dict):
        return
    place: Any = meta
    if data.draw(st.booleans()):
        inner = data.draw(st.sampled_from(["config", "drafter"]))
        place = meta.get(inner) if isinstance(meta.get(inner), dict) else meta
    key = data.draw(st.sampled_from(sorted(place)) if place else st.text())
    place[key] = data.draw(JSON)
    (step / META).write_text(json.dumps(meta))
    sign_meta(step)


@DURATIONS
def test_any_damage_is_found(seconds: float, saved: Path, tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.ERROR)
    intact = {}
    for step in STEPS:
        tensors, _ = CheckpointManager(saved, CheckpointConfig()).load(step)
        intact[step] = tensors

    @given(st.data())
    def loads(data: st.DataObject) -> None:
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(saved, folder)
        for _ in range(data.draw(st.integers(1, 3))):
            damage(data, folder)
        manager = CheckpointManager(folder, CheckpointConfig())
        manager.best()
        try:
            resume = load_resume(manager, Config())
        except UserError as error:
            text = str(error)
            assert "found" in text and "want" in text and "\n" not in text and len(text) < 800
            return
        want = intact[resume.step]
        assert resume.tensors.keys() == want.keys()
        assert all(torch.equal(resume.tensors[name], want[name]) for name in want)

    assert fuzz(loads, seconds) >= 100
