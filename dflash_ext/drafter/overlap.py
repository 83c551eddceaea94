"""Sums of gradients over drafters that begin while the backward pass still runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from dflash_ext.drafter import side_stream
from dflash_ext.drafter.model import DFlashDraftModel
from dflash_ext.grad_sync import GradSync

# Weights of a layer that the context uses too: their gradients end with the context's backward.
CONTEXT_WEIGHTS = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight")


class BackwardSync:
    """Hands each layer's gradients to a GradSync as soon as they are final.

    That is when the last blocks' backward pass has left the layer, from the last layer to the
    first. What the context has a part in follows at the end.

    Args:
        params: the trained parameters in the order in which their gradients lie in memory, the
            same on all ranks.
    """

    def __init__(
        self, model: DFlashDraftModel, sync: GradSync, params: Sequence[nn.Parameter]
    ) -> None:
        self._modules = list(model.layers)
        self._sync = sync
        layer_of = {
            parameter: index
            for index, layer in enumerate(model.layers)
            for name, parameter in layer.named_parameters()
            if name not in CONTEXT_WEIGHTS
        }
        self._layers = [
            [p for p in params if layer_of.get(p) == index] for index in range(len(self._modules))
        ]
        self._rest = [p for p in params if p not in layer_of]
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

    def finish(self) -> None:
        """After the context's backward: the remaining gradients, and the end of all sums.

        Raises (as ``watching``): what GradSync raises.
        """
        self._sync.start(_gradients(self._rest))
        self._sync.finish()
        self._next = len(self._modules) - 1

    def _watch(self, index: int, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        # The gradient of its input is the last thing that a layer's backward pass makes. Token
        # embeddings, the first layer's input, have none.
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: self._begin_down_to(index))

    def _begin_down_to(self, index: int) -> None:
        """Also called again for a layer that is recomputed."""
        while self._next >= index:
            grads = _gradients(self._layers[self._next])
            side_stream.join(grads[0].device)
            self._sync.start(grads)
            self._next -= 1


def _gradients(params: Sequence[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]
