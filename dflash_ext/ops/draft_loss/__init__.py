"""draft_loss: the frozen head, the training objective and its gradient in one pass over logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_ext.ops.draft_loss.teacher import share_teachers
from dflash_ext.ops.dtypes import accumulate_dtype
from dflash_ext.ops.metric_add import metric_add

__all__ = ["DIVERGENCES", "draft_loss", "draft_loss_stats"]

DIVERGENCES = ("forward", "reverse", "js", "tv")  # what `kl` may be
# Of the logits that a GPU holds at a time, a teacher's included. cuBLAS gains by 4096 rows over
# 2048; more of them gain nothing.
CHUNK_BYTES, MOST_CHUNK_ROWS = 2**31, 4096
CPU_CHUNK_ROWS = 2048
ROW_ALIGN = 128


def default_chunk_rows(device: str, vocab: int, itemsize: int, *, teacher: bool) -> int:
    """Rows of logits at a time on a kind of device ("cuda", "cpu"), so that all logits in memory,
    `itemsize` bytes each and twice as many with a teacher, stay below CHUNK_BYTES on a GPU."""
    if device == "cpu":
        return CPU_CHUNK_ROWS  # by task and thread, not by chunk
    rows = min(MOST_CHUNK_ROWS, CHUNK_BYTES // (vocab * itemsize)) // (2 if teacher else 1)
    return max(ROW_ALIGN, rows // ROW_ALIGN * ROW_ALIGN)


def draft_loss_stats(
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
    chunk_rows: int | None = None,
    valid_vocab: int | None = None,
    most_teachers: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """draft_loss, and what its pass over the logits saw: (loss, terms, rank, lse, used weights).

    terms[A,K,4] are the unweighted (loss, ce, kl, cap) of each slot, rank[A,K] int64 the number of
    ids that come before the label (0: it is the argmax; ties by lowest index), lse[A,K] the
    log-sum-exp, and the used weights[A,K] those that multiplied the terms (D-PACE's if on). Slots
    outside rows[:n_rows] have terms and lse 0 and rank valid_vocab. Only loss has a gradient.

    `most_teachers` bounds the different teachers of each run of chunk_rows rows. A GPU then
    projects each once; where there are more, the loss is NaN.
    """
    if kl not in DIVERGENCES:
        raise ValueError(f"kl: found {kl!r}, want {', '.join(DIVERGENCES)}")
    if kl_weight == 0:
        teacher_hidden = teacher_index = None
    elif teacher_hidden is None or teacher_index is None:
        raise ValueError("kl_weight: found a weight but no teacher_hidden and teacher_index")
    if weight.requires_grad:
        raise ValueError("weight: found requires_grad, want a frozen head")
    if chunk_rows is None:
        chunk_rows = default_chunk_rows(
            hidden.device.type,
            weight.shape[0],
            hidden.element_size(),
            teacher=teacher_hidden is not None,
        )
    shared: tuple[Tensor, ...] = ()
    if teacher_hidden is not None and most_teachers is not None and hidden.is_cuda:
        assert teacher_index is not None
        tokens = teacher_hidden.shape[0]
        shared = share_teachers(teacher_index, rows, n_rows, tokens, chunk_rows, most_teachers)
    loss, _, terms, rank, lse, used = torch.ops.dflash_ext.draft_loss.default(
        hidden,
        weight,
        labels,
        weights,
        weight_sum,
        rows,
        n_rows,
        None if teacher_hidden is None else teacher_hidden.detach(),
        teacher_index,
        *shared,
        ce_weight=ce_weight,
        kl_weight=kl_weight,
        kl=kl,
        cap_lambda=cap_lambda,
        dpace_alpha=dpace_alpha,
        softcap=softcap,
        logit_scale=logit_scale,
        chunk_rows=chunk_rows,
        valid_vocab=valid_vocab,
        need_grad=hidden.requires_grad and torch.is_grad_enabled(),
    )
    return loss, terms, rank, lse, used


def draft_loss(
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
    chunk_rows: int | None = None,
    valid_vocab: int | None = None,
    most_teachers: int | None = None,
    metrics: Tensor | None = None,
    measured: bool = True,
) -> Tensor:
    """Loss[] = sum of w (ce_weight CE + kl_weight KL + cap_lambda CAP) / weight_sum.

    hidden          [A, K, H]  drafter states after its final norm; the only input with a gradient
    weight          [V, H]     frozen head of the target
    labels          [A, K] i64; weights [A, K] (mask x decay, 0 = not supervised)
    weight_sum      []         denominator of the whole optimizer step
    rows, n_rows    [R], []    flat indices of the slots to project: rows[:n_rows]
    teacher_hidden  [T, H]     target states after its final norm, with teacher_index [A, K] into T

    KL is the divergence between p, the head's softmax of the teacher state, and q, that of the
    drafter's: `kl` forward is KL(p || q), reverse KL(q || p), js Jensen-Shannon's with weights 1/2,
    tv the total variation (`naive.divergence` has the formulas). CAP is the entropy of the slots
    whose argmax is the label; dpace_alpha replaces the weights by D-PACE's. With `metrics` (an
    accumulator of `metric_add`) the slots' terms and ranks are added to it, or only the loss if not
    `measured`; loss and gradient have the same bits either way.

    On a GPU nothing waits for the device: a label, row or index out of range makes the loss NaN
    instead of raising. All chunks of `rows` are multiplied, however small n_rows is; who knows a
    bound of n_rows on the host passes rows[:bound]. In 16 bits the terms and ranks are those of the
    logits as they are stored, in 16 bits. Memory: chunk_rows x V logits (None: as many rows as
    `default_chunk_rows` says), twice that with a teacher, and the gradient of all rows in fp32.
    `most_teachers`: as in `draft_loss_stats`. Other divergences than forward take a kernel that
    reads a row four times.

    Raises ValueError for an unknown kl or a KL without teacher, and on a CPU IndexError for an
    index out of range.
    """
    loss, terms, rank, _, used = draft_loss_stats(
        hidden,
        weight,
        labels,
        weights,
        weight_sum,
        rows,
        n_rows,
        teacher_hidden=teacher_hidden,
        teacher_index=teacher_index,
        ce_weight=ce_weight,
        kl_weight=kl_weight,
        kl=kl,
        cap_lambda=cap_lambda,
        dpace_alpha=dpace_alpha,
        softcap=softcap,
        logit_scale=logit_scale,
        chunk_rows=chunk_rows,
        valid_vocab=valid_vocab,
        most_teachers=most_teachers,
    )
    if metrics is not None:
        seen = rank if measured else rank.new_empty((0, 0))
        metric_add(metrics, seen, terms.float(), used.float())
    return loss


@torch.library.register_fake("dflash_ext::draft_loss")
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    weight_sum: Tensor,
    rows: Tensor,
    n_rows: Tensor,
    teacher_hidden: Tensor | None = None,
    teacher_index: Tensor | None = None,
    teacher_tokens: Tensor | None = None,
    teacher_place: Tensor | None = None,
    *,
    need_grad: bool = True,
    **options: object,
) -> tuple[Tensor, ...]:
    torch._check(hidden.dim() == 3, lambda: f"hidden: found {hidden.shape}, want [A, K, H]")
    torch._check(weight.dim() == 2, lambda: f"weight: found {weight.shape}, want [V, H]")
    blocks, block_size, width = hidden.shape
    acc = accumulate_dtype(hidden.dtype)
    return (
        hidden.new_empty((), dtype=acc),
        hidden.new_empty((blocks if need_grad else 0, block_size, width)),
        hidden.new_empty((blocks, block_size, 4), dtype=acc),
        hidden.new_empty((blocks, block_size), dtype=torch.int64),
        hidden.new_empty((blocks, block_size), dtype=acc),
        hidden.new_empty((blocks, block_size), dtype=acc),
    )


def _save_gradient(
    ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: tuple[Tensor, ...]
) -> None:
    # The gradient is made by the forward pass; everything but the loss is a by-product of it.
    _, d_hidden, *statistics = output
    ctx.num_inputs = len(inputs)
    ctx.set_materialize_grads(False)  # those of the by-products would be as large as hidden
    ctx.mark_non_differentiable(d_hidden, *statistics)
    ctx.save_for_backward(d_hidden)


def _backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return (None,) * ctx.num_inputs
    (d_hidden,) = ctx.saved_tensors
    # As a vector of one the factor is not rounded to 16 bits first.
    scaled = torch.ops.dflash_ext.scale_gradient.default(d_hidden, grad_loss.reshape(1))
    return (scaled, *[None] * (ctx.num_inputs - 1))


torch.library.register_autograd("dflash_ext::draft_loss", _backward, setup_context=_save_gradient)


# gradient * factor [1], rounded once to the gradient's type.
torch.library.define("dflash_ext::scale_gradient", "(Tensor gradient, Tensor factor) -> Tensor")


@torch.library.impl("dflash_ext::scale_gradient", "default")
def _(gradient: Tensor, factor: Tensor) -> Tensor:
    if gradient.is_cuda and gradient.element_size() == 2:
        # torch's kernel for mixed types does not vectorise: 0.18 ms instead of 0.05 on an H200.
        from dflash_ext.ops.draft_loss.triton import scale_triton

        return scale_triton(gradient, factor)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient))


@torch.library.register_fake("dflash_ext::scale_gradient")
def _(gradient: Tensor, factor: Tensor) -> Tensor:
    return torch.empty_like(gradient)
