"""How gradients become a few long vectors to be summed: in place where they lie side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LONG = 2**26  # elements: a gradient of as many is not copied, however long vectors may be


@dataclass(frozen=True)
class Run:
    """Consecutive gradients [first, stop) that travel together.

    ``in_place``: they are one piece of memory in the dtype of the sum, and are not copied.
    """

    first: int
    stop: int
    in_place: bool


class BucketPlan:
    """The buckets of a list of gradients whose shapes, and whose neighbours, stay the same.

    Gradients that lie one behind the other in one storage are summed where they are, in pieces of
    at most ``numel`` elements; the others are copied into flat buffers of about that size and back.
    """

    def __init__(
        self, grads: Sequence[Tensor], numel: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = [grad.shape for grad in grads]
        self._numel = numel
        self._runs = _runs(grads, numel, dtype)
        self._buffers = [
            None
            if run.in_place
            else torch.empty(
                sum(s.numel() for s in self.shapes[run.first : run.stop]),
                dtype=dtype,
                device=device,
            )
            for run in self._runs
        ]

    def gather(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The vectors to be summed. What has a buffer is copied there.

        Raises:
            ValueError: gradients that lay side by side no longer do.
        """
        vectors: list[Tensor] = []
        for run, buffer in zip(self._runs, self._buffers, strict=True):
            part = grads[run.first : run.stop]
            if buffer is not None:
                torch._foreach_copy_(self._views(run, buffer), list(part))
                vectors.append(buffer)
                continue
            if not all(follows(a, b) for a, b in zip(part, part[1:], strict=False)):
                raise ValueError("gradients that were neighbours in memory have moved apart")
            vectors += _joined(part).split(self._numel)
        return vectors

    def scatter(self, grads: Sequence[Tensor]) -> None:
        """Copies the sums of the buffers back."""
        for run, buffer in zip(self._runs, self._buffers, strict=True):
            if buffer is not None:
                part = list(grads[run.first : run.stop])
                torch._foreach_copy_(part, self._views(run, buffer))

    def _views(self, run: Run, buffer: Tensor) -> list[Tensor]:
        shapes = self.shapes[run.first : run.stop]
        parts = buffer.split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def follows(before: Tensor, after: Tensor) -> bool:
    """Whether ``after`` begins where ``before`` ends, both without gaps, in one storage."""
    return bool(
        before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        and before.dtype == after.dtype
        and before.is_contiguous()
        and after.is_contiguous()
        and before.storage_offset() + before.numel() == after.storage_offset()
    )


def _joined(grads: Sequence[Tensor]) -> Tensor:
    """Neighbours as one vector."""
    first = grads[0]
    size = sum(grad.numel() for grad in grads)
    return first.as_strided((size,), (1,), first.storage_offset())


def _runs(grads: Sequence[Tensor], numel: int, dtype: torch.dtype) -> list[Run]:
    """Neighbours first; of the rest, consecutive runs of at most ``numel`` elements, of which a
    larger gradient, or the only one, makes one of its own."""
    runs: list[Run] = []
    room = 0
    for i, grad in enumerate(grads):
        in_place = grad.dtype == dtype and grad.is_contiguous()
        joins = bool(runs) and i > 0 and runs[-1].in_place and follows(grads[i - 1], grad)
        if in_place and joins:
            runs[-1] = Run(runs[-1].first, i + 1, True)
            continue
        alone = in_place and (grad.numel() >= min(numel, LONG) or len(grads) == 1)
        next_joins = i + 1 < len(grads) and follows(grad, grads[i + 1])
        if alone or (in_place and next_joins):
            runs.append(Run(i, i + 1, True))
            continue
        if runs and not runs[-1].in_place and grad.numel() <= room:
            runs[-1] = Run(runs[-1].first, i + 1, False)
            room -= grad.numel()
        else:
            runs.append(Run(i, i + 1, False))
            room = numel - grad.numel()
    return runs
