"""config.json of a drafter: written for z-lab's code, SGLang and vLLM, read back strictly.

Nothing that a reader would otherwise guess is left out on writing; on reading, nothing is guessed
and nothing that this implementation would compute differently is passed over.
"""

from collections.abc import Sequence
from typing import Any

from dflash_ext.config_check import FULL, MAX_BLOCK_SIZE, SLIDING
from dflash_ext.config_values import UserError, shown
from dflash_ext.drafter.spec import DrafterSpec, SpecError

ARCHITECTURE = "DFlashDraftModel"

# Least and most of each whole number: a damaged file must not make anyone allocate or loop.
_WHOLE = {
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 22),
    "num_hidden_layers": (1, 1024),
    "num_attention_heads": (1, 1 << 14),
    "num_key_value_heads": (1, 1 << 14),
    "head_dim": (2, 1 << 14),
    "vocab_size": (1, 1 << 24),
    "max_position_embeddings": (0, 1 << 40),
    "block_size": (2, MAX_BLOCK_SIZE),
    "mask_token_id": (0, (1 << 24) - 1),
    "num_target_layers": (1, 1 << 14),
    "sliding_window": (1, 1 << 40),
    "bos_token_id": (-1, 1 << 24),
    "pad_token_id": (-1, 1 << 24),
}
# Options of the family and of Qwen3 that change what a drafter computes, at the top level or in
# dflash_config, each with the values that mean a plain DFlash drafter.
_PLAIN: dict[str, tuple[object, ...]] = {
    "model_type": ("qwen3",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "quantization_config": (),
    "partial_rotary_factor": (1,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "add_swa_attention_sink_bias": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "projector_type": (),
    "shift_label": (False,),
    "sample_from_anchor": (False,),
    "use_aux_hidden_state": (True,),
    "conv_kernel_size": (0,),
    "conv_group_size": (0,),
    "selector_rank": (0,),
    "selector_top_k": (0,),
    "markov_rank": (0,),
}
# Values that readers look for in dflash_config first, then at the top level.
_IN_BOTH = {
    *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
    *_PLAIN,
}
# Where a field of DrafterSpec stands in config.json, where the name differs.
_NAMES = {"num_layers": "num_hidden_layers"}


def to_hf_config(spec: DrafterSpec, dtype: str = "float32") -> dict[str, Any]:
    """config.json of `spec` with tensors stored in `dtype`, for all three readers.

    What they would otherwise guess stands there: layer ids, rope base and style, sizes of heads,
    types of layers, the layout of slots, and the in-block mask wherever one flag can state it
    (layers of both types differ in it by default, and there `layer_types` says which is which).
    """
    dflash: dict[str, Any] = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.target_layer_ids),
        "num_target_layers": spec.num_target_layers,
        "sample_from_anchor": False,
        "input_embedding_scale": spec.embed_scale,
        "output_multiplier": spec.logit_scale,
        "final_logit_softcapping": spec.softcap,
    }
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "dflash_config": dflash,
        "num_target_layers": spec.num_target_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {
            "rope_theta": spec.rope_theta,
            "rope_type": "default",
            "partial_rotary_factor": 1.0,
        },
        "is_neox_style": True,
        "rope_is_neox_style": True,
        "layer_types": list(spec.layer_types),
        "sliding_window": spec.sliding_window,
        "use_sliding_window": spec.sliding_window is not None,
        "max_window_layers": spec.num_layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "logit_scale": spec.logit_scale,  # vLLM reads this, not output_multiplier
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": _one_or_list(spec.eos_token_ids),
        "pad_token_id": spec.pad_token_id,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if spec.causal is not None:
        config["is_causal"] = spec.causal
        dflash["causal"] = spec.causal
    return config


def from_hf_config(config: object, place: str = "config.json") -> DrafterSpec:
    """The spec that a config.json describes.

    Raises UserError naming the first value that is missing, of another type, out of range, in
    conflict with another one, or that asks for what a plain DFlash drafter does not compute.
    """
    file = _File(config, place)
    architectures = file.top.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise file.error("architectures", architectures, f"[{ARCHITECTURE!r}]")
    layers = file.whole("num_hidden_layers")
    layer_types = file.layer_types(layers)
    sliding = SLIDING in layer_types
    try:
        spec = DrafterSpec(
            hidden_size=file.whole("hidden_size"),
            intermediate_size=file.whole("intermediate_size"),
            num_layers=layers,
            num_attention_heads=file.whole("num_attention_heads"),
            num_key_value_heads=file.whole("num_key_value_heads"),
            head_dim=file.whole("head_dim"),
            vocab_size=file.whole("vocab_size"),
            rms_norm_eps=file.number("rms_norm_eps"),
            rope_theta=file.rope_theta(),
            max_position_embeddings=file.whole("max_position_embeddings"),
            block_size=file.whole("block_size"),
            mask_token_id=file.whole("mask_token_id"),
            target_layer_ids=file.target_layer_ids(),
            num_target_layers=file.whole("num_target_layers"),
            layer_types=layer_types,
            sliding_window=file.window() if sliding else None,
            causal=file.flag("is_causal"),
            embed_scale=file.number("input_embedding_scale", 1.0),
            logit_scale=file.number("output_multiplier", 1.0),
            softcap=file.softcap(),
            bos_token_id=file.optional_whole("bos_token_id"),
            eos_token_ids=file.eos_token_ids(),
            pad_token_id=file.optional_whole("pad_token_id"),
        )
    except SpecError as error:
        name = _NAMES.get(error.field, error.field)
        raise file.error(name, error.found, error.want) from None
    file.check_plain(spec)
    return spec


class _File:
    """Typed access to a config.json; every mistake is a UserError with the file's name."""

    def __init__(self, config: object, place: str) -> None:
        self.place = place
        if not isinstance(config, dict):
            raise UserError(f"{place}: found {shown(config)}, want a JSON object")
        nested = config.get("dflash_config")
        if nested is not None and not isinstance(nested, dict):
            raise self.error("dflash_config", nested, "an object")
        self.top: dict[str, Any] = config
        self.nested: dict[str, Any] = nested or {}

    def error(self, name: str, found: object, want: str) -> UserError:
        text = "nothing" if found is None else shown(found)
        return UserError(f"{self.place}: {name}: found {text}, want {want}")

    def get(self, name: str) -> Any:
        """The value at the top level or in dflash_config; None if it is in neither."""
        outer = self.top.get(name)
        inner = self.nested.get(name) if name in _IN_BOTH else None
        if outer is not None and inner is not None and outer != inner:
            found = f"{shown(outer)} at the top level and {shown(inner)} in dflash_config"
            raise UserError(f"{self.place}: {name}: found {found}, want one value")
        return outer if inner is None else inner

    def whole(self, name: str) -> int:
        value, (low, high) = self.get(name), _WHOLE[name]
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, value, f"a whole number from {low} to {high}")
        return value

    def optional_whole(self, name: str) -> int | None:
        return None if self.get(name) is None else self.whole(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        return self.positive(name, default if value is None else value)

    def positive(self, name: str, value: object) -> float:
        # Comparing before converting: a whole number may be too large for a float.
        if type(value) not in (int, float) or not 0 < value <= 1e30:  # type: ignore[operator]
            raise self.error(name, value, "a positive number")
        return float(value)  # type: ignore[arg-type]

    def flag(self, name: str) -> bool | None:
        value = self.get(name)
        if value is not None and type(value) is not bool:
            raise self.error(name, value, "true or false")
        return value

    def softcap(self) -> float | None:
        """None and 0 both mean none to the readers."""
        value = self.get("final_logit_softcapping")
        return None if value is None or value == 0 else self.number("final_logit_softcapping")

    def ids(self, name: str, value: object) -> tuple[int, ...]:
        wanted = "a list of whole numbers"
        if not isinstance(value, list) or any(type(i) is not int or i < 0 for i in value):
            raise self.error(name, value, wanted)
        return tuple(value)

    def eos_token_ids(self) -> tuple[int, ...]:
        value = self.get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        return self.ids("eos_token_id", listed)

    def target_layer_ids(self) -> tuple[int, ...]:
        ids = self.ids("target_layer_ids", self.get("target_layer_ids"))
        aux = self.top.get("eagle_aux_hidden_state_layer_ids")
        if aux is not None and aux != [i + 1 for i in ids]:
            want = "each of target_layer_ids + 1: vLLM obeys these"
            raise self.error("eagle_aux_hidden_state_layer_ids", aux, want)
        return ids

    def layer_types(self, layers: int) -> tuple[str, ...]:
        value = self.get("layer_types")
        if value is None and not (self.get("use_sliding_window") or self.nested.get("use_swa")):
            return (FULL,) * layers  # older exports, of the time before sliding layers
        if not isinstance(value, list) or any(not isinstance(kind, str) for kind in value):
            raise self.error("layer_types", value, f"{layers} names, {FULL!r} or {SLIDING!r}")
        return tuple(value)

    def window(self) -> int:
        if self.get("use_sliding_window") is not True:
            raise self.error(
                "use_sliding_window",
                self.get("use_sliding_window"),
                "true, because layer_types has sliding layers: without it readers drop the window",
            )
        return self.whole("sliding_window")

    def rope_theta(self) -> float:
        """The base of the positions, stated once or twice alike; scaled positions are refused."""
        found: list[float] = []
        for name in ("rope_parameters", "rope_scaling"):
            rope = self.top.get(name)
            if rope is None:
                continue
            if not isinstance(rope, dict):
                raise self.error(name, rope, "an object or null")
            kind = rope.get("rope_type", rope.get("type"))
            if kind not in (None, "default"):
                raise self.error(f"{name}.rope_type", kind, "'default', positions as they are")
            share = rope.get("partial_rotary_factor")
            if share is not None and share != 1:
                raise self.error(f"{name}.partial_rotary_factor", share, "1, whole heads turned")
            if rope.get("rope_theta") is not None:
                found.append(self.positive(f"{name}.rope_theta", rope["rope_theta"]))
        if self.top.get("rope_theta") is not None:
            found.insert(0, self.positive("rope_theta", self.top["rope_theta"]))
        if not found:
            raise self.error("rope_theta", None, "the base of the positions")
        if len(set(found)) > 1:
            raise UserError(
                f"{self.place}: rope_theta: found {found[0]} at the top level and {found[-1]} in "
                "rope_parameters, want one value"
            )
        return found[0]

    def check_plain(self, spec: DrafterSpec) -> None:
        """Refuse what the spec cannot express: other members of the family, other readings."""
        for name, plain in _PLAIN.items():
            value = self.get(name)
            if value is not None and value not in plain:
                want = f"{shown(plain[0])} or nothing" if plain else "nothing"
                raise self.error(name, value, f"{want}: this is a plain DFlash drafter")
        for name, mine in (
            ("draft_vocab_size", spec.vocab_size),
            ("target_hidden_size", spec.hidden_size),
        ):
            if self.get(name) not in (None, mine):
                raise self.error(name, self.get(name), f"{mine} as in the rest of the file")
        window = self.nested.get("swa_window_size")
        if window is not None and window != spec.sliding_window:
            raise self.error("swa_window_size", window, f"the sliding_window {spec.sliding_window}")
        if self.nested.get("use_swa") and SLIDING not in spec.layer_types:
            raise self.error("use_swa", self.nested["use_swa"], "false: no layer is sliding")
        causal = self.nested.get("causal")
        if causal is not None and any(
            spec.layer_causal(i) != causal for i in range(spec.num_layers)
        ):
            raise self.error("causal", causal, "the same as is_causal says at the top level")


def _one_or_list(ids: Sequence[int]) -> int | list[int] | None:
    if len(ids) == 1:
        return ids[0]
    return list(ids) if ids else None
