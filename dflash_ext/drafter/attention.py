"""Attention of a drafter layer: block slots attend to the target's context and to their block.

Letters: T packed context tokens, A anchors, K slots, H hidden, Hq/Hk query/key heads, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_ext import ops
from dflash_ext.drafter import fused
from dflash_ext.drafter.context import ContextSums, Projection
from dflash_ext.drafter.fused import HeadNorms, has_main_grad
from dflash_ext.drafter.live_rows import LiveRows
from dflash_ext.drafter.shared_slots import SharedSlots
from dflash_ext.drafter.spec import DrafterSpec

Rope = tuple[Tensor, Tensor]


class Linear(nn.Linear):
    """x @ weight^T, without a bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if has_main_grad(self.weight):
            return fused.linear(x, self.weight)
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if has_main_grad(self.weight):
            return fused.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum) of x and the residual stream, which starts as None."""
        if residual is None:
            return self(x), x
        if has_main_grad(self.weight):
            return fused.add_rms_norm(x, residual, self.weight, self.eps)
        total = residual + x
        return self(total), total


def rope_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rope:
    """(cos, sin), each [..., 1, D/2] in `dtype`, of integer positions [...].

    Angles are fp32 whatever the dtype of the model; a buffer would be rounded by `model.to(bf16)`.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions.float()[..., None] * (1.0 / theta**exponents)
    return angles.cos().to(dtype).unsqueeze(-2), angles.sin().to(dtype).unsqueeze(-2)


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate x [..., heads, D]; dimension i pairs with i + D/2 (the NeoX convention)."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DraftAttention(nn.Module):
    """Grouped-query attention with per-head q/k norms, as in Qwen3.

    Keys and values of the context come from the fused target states through the same projections
    as those of the block; the context has no queries.
    """

    def __init__(self, spec: DrafterSpec, layer: int) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.window = spec.layer_window(layer)
        self.causal = spec.layer_causal(layer)
        q_size = spec.num_attention_heads * spec.head_dim
        kv_size = spec.num_key_value_heads * spec.head_dim
        self.q_proj = Linear(spec.hidden_size, q_size)
        self.k_proj = Linear(spec.hidden_size, kv_size)
        self.v_proj = Linear(spec.hidden_size, kv_size)
        self.o_proj = Linear(q_size, spec.hidden_size)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., Hk, D] of states x [..., H]: context or block."""
        if has_main_grad(self.k_proj.weight):
            weights, heads = self.context_projection(rope)
            return fused.qkv_norm_rope(fused.linear(x, *weights), heads)[1:]
        shape = (*x.shape[:-1], -1, self.head_dim)
        keys = apply_rope(self.k_norm(self.k_proj(x).view(shape)), rope)
        return keys, self.v_proj(x).view(shape)

    def queries_keys_values(
        self, x: Tensor, rope: Rope, shared: SharedSlots | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [A, K, Hq, D], and `keys_values`, of block states x [A, K, H].

        With `shared`, for weights with a `main_grad`, x are the rows that differ.
        """
        if has_main_grad(self.q_proj.weight):
            qkv = fused.linear(x, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
            if shared is not None:
                qkv = shared.spread(qkv)
            return fused.qkv_norm_rope(qkv, self._heads(rope, self.q_norm))
        shape = (*x.shape[:-1], -1, self.head_dim)
        queries = apply_rope(self.q_norm(self.q_proj(x).view(shape)), rope)
        return queries, *self.keys_values(x, rope)

    def context_projection(self, rope: Rope) -> Projection:
        """What makes keys and values of the fused target states, as one GEMM and one op."""
        return Projection((self.k_proj.weight, self.v_proj.weight), self._heads(rope, None))

    def _heads(self, rope: Rope, q_norm: RMSNorm | None) -> HeadNorms:
        cos, sin = (fused.flat(table) for table in rope)
        return HeadNorms(
            None if q_norm is None else q_norm.weight,
            self.k_norm.weight,
            cos,
            sin,
            self.k_norm.eps,
            0 if q_norm is None else self.q_proj.out_features // self.head_dim,
            self.k_proj.out_features // self.head_dim,
        )

    def forward(
        self,
        x: Tensor,
        context: tuple[Tensor, Tensor] | ContextSums,
        ctx_start: Tensor,
        ctx_end: Tensor,
        rope: Rope,
        shared: SharedSlots | None = None,
        live: LiveRows | None = None,
    ) -> Tensor:
        """Block states x [A, K, H] over context keys/values [T, Hk, D]; returns [A, K, H].

        With `shared`, x are the rows that differ; with `live`, only its rows [R, H] are returned.
        """
        queries, keys, values = self.queries_keys_values(x, rope, shared)
        options = {"scale": self.head_dim**-0.5, "window": self.window, "causal": self.causal}
        if isinstance(context, ContextSums):
            out = context.attend(queries, keys, values, ctx_start, ctx_end, **options)
        else:
            out = ops.block_attention(
                queries, *context, keys, values, ctx_start, ctx_end, **options
            )
        out = out.flatten(-2)
        return self.o_proj(out if live is None else live.pick(out))
