"""The checks of an export: what each engine makes of it, and that no silent mistake passes."""

import copy
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from drafter_cases import random_model
from export_cases import SPECS, drop, edit_config, edit_tensors, rename, transform

from dflash_ext.config import UserError
from dflash_ext.config_check import FULL, SLIDING
from dflash_ext.engine_readers import (
    READERS,
    RefusedError,
    read_like_sglang,
    read_like_vllm,
    read_like_zlab,
    served,
    sglang_names,
    vllm_names,
)
from dflash_ext.export import read_config, write_export
from dflash_ext.export_check import ExportError, check_config, check_export, check_names, mutations
from dflash_ext.zlab import zlab_model_module

ALL_SPECS = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@pytest.fixture(scope="module")
def zlab_model() -> ModuleType:
    return zlab_model_module()


@ALL_SPECS
def test_every_engine_reads_what_was_trained(spec):
    config = json.loads(json.dumps(spec.to_hf_config()))
    for engine, read in READERS.items():
        reading = read(config)
        assert reading == {key: served(spec)[key] for key in reading}, engine
        assert {"target_layer_ids", "mask_token_id", "windows", "causal", "rope_theta"} <= set(
            reading
        )
    check_config(config, spec)


CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no is_causal": {"is_causal": None},
    "causal": {"is_causal": True},
    "no nested block size": {"dflash_config.block_size": None},
    "no block size": {"dflash_config.block_size": None, "block_size": None},
    "no ids": {"dflash_config.target_layer_ids": None},
    "top-level ids": {"dflash_config.target_layer_ids": None, "target_layer_ids": [1, 3]},
    "no mask": {"dflash_config.mask_token_id": None},
    "no window flag": {"use_sliding_window": None},
    "no layer types": {"layer_types": None, "max_window_layers": 1},
    "nested rope only": {"rope_theta": None},
    "top-level rope only": {"rope_parameters": None},
    "no rope": {"rope_theta": None, "rope_parameters": None},
    "another rope": {"rope_theta": 77.0},
    "no head size": {"head_dim": None},
    "no multiplier": {"dflash_config.output_multiplier": None},
    "soft cap 0": {"dflash_config.final_logit_softcapping": 0},
}


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with values set, or left out where None."""
    config = copy.deepcopy(config)
    for name, value in changes.items():
        place = config["dflash_config"] if "." in name else config
        place.pop(name.split(".")[-1], None)
        if value is not None:
            place[name.split(".")[-1]] = value
    return config


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@ALL_SPECS
def test_zlabs_own_class_agrees_with_our_reading(spec, changes, zlab_model, tmp_path):
    """The reader's fallbacks are those of the package, value by value."""
    config = changed(spec.to_hf_config(), changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    hf = zlab_model.Qwen3Config.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = zlab_model.DFlashDraftModel(hf)
    attention = [layer.self_attn for layer in model.layers]
    value = zlab_model._draft_value
    theirs = {
        "block_size": model.block_size,
        "target_layer_ids": list(model.target_layer_ids),
        "num_target_layers": hf.num_target_layers,
        "mask_token_id": model.mask_token_id,
        "windows": [a.sliding_window for a in attention],
        "causal": [a.is_causal for a in attention],
        "rope_theta": hf.rope_parameters["rope_theta"],
        "rope_style": "neox",
        "first_slot": 1,
        "heads": (hf.num_attention_heads, hf.num_key_value_heads, attention[0].head_dim),
        "rms_norm_eps": attention[0].q_norm.variance_epsilon,
        "vocab_size": hf.vocab_size,
        "embed_scale": float(value(hf, "input_embedding_scale", 1.0)),
        "logit_scale": float(value(hf, "output_multiplier", 1.0)),
        "softcap": value(hf, "final_logit_softcapping") or None,
    }
    assert read_like_zlab(config) == theirs


@pytest.mark.parametrize(
    ("read", "changes", "key", "value"),
    [
        (read_like_vllm, {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "target_layer_ids", [0, 1]),
        (read_like_vllm, {"rope_theta": None, "rope_parameters": None}, "rope_theta", 1e6),
        (read_like_vllm, {"is_causal": None, "dflash_config.causal": True}, "causal", [True] * 2),
        (read_like_vllm, {"is_neox_style": False}, "rope_style", "interleaved"),
        (
            read_like_vllm,
            {"dflash_config.use_swa": True, "dflash_config.swa_window_size": 9},
            "windows",
            [9, 9],
        ),
        (
            read_like_sglang,
            {"is_causal": None, "dflash_config.causal": True},
            "causal",
            [False] * 2,
        ),
        (read_like_sglang, {"rope_is_neox_style": False}, "rope_style", "interleaved"),
        (
            read_like_sglang,
            {"block_size": None, "dflash_config.block_size": None},
            "block_size",
            16,
        ),
    ],
)
def test_known_fallbacks_of_the_engines(read, changes, key, value):
    assert read(changed(SPECS["full"].to_hf_config(), changes))[key] == value


@pytest.mark.parametrize(
    ("read", "changes", "message"),
    [
        (read_like_zlab, {"num_target_layers": None}, "no num_target_layers"),
        (read_like_vllm, {"dflash_config.target_layer_ids": None}, "no layer ids"),
        (read_like_vllm, {"dflash_config.sample_from_anchor": True}, "sample_from_anchor"),
        (read_like_vllm, {"dflash_config.query_zero_predicts_next": True}, "sample_from_anchor"),
        (read_like_vllm, {"draft_vocab_size": 5}, "d2t"),
        (read_like_vllm, {"use_sliding_window": False}, "without a sliding_window"),
        (read_like_sglang, {"use_sliding_window": False}, "without a sliding_window"),
        (read_like_sglang, {"hidden_act": "gelu"}, "hidden_act"),
        (
            read_like_sglang,
            {"num_target_layers": None, "dflash_config.num_target_layers": 2},
            "outside of 2",
        ),
    ],
)
def test_what_engines_refuse(read, changes, message):
    with pytest.raises(RefusedError, match=message):
        read(changed(SPECS["mixed"].to_hf_config(), changes))


def shapes_of(spec) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in random_model(spec).state_dict().items()}


def test_names_find_their_place_in_the_engines():
    names = set(shapes_of(SPECS["mixed"]))
    assert sglang_names(names, 3) == vllm_names(names, 3) == (set(), set())
    prefixed = {f"model.{name}" for name in names}
    assert sglang_names(prefixed, 3) == (set(), set())  # SGLang takes them off
    assert vllm_names(prefixed, 3)[0] == prefixed  # vLLM puts on another one
    without = names - {"layers.1.self_attn.v_proj.weight"}
    fused = "layers.1.self_attn.qkv_proj.weight"
    assert sglang_names(without, 3) == vllm_names(without, 3) == (set(), {fused})
    assert sglang_names({*names, "fc.bias"}, 3) == ({"fc.bias"}, set())
    assert vllm_names({*names, "lm_head.weight"}, 3) == (set(), set())


@ALL_SPECS
def test_no_mutation_goes_unnoticed(spec):
    config, shapes = json.loads(json.dumps(spec.to_hf_config())), shapes_of(spec)
    count = 0
    for what, new_config, new_shapes in mutations(config, shapes, spec):
        count += 1
        with pytest.raises(ExportError):
            check_config(new_config, spec)
            check_names(new_shapes, spec)
            pytest.fail(f"{what}: not noticed")
    assert count > 60


def test_a_check_that_notices_nothing_is_itself_noticed(tmp_path, monkeypatch):
    model = random_model(SPECS["full"])
    write_export(model, tmp_path / "x")
    monkeypatch.setattr("dflash_ext.export_check.check_config", lambda *args: None)
    with pytest.raises(ExportError, match="checks: found no architectures at top unnoticed"):
        check_export(tmp_path / "x", model)


@ALL_SPECS
def test_the_report(spec, tmp_path):
    model = random_model(spec)
    write_export(model, tmp_path / "x")
    lines = check_export(tmp_path / "x", model)
    notes = [line for line in lines if line.startswith("note: ")]
    assert len(lines) - len(notes) == 5
    found = " ".join(notes)
    assert "num_speculative_tokens 3 " in notes[0] and "draft-tokens 4 " in notes[0]
    assert ("input_embedding_scale" in found) is (spec.embed_scale != 1)
    assert ("V2 model runner" in found) is (len(set(spec.layer_types)) == 2)
    explicit = any(spec.layer_causal(i) != (t == SLIDING) for i, t in enumerate(spec.layer_types))
    assert ("is_causal" in found) is explicit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("hidden_norm.weight"), "hidden_norm.weight: found nothing"),
        (rename("fc.weight", "model.fc.weight"), "fc.weight: found nothing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra: found .*want nothing"),
        (transform("fc.weight", lambda w: w[:, :32]), r"fc.weight: found \(32, 32\)"),
        (transform("norm.weight", lambda w: w * float("inf")), "norm.weight has non-finite"),
        (transform("layers.1.self_attn.k_proj.weight", lambda w: w.flip(0)), "other outputs"),
        (
            transform("norm.weight", lambda w: w.bfloat16()),
            "found tensors of bfloat16 and float32, want one",
        ),
        (transform("norm.weight", lambda w: w * 0), "norm.weight: found only zeros"),
    ],
    ids=["dropped", "prefixed", "extra", "shape", "inf", "permuted", "dtype", "zero"],
)
def test_changed_tensors_are_noticed(change, message, tmp_path):
    model = random_model(SPECS["mixed"])
    write_export(model, tmp_path / "x")
    edit_tensors(tmp_path / "x", change)
    with pytest.raises((UserError, ExportError), match=message):
        check_export(tmp_path / "x", model)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_layer_ids": [1, 2]},
        {"mask_token_id": 94},
        {"sliding_window": 7},
        {"is_causal": False},
        {"layer_types": [FULL, FULL, SLIDING]},
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        {"output_multiplier": 2.0},
        {"dtype": "bfloat16"},
        {"torch_dtype": "float16"},
        {"block_size": 9},
        {"rope_parameters": {"rope_theta": 3000.0, "partial_rotary_factor": 0.25}},
        {"architectures": ["DSparkDraftModel"]},
        {"logit_scale": 2.0},
        {"auto_map": {}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_changed_config_is_noticed(changes, tmp_path: Path):
    model = random_model(SPECS["mixed"])
    write_export(model, tmp_path / "x")
    edit_config(tmp_path / "x", **changes)
    with pytest.raises((ExportError, UserError), match="config.json: "):
        check_export(tmp_path / "x", model)


def test_a_window_of_no_layer_is_noticed(tmp_path: Path):
    model = random_model(SPECS["full"])
    write_export(model, tmp_path / "x")
    edit_config(tmp_path / "x", sliding_window=77)
    with pytest.raises(ExportError, match="sliding_window: found 77, want None"):
        check_export(tmp_path / "x", model)


def test_the_stored_config_is_what_is_checked(tmp_path):
    write_export(random_model(SPECS["mixed"]), tmp_path / "x")
    assert read_config(tmp_path / "x") == json.loads(json.dumps(SPECS["mixed"].to_hf_config()))
