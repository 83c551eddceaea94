"""What defines a drafter: everything its config.json states."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_ext.config_check import FULL, MAX_BLOCK_SIZE, SLIDING
from dflash_ext.config_values import UserError, shown
from dflash_ext.layout import BlockLayout

if TYPE_CHECKING:
    from dflash_ext.config import Config
    from dflash_ext.target import TargetInfo


class SpecError(UserError):
    """A field of a drafter that cannot be, or does not fit the others."""

    def __init__(self, field: str, found: object, want: str) -> None:
        section = "model" if field == "target_layer_ids" else "drafter"
        super().__init__(f"{section}.{field}: found {shown(found)}, want {want}")
        self.field, self.found, self.want = field, found, want


@dataclass(frozen=True)
class DrafterSpec:
    """Sizes and conventions of a drafter; `to_hf_config` and `from_hf_config` round-trip it.

    `causal` is the in-block mask of every layer when set. Unset, full-attention layers see their
    whole block and sliding layers only the slots up to their own, which is what the serving
    engines assume; it stays unset only where layers of both kinds differ. `target_layer_ids` are
    0-based decoder layers of the target whose output is captured.
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
        if self.causal is None and len(set(self.layer_types)) == 1:
            object.__setattr__(self, "causal", self.layer_types[0] == SLIDING)

    @property
    def num_parameters(self) -> int:
        """Of all tensors of `DFlashDraftModel`, with or without a split `fc`."""
        hidden, heads = self.hidden_size, self.num_attention_heads + self.num_key_value_heads
        attention = 2 * heads * self.head_dim * hidden + 2 * self.head_dim
        layer = attention + 3 * hidden * self.intermediate_size + 2 * hidden
        return self.num_layers * layer + len(self.target_layer_ids) * hidden**2 + 2 * hidden

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
        """config.json as all readers understand it; see `hf_config.to_hf_config`."""
        from dflash_ext.drafter.hf_config import to_hf_config

        return to_hf_config(self, dtype)

    @classmethod
    def from_hf_config(cls, config: object, place: str = "config.json") -> "DrafterSpec":
        """The spec a config.json describes; see `hf_config.from_hf_config`. Raises UserError."""
        from dflash_ext.drafter.hf_config import from_hf_config

        return from_hf_config(config, place)


def drafter_spec(
    cfg: "Config",
    info: "TargetInfo",
    mask_token_id: int,
    target_layer_ids: Sequence[int],
    start: DrafterSpec | None = None,
) -> DrafterSpec:
    """The drafter of this run: its own sizes where configured, elsewhere those of `start`, the
    drafter it starts from, and without one the target's.

    Raises UserError naming the field if the configured sizes do not fit together.
    """
    drafter = cfg.drafter
    like: TargetInfo | DrafterSpec = start or info
    layer_types, window, causal = drafter.layer_types, drafter.sliding_window, None
    if layer_types is None and start is not None:
        layer_types, window, causal = [*start.layer_types], start.sliding_window, start.causal
    return DrafterSpec(
        hidden_size=info.hidden_size,
        intermediate_size=drafter.intermediate_size or like.intermediate_size,
        num_layers=drafter.num_layers,
        num_attention_heads=drafter.num_attention_heads or like.num_attention_heads,
        num_key_value_heads=drafter.num_key_value_heads or like.num_key_value_heads,
        head_dim=drafter.head_dim or like.head_dim,
        vocab_size=info.vocab_size,
        rms_norm_eps=like.rms_norm_eps,
        rope_theta=like.rope_theta,
        max_position_embeddings=info.max_position_embeddings,
        block_size=drafter.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(target_layer_ids),
        num_target_layers=info.num_layers,
        layer_types=tuple(layer_types or [FULL] * drafter.num_layers),
        sliding_window=window,
        causal=causal,
        embed_scale=info.embed_scale,
        logit_scale=info.logit_scale,
        softcap=info.softcap,
        bos_token_id=info.bos_token_id,
        eos_token_ids=tuple(info.eos_token_ids),
        pad_token_id=info.pad_token_id,
    )


def _check(spec: DrafterSpec) -> None:
    def want(holds: bool, field: str, rule: str) -> None:
        if not holds:
            found = getattr(spec, field)
            raise SpecError(field, list(found) if isinstance(found, tuple) else found, rule)

    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    want(spec.num_layers >= 1, "num_layers", "at least 1")
    want(spec.intermediate_size >= 1, "intermediate_size", "at least 1")
    want(
        kv_heads >= 1 and heads % kv_heads == 0,
        "num_key_value_heads",
        f"a divisor of num_attention_heads = {heads}",
    )
    want(
        spec.head_dim >= 2 and spec.head_dim % 2 == 0,
        "head_dim",
        "an even number (rotary halves)",
    )
    want(2 <= spec.block_size <= MAX_BLOCK_SIZE, "block_size", f"2 to {MAX_BLOCK_SIZE}")
    want(
        0 <= spec.mask_token_id < spec.vocab_size,
        "mask_token_id",
        f"an id of the target's vocabulary (0 to {spec.vocab_size - 1})",
    )
    want(
        len(spec.layer_types) == spec.num_layers and set(spec.layer_types) <= {FULL, SLIDING},
        "layer_types",
        f"{spec.num_layers} names, each {FULL!r} or {SLIDING!r}",
    )
    window = spec.sliding_window
    if SLIDING in spec.layer_types:
        want(
            window is not None and window >= 1,
            "sliding_window",
            "a positive window, because layer_types has sliding layers",
        )
    else:
        want(window is None, "sliding_window", "none, because no layer is sliding")
    ids = spec.target_layer_ids
    want(
        bool(ids)
        and list(ids) == sorted(set(ids))
        and 0 <= ids[0] <= ids[-1] < spec.num_target_layers,
        "target_layer_ids",
        f"increasing layer numbers from 0 to {spec.num_target_layers - 1}",
    )
