"""Attention of a drafter layer: block slots attend to the target's context and to their block.

Letters: T packed context tokens, A anchors, K slots, H hidden, Hq/Hk query/key heads, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_ext import ops
from dflash_ext.drafter.spec import DrafterSpec

Rope = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


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
        self.q_proj = nn.Linear(spec.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, spec.hidden_size, bias=False)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., Hk, D] of states x [..., H]: context or block."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        keys = apply_rope(self.k_norm(self.k_proj(x).view(shape)), rope)
        return keys, self.v_proj(x).view(shape)

    def forward(
        self,
        x: Tensor,
        context: tuple[Tensor, Tensor],
        ctx_start: Tensor,
        ctx_end: Tensor,
        rope: Rope,
    ) -> Tensor:
        """Block states x [A, K, H] over context keys/values [T, Hk, D]; returns [A, K, H]."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        queries = apply_rope(self.q_norm(self.q_proj(x).view(shape)), rope)
        keys, values = self.keys_values(x, rope)
        out = ops.block_attention(
            queries,
            *context,
            keys,
            values,
            ctx_start,
            ctx_end,
            scale=self.head_dim**-0.5,
            window=self.window,
            causal=self.causal,
        )
        return self.o_proj(out.reshape(*x.shape[:-1], -1))
