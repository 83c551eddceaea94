"""draft_loss in plain torch: the specification, in any dtype, differentiated by autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dflash_ext.ops.dtypes import accumulate_dtype


def head_logits(
    hidden: Tensor, weight: Tensor, *, softcap: float | None, logit_scale: float, valid_vocab: int
) -> Tensor:
    """The target's logits [N, valid_vocab]: scale first, then the soft cap."""
    dtype = accumulate_dtype(hidden.dtype)
    logits = hidden.to(dtype) @ weight[:valid_vocab].to(dtype).T * logit_scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def divergence(kl: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    """The divergence [N] named `kl` between a target's p and a drafter's q, rows of logarithms.

    forward  KL(p || q) = sum of p log(p / q)
    reverse  KL(q || p)
    js       KL(p || m) / 2 + KL(q || m) / 2 with m = (p + q) / 2 (Lin 1991), at most log 2
    tv       sum of |p - q| / 2: 1 minus the acceptance rate of speculative sampling

    All at temperature 1, as in DistillSpec (arXiv 2310.08461) and speculators' losses kl_div, rkl,
    jsd and tv.
    """
    p, q = log_p.exp(), log_q.exp()
    if kl == "forward":
        return (p * (log_p - log_q)).sum(-1)
    if kl == "reverse":
        return (q * (log_q - log_p)).sum(-1)
    if kl == "js":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        return (p * (log_p - log_m) + q * (log_q - log_m)).sum(-1) / 2
    if kl == "tv":
        return (p - q).abs().sum(-1) / 2
    raise ValueError(f"kl: found {kl!r}, want forward, reverse, js or tv")


def row_terms(
    logits: Tensor, labels: Tensor, teacher_logits: Tensor | None, kl: str = "forward"
) -> tuple[Tensor, ...]:
    """(ce, kl, cap, rank, lse), each [N], of rows of logits [N, V] and labels [N].

    rank counts the ids that come before the label in (value descending, index ascending) order,
    so rank 0 is "the argmax is the label, ties going to the lowest index"; rows with a logit that
    is not finite have the last rank, V.
    """
    lse = torch.logsumexp(logits, -1)
    log_probs = logits - lse[:, None]
    label_logit = logits.gather(1, labels[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > label_logit) | ((logits == label_logit) & (ids < labels[:, None]))
    rank = torch.where(lse.isfinite(), before.sum(-1), logits.shape[1])
    ce = -log_probs.gather(1, labels[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    cap = torch.where(rank == 0, entropy, 0.0)
    if teacher_logits is None:
        difference = torch.zeros_like(ce)
    else:
        difference = divergence(kl, torch.log_softmax(teacher_logits, -1), log_probs)
    return ce, difference, cap, rank, lse


def dpace_weights(ce: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): w_j = sum over m >= j of C_m, from ce [A, K] and mask [A, K].

    C_j is the product over supervised i <= j of (1 - alpha) exp(-ce_i) + alpha; slots that are
    not supervised neither scale the product nor add to a sum. A NaN counts as no confidence (the
    loss itself carries it), and a supervised slot keeps a weight > 0.
    """
    confidence = (1 - alpha) * torch.exp(-ce).nan_to_num(nan=0.0) + alpha
    prefix = torch.where(mask, confidence, 1.0).cumprod(1)
    prefix = torch.where(mask, prefix.clamp_min(torch.finfo(torch.float32).tiny), 0.0)
    return torch.where(mask, prefix.flip(1).cumsum(1).flip(1), 0.0)


def draft_loss_stats_naive(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    weight_sum: Tensor,
    rows: Tensor,
    n_rows: Tensor,
    *,
    teacher_hidden: Tensor | None = None,
    teacher_index: Tensor | None = None,
    ce_weight: float = 1.0,
    kl_weight: float = 0.0,
    kl: str = "forward",
    cap_lambda: float = 0.0,
    dpace_alpha: float | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_rows: int = 2048,
    valid_vocab: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss[], terms[A,K,4], rank[A,K], lse[A,K], used weights[A,K]); only the loss has a gradient.

    terms are (loss, ce, kl, cap) per slot, unweighted. Slots that are not projected have terms 0,
    lse 0 and rank valid_vocab. At most chunk_rows rows of logits exist at a time: each chunk is
    recomputed in the backward pass.
    """
    num_blocks, block_size, width = hidden.shape
    vocab = weight.shape[0] if valid_vocab is None else valid_vocab
    dtype = accumulate_dtype(hidden.dtype)
    picked = rows[: int(n_rows)]
    flat_labels = labels.reshape(-1)[picked]

    def chunk_terms(states: Tensor, teacher: Tensor | None, targets: Tensor) -> tuple[Tensor, ...]:
        def logits(x: Tensor) -> Tensor:
            return head_logits(
                x, weight, softcap=softcap, logit_scale=logit_scale, valid_vocab=vocab
            )

        teacher_logits = None if teacher is None else logits(teacher)
        return row_terms(logits(states), targets, teacher_logits, kl)

    student = hidden.reshape(-1, width)[picked]
    teacher = None
    if kl_weight != 0:
        assert teacher_hidden is not None and teacher_index is not None
        teacher = teacher_hidden.detach()[teacher_index.reshape(-1)[picked]]
    parts = []
    for start in range(0, picked.numel(), chunk_rows):
        chunk = slice(start, start + chunk_rows)
        args = (student[chunk], None if teacher is None else teacher[chunk], flat_labels[chunk])
        parts.append(checkpoint(chunk_terms, *args, use_reentrant=False))
    if parts:
        ce, difference, cap, rank, lse = (torch.cat(column) for column in zip(*parts, strict=True))
    else:
        ce = difference = cap = lse = student.to(dtype).sum(-1)
        rank = picked

    slots = num_blocks * block_size
    loss_terms = ce_weight * ce + kl_weight * difference + cap_lambda * cap
    stacked = torch.stack([loss_terms, ce, difference, cap], -1)
    all_terms = stacked.new_zeros(slots, 4).index_copy(0, picked, stacked)
    all_terms = all_terms.view(num_blocks, block_size, 4)
    all_lse = lse.detach().new_zeros(slots).index_copy(0, picked, lse.detach())
    all_rank = torch.full((slots,), vocab, device=rank.device).index_copy(0, picked, rank)

    used = weights.to(dtype)
    if dpace_alpha is not None:
        used = dpace_weights(all_terms[..., 1].detach(), weights > 0, dpace_alpha)
    weighted = torch.where(used != 0, used * all_terms[..., 0], 0.0)
    loss = weighted.sum() * torch.where(weight_sum > 0, 1 / weight_sum.to(dtype), 0.0)
    return (
        loss,
        all_terms.detach(),
        all_rank.view(num_blocks, block_size),
        all_lse.view(num_blocks, block_size),
        used,
    )
