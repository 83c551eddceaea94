"""What can be checked of a configuration before the target and the data are loaded."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_ext import _C
from dflash_ext.config_values import UserError, devices_of, shown, split_weight

if TYPE_CHECKING:
    from dflash_ext.config import Config, DrafterConfig, TopologyConfig

MAX_BLOCK_SIZE = 32  # what block_attention and the per-slot metric words are laid out for
MAX_SEED = 2**63 - 1
MAX_WEIGHT = 1000  # of a source of training text: passes in one epoch
FULL, SLIDING = "full_attention", "sliding_attention"


def validate(cfg: Config, *, devices: bool = True) -> None:
    """Check ranges, combinations, devices and optional packages.

    Args:
        devices: whether the devices must be there; not for a plan.

    Raises:
        UserError: the first field that cannot work.
    """
    _check_fields(cfg)
    _check_drafter(cfg.drafter)
    if cfg.model.target_layer_ids is not None:
        check_layer_ids(cfg.model.target_layer_ids, None)
    for device in cfg.topology.drafters:
        if len(devices_of(device)) > 1:
            raise UserError(f"topology.drafters: found {device}, want one device for each drafter")
    if devices:
        _check_devices("topology.targets", cfg.topology.targets)
        _check_devices("topology.drafters", cfg.topology.drafters)
    _check_weights(cfg)
    _check_hidden_states(cfg)
    train = cfg.train
    if train.kl != "forward" and train.kl_weight == 0:
        raise UserError(
            f"train.kl_weight: found 0 with train.kl {train.kl}, want the weight of that divergence"
        )
    if train.prefix_weight_base is not None and cfg.drafter.block_size < 3:
        raise UserError(
            f"drafter.block_size: found {cfg.drafter.block_size} with train.prefix_weight_base, "
            "want at least 3: two clean tokens and a proposal"
        )
    name = cfg.log.name
    if name != Path(name).name or name in (".", "..") or not name.isprintable() or not name.strip():
        raise UserError(f"log.name: found {name!r}, want a plain folder name")
    if train.cuda_graph and "cpu" in cfg.topology.drafters:
        raise UserError("train.cuda_graph: found true with a drafter on cpu, want false")
    if train.ce_weight == train.kl_weight == train.cap_lambda == 0:
        raise UserError(
            "train.ce_weight: found 0, as are kl_weight and cap_lambda, want at least one above 0"
        )
    if cfg.checkpoint.keep_best and not (cfg.data.eval and train.eval_every):
        field = "train.eval_every 0" if cfg.data.eval else "an empty data.eval"
        raise UserError(
            f"checkpoint.keep_best: found true with {field}, "
            "want evaluations during the run to choose by"
        )
    if train.eval_every and not cfg.data.eval:
        raise UserError(
            f"train.eval_every: found {train.eval_every} with an empty data.eval, "
            "want held-out text, or 0"
        )
    if cfg.log.wandb != "off" and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"log.wandb: found {cfg.log.wandb} without the package wandb, "
            "want off, or: pip install 'dflash-ext[wandb]'"
        )


def _check_fields(cfg: Config) -> None:
    """What the fields themselves say: ``required``, ``at_least``, ``above``, ``at_most``."""
    for section in dataclasses.fields(cfg):
        values = getattr(cfg, section.name)
        for field in dataclasses.fields(values):
            key, limits = f"{section.name}.{field.name}", field.metadata
            value = getattr(values, field.name)
            if "required" in limits and not value:
                raise UserError(f"{key}: found nothing, want {limits['required']}")
            low = limits.get("at_least", limits.get("above"))
            if low is not None and value is not None:
                _check_number(key, value, low, "above" in limits, limits.get("at_most"))


def _check_number(key: str, value: float, low: float, exclusive: bool, high: float | None) -> None:
    inside = value > low if exclusive else value >= low
    if math.isfinite(value) and inside and (high is None or value <= high):
        return
    want = f"more than {low}" if exclusive else f"at least {low}"
    if high is not None:
        want += f" and at most {high}"
    elif not math.isfinite(value):
        want = "a finite number"
    raise UserError(f"{key}: found {value}, want {want}")


def _check_weights(cfg: Config) -> None:
    for entry in cfg.data.train:
        weight, name = split_weight(entry)
        if not name.strip() or not 0 < weight <= MAX_WEIGHT:
            raise UserError(
                f"data.train: found {shown(entry)}, want WEIGHT * FILE with a weight above 0 and "
                f"at most {MAX_WEIGHT}"
            )
    for entry in cfg.data.eval:
        if not entry.strip():
            raise UserError("data.eval: found an empty name, want files of text, or [] for none")
        if split_weight(entry)[1] != entry:
            raise UserError(f"data.eval: found {shown(entry)}, want it without a weight")


def _check_hidden_states(cfg: Config) -> None:
    data = cfg.data
    if not data.hidden_states:
        if data.hidden_layer_ids is not None or data.hidden_last != "none":
            raise UserError(
                "data.hidden_states: found nothing, want the folder that data.hidden_layer_ids and "
                "data.hidden_last are about"
            )
        return
    if any(len(devices_of(entry)) > 1 for entry in cfg.topology.targets):
        raise UserError(
            f"topology.targets: found {cfg.topology.targets} with data.hidden_states, want one "
            "device for each target"
        )
    if not data.hidden_layer_ids or len(set(data.hidden_layer_ids)) != len(data.hidden_layer_ids):
        raise UserError(
            f"data.hidden_layer_ids: found {shown(data.hidden_layer_ids)}, want the layers stored "
            "in data.hidden_states"
        )
    if cfg.train.kl_weight > 0 and data.hidden_last == "none":
        raise UserError(
            "data.hidden_last: found none, want raw or normed last states with train.kl_weight"
        )


def _check_drafter(drafter: DrafterConfig) -> None:
    heads, groups = drafter.num_attention_heads, drafter.num_key_value_heads
    if heads is not None and groups is not None and heads % groups:
        raise UserError(
            f"drafter.num_attention_heads: found {heads}, want a multiple of the "
            f"{groups} key/value heads"
        )
    types = drafter.layer_types
    if types is not None and len(types) != drafter.num_layers:
        raise UserError(
            f"drafter.layer_types: found {len(types)} entries, want one for each of the "
            f"{drafter.num_layers} layers"
        )
    unknown = [kind for kind in types or () if kind not in (FULL, SLIDING)]
    if unknown:
        raise UserError(f"drafter.layer_types: found {unknown[0]}, want {FULL} or {SLIDING}")
    sliding, window = SLIDING in (types or ()), drafter.sliding_window
    if sliding and window is None:
        raise UserError(
            "drafter.sliding_window: found null, want a size (layer_types has sliding_attention)"
        )
    if not sliding and window is not None:
        raise UserError(
            f"drafter.sliding_window: found {window}, want null "
            "(layer_types has no sliding_attention)"
        )


def check_layer_ids(ids: Sequence[int], num_layers: int | None) -> None:
    """Refuse ids that are none, not ascending, or outside [0, num_layers).

    Args:
        ids: 0-based decoder layers whose outputs are captured.
        num_layers: decoder layers of the target; None = not known yet.

    Raises:
        UserError: naming model.target_layer_ids.
    """
    limit = math.inf if num_layers is None else num_layers
    ascending = all(a < b for a, b in zip(ids, ids[1:], strict=False))
    if not ids or not ascending or ids[0] < 0 or ids[-1] >= limit:
        top = "" if num_layers is None else f" to {num_layers - 1}"
        raise UserError(
            f"model.target_layer_ids: found {shown(list(ids))}, "
            f"want ascending layer numbers from 0{top}"
        )


def _check_devices(key: str, devices: list[str]) -> None:
    if all(device == "cpu" for entry in devices for device in devices_of(entry)):
        return
    import torch  # only to count devices

    known = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    for device in (d for entry in devices for d in devices_of(entry)):
        if device not in known:
            raise UserError(f"{key}: found {device}, want one of {', '.join(known)}")


def check_topology(topology: TopologyConfig) -> None:
    """Refuse workers on CPUs beside workers on GPUs, and GPUs the extension has no kernels for.

    Raises:
        UserError: naming topology.targets or topology.drafters.
    """
    check_same_kind(topology)
    if topology.drafters[0] != "cpu" and not _C.with_cuda:
        raise UserError(
            f"topology.targets: found {topology.targets[0]} and an extension built without CUDA, "
            "want cpu, or a build with nvcc and a CUDA build of torch"
        )


def check_same_kind(topology: TopologyConfig) -> None:
    """Refuse workers on CPUs beside workers on GPUs.

    Raises:
        UserError: naming topology.drafters.
    """
    entries = [*topology.targets, *topology.drafters]
    on_cpu = [device == "cpu" for entry in entries for device in devices_of(entry)]
    if any(on_cpu) and not all(on_cpu):
        raise UserError(
            f"topology.drafters: found {topology.drafters} with targets {topology.targets}, "
            "want all on cpu or all on GPUs"
        )
