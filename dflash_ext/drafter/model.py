"""The DFlash drafter: a few Qwen3-type layers over blocks, fed with the target's hidden states.

Parameter names and semantics are those of the published checkpoints. Letters: T packed context
tokens, L captured layers, H hidden, A anchors, K slots of a block, Hk key heads, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash_ext import ops
from dflash_ext.drafter import fused
from dflash_ext.drafter.attention import DraftAttention, Linear, RMSNorm, Rope, rope_tables
from dflash_ext.drafter.context import ContextSums, Projection
from dflash_ext.drafter.fused import has_main_grad
from dflash_ext.drafter.live_rows import LiveRows
from dflash_ext.drafter.shared_slots import SharedSlots
from dflash_ext.drafter.spec import DrafterSpec
from dflash_ext.ops.dtypes import accumulate_dtype

if TYPE_CHECKING:
    from dflash_ext.target import Target

ContextKV = list[tuple[Tensor, Tensor]]


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        if has_main_grad(self.gate_proj.weight):
            gate_up = fused.linear(x, self.gate_proj.weight, self.up_proj.weight)
            return self.down_proj(ops.swiglu(gate_up))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP over the slots of each block."""

    def __init__(self, spec: DrafterSpec, layer: int) -> None:
        super().__init__()
        self.self_attn = DraftAttention(spec, layer)
        self.mlp = DraftMLP(spec.hidden_size, spec.intermediate_size)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def sublayer(self, name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Where a member of the family wraps "attention" or "mlp"; x is already normalised."""
        return function(x)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        context: tuple[Tensor, Tensor] | ContextSums,
        ctx_start: Tensor,
        ctx_end: Tensor,
        rope: Rope,
        shared: SharedSlots | None = None,
        live: LiveRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(output of the MLP, residual stream without it): the next norm adds them, in one pass.

        With `shared`, which the first layer may have, attention is given the rows that differ. With
        `live`, which the last one may have, both results are rows [R, H].
        """

        def attend(normed: Tensor) -> Tensor:
            return self.self_attn(normed, context, ctx_start, ctx_end, rope, shared, live)

        if shared is None:
            normed, residual = self.input_layernorm.add(x, residual)
        else:
            normed, residual = self.input_layernorm(shared.distinct(x)), x
        x = self.sublayer("attention", attend, normed)
        if live is not None:
            residual = live.pick(residual)
        normed, residual = self.post_attention_layernorm.add(x, residual)
        return self.sublayer("mlp", self.mlp, normed), residual


class DFlashDraftModel(nn.Module):
    """Drafts a whole block in one forward pass.

    `context` turns captured target states into keys and values once per packed batch; `forward`
    then runs any number of blocks over them. Embedding and head are the target's (`FrozenHead`)
    and no part of the model. `recompute` keeps only each layer's input for the backward pass.
    """

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.recompute = False
        features = len(spec.target_layer_ids) * spec.hidden_size
        self.fc = Linear(features, spec.hidden_size)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(spec, i) for i in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def context(self, hidden: Tensor, positions: Tensor) -> ContextKV:
        """Keys and values of the context, [T, Hk, D] each, one pair per layer.

        hidden: captured states [T, L*H], or [L, T, H]; positions: document-local [T] int64.
        The fused states go to every layer's k/v projection without the layer's input norm.
        """
        states = self.hidden_norm(self._fuse(hidden))
        rope = self._rope(positions, states.dtype)
        layers = cast("list[DraftLayer]", self.layers)
        return [layer.self_attn.keys_values(states, rope) for layer in layers]

    def context_projections(
        self, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, list[Projection]]:
        """(fused states [T, H], what each layer makes of them); arguments as in `context`."""
        states = self.hidden_norm(self._fuse(hidden))
        rope = self._rope(positions, states.dtype)
        layers = cast("list[DraftLayer]", self.layers)
        return states, [layer.self_attn.context_projection(rope) for layer in layers]

    def forward(
        self,
        block_embeds: Tensor,
        ctx_kv: ContextKV | list[ContextSums],
        ctx_start: Tensor,
        ctx_end: Tensor,
        *,
        clean: int | None = None,
        live: LiveRows | None = None,
    ) -> Tensor:
        """Block states [A, K, H] after the final norm.

        block_embeds [A, K, H]; block a sees context rows [ctx_start[a], ctx_end[a]) of its
        document, and slot k has position ctx_end - ctx_start + k. Whoever knows that all slots
        from `clean` on have the same embedding says so, to spare the first layer products; and
        whoever looks at some slots only says at which (`live`): the others' states are then 0.
        """
        x, residual = block_embeds, None
        shared = self._shared_slots(block_embeds, clean)
        positions = self.spec.layout.positions(ctx_end - ctx_start)[:, : x.shape[1]]
        rope = self._rope(positions, x.dtype)
        last = len(self.layers) - 1
        for i, (layer, context) in enumerate(zip(self.layers, ctx_kv, strict=True)):
            live_here = live if i == last else None
            args = (x, residual, context, ctx_start, ctx_end, rope, shared, live_here)
            shared = None  # what a layer makes of a slot depends on its place
            if self.recompute and torch.is_grad_enabled():
                x, residual = checkpoint(
                    layer, *args, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x, residual = layer(*args)
        states = self.norm.add(x, residual)[0]
        return states if live is None else live.place(states)

    def _fuse(self, hidden: Tensor) -> Tensor:
        if hidden.dim() == 2:
            return self.fc(hidden)
        if has_main_grad(self.fc.weight):
            return fused.split_linear(hidden, self.fc.weight)
        parts = self.fc.weight.chunk(hidden.shape[0], dim=1)
        total = hidden[0] @ parts[0].T
        for states, weight in zip(hidden[1:], parts[1:], strict=True):
            total = torch.addmm(total, states, weight.T)
        return total

    def _shared_slots(self, embeds: Tensor, clean: int | None) -> SharedSlots | None:
        blocks, size = embeds.shape[:2]
        if clean is None or clean >= size or blocks == 0 or not has_main_grad(self.fc.weight):
            return None
        return SharedSlots(blocks, size, clean)

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        if has_main_grad(self.fc.weight):  # then an op rotates that takes unrounded tables
            dtype = accumulate_dtype(dtype)
        return rope_tables(positions, self.spec.head_dim, self.spec.rope_theta, dtype)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Normal weights with std 0.02, and norms of 1: the same bits on every device.

        Projections into the residual stream are divided by sqrt(2 * layers), so that its scale
        does not depend on the depth (GPT-2).
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / (2 * self.spec.num_layers) ** 0.5 if residual else 0.02
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    @classmethod
    def empty(cls, spec: DrafterSpec, dtype: torch.dtype) -> "DFlashDraftModel":
        """A drafter on the CPU whose weights are yet to be set: torch's own first weights, which
        take as long to draw as those that replace them, are left out."""
        with torch.device("meta"):
            model = cls(spec).to(dtype)
        return model.to_empty(device="cpu")

    def init_from_target(self, target: "Target") -> None:
        """Start from the target's last layers; see `drafter.init.init_from_target`."""
        from dflash_ext.drafter.init import init_from_target

        init_from_target(self, target)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, expect: DrafterSpec | None = None
    ) -> "DFlashDraftModel":
        """Load an exported drafter in its stored dtype, on the CPU.

        With `expect` the model has that spec, and only weights come from the folder. Raises
        UserError for a folder that is no export, or naming a tensor whose shape does not fit.
        """
        from dflash_ext.export import check_tensors, read_export

        spec, tensors = read_export(folder)
        with torch.device("meta"):
            model = cls(expect or spec)
        check_tensors(model, tensors, str(folder))
        model.load_state_dict(tensors, assign=True)
        return model

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write the Hugging Face layout; see `export.write_export`."""
        from dflash_ext.export import write_export

        write_export(self, folder, dtype)


@dataclass(frozen=True)
class FrozenHead:
    """The target's embedding and head: how tokens come in and logits go out.

    z = logit_scale * head_weight @ h, then softcap * tanh(z / softcap) if there is a softcap.
    Ids from `valid_vocab` on are padding of the table and never proposed.
    """

    embed_weight: Tensor
    head_weight: Tensor
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    valid_vocab: int | None = None

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., H] of ids [...]."""
        rows = F.embedding(ids, self.embed_weight)
        return rows if self.embed_scale == 1.0 else rows * self._rounded_scale

    @property
    def _rounded_scale(self) -> float:
        # The target multiplies by the scale in the table's dtype.
        return torch.tensor(self.embed_scale, dtype=self.embed_weight.dtype).item()
