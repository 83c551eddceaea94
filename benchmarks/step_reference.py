"""The drafter step in plain torch, written from the model's definition and in any dtype.

In float32 it is what every other path is compared with; in bfloat16 it is the plain path whose
error bounds theirs. Documents are equally long and have equally many anchors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.step_problem import Problem, Terms

CHUNK_ROWS = 1024


def reference_step(
    problem: Problem, terms: Terms, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss [] and the gradient of every parameter, in ``dtype``."""
    params = {
        name: p.detach().to(dtype, copy=True).requires_grad_()
        for name, p in problem.model.named_parameters()
    }
    loss = row_losses(problem, terms, _Drafter(problem, params).states(), dtype)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in params.items() if p.grad is not None}


def row_losses(problem: Problem, terms: Terms, states: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of weighted losses over weight_sum; states [A, K, H]."""
    plan, table = problem.plan, problem.head.head_weight.to(dtype)
    rows = plan.rows[: problem.rows]
    teacher = problem.last[plan.teacher_index.flatten()[rows]].to(dtype)
    labels, weights = plan.labels.flatten()[rows], plan.weights.flatten()[rows]
    picked = states.flatten(0, 1)[rows]

    def chunk(hidden: Tensor, teacher: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        log_q = F.linear(hidden, table).float().log_softmax(-1)
        loss = terms.ce * F.nll_loss(log_q, labels, reduction="none")
        if terms.kl:
            log_p = F.linear(teacher, table).float().log_softmax(-1)
            loss = loss + terms.kl * (log_p.exp() * (log_p - log_q)).sum(-1)
        return (weights * loss).sum()

    parts = zip(*(x.split(CHUNK_ROWS) for x in (picked, teacher, labels, weights)), strict=True)
    sums = [checkpoint(chunk, *part, use_reentrant=False) for part in parts]
    return torch.stack(sums).sum() / plan.weight_sum


class _Drafter:
    """Block states of all anchors from a dict of weights."""

    def __init__(self, problem: Problem, params: Mapping[str, Tensor]) -> None:
        self.problem, self.params = problem, params
        self.dtype = params["norm.weight"].dtype
        self.documents = problem.shape.documents
        self.spec = problem.spec

    def states(self) -> Tensor:
        problem, documents = self.problem, self.documents
        spec, plan = self.spec, problem.plan
        starts = plan.anchors - plan.ctx_start  # the anchors' positions in their documents
        slots = torch.arange(spec.block_size, device=starts.device)
        positions = (starts[:, None] + slots).view(documents, -1)
        ids = torch.full_like(plan.labels, spec.mask_token_id)
        ids[:, 0] = plan.labels[:, 0]
        x = (
            F.embedding(ids, problem.head.embed_weight)
            .to(self.dtype)
            .view(documents, -1, spec.hidden_size)
        )
        context = self.norm("hidden_norm", self.linear("fc", problem.hidden.to(self.dtype)))
        context = context.view(documents, -1, spec.hidden_size)
        mask = self.mask(starts.view(documents, -1), context.shape[1])
        for layer in range(spec.num_layers):
            name = f"layers.{layer}"
            normed = self.norm(f"{name}.input_layernorm", x)
            x = x + self.attention(f"{name}.self_attn", normed, context, positions, mask)
            normed = self.norm(f"{name}.post_attention_layernorm", x)
            gate = F.silu(self.linear(f"{name}.mlp.gate_proj", normed))
            up = self.linear(f"{name}.mlp.up_proj", normed)
            x = x + self.linear(f"{name}.mlp.down_proj", gate * up)
        return self.norm("norm", x).view(-1, spec.block_size, spec.hidden_size)

    def mask(self, starts: Tensor, tokens: int) -> Tensor:
        """Bool [B, 1, A/B * K, S + A/B * K]: context before the anchor, and the own block."""
        slots = self.spec.block_size
        query = starts.repeat_interleave(slots, 1)[:, :, None]
        past = torch.arange(tokens, device=starts.device) < query
        block = torch.arange(starts.shape[1], device=starts.device).repeat_interleave(slots)
        own = (block[:, None] == block).expand(starts.shape[0], -1, -1)
        return torch.cat([past, own], -1)[:, None]

    def attention(
        self, name: str, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor
    ) -> Tensor:
        before = torch.arange(context.shape[1], device=x.device).expand(self.documents, -1)
        everywhere = torch.cat([before, positions], 1)
        queries = self.heads(f"{name}.q_proj", x)
        both = torch.cat([context, x], 1)
        keys, values = self.heads(f"{name}.k_proj", both), self.heads(f"{name}.v_proj", both)
        queries = self.rotated(self.norm(f"{name}.q_norm", queries), positions)
        keys = self.rotated(self.norm(f"{name}.k_norm", keys), everywhere)
        group = queries.shape[2] // keys.shape[2]
        keys, values = (t.repeat_interleave(group, 2).transpose(1, 2) for t in (keys, values))
        out = F.scaled_dot_product_attention(queries.transpose(1, 2), keys, values, attn_mask=mask)
        return self.linear(f"{name}.o_proj", out.transpose(1, 2).flatten(2))

    def heads(self, name: str, x: Tensor) -> Tensor:
        return self.linear(name, x).unflatten(-1, (-1, self.spec.head_dim))

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.spec.head_dim // 2
        rates = self.spec.rope_theta ** (-torch.arange(half, device=x.device).float() / half)
        angles = (positions.float()[..., None] * rates).unsqueeze(2)
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        first, second = x.split(half, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.params[f"{name}.weight"], self.spec.rms_norm_eps)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.params[f"{name}.weight"])
