"""The converter of speculators 0.9.0 takes our exports as it takes z-lab's checkpoints.

Its wheel and that of loguru are unpacked, not installed; what only its servers need is stubbed out.
"""

import importlib
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from export_cases import edit_config, edit_tensors, rename
from safetensors.torch import load_file
from tiny_drafter import tiny_spec
from transformers import AutoConfig

from dflash_ext.drafter import DFlashDraftModel, DrafterSpec
from dflash_ext.engine_readers import served
from dflash_ext.target import load_target
from dflash_ext.target_source import cache_dir
from dflash_ext.wheels import fetch_wheel

WHEELS = {
    "speculators==0.9.0": "f0de7571274ce996d769ce81240379728dcb38701f77d2d34cfd0d670d1b4481",
    "loguru==0.7.3": "31a33c10c8e1e10422bfd431aeb5d351c7cf7fa671e3c4df004162264b28220c",
}
SERVERS = ("openai", "openai.types", "openai.types.chat", "openai.types.completion")
STUBS = (*SERVERS, "datasets", "hs_connectors")


class Stub(ModuleType):
    """A package of which every name is an empty class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("wheels")  # it copies its own files, so not from the zip
    for requirement, sha256 in WHEELS.items():
        with zipfile.ZipFile(fetch_wheel(requirement, sha256, cache_dir(), "tests")) as wheel:
            wheel.extractall(folder)
    before = dict(sys.modules)
    sys.path.insert(0, str(folder))
    for name in STUBS:
        sys.modules.setdefault(name, Stub(name))
    module = importlib.import_module("speculators.convert.dflash.converter")
    module.logger.remove()
    yield module
    for name in set(sys.modules) - set(before):
        if name.split(".")[0] in {"speculators", "loguru", "openai", "datasets", "hs_connectors"}:
            del sys.modules[name]
    sys.path.remove(str(folder))


@pytest.fixture
def spec(tiny_target_dir: Path) -> DrafterSpec:
    return tiny_spec(load_target(str(tiny_target_dir), dtype="float32", device="cpu"))


@pytest.fixture
def export(spec: DrafterSpec, tmp_path: Path) -> Path:
    model = DFlashDraftModel(spec)
    model.init_weights(seed=1)
    model.save_pretrained(tmp_path / "export", torch.bfloat16)
    return tmp_path / "export"


def test_our_export_is_converted(converter, export, spec, tiny_target_dir, tmp_path):
    out = tmp_path / "converted"
    converter.DFlashConverter().convert(export, out, str(tiny_target_dir), validate=True)
    config = json.loads((out / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [i + 1 for i in spec.target_layer_ids]
    assert config["mask_token_id"] == spec.mask_token_id
    assert config["block_size"] == spec.block_size
    assert config.get("sample_from_anchor", False) is False
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    layer = config["transformer_layer_config"]
    hf = AutoConfig.for_model(**layer)
    want = served(spec)
    assert hf.rope_parameters["rope_theta"] == want["rope_theta"]
    assert (hf.num_attention_heads, hf.num_key_value_heads, hf.head_dim) == want["heads"]
    windows = [hf.sliding_window if t == "sliding_attention" else None for t in hf.layer_types]
    assert windows == want["windows"]
    assert hf.rms_norm_eps == want["rms_norm_eps"]
    ours, theirs = load_file(export / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


def test_it_would_refuse_another_name(converter, export, tiny_target_dir, tmp_path):
    edit_tensors(export, rename("fc.weight", "context_proj.weight"))
    with pytest.raises(ValueError, match=r"context_proj\.weight"):
        converter.DFlashConverter().convert(export, tmp_path / "y", str(tiny_target_dir))


def test_it_would_refuse_another_width(converter, export, tiny_target_dir, tmp_path):
    edit_config(export, hidden_size=32)
    with pytest.raises(ValueError, match="hidden_size=32"):
        converter.DFlashConverter().convert(export, tmp_path / "y", str(tiny_target_dir))
