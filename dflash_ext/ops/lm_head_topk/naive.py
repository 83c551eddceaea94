"""lm_head_topk in plain torch: the specification, in any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_ext.ops.dtypes import accumulate_dtype


def lm_head_topk_naive(
    hidden: Tensor,
    weight: Tensor,
    k: int = 8,
    labels: Tensor | None = None,
    *,
    valid_vocab: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(values, indices, logsumexp, rank, label_logit) of z = softcap(logit_scale * hidden @ W^T).

    bf16, fp16 and fp32 inputs are multiplied in fp32, fp64 in fp64; results have that dtype.
    """
    dtype = accumulate_dtype(hidden.dtype)
    vocab = weight.shape[0]
    valid = vocab if valid_vocab is None else valid_vocab
    z = hidden.to(dtype) @ weight.to(dtype).T * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z[:, valid:] = float("-inf")

    # A stable descending sort keeps the lower index first among equals and puts NaN on top.
    found = min(k, valid)
    values, indices = z[:, :valid].sort(dim=-1, descending=True, stable=True)
    values = torch.nn.functional.pad(values[:, :found], (0, k - found), value=float("-inf"))
    indices = torch.nn.functional.pad(indices[:, :found], (0, k - found), value=-1)
    lse = torch.logsumexp(z, -1)
    if labels is None:
        return values, indices, lse, indices.new_empty(0), values.new_empty(0)

    label_logit = z.gather(1, labels[:, None])
    nan, label_nan = z.isnan(), label_logit.isnan()
    greater = (z > label_logit) | (nan & ~label_nan)
    equal = (z == label_logit) | (nan & label_nan)
    before = torch.arange(vocab, device=z.device) < labels[:, None]
    rank = (greater | (equal & before)).sum(-1)
    return values, indices, lse, rank, label_logit[:, 0]
