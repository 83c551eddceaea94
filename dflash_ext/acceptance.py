"""Serving-walk acceptance: the accepted lengths of real greedy decoding, without decoding.

On the target's own greedy text every token that a server emits is known beforehand, so every
position can be drafted as an anchor in one pass; afterwards the anchors are visited as a server
would visit them: ``a <- a + accepted + 1``. A length is accepted + 1 (the bonus token), clipped at
the text's last token, as in z-lab's ``dflash_generate(return_stats=True).acceptance_lengths``.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash_ext import ops
from dflash_ext.layout import BlockLayout

if TYPE_CHECKING:
    from dflash_ext.data.packing import BatchPlan
    from dflash_ext.drafter.model import ContextKV, DFlashDraftModel, FrozenHead

MAX_NGRAM = 3  # of prompt lookup


@dataclasses.dataclass(frozen=True)
class Proposals:
    """The k best tokens of each proposal slot (P of them), best first: [N, P, k] and lse [N, P]."""

    values: Tensor
    indices: Tensor
    logsumexp: Tensor


@torch.no_grad()
def propose(
    model: DFlashDraftModel,
    head: FrozenHead,
    ctx_kv: ContextKV,
    anchor_tokens: Tensor,
    ctx_start: Tensor,
    ctx_end: Tensor,
    *,
    size: int | None = None,
    k: int = 1,
    group: int = 256,
) -> Proposals:
    """Draft a block of `size` (default: the drafter's) after each anchor, `group` anchors at once.

    `anchor_tokens`, `ctx_start`, `ctx_end`: [N], packed indices as in a BatchPlan. A size below the
    drafter's is the shortened block with which z-lab drafts next to the length limit; attention in
    a block is bidirectional, so its proposals differ from the first slots of a full block.
    """
    layout = BlockLayout(size=size or model.spec.block_size)
    values, indices, logsumexp = [], [], []
    for begin in range(0, anchor_tokens.shape[0], group):
        part = slice(begin, begin + group)
        hidden = _draft(
            model, head, ctx_kv, anchor_tokens[part], ctx_start[part], ctx_end[part], layout
        )
        top, index, lse = _top_k(hidden.reshape(-1, hidden.shape[-1]), head, k)
        shape = (*hidden.shape[:2], k)
        values.append(top.view(shape))
        indices.append(index.view(shape))
        logsumexp.append(lse.view(shape[:2]))
    if not values:
        empty = torch.zeros(0, layout.num_proposals, k, device=anchor_tokens.device)
        return Proposals(empty, empty.long(), empty[..., 0])
    return Proposals(torch.cat(values), torch.cat(indices), torch.cat(logsumexp))


@torch.no_grad()
def accepted_proposals(
    model: DFlashDraftModel,
    head: FrozenHead,
    ctx_kv: ContextKV,
    labels: Tensor,
    weights: Tensor,
    ctx_start: Tensor,
    ctx_end: Tensor,
    *,
    group: int = 256,
) -> Tensor:
    """Number of leading greedy proposals of each anchor that are the text's own tokens: [N] int64.

    `labels`, `weights` [N, K] and `ctx_start`, `ctx_end` [N] as in a BatchPlan. The head sees a
    slot only where all slots before it were right: for a block of 16 of which 2 proposals are
    accepted 3 rows instead of 15.
    """
    layout = BlockLayout(size=model.spec.block_size)
    tokens, wanted, supervised = labels[:, 0], labels[:, 1:], weights[:, 1:] > 0
    accepted = torch.zeros_like(tokens)
    for begin in range(0, len(tokens), group):
        part = slice(begin, begin + group)
        hidden = _draft(model, head, ctx_kv, tokens[part], ctx_start[part], ctx_end[part], layout)
        alive = torch.arange(begin, begin + len(hidden), device=hidden.device)
        for slot in range(layout.num_proposals):
            alive = alive[supervised[alive, slot]]
            if len(alive) == 0:
                break
            drafts = _top_k(hidden[alive - begin, slot], head, 1)[1][:, 0]
            alive = alive[drafts == wanted[alive, slot]]
            accepted[alive] += 1
    return accepted


def _draft(
    model: DFlashDraftModel,
    head: FrozenHead,
    ctx_kv: ContextKV,
    anchor_tokens: Tensor,
    ctx_start: Tensor,
    ctx_end: Tensor,
    layout: BlockLayout,
) -> Tensor:
    """The drafter's output in the proposal slots of each anchor's block: [N, P, H]."""
    block_ids = layout.input_ids(anchor_tokens, model.spec.mask_token_id)
    hidden = model(head.embed(block_ids), ctx_kv, ctx_start, ctx_end)
    return hidden[:, layout.loss_slots().to(hidden.device)]


def _top_k(hidden: Tensor, head: FrozenHead, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values [N, k], indices [N, k] and log-sum-exp [N] of the logits of hidden [N, H]."""
    values, indices, logsumexp, _, _ = ops.lm_head_topk(
        hidden,
        head.head_weight,
        k=k,
        valid_vocab=head.valid_vocab,
        softcap=head.softcap,
        logit_scale=head.logit_scale,
    )
    return values, indices, logsumexp


def accept_lengths(correct: Tensor) -> Tensor:
    """Number of leading True values of each row: [N, P] bool -> [N] int64."""
    return correct.long().cumprod(dim=1).sum(dim=1)


def walk(first: int, last: int, accepted_at: Callable[[int], int]) -> list[int]:
    """Visit anchors as a server does, from `first` until the text's last token is out.

    `accepted_at(a)` is the number of accepted proposals of anchor a. Returns accepted + 1 per step,
    clipped so that the lengths sum to `last - first`; empty if there is nothing after `first`.
    """
    lengths = []
    anchor = first
    while anchor < last:
        length = min(accepted_at(anchor) + 1, last - anchor)
        lengths.append(length)
        anchor += length
    return lengths


def text_end(answer: Sequence[int], stop_token_ids: Collection[int]) -> int:
    """Index of the answer's last token: its first stop token, else its last one."""
    stops = (i for i, token in enumerate(answer) if token in stop_token_ids)
    return next(stops, len(answer) - 1)


def evaluate_plan(
    model: DFlashDraftModel,
    head: FrozenHead,
    hidden: Tensor,
    plan: BatchPlan,
    *,
    group: int = 256,
    stop_token_ids: Collection[int] = (),
) -> list[list[int]]:
    """Lengths per document (order of `plan.doc_ranges`) of an evaluation plan.

    `hidden` [T, L*H] or [L, T, H]: the slot's captured hidden states. Each run of consecutive
    anchors is one answer; it ends at its first stop token, else with the run. Blocks are always
    full ones: near the end of a text without a stop token this is a server with a later limit.
    """
    doc_start = plan.doc_start.to(hidden.device)
    positions = torch.arange(len(doc_start), device=hidden.device) - doc_start
    with torch.no_grad():
        ctx_kv = model.context(hidden, positions)
    anchors = _real_anchors(plan)
    labels = plan.labels[: len(anchors)].to(hidden.device)
    accepted = accepted_proposals(
        model,
        head,
        ctx_kv,
        labels,
        plan.weights[: len(anchors)].to(hidden.device),
        plan.ctx_start[: len(anchors)].to(hidden.device),
        plan.ctx_end[: len(anchors)].to(hidden.device),
        group=group,
    ).tolist()
    accepted_at = dict(zip(anchors, accepted, strict=True))
    token_at = dict(zip(anchors, labels[:, 0].tolist(), strict=True))
    token_at |= dict(zip((a + 1 for a in anchors), labels[:, 1].tolist(), strict=True))

    lengths: list[list[int]] = [[] for _ in plan.doc_ranges]
    for first, last in _runs(anchors):
        end = text_end([token_at[t] for t in range(first, last + 1)], stop_token_ids)
        document = next(i for i, (lo, hi) in enumerate(plan.doc_ranges) if lo <= first < hi)
        lengths[document] += walk(first, first + end, accepted_at.__getitem__)
    return lengths


def _real_anchors(plan: BatchPlan) -> list[int]:
    """Packed indices of the plan's anchors without the padding (whose ctx_end is T)."""
    total = plan.src_index.shape[0]
    return [
        anchor
        for anchor, end in zip(plan.anchors.tolist(), plan.ctx_end.tolist(), strict=True)
        if end < total
    ]


def _runs(ascending: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal runs [first, end) of consecutive integers (of anchors: `end` is the last token)."""
    runs: list[tuple[int, int]] = []
    for value in ascending:
        if runs and runs[-1][1] == value:
            runs[-1] = (runs[-1][0], value + 1)
        else:
            runs.append((value, value + 1))
    return runs


def prompt_lookup_lengths(ids: Sequence[int], prompt_len: int, block_size: int) -> list[int]:
    """The walk with a prompt-lookup (n-gram) drafter: the baseline that needs no training.

    `ids` is prompt and answer; the answer's first token (index `prompt_len`) is the first anchor.
    The text so far is searched for its own last n tokens, n = MAX_NGRAM .. 1; the earliest match of
    the longest n proposes the up to block_size - 1 tokens that follow it (rule of Hugging Face's
    PromptLookupCandidateGenerator).
    """
    ids = list(ids)

    def accepted_at(anchor: int) -> int:
        proposal = _lookup(ids[: anchor + 1], block_size - 1)
        accepted = 0
        for drafted, actual in zip(proposal, ids[anchor + 1 :], strict=False):
            if drafted != actual:
                break
            accepted += 1
        return accepted

    return walk(prompt_len, len(ids) - 1, accepted_at)


def _lookup(text: list[int], num_proposals: int) -> list[int]:
    for n in range(min(MAX_NGRAM, len(text) - 1), 0, -1):
        suffix = text[-n:]
        for begin in range(len(text) - n):
            if text[begin : begin + n] == suffix:
                return text[begin + n : begin + n + num_proposals]
    return []


def accept_len(per_prompt: Sequence[Sequence[int]]) -> float:
    """Mean over prompts of the mean length of each (z-lab's figure); NaN if nothing was decoded."""
    means = [statistics.fmean(lengths) for lengths in per_prompt if lengths]
    return statistics.fmean(means) if means else float("nan")


def accept_len_pooled(per_prompt: Sequence[Sequence[int]]) -> float:
    """Tokens over verification steps of all prompts together; NaN if nothing was decoded."""
    steps = sum(len(lengths) for lengths in per_prompt)
    return sum(map(sum, per_prompt)) / steps if steps else float("nan")


def histogram(per_prompt: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """Number of steps of each length 1 .. block_size (entry i counts length i + 1)."""
    counts = [0] * block_size
    for lengths in per_prompt:
        for length in lengths:
            counts[length - 1] += 1
    return counts
