"""Sums of gradients over drafters that begin while the backward pass still runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from dflash_ext.drafter.fused import RowBlocks, request_blocks
from dflash_ext.drafter.model import DFlashDraftModel
from dflash_ext.grad_sync import GradSync
from dflash_ext.optim import norms_of, total_norm

# Matrices of a layer that the context uses too: their gradients end with the context's backward,
# in the shortest products there are, so that what is summed last is short.
CONTEXT_WEIGHTS = ("self_attn.k_proj.weight", "self_attn.v_proj.weight")
# The longest sum near the end of a step: a block's runs beside the products that follow. At
# 5120 x 25600 four blocks take as many waves of tiles as one product.
FC_BLOCKS = 4


class BackwardSync:
    """Hands gradients to a GradSync as soon as they are final, in a few long parts.

    Those of a layer's matrices when the last blocks' backward pass has left it, from the last layer
    to the first; that of `fc` in blocks of rows, and keys' and values' by layer, if they have
    storage of their own; the rest at the end, with the small vectors of all layers: however short a
    sum is, on a GPU it waits for its turn beside the products.

    Args:
        params: the trained parameters in the order in which their gradients lie in memory, the
            same on all ranks.
        fc_blocks: at most as many of fc's gradient, the same on all ranks.
    """

    def __init__(
        self,
        model: DFlashDraftModel,
        sync: GradSync,
        params: Sequence[nn.Parameter],
        fc_blocks: int = FC_BLOCKS,
    ) -> None:
        self._modules = list(model.layers)
        self._sync, self._params = sync, params
        self._fc, self._fc_blocks = model.get_parameter("fc.weight"), fc_blocks
        # What was handed over, in order: the parameters whose gradients each part completes.
        self._begun: list[list[nn.Parameter]] = []
        layer_of = {
            parameter: index
            for index, layer in enumerate(model.layers)
            for name, parameter in layer.named_parameters()
            if parameter.dim() > 1 and name not in CONTEXT_WEIGHTS
        }
        of_context = {
            layer.get_parameter(name) for layer in model.layers for name in CONTEXT_WEIGHTS
        }
        self._layers = [
            [p for p in params if layer_of.get(p) == index] for index in range(len(self._modules))
        ]
        self._context = [p for p in params if p in of_context]
        self._rest = [p for p in params if p not in layer_of and p not in of_context]
        self._next = len(self._modules) - 1  # the layer whose sum begins next

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Forward and backward of a step's last blocks go inside: gradients become final here."""
        handles = [
            layer.register_forward_pre_hook(functools.partial(self._watch, index))
            for index, layer in enumerate(self._modules)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._begin_down_to(0)
        request_blocks(self._fc, RowBlocks(self._fc_blocks, self._begin_fc_rows))

    def begin_projected(self, weights: Sequence[Tensor]) -> None:
        """A layer's keys' and values' gradients are final before those of all layers."""
        self._begin([p for p in self._context if any(p is weight for weight in weights)])

    def finish(self) -> Tensor:
        """After the context's backward: the remaining gradients, and the end of all sums.

        Returns the norm of all gradients, as `optim.global_norm`: [] fp32. It is taken part by
        part, while the last sums run.

        Raises (as ``watching`` and ``begin_projected``): what GradSync raises.
        """
        request_blocks(self._fc, None)
        done = {p for part in self._begun for p in part}
        for params in (self._context, self._rest):
            if not done.issuperset(params):
                self._begin([p for p in params if p not in done])
        norm_of: dict[nn.Parameter, Tensor] = {}
        parts = iter(self._begun)

        def take_norms(_: Sequence[Tensor]) -> None:
            part = next(parts)
            norms = norms_of([p.grad for p in part if p.grad is not None]) if part else []
            norm_of.update(zip(part, norms, strict=True))

        self._sync.finish(take_norms)
        self._next = len(self._modules) - 1
        self._begun = []
        return total_norm([norm_of[p] for p in self._params if p in norm_of])

    def _watch(self, index: int, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        # The gradient of its input is the last thing that a layer's backward pass makes. Token
        # embeddings, the first layer's input, have none.
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: self._begin_down_to(index))

    def _begin_down_to(self, index: int) -> None:
        """Also called again for a layer that is recomputed."""
        while self._next >= index:
            self._begin(self._layers[self._next])
            self._next -= 1

    def _begin_fc_rows(self, rows: Tensor) -> None:
        """A block of fc's gradient, from the first to the last."""
        grad = self._fc.grad
        assert grad is not None
        end = grad.storage_offset() + grad.numel()
        is_last = rows.storage_offset() + rows.numel() == end
        self._start([rows], [self._fc] if is_last else [])

    def _begin(self, params: Sequence[nn.Parameter]) -> None:
        params = [p for p in params if p.grad is not None]
        self._start([p.grad for p in params if p.grad is not None], params)

    def _start(self, grads: list[Tensor], completed: list[nn.Parameter]) -> None:
        self._begun.append(completed)
        self._sync.start(grads)
