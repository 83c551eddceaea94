"""Damaged drafters and checkpoints: exit code 2 and one line, in every command that reads them."""

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_drafter
import torch
from drafter_cases import random_model
from export_cases import SPECS, drop, edit_config, edit_tensors, rename, transform
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_run import TinyRun

from dflash_ext import evaluate, export
from dflash_ext.command import run_command
from dflash_ext.config import UserError
from dflash_ext.drafter import DFlashDraftModel, DrafterSpec
from dflash_ext.export import read_spec, write_export
from dflash_ext.run_folder import has_run

GOOD = json.loads(json.dumps(SPECS["mixed"].to_hf_config()))
FAST = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
WRONG: list[Any] = [
    *(None, "", "x", "1", "full_attention", True, False, [], [1], ["x"], [None], [[1]], {}),
    *(-1, 0, 1, 2, 3, 7, 33, 2**31, 2**63, 10**30, 10**400, 1e308, 1.5, float("nan")),
    *(float("inf"), [True], [1.5], [10**9, 10**9], {"a": 1}, {"rope_theta": "x"}),
    *({"rope_type": 7}, {"rope_theta": float("nan")}, {"rope_theta": 10**400}),
]
MORE_KEYS = (
    *("conv_kernel_size", "swa_window_size", "use_swa", "attention_sink_bias", "projector_type"),
    *("eagle_aux_hidden_state_layer_ids", "quantization_config", "target_hidden_size", "causal"),
    *("is_causal", "layer_types", "partial_rotary_factor"),
)


def changed_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of both levels, with every wrong value, and without it."""
    for level, keys in (("top", GOOD), ("dflash_config", GOOD["dflash_config"])):
        for key in dict.fromkeys((*keys, *MORE_KEYS)):
            for value in (*WRONG, "left out"):
                config = copy.deepcopy(GOOD)
                place = config if level == "top" else config["dflash_config"]
                place[key] = value
                if value == "left out":
                    del place[key]
                yield f"{level}.{key} = {str(value)[:50]}", config


def check_reading(config: object) -> bool:
    """Whether a config is taken; if not, then with one line that names the file."""
    try:
        spec = DrafterSpec.from_hf_config(config, "DIR/config.json")
    except UserError as error:
        text = str(error)
        assert text.startswith("DIR/config.json: ") and "\n" not in text and len(text) < 400
        assert ": found " in text and ", want " in text
        return False
    assert DrafterSpec.from_hf_config(spec.to_hf_config()) == spec
    return True


def test_every_field_with_every_wrong_value() -> None:
    taken = {what: check_reading(config) for what, config in changed_configs()}
    assert len(taken) > 2000
    assert sum(taken.values()) < len(taken) / 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
TOP_KEYS = st.sampled_from(sorted({*GOOD, *MORE_KEYS}))
NESTED_KEYS = st.sampled_from(sorted({*GOOD["dflash_config"], *MORE_KEYS}))


@FAST
@given(st.dictionaries(TOP_KEYS, JSON, max_size=4), st.dictionaries(NESTED_KEYS, JSON, max_size=3))
def test_any_values_together(top: dict[str, Any], nested: dict[str, Any]) -> None:
    config = GOOD | {"dflash_config": GOOD["dflash_config"] | nested} | top
    check_reading(config)


@FAST
@given(JSON)
def test_any_json(config: object) -> None:
    assert not check_reading(config)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '"x"', "\ufeff{}", "[" * 10**5, '{"a":' + "9" * 5000 + "}", "\x00"],
    ids=repr,
)
def test_text_that_is_no_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json: found ") as caught:
        read_spec(tmp_path)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match=r"config\.json: found no JSON"):
        read_spec(tmp_path)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "x"
    write_export(random_model(SPECS["mixed"]), folder)
    return folder


@FAST
@given(data=st.data())
def test_any_damage_of_the_weights(data: st.DataObject, written: Path, tmp_path: Path) -> None:
    """Cut short, a few bytes changed (mostly of the header), bytes put in or taken out."""
    folder = tmp_path / "x"
    if not folder.exists():
        shutil.copytree(written, folder)
    content = bytearray((written / "model.safetensors").read_bytes())
    header = int.from_bytes(content[:8], "little") + 8
    how = data.draw(st.sampled_from(["cut", "change", "insert", "remove"]))
    place = data.draw(st.integers(0, header) | st.integers(0, len(content) - 1))
    if how == "cut":
        del content[place:]
    elif how == "change":
        for offset in data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4)):
            content[min(place + offset, len(content) - 1)] = data.draw(st.integers(0, 255))
    elif how == "insert":
        content[place:place] = data.draw(st.binary(min_size=1, max_size=9))
    else:
        del content[place : place + data.draw(st.integers(1, 9))]
    (folder / "model.safetensors").write_bytes(content)
    try:
        model = DFlashDraftModel.from_pretrained(folder)
    except UserError as error:
        assert str(error).startswith(str(folder)) and "want " in str(error)
    else:  # a number became another number
        assert model.spec == SPECS["mixed"]


# -- the commands --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tiny_target_dir: Path) -> tiny_drafter.Bench:
    return tiny_drafter.bench(tiny_target_dir)


@pytest.fixture
def drafter(bench: tiny_drafter.Bench, tmp_path: Path) -> Path:
    bench.drafter.save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no folder": shutil.rmtree,
    "no config": lambda f: (f / "config.json").unlink(),
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "folders for files": lambda f: to_folder(f / "model.safetensors"),
    "cut weights": lambda f: truncate(f / "model.safetensors"),
    "empty weights": lambda f: (f / "model.safetensors").write_bytes(b""),
    "cut config": lambda f: truncate(f / "config.json"),
    "wrong type": lambda f: edit_config(f, hidden_size="64"),
    "out of range": lambda f: edit_config(f, mask_token_id=10**9),
    "missing tensor": lambda f: edit_tensors(f, drop("fc.weight")),
    "another name": lambda f: edit_tensors(f, rename("fc.weight", "context_proj.weight")),
    "another shape": lambda f: edit_tensors(f, transform("fc.weight", lambda w: w[1:])),
    "whole numbers": lambda f: edit_tensors(f, transform("norm.weight", torch.Tensor.int)),
    "not finite": lambda f: edit_tensors(f, transform("norm.weight", lambda w: w * torch.nan)),
}


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ") and "Traceback" not in captured.out
    return line


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_evaluate_and_init_from(damage, drafter, bench, tiny_jsonl, tmp_path, capsys) -> None:
    run = TinyRun(bench.folder, tiny_jsonl, tmp_path)
    damage(drafter)
    capsys.readouterr()
    options = ["--drafter", drafter, "--target", bench.folder, "--data", tiny_jsonl(n=1)]
    assert evaluate.main(list(map(str, options))) == 2
    assert str(drafter) in one_line(capsys)
    assert run("a", f"--drafter.init_from={drafter}", "--drafter.num_layers=3") == 2
    assert str(drafter) in one_line(capsys)
    assert not has_run(tmp_path / "a")


META_DAMAGES: dict[str, dict[str, Any]] = {
    "no drafter": {"drafter": None},
    "another drafter": {"drafter": {"architectures": ["LlamaForCausalLM"]}},
    "no configuration": {"config": []},
    "no section": {"config": {"model": {}}},
    "no world": {"world": "1"},
    "no hash": {"data_hash": None},
    "no tokens": {"tokens": 1.5},
    "a score of text": {"score": "high"},
    "another step": {"step": 7},
    "a newer format": {"format_version": 99},
    "no format": {"format_version": "x"},
}


def edit_meta(folder: Path, changes: dict[str, Any]) -> None:
    """Change the meta data and sign them, as another program might have written them."""
    meta = folder / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | changes))
    sign(folder)


def sign(folder: Path) -> None:
    names = ("tensors.safetensors", "meta.json")
    contents = {name: (folder / name).read_bytes() for name in names}
    files = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    (folder / "manifest.json").write_text(json.dumps({"files": files}))


def edit_states(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "tensors.safetensors")
    change(tensors)
    save_file(tensors, folder / "tensors.safetensors")
    sign(folder)


RESUME_DAMAGES: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda f: (f / "manifest.json").unlink(),
    "cut manifest": lambda f: truncate(f / "manifest.json"),
    "manifest of text": lambda f: (f / "manifest.json").write_text('"files"'),
    "cut tensors": lambda f: truncate(f / "tensors.safetensors"),
    "flipped bit": lambda f: flip(f / "tensors.safetensors"),
    "no meta": lambda f: (f / "meta.json").unlink(),
    "signed garbage": lambda f: ((f / "tensors.safetensors").write_text("x"), sign(f)),
    "signed list": lambda f: ((f / "meta.json").write_text("[]"), sign(f)),
    "missing state": lambda f: edit_states(f, drop("model.fc.weight")),
    "another state": lambda f: edit_states(f, rename("model.fc.weight", "model.f.weight")),
    "cut state": lambda f: edit_states(f, transform("model.norm.weight", lambda w: w[1:])),
    **{name: lambda f, c=changes: edit_meta(f, c) for name, changes in META_DAMAGES.items()},
}
ONLY_RESUME = {"no world", "no hash", "no tokens", "no configuration", "no section"}


@pytest.fixture(scope="module")
def trained(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run with one checkpoint, and its texts."""
    folder = tmp_path_factory.mktemp("trained")

    def jsonl(n: int, name: str = "train.jsonl") -> Path:
        from conftest import tiny_chats

        (folder / name).write_text("\n".join(map(json.dumps, tiny_chats(n))) + "\n")
        return folder / name

    run = TinyRun(tiny_target_dir, jsonl, folder)
    assert run("good", "--train.steps=2") == 0
    return run


@pytest.mark.parametrize("name", RESUME_DAMAGES)
def test_resume_and_export(name, trained, tmp_path, capsys) -> None:
    shutil.copytree(trained.folder / "good", tmp_path / "a")
    RESUME_DAMAGES[name](tmp_path / "a" / "checkpoints" / "step_00000002")
    capsys.readouterr()
    assert trained("a", f"--log.dir={tmp_path}", "--train.steps=2", "--resume") == 2
    line = one_line(capsys)
    assert str(tmp_path) in line and "want " in line
    if name not in ONLY_RESUME | {"a score of text"}:
        arguments = ["--run", str(tmp_path / "a"), "--out", str(tmp_path / "x")]
        assert run_command(lambda: export.main(arguments)) == 2
        assert str(tmp_path) in one_line(capsys)
        assert not (tmp_path / "x").exists()
