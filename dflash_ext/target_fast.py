"""The loaded target with fused operators: its modules keep weights and names, and change forward.

Modules are recognised by what they compute, or by their class where that is not enough; all others
stay as transformers made them. A pass with a key/value cache runs transformers' own code.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_ext.fast_gdn import GdnKernels
from dflash_ext.fp8 import Fp8Linear, fp8_linear
from dflash_ext.ops import add_rms_norm, qkv_norm_rope, rms_norm, swiglu

__all__ = ["fuse_target", "merged_weight"]

PROBE_LIMIT = 1e-5  # relative error of a fused form in fp32
CACHES = ("cache", "past_key_values", "cache_params")  # names in releases of transformers
LAYERS = ("LlamaDecoderLayer", "Qwen3DecoderLayer", "Qwen3_5DecoderLayer")
_merging = threading.Lock()


def fuse_target(model: nn.Module, kernels: GdnKernels | None = None) -> dict[str, int]:
    """Fuse the modules of a frozen transformers model in place; returns how many of each kind.

    `kernels` are those of GatedDeltaNet layers (None: the functions that transformers would run).
    Merged projections take no memory of their own: the weights they are made of become parts of
    one tensor. Hidden states differ by rounding alone.
    """
    counts: Counter[str] = Counter()
    shifts: dict[type, float | None] = {}
    for module in list(model.modules()):
        kind = type(module)
        if kind.__name__.endswith("RMSNorm"):
            if kind not in shifts:
                shifts[kind] = _norm_shift(module)
            if (shift := shifts[kind]) is not None:
                _adopt(module, _Norm).weight_shift = shift
                counts["norms"] += 1
        elif _is_mlp(module):
            _adopt(module, _Mlp)
            counts["MLPs"] += 1
        elif kind.__name__ == "Qwen3Attention" and _can_merge(module, _Attention.PARTS):
            _adopt(module, _Attention)
            counts["attentions"] += 1
        elif kind.__name__ == "Qwen3_5Attention" and _can_merge(module, _Attention.PARTS):
            _adopt(module, _GatedAttention)
            counts["attentions"] += 1
        elif kind.__name__ == "Qwen3_5GatedDeltaNet" and _is_gdn(module):
            own = _own_kernels(sys.modules[kind.__module__])
            _adopt(module, _GatedDeltaNet).gdn_kernels = kernels or own
            counts["gated delta nets"] += 1
    for module in list(model.modules()):  # after their norms
        norm = getattr(module, "post_attention_layernorm", None)
        if type(module).__name__ in LAYERS and isinstance(norm, _Norm):
            _adopt(module, _Layer)
            counts["residual additions"] += 1
    return dict(counts)


def merged_weight(parts: Sequence[Any]) -> Tensor:
    """The weights [N_i, H] of `parts` as one tensor [sum N_i, H], whose rows they then are."""
    first = parts[0].weight
    if not _adjacent(parts):
        with _merging:
            if not _adjacent(parts):
                _merge(parts)
    rows = sum(part.weight.shape[0] for part in parts)
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


def _adjacent(parts: Sequence[Any]) -> bool:
    storage = parts[0].weight.untyped_storage().data_ptr()
    at = parts[0].weight.data_ptr()
    for part in parts:
        weight = part.weight
        if weight.data_ptr() != at or weight.untyped_storage().data_ptr() != storage:
            return False
        at += weight.nbytes
    return True


@torch.no_grad()
def _merge(parts: Sequence[Any]) -> None:
    whole = torch.cat([part.weight for part in parts])
    for part, rows in zip(parts, whole.split([p.weight.shape[0] for p in parts]), strict=True):
        part.weight.data = rows


# Recognising modules


def _norm_shift(module: nn.Module) -> float | None:
    """0 for weight * x / rms(x), 1 for (1 + weight) * x / rms(x), None for anything else."""
    weight, eps = getattr(module, "weight", None), _eps(module)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or eps is None:
        return None
    generator = torch.Generator().manual_seed(0)
    probe = copy.deepcopy(module).to(device="cpu", dtype=torch.float32)
    scale = torch.randn(weight.shape, generator=generator)
    x = torch.randn(4, len(scale), generator=generator) * eps**0.5  # so that eps counts
    try:
        with torch.no_grad():
            probe.get_parameter("weight").copy_(scale)
            got = probe(x)
    except (TypeError, RuntimeError, ValueError):  # takes something else
        return None
    fits = [s for s in (0.0, 1.0) if _close(got, rms_norm(x, scale + s, eps))]
    return fits[0] if fits else None


def _eps(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        if isinstance(eps := getattr(module, name, None), float):
            return eps
    return None


def _is_mlp(module: nn.Module) -> bool:
    """Whether the module computes down(silu(gate(x)) * up(x)), tried with small projections."""
    if not _can_merge(module, _Mlp.PARTS) or not hasattr(module, "down_proj"):
        return False
    shapes = {"gate_proj": (6, 10), "up_proj": (6, 10), "down_proj": (10, 6)}
    generator = torch.Generator().manual_seed(0)
    probe = copy.copy(module)
    probe.__dict__["_modules"] = dict(module._modules)
    for name, (inputs, outputs) in shapes.items():
        linear = nn.Linear(inputs, outputs, bias=False, device="cpu", dtype=torch.float32)
        linear.weight.data = torch.randn(outputs, inputs, generator=generator)
        setattr(probe, name, linear)
    x = torch.randn(3, 6, generator=generator)
    with torch.no_grad():
        try:
            got = probe(x)
        except (TypeError, RuntimeError, ValueError):
            return False
        gate, up, down = (probe.get_submodule(name) for name in shapes)
        return _close(got, down(F.silu(gate(x)) * up(x)))


def _close(got: Any, want: Tensor) -> bool:
    if not isinstance(got, Tensor) or got.shape != want.shape:
        return False
    return bool((got - want).norm() <= PROBE_LIMIT * want.norm())


def _can_merge(module: nn.Module, names: Sequence[str]) -> bool:
    parts = [getattr(module, name, None) for name in names]
    # A subclass, as of quantised weights, may keep its weight in another form.
    return all(
        type(part) is nn.Linear
        and getattr(part, "bias", None) is None
        and part.weight.is_contiguous()
        and part.weight.dtype == module.get_submodule(names[0]).weight.dtype
        for part in parts
    )


def _is_gdn(module: Any) -> bool:
    modeling = sys.modules[type(module).__module__]
    return (
        _can_merge(module, _GatedDeltaNet.PARTS)
        and module.activation == "silu"
        and module.conv1d.bias is None
        and hasattr(modeling, "causal_conv1d_fn")
        and hasattr(modeling, "torch_chunk_gated_delta_rule")
    )


def _own_kernels(modeling: ModuleType) -> GdnKernels:
    """What a modeling module of transformers has bound under the names of its functions."""

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        out = modeling.causal_conv1d_fn(x.transpose(1, 2), weight, None, activation="silu")
        return out.transpose(1, 2)

    return GdnKernels(convolve, modeling.torch_chunk_gated_delta_rule, None, "transformers")


# Fused forms: classes put in front of a module's own


@functools.cache
def _fused_class(fused: Any, own: Any) -> Any:
    return type(f"Fused{own.__name__}", (fused, own), {"__module__": own.__module__})


def _adopt(module: nn.Module, fused: type[_Fused]) -> Any:
    adopted: Any = module
    kinds: tuple[Any, Any] = (fused, type(module))
    adopted.__class__ = _fused_class(*kinds)
    if fused.PARTS:
        adopted.merged()
    return adopted


class _Fused(nn.Module):
    """A form whose projections PARTS, if any, run as one matrix product."""

    PARTS: tuple[str, ...] = ()

    def merged(self) -> Tensor:
        return merged_weight([getattr(self, name) for name in self.PARTS])

    def project(self, x: Tensor) -> Tensor:
        parts = [getattr(self, name) for name in self.PARTS]
        if isinstance(parts[0], Fp8Linear):
            return fp8_linear(x, self.merged(), torch.cat([part.scale for part in parts]))
        return F.linear(x, self.merged())

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)  # of .to(): every weight moves to memory of its own
        if self.PARTS:
            self.merged()
        return self


class _Norm(_Fused):
    weight: Tensor
    weight_shift: float

    def scale(self) -> Tensor:
        return self.weight.float() + 1.0 if self.weight_shift else self.weight

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale(), _eps(self) or 0.0)

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, self.scale(), _eps(self) or 0.0)


class _Mlp(_Fused):
    PARTS = ("gate_proj", "up_proj")
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.project(x)))


class _Layer(_Fused):
    """A decoder layer that adds the residual stream in the second norm's kernel."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or _cached(kwargs):
            return super().forward(hidden_states, *args, **kwargs)
        this: Any = self
        normed = this.input_layernorm(hidden_states)
        if hasattr(this, "linear_attn"):
            mixed = this.linear_attn(hidden_states=normed, **_without(kwargs, "position_"))
        else:
            mixed, _ = this.self_attn(hidden_states=normed, **kwargs)
        normed, total = this.post_attention_layernorm.after_add(mixed, hidden_states)
        return total + this.mlp(normed)


class _Attention(_Fused):
    """Attention of Qwen3: one projection, then norms and rotation of all heads in one kernel."""

    PARTS = ("q_proj", "k_proj", "v_proj")
    head_dim: int
    scaling: float
    config: Any

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if _cached(kwargs):
            return super().forward(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **kwargs,
            )
        this: Any = self
        rows, columns, _ = hidden_states.shape
        half = self.head_dim // 2
        cos, sin = (
            table[..., :half].expand(rows, columns, half).reshape(-1, half)
            for table in position_embeddings
        )
        heads = [getattr(self, name).out_features // self.head_dim for name in self.PARTS]
        q, k, v = qkv_norm_rope(
            self.project(hidden_states).flatten(0, 1),
            this.q_norm.weight,
            this.k_norm.weight,
            cos,
            sin,
            _eps(this.q_norm) or 0.0,
            heads[0],
            heads[1],
        )
        q, k, v = (t.view(rows, columns, -1, self.head_dim).transpose(1, 2) for t in (q, k, v))
        kwargs["sliding_window"] = this.sliding_window
        out, weights = self.attend(q, k, v, attention_mask, kwargs)
        return this.o_proj(out), weights

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """transformers' attention of [B, heads, S, D]: ([B, S, heads * D], weights or None)."""
        eager = sys.modules[type(self).__module__].eager_attention_forward
        name = self.config._attn_implementation
        run = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
        others = {name: value for name, value in kwargs.items() if name not in CACHES}
        out, weights = run(self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **others)
        return out.flatten(2), weights


class _GatedAttention(_Attention):
    """Attention of Qwen3.5: queries carry a gate, and a part of each head is rotated."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if _cached(kwargs):
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        this: Any = self
        sizes = [getattr(self, name).out_features for name in self.PARTS]
        q_gate, k, v = (
            t.unflatten(-1, (-1, self.head_dim))
            for t in self.project(hidden_states).split(sizes, dim=-1)
        )
        q, gate = q_gate.unflatten(2, (-1, 2)).unbind(3)
        rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
        q, k = this.q_norm(q).transpose(1, 2), this.k_norm(k).transpose(1, 2)
        q, k = rotate(q, k, *position_embeddings)
        out, weights = self.attend(q, k, v.transpose(1, 2), attention_mask, kwargs)
        return this.o_proj(out * torch.sigmoid(gate).flatten(2)), weights


class _GatedDeltaNet(_Fused):
    """GatedDeltaNet of Qwen3.5: one projection; convolutions read it and write what comes next."""

    PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    gdn_kernels: GdnKernels

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        packed = kwargs.get("cu_seq_lens_q") is not None or kwargs.get("seq_idx") is not None
        if _cached(kwargs) or attention_mask is not None or packed:
            return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)
        this: Any = self
        kernels = self.gdn_kernels
        widths = [this.key_dim, this.key_dim, this.value_dim]
        *qkv, z, b, a = self.project(hidden_states).split(
            [*widths, this.value_dim, this.num_v_heads, this.num_v_heads], dim=-1
        )
        filters = this.conv1d.weight.squeeze(1).split(widths)
        q, k, v = (kernels.convolve(x, w) for x, w in zip(qkv, filters, strict=True))
        decay = -this.A_log.float().exp() * F.softplus(a.float() + this.dt_bias)
        out, _ = kernels.delta_rule(
            q.unflatten(-1, (-1, this.head_k_dim)),
            k.unflatten(-1, (-1, this.head_k_dim)),
            v.unflatten(-1, (-1, this.head_v_dim)),
            g=decay,
            beta=b.sigmoid(),
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
        )
        out, gate = (t.reshape(-1, this.head_v_dim) for t in (out, z))
        if kernels.norm_gated is None:
            out = this.norm(out, gate)
        else:
            out = kernels.norm_gated(out, gate, this.norm.weight, this.norm.variance_epsilon)
        return this.out_proj(out.view(*hidden_states.shape[:2], -1))


def _cached(kwargs: dict[str, Any]) -> bool:
    return any(kwargs.get(name) is not None for name in CACHES)


def _without(kwargs: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if not name.startswith(prefix)}
