"""What z-lab's package, vLLM and SGLang make of an exported drafter: pure functions of its files.

Written from their sources as of November 2026 (dflash 0.1.0 `dflash/model.py`; vLLM
`models/qwen3_dflash.py`, `eagle3_utils.py`; SGLang `models/dflash.py`, `dflash_utils.py`). They
copy the fallbacks, too: a value that is left out is not an error there but another drafter.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

from dflash_ext.config_check import FULL, SLIDING
from dflash_ext.drafter.spec import DrafterSpec

Reading = dict[str, Any]


class RefusedError(Exception):
    """A reader does not load this; the message is what it complains about."""


def served(spec: DrafterSpec) -> Reading:
    """What every reader must arrive at for the drafter to serve as it was trained."""
    layers = range(spec.num_layers)
    return {
        "block_size": spec.block_size,
        "target_layer_ids": list(spec.target_layer_ids),
        "num_target_layers": spec.num_target_layers,
        "mask_token_id": spec.mask_token_id,
        "windows": [spec.layer_window(i) for i in layers],
        "causal": [spec.layer_causal(i) for i in layers],
        "rope_theta": spec.rope_theta,
        "rope_style": "neox",
        "first_slot": spec.layout.first_loss_slot,
        "heads": (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim),
        "rms_norm_eps": spec.rms_norm_eps,
        "vocab_size": spec.vocab_size,
        "embed_scale": spec.embed_scale,
        "logit_scale": spec.logit_scale,
        "softcap": spec.softcap,
    }


def read_like_zlab(config: dict[str, Any]) -> Reading:
    """z-lab's `DFlashDraftModel(config)` and `dflash_generate`."""
    normal, nested = _as_qwen3(config), config.get("dflash_config", {})

    def value(name: str, default: object = None) -> Any:
        return nested.get(name, config.get(name, default))

    if "num_target_layers" not in config:
        raise RefusedError("no num_target_layers (its formula for layer ids is always evaluated)")
    layers = range(config["num_hidden_layers"])
    ids = value("target_layer_ids", zlab_layer_ids(config["num_target_layers"], len(layers)))
    cap = value("final_logit_softcapping")
    return {
        **_common(config),
        "block_size": int(value("block_size", 16)),
        "target_layer_ids": list(ids),
        "num_target_layers": config["num_target_layers"],
        "mask_token_id": value("mask_token_id"),
        "windows": [_window(normal, i) for i in layers],
        "causal": [_causal(config.get("is_causal"), normal, i) for i in layers],
        "rope_theta": _theta(config, default=10000.0),
        "rope_style": "neox",
        "first_slot": 1,
        "embed_scale": float(value("input_embedding_scale", 1.0)),
        "logit_scale": float(value("output_multiplier", 1.0)),
        "softcap": float(cap) if cap else None,
    }


def read_like_vllm(config: dict[str, Any]) -> Reading:
    """vLLM's `DFlashQwen3ForCausalLM`. Block size and embedding scale are not read there."""
    normal, nested = _as_qwen3(config), config.get("dflash_config") or {}
    layers = range(config["num_hidden_layers"])
    aux = config.get("eagle_aux_hidden_state_layer_ids")
    aux = aux or [i + 1 for i in nested.get("target_layer_ids") or []]
    aux = aux or [i + 1 for i in config.get("target_layer_ids") or []]
    if not aux:
        raise RefusedError("no layer ids: the target's default layers would be captured")
    if nested.get("sample_from_anchor") or nested.get("query_zero_predicts_next"):
        raise RefusedError("sample_from_anchor is not supported for DFlash")
    if config.get("draft_vocab_size", config["vocab_size"]) != config["vocab_size"]:
        raise RefusedError("draft_vocab_size differs, and the file has no d2t")
    explicit = config.get("is_causal")
    explicit = nested.get("causal") if explicit is None else explicit
    return {
        **_common(config),
        "target_layer_ids": [i - 1 for i in aux],
        "mask_token_id": nested.get("mask_token_id", config.get("mask_token_id")),
        "windows": [_vllm_window(normal, nested, i) for i in layers],
        "causal": [_causal(explicit, normal, i) for i in layers],
        "rope_theta": _theta(config, default=1e6),
        "rope_style": "neox" if config.get("is_neox_style", True) else "interleaved",
        "first_slot": 1,
        "logit_scale": config.get("logit_scale", 1.0),
    }


def read_like_sglang(config: dict[str, Any]) -> Reading:
    """SGLang's `DFlashDraftModel` and `parse_dflash_draft_config`."""
    normal, nested = _as_qwen3(config), config.get("dflash_config") or {}
    layers = range(config["num_hidden_layers"])

    def value(name: str) -> Any:
        return nested.get(name, config.get(name))

    depth = value("num_target_layers") or len(layers)
    ids = value("target_layer_ids")
    ids = zlab_layer_ids(depth, len(layers)) if ids is None else ids
    if any(not 0 <= i < depth for i in ids):
        raise RefusedError(f"layer ids {ids} outside of {depth} target layers")
    if config.get("hidden_act", "silu") != "silu":
        raise RefusedError(f"hidden_act {config['hidden_act']}")
    if SLIDING in normal["layer_types"] and normal["sliding_window"] is None:
        raise RefusedError("sliding layers without a sliding_window")
    neox = config.get("rope_is_neox_style", config.get("is_neox_style", True))
    return {
        **_common(config),
        "block_size": value("block_size") or 16,
        "target_layer_ids": list(ids),
        "num_target_layers": depth,
        "mask_token_id": value("mask_token_id"),
        # It stores how far a query sees to the left, one less than the window.
        "windows": [_window(normal, i) for i in layers],
        "causal": [_causal(config.get("is_causal"), normal, i) for i in layers],
        "rope_theta": _theta(config, default=10000.0),
        "rope_style": "neox" if neox else "interleaved",
        "first_slot": 1,
        "logit_scale": float(nested.get("output_multiplier", 1.0)),
        "softcap": float(nested.get("final_logit_softcapping") or 0.0) or None,
    }


READERS: dict[str, Callable[[dict[str, Any]], Reading]] = {
    "z-lab": read_like_zlab,
    "vLLM": read_like_vllm,
    "SGLang": read_like_sglang,
}


def sglang_names(names: Collection[str], num_layers: int) -> tuple[set[str], set[str]]:
    """(names that SGLang drops without an error, parameters it leaves as they were made)."""
    parameters = {fused for _, fused in _fused(num_layers)}
    parts = set(_fused(num_layers))
    ignored, loaded = set(), set()
    for name in names:
        plain = name.removeprefix("model.")
        match = next((part for part in parts if part[0] == plain), None)
        if match is None:
            ignored.add(name)
        else:
            loaded.add(match)
    missing = {fused for _, fused in parts - loaded}
    return ignored, missing & parameters


def vllm_names(names: Collection[str], num_layers: int) -> tuple[set[str], set[str]]:
    """(names that vLLM refuses, parameters it would leave uninitialised)."""
    parts = dict(_fused(num_layers))
    own = {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"}
    unknown = {name for name in names if name not in parts and name not in own}
    return unknown, {parts[name] for name in parts.keys() - set(names)}


def _fused(num_layers: int) -> Iterator[tuple[str, str]]:
    """(name in the file, the engine's parameter it fills, which joins q, k, v and gate, up)."""
    for name in ("fc.weight", "hidden_norm.weight", "norm.weight"):
        yield name, name
    for i in range(num_layers):
        for part in ("q_proj", "k_proj", "v_proj"):
            yield f"layers.{i}.self_attn.{part}.weight", f"layers.{i}.self_attn.qkv_proj.weight"
        for part in ("gate_proj", "up_proj"):
            yield f"layers.{i}.mlp.{part}.weight", f"layers.{i}.mlp.gate_up_proj.weight"
        for part in (
            *("self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.down_proj"),
            *("input_layernorm", "post_attention_layernorm"),
        ):
            yield f"layers.{i}.{part}.weight", f"layers.{i}.{part}.weight"


def _as_qwen3(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers' Qwen3Config makes of the layers: all three readers load it first."""
    layers = config["num_hidden_layers"]
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        sliding = window is not None
        types = [SLIDING if sliding and i >= first else FULL for i in range(layers)]
    return {"sliding_window": window, "layer_types": types}


def _common(config: dict[str, Any]) -> Reading:
    heads = config["num_attention_heads"]
    return {
        "heads": (heads, config.get("num_key_value_heads", 32), config.get("head_dim", 128)),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "vocab_size": config["vocab_size"],
    }


def _window(normal: dict[str, Any], layer: int) -> int | None:
    return normal["sliding_window"] if normal["layer_types"][layer] == SLIDING else None


def _vllm_window(normal: dict[str, Any], nested: dict[str, Any], layer: int) -> int | None:
    types, forced = normal["layer_types"], nested.get("use_swa", False)
    sliding = forced if forced and SLIDING not in types else types[layer] == SLIDING
    if not sliding:
        return None
    window = nested.get("swa_window_size", normal["sliding_window"])
    if window is None:
        raise RefusedError("sliding layers without a sliding_window")
    return window


def _causal(explicit: bool | None, normal: dict[str, Any], layer: int) -> bool:
    return normal["layer_types"][layer] == SLIDING if explicit is None else bool(explicit)


def _theta(config: dict[str, Any], default: float) -> float:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("rope_theta", config.get("rope_theta", default))


def zlab_layer_ids(num_target_layers: int, num_layers: int) -> list[int]:
    """z-lab's `build_target_layer_ids`, where a config names no layers."""
    if num_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + i * span / (num_layers - 1)) for i in range(num_layers)]
