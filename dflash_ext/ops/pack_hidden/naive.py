"""pack_hidden in plain torch: the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def layer_view(out: Tensor, layer: int, hidden_size: int) -> Tensor:
    """Layer `layer` of the slot buffer: [T, H] of [L, T, H] or of [T, L*H]."""
    if out.dim() == 3:
        return out[layer]
    return out[:, layer * hidden_size : (layer + 1) * hidden_size]


def num_layers(out: Tensor, hidden_size: int) -> int:
    return out.shape[0] if out.dim() == 3 else out.shape[1] // hidden_size


def pack_hidden_naive(
    layers: Sequence[Tensor],
    src_index: Tensor,
    out: Tensor,
    *,
    n_rows: Tensor,
    high_water: Tensor,
    first_layer: int = 0,
) -> None:
    """Rows [0, n_rows) from the layers, zeros where src_index is -1 and in [n_rows, high_water)."""
    n, dirty = int(n_rows), int(high_water)
    index = src_index[:n]
    hidden_size = layers[0].shape[-1]
    for i, layer in enumerate(layers):
        target = layer_view(out, first_layer + i, hidden_size)
        rows = layer.reshape(-1, hidden_size)[index.clamp_min(0)]
        target[:n] = torch.where(index[:, None] >= 0, rows, 0)
        target[n:dirty] = 0
    last = first_layer + len(layers) == num_layers(out, hidden_size)
    high_water.fill_(n if last else max(n, dirty))
