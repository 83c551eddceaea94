"""Exported drafters: what is in the folder, how readers understand it, the command."""

import json
from typing import Any

import pytest
import torch
from drafter_cases import MIXES, random_model, small_spec
from export_cases import SPECS
from safetensors.torch import load_file

from dflash_ext import export
from dflash_ext.config import UserError
from dflash_ext.config_check import FULL, SLIDING
from dflash_ext.drafter import DFlashDraftModel, DrafterSpec
from dflash_ext.export import check_replaceable, read_config, write_export
from dflash_ext.export_check import check_export

ALL_SPECS = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def test_config_states_everything_an_engine_reads(tmp_path):
    write_export(random_model(SPECS["mixed"]), tmp_path / "x")
    config = read_config(tmp_path / "x")
    want = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 96,
        "draft_vocab_size": 96,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 3000.0,
        "rope_parameters": {
            "rope_theta": 3000.0,
            "rope_type": "default",
            "partial_rotary_factor": 1.0,
        },
        "is_neox_style": True,
        "rope_is_neox_style": True,
        "layer_types": [SLIDING, FULL, SLIDING],
        "sliding_window": 6,
        "use_sliding_window": True,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": [1, 2],
        "pad_token_id": 0,
        "dtype": "float32",
    }
    assert {name: config[name] for name in want} == want
    assert "auto_map" not in config
    assert "is_causal" not in config  # one flag cannot state a mix
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    for name, causal in (("full", False), ("all_causal", True), ("sliding", True)):
        config = read_config_of(SPECS[name])
        assert config["is_causal"] is config["dflash_config"]["causal"] is causal


def read_config_of(spec: DrafterSpec) -> dict[str, Any]:
    return json.loads(json.dumps(spec.to_hf_config()))


@ALL_SPECS
def test_config_reads_back_as_the_spec(spec):
    assert DrafterSpec.from_hf_config(read_config_of(spec)) == spec


@pytest.mark.parametrize("name", ["num_target_layers", "mask_token_id", "target_layer_ids"])
def test_a_missing_value_is_named_not_guessed(name):
    config = read_config_of(SPECS["full"])
    config.pop(name, None)
    config["dflash_config"].pop(name, None)
    with pytest.raises(UserError, match=f"config.json: {name}: found nothing"):
        DrafterSpec.from_hf_config(config)


def test_two_rope_bases_are_refused():
    config = read_config_of(SPECS["full"]) | {"rope_theta": 10000.0}
    with pytest.raises(UserError, match="rope_theta: found 10000.0 at the top level and 3000.0"):
        DrafterSpec.from_hf_config(config)


def test_another_architecture_is_refused():
    config = read_config_of(SPECS["full"]) | {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(UserError, match="architectures: found"):
        DrafterSpec.from_hf_config(config)


@ALL_SPECS
def test_load_gives_back_the_model(spec, tmp_path):
    model = random_model(spec)
    model.save_pretrained(tmp_path / "x")
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "x")
    assert loaded.spec == spec
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(t, state[n]) for n, t in loaded.state_dict().items())
    assert all(p.requires_grad for p in loaded.parameters())
    check_export(tmp_path / "x", model)


def test_stored_dtype(tmp_path):
    model = random_model(SPECS["mixed"])
    write_export(model, tmp_path / "x", torch.bfloat16)
    tensors = load_file(tmp_path / "x" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert read_config(tmp_path / "x")["dtype"] == "bfloat16"
    assert "bfloat16" in check_export(tmp_path / "x", model)[0]
    assert next(model.parameters()).dtype == torch.float32
    write_export(model.to(torch.bfloat16), tmp_path / "y")
    assert read_config(tmp_path / "y")["dtype"] == "bfloat16"


def test_an_older_export_is_replaced_and_nothing_is_left_over(tmp_path):
    write_export(random_model(SPECS["full"], seed=1), tmp_path / "x")
    (tmp_path / ".x.tmp").mkdir()  # of an export that was killed
    model = random_model(SPECS["mixed"], seed=2)
    write_export(model, tmp_path / "x")
    check_export(tmp_path / "x", model)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert {p.name for p in (tmp_path / "x").iterdir()} == {"config.json", "model.safetensors"}


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"found 'notes.txt', want a new folder"):
        write_export(random_model(SPECS["full"]), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failed_write_leaves_the_older_export(tmp_path, monkeypatch):
    model = random_model(SPECS["full"])
    write_export(model, tmp_path / "x")

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_export(random_model(SPECS["full"], seed=1), tmp_path / "x")
    check_export(tmp_path / "x", model)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_non_finite_weights_are_not_exported(tmp_path):
    model = random_model(SPECS["full"])
    with torch.no_grad():
        model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="layers.1.mlp.up_proj.weight has non-finite"):
        write_export(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_expected_spec_wins_over_the_stored_one(tmp_path):
    model = random_model(SPECS["full"])
    write_export(model, tmp_path / "x")
    expect = small_spec(MIXES["full"], block_size=8, target_layer_ids=(1, 3))
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "x", expect=expect)
    assert loaded.spec == expect
    assert torch.equal(loaded.fc.weight, model.fc.weight)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    write_export(random_model(SPECS["full"]), tmp_path / "x")
    with pytest.raises(UserError, match=r"fc.weight: found \(32, 64\), want \(32, 96\)"):
        DFlashDraftModel.from_pretrained(
            tmp_path / "x", expect=small_spec(MIXES["full"], target_layer_ids=(0, 1, 2))
        )


def test_a_folder_without_a_drafter_is_one_line(tmp_path):
    with pytest.raises(UserError, match="config.json: found No such file") as caught:
        DFlashDraftModel.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_model_of_another_kind_is_not_replaced(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UserError, match="want a new folder or an older export"):
        check_replaceable(folder)
    assert (folder / "config.json").exists()
