"""lm_head_topk: the k best ids, log-sum-exp and label rank of a head, without keeping logits."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MAX_K", "lm_head_topk"]

MAX_K = 1024


def lm_head_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int = 8,
    labels: Tensor | None = None,
    *,
    valid_vocab: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Statistics of z = logit_scale * hidden @ weight.T, then z = softcap * tanh(z / softcap).

    hidden       [N, H]   bf16, fp16 or fp32; products are summed in fp32
    weight       [V, H]   hidden's dtype
    k                     1 to MAX_K
    labels       [N] i64  in [0, V), or None
    valid_vocab           ids from here on (padding of the head) have z = -inf and are not returned

    values       [N, k] f32  the largest z, descending; equal ones by ascending index
    indices      [N, k] i64  their ids; -1 (with value -inf) where k exceeds the valid ids
    logsumexp    [N] f32     over the valid ids
    rank         [N] i64     ids before the label in that order: 0 means the label is the argmax
    label_logit  [N] f32     z of the label

    Without labels the last two are empty. NaN counts as the largest value, as in torch.topk, and
    makes logsumexp NaN. Nothing here has a gradient, and at most a bounded chunk of logits exists.

    Raises RuntimeError for shapes, dtypes or k that do not fit, and on the CPU for labels outside
    [0, V); on a GPU, which nothing waits for, such a label has rank -1 and label_logit NaN.

    On a GPU values, indices, rank and label_logit of a row do not depend on the other rows of the
    batch if the Hopper kernel runs (16-bit inputs, k <= 32, rows of a multiple of 16 bytes);
    logsumexp may differ in the last bits.
    """
    return torch.ops.dflash_ext.lm_head_topk.default(
        hidden.detach(),
        weight.detach(),
        k,
        labels,
        valid_vocab=valid_vocab,
        softcap=softcap,
        logit_scale=logit_scale,
    )


@torch.library.register_fake("dflash_ext::lm_head_topk")
def _(
    hidden: Tensor,
    weight: Tensor,
    k: int = 8,
    labels: Tensor | None = None,
    *,
    valid_vocab: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch._check(hidden.dim() == 2, lambda: f"hidden: found {hidden.shape}, want [N, H]")
    torch._check(weight.dim() == 2, lambda: f"weight: found {weight.shape}, want [V, H]")
    torch._check(1 <= k <= MAX_K, lambda: f"k: found {k}, want 1 to {MAX_K}")
    n = hidden.shape[0]
    labelled = 0 if labels is None else n
    f32 = torch.float32
    return (
        hidden.new_empty((n, k), dtype=f32),
        hidden.new_empty((n, k), dtype=torch.int64),
        hidden.new_empty((n,), dtype=f32),
        hidden.new_empty((labelled,), dtype=torch.int64),
        hidden.new_empty((labelled,), dtype=f32),
    )
