"""The context's side of a training step: keys and values once, their gradients summed over blocks.

Any number of groups of blocks attend to the same keys and values; what they leave for them adds up
in fp32, and one backward pass through the projections and `fc` ends the batch.

Letters: T context tokens, A anchors, K slots, Hq/Hk query/key heads, D head size, L captured
layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dflash_ext import ops
from dflash_ext.drafter import fused
from dflash_ext.drafter.fused import HeadNorms
from dflash_ext.flat_params import merged_view
from dflash_ext.ops.dtypes import accumulate_dtype

if TYPE_CHECKING:
    from dflash_ext.drafter.model import DFlashDraftModel


class ContextSums(NamedTuple):
    """A layer's keys and values, outside autograd, and the sums of their gradients so far."""

    k: Tensor  # [T, Hk, D]
    v: Tensor
    dk: Tensor  # [T, Hk, D] in fp32 (fp64 for fp64)
    dv: Tensor

    def attend(
        self,
        q: Tensor,
        k_blk: Tensor,
        v_blk: Tensor,
        ctx_start: Tensor,
        ctx_end: Tensor,
        **options: Any,
    ) -> Tensor:
        """`ops.block_attention` [A, K, Hq, D]; its backward pass adds to dk and dv."""
        return _BlockAttention.apply(q, k_blk, v_blk, self, ctx_start, ctx_end, options)


class _BlockAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k_blk: Tensor,
        v_blk: Tensor,
        context: ContextSums,
        ctx_start: Tensor,
        ctx_end: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        inputs = (q, context.k, context.v, k_blk, v_blk)
        ranges = (ctx_start, ctx_end)
        out, lse = torch.ops.dflash_ext.block_attention.default(*inputs, *ranges, **options)
        ctx.save_for_backward(*inputs, out, lse, *ranges)
        ctx.sums, ctx.options = (context.dk, context.dv), options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk_blk, dv_blk = torch.ops.dflash_ext.block_attention_backward.default(
            grad_out, *ctx.saved_tensors, *ctx.sums, **ctx.options
        )
        return dq, dk_blk, dv_blk, None, None, None, None


class Projection(NamedTuple):
    """A layer's way from the fused target states to keys and values of the context."""

    weights: tuple[Tensor, Tensor]  # of k and v, adjacent in storage
    heads: HeadNorms


class _WeightGrads:
    """How keys' and values' projections get their gradients: at once, or later."""

    def __init__(self) -> None:
        self.are_late = False
        self._waiting: list[tuple[Sequence[Tensor], Tensor, Tensor]] = []

    def add(self, weights: Sequence[Tensor], grad_out: Tensor, x: Tensor) -> None:
        """As `fused.add_matrix_grad`."""
        if self.are_late:
            self._waiting.append((weights, grad_out, x))
        else:
            fused.add_matrix_grad(weights, grad_out, x)

    @torch.no_grad()
    def make(self, made: Callable[[Sequence[Tensor]], None]) -> None:
        """The later ones, each then handed over by its weights."""
        for weights, grad_out, x in self._waiting:
            fused.add_matrix_grad(weights, grad_out, x)
            made(weights)
        self._waiting = []


class _KeysValues(Function):
    """All layers' keys and values in one node: the gradients for the states add up in its GEMMs.

    Its gradients come from the sums, not from autograd, which would round them first; the output
    that has a gradient is a handle without a value.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        layers: list[Projection],
        sums: Tensor,
        weight_grads: _WeightGrads,
    ) -> tuple[Tensor, ...]:
        projected, outputs = [], []
        for weights, heads in layers:
            kv = states @ merged_view(weights).T
            _, k, v = ops.qkv_norm_rope(kv, *heads)
            projected.append(kv)
            outputs += [k, v]
        ctx.save_for_backward(states, *projected)
        ctx.layers, ctx.sums, ctx.weight_grads = layers, sums, weight_grads
        ctx.mark_non_differentiable(*outputs)
        return states.new_zeros(()), *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, None, None, None]:
        states, *projected = ctx.saved_tensors
        dstates = None
        for (weights, heads), kv, (dk, dv) in zip(ctx.layers, projected, ctx.sums, strict=True):
            dkv = heads.backward(None, dk, dv, kv)
            ctx.weight_grads.add(weights, dkv, states)
            weight = merged_view(weights)
            dstates = dkv @ weight if dstates is None else dstates.addmm_(dkv, weight)
        return dstates, None, None, None


class TrainContext:
    """Keys and values of one batch's context for all layers, and the way back.

    Args:
        hidden: captured states [T, L*H] or [L, T, H].
        positions: document-local positions [T].
    """

    def __init__(self, model: DFlashDraftModel, hidden: Tensor, positions: Tensor) -> None:
        self._handle: Tensor | None = None
        self._weight_grads = _WeightGrads()
        if fused.has_main_grad(model.fc.weight):
            states, layers = model.context_projections(hidden, positions)
            spec, tokens = model.spec, states.shape[0]
            shape = (len(layers), 2, tokens, spec.num_key_value_heads, spec.head_dim)
            sums = torch.zeros(shape, dtype=accumulate_dtype(states.dtype), device=states.device)
            self._handle, *outputs = _KeysValues.apply(states, layers, sums, self._weight_grads)
        else:
            self._outputs = [part for pair in model.context(hidden, positions) for part in pair]
            outputs = [part.detach() for part in self._outputs]
            shape = (len(outputs) // 2, 2, *outputs[0].shape)
            sums = torch.zeros(shape, dtype=accumulate_dtype(hidden.dtype), device=hidden.device)
        pairs = zip(outputs[::2], outputs[1::2], sums, strict=True)
        self.layers = [ContextSums(k, v, *pair) for k, v, pair in pairs]

    def backward(self, projected: Callable[[Sequence[Tensor]], None] | None = None) -> None:
        """Carry the sums on to the weights; once, after the backward passes of all blocks.

        projected: called with the weights of each layer's keys and values when their gradients are
            final, if that is before the end; they are then made last, behind that of `fc`.
        """
        if self._handle is not None:
            self._weight_grads.are_late = projected is not None
            self._handle.backward()
            if projected is not None:
                self._weight_grads.make(projected)
            return
        sums = [part for layer in self.layers for part in (layer.dk, layer.dv)]
        grads = [s.to(o.dtype) for s, o in zip(sums, self._outputs, strict=True)]
        torch.autograd.backward(self._outputs, grads)
