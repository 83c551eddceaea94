"""drafter.init_from with a folder: a public checkpoint goes on training as what it is."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import drop, edit_tensors, rename, transform
from safetensors.torch import load_file, save_file

from dflash_ext.config import DrafterConfig, UserError
from dflash_ext.drafter import DFlashDraftModel, DrafterSpec
from dflash_ext.drafter.init import start_spec
from dflash_ext.export import read_config, read_spec

# What a folder of z-lab's hub looks like, for the tiny target: sizes of its own, no
# rope_parameters, block_size and num_target_layers at the top only.
PUBLIC: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 8,
    "bos_token_id": 256,
    "dflash_config": {"mask_token_id": 262, "target_layer_ids": [1, 2, 4]},
    "dtype": "bfloat16",
    "eos_token_id": 258,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 40960,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 3,
    "num_target_layers": 6,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 16,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.3",
    "use_cache": True,
    "use_sliding_window": True,
    "vocab_size": 264,
}


@pytest.fixture
def public(tmp_path: Path) -> Path:
    folder = tmp_path / "public"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLIC))
    model = DFlashDraftModel(DrafterSpec.from_hf_config(PUBLIC))
    model.init_weights(seed=7)
    save_file(model.bfloat16().state_dict(), folder / "model.safetensors")
    for name in ("README.md", "dflash.py", ".gitattributes"):
        (folder / name).write_text("# raise SystemExit")
    return folder


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def test_what_is_not_configured_is_the_checkpoints(run, public, capsys):
    """Sizes, rope, windows, layers and mask are taken over; the block size is this run's."""
    assert run("a", f"--drafter.init_from={public}", "--plan") == 0
    assert "start    block_size 8 there, 4 here" in capsys.readouterr().out
    assert run("a", f"--drafter.init_from={public}", "--train.lr=1e-30") == 0
    spec = read_spec(run.folder / "a" / "export")
    for name in (
        *("head_dim", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("layer_types", "sliding_window", "causal", "rope_theta", "rms_norm_eps"),
        *("mask_token_id", "target_layer_ids", "num_target_layers"),
    ):
        assert getattr(spec, name) == getattr(read_spec(public), name), name
    assert spec.block_size == 4
    assert (
        read_config(run.folder / "a" / "export")["max_position_embeddings"] == 512
    )  # the target's
    trained = load_file(run.folder / "a" / "export" / "model.safetensors")
    start = load_file(public / "model.safetensors")
    assert trained.keys() == start.keys()
    # A learning rate of nothing: the run starts from exactly these weights.
    assert all(torch.equal(trained[n], t.float()) for n, t in start.items())


def test_a_warm_run_goes_on_without_the_folder(run, public, capsys):
    start = f"--drafter.init_from={public}"
    assert run("whole", start) == 0
    assert run("parts", start, "--train.steps=3", "--train.schedule=constant") == 0
    assert run("again", start, "--train.schedule=constant") == 0
    shutil.rmtree(public)
    assert run("parts", start, "--train.schedule=constant", "--resume") == 0
    one, two = (load_file(run.folder / n / "export/model.safetensors") for n in ("again", "parts"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_configured_values_win_and_are_reported(run, public, capsys):
    flags = (
        *("--drafter.layer_types=[full_attention, full_attention]", "--drafter.mask_token_id=263"),
        *("--model.target_layer_ids=[0, 2, 4]", "--drafter.block_size=8"),
    )
    assert run("a", f"--drafter.init_from={public}", *flags, "--plan") == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("start ")]
    assert lines == [
        "start    mask_token_id 262 there, 263 here",
        "start    target_layer_ids (1, 2, 4) there, (0, 2, 4) here",
        "start    layer_types ('sliding_attention', 'full_attention') there, "
        "('full_attention', 'full_attention') here",
        "start    sliding_window 16 there, None here",
        "start    causal None there, False here",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("hidden_norm.weight"), "hidden_norm.weight: found nothing, want (64,)"),
        (
            rename("fc.weight", "model.fc.weight"),
            "fc.weight: found nothing, want (64, 192) (and 1 others)",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(2).bfloat16()}),
            "lm_head.weight: found (2,), want",
        ),
        (
            lambda t: t.update({"layers.2.input_layernorm.weight": torch.ones(64).bfloat16()}),
            "layers.2.input_layernorm.weight: found (64,), want nothing",
        ),
        (
            transform("layers.0.mlp.up_proj.weight", lambda w: w[:79]),
            "up_proj.weight: found (79, 64), want (80, 64)",
        ),
        (transform("norm.weight", lambda w: w / 0), "norm.weight has non-finite values"),
    ],
    ids=["missing", "renamed", "head", "layer", "shape", "inf"],
)
def test_every_missing_or_unexpected_tensor_is_an_error(change, message, run, public, capsys):
    edit_tensors(public, change)
    assert run("a", f"--drafter.init_from={public}") == 2
    assert message in one_line(capsys)
    assert not (run.folder / "a" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "drafter.init_from: hidden_size: found 32, want the target's 64"),
        (
            {"num_target_layers": 9},
            "num_target_layers: found 9, want the target's 6, or set model.",
        ),
        ({"layer_types": None}, "layer_types: found nothing, want 2 names"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling.rope_type: found 'yarn'",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: found 0.5"),
        ({"attention_bias": True}, "attention_bias: found True"),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu'"),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures: found ['DFlash2DraftModel']"),
        (
            {"dflash_config": PUBLIC["dflash_config"] | {"projector_type": "domino"}},
            "projector_type",
        ),
        ({"dflash_config": PUBLIC["dflash_config"] | {"block_size": 16}}, "block_size: found 8 at"),
        ({"dflash_config": PUBLIC["dflash_config"] | {"causal": True}}, "causal: found True"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "eagle_aux_hidden_state_layer_ids"),
        ({"draft_vocab_size": 100}, "draft_vocab_size: found 100"),
        ({"use_sliding_window": False}, "use_sliding_window: found False"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_drafter_of_another_kind_is_refused(changes, message, run, public, capsys):
    (public / "config.json").write_text(json.dumps(PUBLIC | changes))
    assert run("a", f"--drafter.init_from={public}") == 2
    assert message in one_line(capsys)


def test_another_number_of_layers_is_named(run, public, capsys):
    assert run("a", f"--drafter.init_from={public}", "--drafter.num_layers=3") == 2
    assert "drafter.num_layers: found 3, want 2 as in " in one_line(capsys)


@pytest.mark.parametrize("missing", ["", "config.json", "model.safetensors"])
def test_a_folder_with_something_missing(missing, run, public, capsys):
    if missing:
        (public / missing).unlink()
    else:
        shutil.rmtree(public)
    assert run("a", f"--drafter.init_from={public}") == 2
    assert str(public) in one_line(capsys)


@pytest.mark.parametrize("name", ["tagret", "", __file__])
def test_a_start_that_is_no_folder_names_the_choices(name: str) -> None:
    with pytest.raises(UserError, match=r"drafter\.init_from: found .* want none, target, or the"):
        start_spec(DrafterConfig(init_from=name))
