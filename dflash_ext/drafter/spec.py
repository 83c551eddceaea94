"""What defines a drafter: everything its config.json states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_ext.config import UserError
from dflash_ext.layout import BlockLayout

if TYPE_CHECKING:
    from dflash_ext.config import Config
    from dflash_ext.target import TargetInfo

FULL, SLIDING = "full_attention", "sliding_attention"
ARCHITECTURE = "DFlashDraftModel"


@dataclass(frozen=True)
class DrafterSpec:
    """Sizes and conventions of a drafter; `to_hf_config` and `from_hf_config` round-trip it.

    `causal` is the in-block mask of every layer when set. Unset, full-attention layers see their
    whole block and sliding layers only the slots up to their own, which is what the serving
    engines assume. `target_layer_ids` are 0-based decoder layers of the target whose output is
    captured.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    causal: bool | None = None
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.block_size, causal_in_block=bool(self.causal))

    def layer_window(self, layer: int) -> int | None:
        """Sliding window of a layer (the query's own position counts), or None."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def layer_causal(self, layer: int) -> bool:
        """Whether slot k of a block sees only slots <= k in this layer."""
        return self.layer_types[layer] == SLIDING if self.causal is None else self.causal

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        """config.json as z-lab's code, SGLang and vLLM read it.

        Values that a reader would otherwise guess (layer ids, rope base, causality when one flag
        can state it) are explicit, and block_size stands in both places that readers look at.
        """
        dflash: dict[str, Any] = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "num_target_layers": self.num_target_layers,
            "input_embedding_scale": self.embed_scale,
            "output_multiplier": self.logit_scale,
            "final_logit_softcapping": self.softcap,
        }
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": dflash,
            "num_target_layers": self.num_target_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
            "max_window_layers": self.num_layers,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": _one_or_list(self.eos_token_ids),
            "pad_token_id": self.pad_token_id,
            "dtype": dtype,
            "torch_dtype": dtype,
        }
        if self.causal is not None:
            config["is_causal"] = self.causal
            dflash["causal"] = self.causal
        return config

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> "DrafterSpec":
        """The spec a config.json describes. Raises UserError naming a missing or refused key."""
        architectures = config.get("architectures")
        if architectures != [ARCHITECTURE]:
            raise UserError(
                f"config.json: architectures: found {architectures}, want [{ARCHITECTURE!r}]"
            )
        dflash = config.get("dflash_config") or {}

        def value(name: str) -> Any:
            found = dflash.get(name, config.get(name))
            if found is None:
                raise UserError(
                    f"config.json: {name}: found nothing, want a value "
                    "at the top level or in dflash_config"
                )
            return found

        layers = int(value("num_hidden_layers"))
        eos = config.get("eos_token_id")
        return cls(
            hidden_size=int(value("hidden_size")),
            intermediate_size=int(value("intermediate_size")),
            num_layers=layers,
            num_attention_heads=int(value("num_attention_heads")),
            num_key_value_heads=int(value("num_key_value_heads")),
            head_dim=int(value("head_dim")),
            vocab_size=int(value("vocab_size")),
            rms_norm_eps=float(value("rms_norm_eps")),
            rope_theta=_rope_theta(config),
            max_position_embeddings=int(value("max_position_embeddings")),
            block_size=int(value("block_size")),
            mask_token_id=int(value("mask_token_id")),
            target_layer_ids=tuple(int(i) for i in value("target_layer_ids")),
            num_target_layers=int(value("num_target_layers")),
            layer_types=tuple(config.get("layer_types") or [FULL] * layers),
            sliding_window=config.get("sliding_window"),
            causal=config.get("is_causal", dflash.get("causal")),
            embed_scale=float(dflash.get("input_embedding_scale", 1.0)),
            logit_scale=float(dflash.get("output_multiplier", 1.0)),
            softcap=dflash.get("final_logit_softcapping"),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            pad_token_id=config.get("pad_token_id"),
        )


def drafter_spec(
    cfg: "Config", info: "TargetInfo", mask_token_id: int, target_layer_ids: Sequence[int]
) -> DrafterSpec:
    """The drafter of this run: its own sizes where configured, the target's everywhere else.

    Raises UserError naming the field if the configured sizes do not fit together.
    """
    drafter = cfg.drafter
    layer_types = tuple(drafter.layer_types or [FULL] * drafter.num_layers)
    return DrafterSpec(
        hidden_size=info.hidden_size,
        intermediate_size=drafter.intermediate_size or info.intermediate_size,
        num_layers=drafter.num_layers,
        num_attention_heads=drafter.num_attention_heads or info.num_attention_heads,
        num_key_value_heads=drafter.num_key_value_heads or info.num_key_value_heads,
        head_dim=drafter.head_dim or info.head_dim,
        vocab_size=info.vocab_size,
        rms_norm_eps=info.rms_norm_eps,
        rope_theta=info.rope_theta,
        max_position_embeddings=info.max_position_embeddings,
        block_size=drafter.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(target_layer_ids),
        num_target_layers=info.num_layers,
        layer_types=layer_types,
        sliding_window=drafter.sliding_window,
        # One flag describes every layer only without sliding ones; then it is stated.
        causal=None if SLIDING in layer_types else False,
        embed_scale=info.embed_scale,
        logit_scale=info.logit_scale,
        softcap=info.softcap,
        bos_token_id=info.bos_token_id,
        eos_token_ids=tuple(info.eos_token_ids),
        pad_token_id=info.pad_token_id,
    )


def _check(spec: DrafterSpec) -> None:
    def want(holds: bool, field: str, found: object, rule: str) -> None:
        if not holds:
            raise UserError(f"drafter.{field}: found {found}, want {rule}")

    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    want(spec.num_layers >= 1, "num_layers", spec.num_layers, "at least 1")
    want(spec.intermediate_size >= 1, "intermediate_size", spec.intermediate_size, "at least 1")
    want(
        kv_heads >= 1 and heads % kv_heads == 0,
        "num_key_value_heads",
        kv_heads,
        f"a divisor of num_attention_heads = {heads}",
    )
    want(
        spec.head_dim >= 2 and spec.head_dim % 2 == 0,
        "head_dim",
        spec.head_dim,
        "an even number (rotary halves)",
    )
    want(2 <= spec.block_size <= 32, "block_size", spec.block_size, "2 to 32")
    want(
        0 <= spec.mask_token_id < spec.vocab_size,
        "mask_token_id",
        spec.mask_token_id,
        f"an id of the target's vocabulary (0 to {spec.vocab_size - 1})",
    )
    want(
        len(spec.layer_types) == spec.num_layers and set(spec.layer_types) <= {FULL, SLIDING},
        "layer_types",
        list(spec.layer_types),
        f"{spec.num_layers} names, each {FULL!r} or {SLIDING!r}",
    )
    window = spec.sliding_window
    if SLIDING in spec.layer_types:
        want(
            window is not None and window >= 1,
            "sliding_window",
            window,
            "a positive window, because layer_types has sliding layers",
        )
    else:
        want(window is None, "sliding_window", window, "none, because no layer is sliding")
    ids = spec.target_layer_ids
    if (
        not ids
        or list(ids) != sorted(set(ids))
        or not 0 <= ids[0] <= ids[-1] < (spec.num_target_layers)
    ):
        raise UserError(
            f"model.target_layer_ids: found {list(ids)}, want increasing layer "
            f"numbers from 0 to {spec.num_target_layers - 1}"
        )


def _rope_theta(config: Mapping[str, Any]) -> float:
    nested = (config.get("rope_parameters") or {}).get("rope_theta")
    top = config.get("rope_theta")
    if nested is not None and top is not None and float(nested) != float(top):
        raise UserError(
            f"config.json: rope_theta: found {top} at the top level and {nested} in "
            "rope_parameters, want one value"
        )
    found = nested if nested is not None else top
    if found is None:
        raise UserError("config.json: rope_theta: found nothing, want the base of the positions")
    return float(found)


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    if len(ids) == 1:
        return ids[0]
    return list(ids) if ids else None
