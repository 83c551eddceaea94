"""Exported drafters: what is in the folder, how readers understand it, the command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_cases import MIXES, random_model, small_spec
from safetensors.torch import load_file, save_file

from dflash_ext import export
from dflash_ext.checkpoint import CheckpointManager
from dflash_ext.config import CheckpointConfig, UserError, run_command
from dflash_ext.drafter import DFlashDraftModel, DrafterSpec
from dflash_ext.drafter.spec import FULL, SLIDING
from dflash_ext.export import check_export, check_replaceable, main, write_export

SPECS = {
    "full": small_spec(MIXES["full"]),
    "mixed": small_spec(MIXES["mixed"]),
    "all_sliding_bidirectional": small_spec(MIXES["sliding"], causal=False),
    "all_causal": small_spec(MIXES["full"], causal=True),
    "scaled": small_spec(MIXES["full"], embed_scale=5.5, logit_scale=0.25, softcap=30.0),
}
ALL_SPECS = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def edit_config(folder: Path, **changes: Any) -> None:
    config = read_config(folder)
    for name, value in changes.items():
        place = config["dflash_config"] if name in config["dflash_config"] else config
        place[name] = value
    (folder / "config.json").write_text(json.dumps(config))


def read_like_zlab(config: dict[str, Any]) -> dict[str, Any]:
    nested = config["dflash_config"]
    explicit = config.get("is_causal")
    return {
        "block_size": nested.get("block_size", config.get("block_size", 16)),
        "target_layer_ids": nested.get("target_layer_ids", config.get("target_layer_ids")),
        "mask_token_id": nested.get("mask_token_id", config.get("mask_token_id")),
        "windows": [
            config["sliding_window"] if t == SLIDING else None for t in config["layer_types"]
        ],
        "causal": [t == SLIDING if explicit is None else explicit for t in config["layer_types"]],
        "theta": config["rope_parameters"]["rope_theta"],
        "target_layers": config["num_target_layers"],
    }


def read_like_vllm(config: dict[str, Any]) -> dict[str, Any]:
    nested = config["dflash_config"]
    aux = config.get("eagle_aux_hidden_state_layer_ids")
    if aux is None:
        aux = [i + 1 for i in nested["target_layer_ids"]]
    explicit = config.get("is_causal", nested.get("causal"))
    window = nested.get("swa_window_size") or config["sliding_window"]
    return read_like_zlab(config) | {
        "target_layer_ids": [i - 1 for i in aux],
        "windows": [window if t == SLIDING else None for t in config["layer_types"]],
        "causal": [t == SLIDING if explicit is None else explicit for t in config["layer_types"]],
        "theta": (config.get("rope_parameters") or {}).get("rope_theta", 1e6),
    }


def read_like_sglang(config: dict[str, Any]) -> dict[str, Any]:
    bound = config.get("num_target_layers", config["num_hidden_layers"])
    assert max(config["dflash_config"]["target_layer_ids"]) < bound
    window_left = None if config["sliding_window"] is None else config["sliding_window"] - 1
    return read_like_zlab(config) | {
        "windows": [window_left + 1 if t == SLIDING else None for t in config["layer_types"]],
        "theta": config["rope_theta"],
    }


@ALL_SPECS
def test_every_reader_resolves_what_was_trained(spec, tmp_path):
    write_export(random_model(spec), tmp_path / "x")
    config = read_config(tmp_path / "x")
    layers = range(spec.num_layers)
    want = {
        "block_size": spec.block_size,
        "target_layer_ids": list(spec.target_layer_ids),
        "mask_token_id": spec.mask_token_id,
        "windows": [spec.layer_window(i) for i in layers],
        "causal": [spec.layer_causal(i) for i in layers],
        "theta": spec.rope_theta,
        "target_layers": spec.num_target_layers,
    }
    for read in (read_like_zlab, read_like_vllm, read_like_sglang):
        assert read(config) == want, read.__name__
    assert config["block_size"] == config["dflash_config"]["block_size"]
    assert config.get("is_causal") == config["dflash_config"].get("causal") == spec.causal


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
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": 3000.0, "rope_type": "default"},
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
    assert read_config_of(SPECS["full"])["is_causal"] is False


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
    assert len(check_export(tmp_path / "x", model)) == 3


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


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def drop(name):
    return lambda tensors: tensors.pop(name)


def rename(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def transform(name, function):
    return lambda tensors: tensors.update({name: function(tensors[name]).contiguous()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("hidden_norm.weight"), "hidden_norm.weight: found nothing"),
        (rename("fc.weight", "model.fc.weight"), "fc.weight: found nothing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra: found .*want nothing"),
        (transform("fc.weight", lambda w: w[:, :32]), r"fc.weight: found \(32, 32\)"),
        (transform("norm.weight", lambda w: w * float("inf")), "norm.weight has non-finite"),
        (transform("layers.1.self_attn.k_proj.weight", lambda w: w.flip(0)), "other outputs"),
        (transform("norm.weight", lambda w: w.bfloat16()), "several dtypes"),
    ],
    ids=["dropped", "prefixed", "extra", "shape", "inf", "permuted", "dtype"],
)
def test_check_notices_changed_tensors(change, message, tmp_path):
    model = random_model(SPECS["mixed"])
    write_export(model, tmp_path / "x")
    edit_tensors(tmp_path / "x", change)
    with pytest.raises((UserError, RuntimeError), match=message):
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
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_check_notices_a_changed_config(changes, tmp_path):
    model = random_model(SPECS["mixed"])
    write_export(model, tmp_path / "x")
    edit_config(tmp_path / "x", **changes)
    with pytest.raises(RuntimeError, match="config.json: found"):
        check_export(tmp_path / "x", model)


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
    with pytest.raises(UserError, match="found no readable drafter") as caught:
        DFlashDraftModel.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A run with checkpoints of steps 10 and 20 and their drafters (seeds 10 and 20)."""
    manager = CheckpointManager(tmp_path / "run" / "checkpoints", CheckpointConfig())
    for step in (10, 20):
        model = random_model(SPECS["mixed"], seed=step)
        tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        tensors["optimizer.exp_avg.0"] = torch.zeros(3)
        manager.save(step, tensors, {"drafter": model.spec.to_hf_config()})
    manager.close()
    return tmp_path / "run"


def command(*arguments: object) -> int:
    return run_command(lambda: main([str(a) for a in arguments]))


def test_command_exports_a_step_and_checks_it(run_dir, tmp_path, capsys):
    assert command("--run", run_dir, "--step", 10, "--out", tmp_path / "x", "--check") == 0
    output = capsys.readouterr().out
    assert "at step 10" in output
    assert "36 tensors" in output and output.count("ok: ") == 3
    check_export(tmp_path / "x", random_model(SPECS["mixed"], seed=10))


def test_command_takes_the_newest_step(run_dir, tmp_path):
    assert command("--run", run_dir, "--out", tmp_path / "x", "--dtype", "bfloat16") == 0
    check_export(tmp_path / "x", random_model(SPECS["mixed"], seed=20))
    assert read_config(tmp_path / "x")["dtype"] == "bfloat16"


def test_command_errors_are_one_line_and_code_2(run_dir, tmp_path, capsys):
    for arguments in (
        ("--run", tmp_path / "none", "--out", tmp_path / "x"),
        ("--run", run_dir, "--step", 11, "--out", tmp_path / "x"),
        ("--run", run_dir, "--out", run_dir),
    ):
        assert command(*arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_model_of_another_kind_is_not_replaced(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UserError, match="want a new folder or an older export"):
        check_replaceable(folder)
    assert (folder / "config.json").exists()
