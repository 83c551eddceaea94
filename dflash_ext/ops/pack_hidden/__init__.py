"""pack_hidden: the target's captured layers, without padding, into a drafter's slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["pack_hidden"]


def pack_hidden(
    layers: Sequence[Tensor],
    src_index: Tensor,
    out: Tensor,
    *,
    n_rows: Tensor,
    high_water: Tensor,
    first_layer: int = 0,
) -> None:
    """Gathers rows of each layer into `out`: out[t, l] = layers[l][src_index[t]] for t < n_rows.

    layers      L' x [B, S, H]        any strides in the first two dimensions, no gradient taken
    src_index   [T] i64               row * S + position of each packed token, -1: a row of zeros
    out         [T, L*H] or [L, T, H] any row stride; the layers' dtype
    n_rows      [] i64                packed tokens of this batch
    high_water  [] i64                rows that may hold something else than zero; updated
    first_layer                       layers[0] is layer first_layer of out

    Rows [n_rows, high_water) are zeroed, later ones are left alone: start high_water at T for a
    buffer that was not cleared, at 0 for one that was. A slot can be filled by one call or by a
    call a layer: high_water falls to n_rows with the call that writes the last layer.

    Raises RuntimeError for shapes, dtypes or indices that do not fit.
    """
    torch.ops.dflash_ext.pack_hidden.default(
        list(layers),
        src_index,
        out,
        n_rows=n_rows,
        high_water=high_water,
        first_layer=first_layer,
    )


@torch.library.register_fake("dflash_ext::pack_hidden")
def _(
    layers: Sequence[Tensor],
    src_index: Tensor,
    out: Tensor,
    *,
    n_rows: Tensor,
    high_water: Tensor,
    first_layer: int = 0,
) -> None:
    torch._check(len(layers) > 0, lambda: "layers: found none, want at least one")
    torch._check(src_index.dim() == 1, lambda: f"src_index: found {src_index.shape}, want [T]")
    torch._check(out.dim() in (2, 3), lambda: f"out: found {out.shape}, want [T, L*H] or [L, T, H]")
