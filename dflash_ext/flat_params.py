"""Parameters, fp32 masters and fp32 gradients of a drafter, each in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class FlatParams:
    """Moves parameters into one buffer, in the given order and without gaps.

    Every parameter becomes a view of ``weight`` and gets ``main_grad``, a view of ``grad`` in its
    shape, which is its ``grad`` too: autograd adds to it, and a backward pass of its own may write
    there. Neighbours can be used as one matrix (``merged_view``).

    Args:
        params: of one dtype on one device.

    Attributes:
        weight: [P] in the parameters' dtype.
        master: [P] fp32; ``weight`` itself if that is fp32.
        grad: [P] fp32, zeros at first.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        first = params[0]
        for p in params:
            if p.dtype != first.dtype or p.device != first.device:
                raise ValueError(
                    f"parameters: found {p.dtype} on {p.device} beside {first.dtype} on "
                    f"{first.device}, want one dtype and device"
                )
        self.shapes = [p.shape for p in params]
        with torch.no_grad():
            self.weight = torch.cat([p.reshape(-1) for p in params])
        in_fp32 = self.weight.dtype == torch.float32
        self.master = self.weight if in_fp32 else self.weight.float()
        self.grad = torch.zeros_like(self.master)
        for p, weight, grad in zip(
            params, self.views(self.weight), self.views(self.grad), strict=True
        ):
            p.data = weight
            if not in_fp32:
                p.grad_dtype = torch.float32
            p.main_grad = grad  # type: ignore[attr-defined]
            p.grad = grad

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a [P] buffer, in its shape."""
        parts = flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def flat_view(tensors: Sequence[Tensor]) -> Tensor:
    """Contiguous tensors that lie one behind the other in one storage, as one [P] view, detached.

    Raises:
        ValueError: they do not.
    """
    for before, after in pairwise(tensors):
        if (
            before.untyped_storage().data_ptr() != after.untyped_storage().data_ptr()
            or before.storage_offset() + before.numel() != after.storage_offset()
            or before.dtype != after.dtype
        ):
            raise ValueError("found tensors apart, want neighbours in one buffer")
    if not all(t.is_contiguous() for t in tensors):
        raise ValueError("found a tensor with gaps, want contiguous ones")
    first = tensors[0].detach()
    return first.as_strided((sum(t.numel() for t in tensors),), (1,), first.storage_offset())


def merged_view(tensors: Sequence[Tensor]) -> Tensor:
    """[t0; t1; ...]: matrices [R_i, C] that lie one behind the other, as one [sum R_i, C] view.

    For parameters of a ``FlatParams`` (q, k and v of a layer; gate and up), or their ``main_grad``.
    The view is detached.

    Raises:
        ValueError: they are no neighbours, or their widths differ.
    """
    widths = {tuple(t.shape[1:]) for t in tensors}
    if len(widths) != 1 or tensors[0].dim() != 2:
        raise ValueError(
            f"found shapes {[list(t.shape) for t in tensors]}, want [rows, C] of one C"
        )
    return flat_view(tensors).view(-1, tensors[0].shape[1])
