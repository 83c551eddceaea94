"""Everything `evaluate` measures on one text: one prefill, one pass over all anchors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash_ext import ops
from dflash_ext.acceptance import accept_lengths, prompt_lookup_lengths, propose, walk
from dflash_ext.ddtree import path_pops

if TYPE_CHECKING:
    from dflash_ext.drafter.model import DFlashDraftModel, FrozenHead
    from dflash_ext.target import Target

DDTREE_BUDGETS = (16, 64, 256)
NEAR_TIE = 1e-4  # two best logits closer than this: rounding may decide between them


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer inside a text: its first anchor, its last token, and the length limit.

    `limit` is z-lab's max_length: blocks hold positions below it, so blocks next to it are
    shortened. An answer that ended by itself may have a limit far away.
    """

    first: int
    last: int
    limit: int


@dataclasses.dataclass(frozen=True)
class Text:
    """A prompt with the target's greedy answer, or a conversation with several, as token ids."""

    ids: list[int]
    answers: list[Answer]


@dataclasses.dataclass(frozen=True)
class NearTie:
    """A place where the two best logits are within NEAR_TIE, so another decoder may differ."""

    model: str  # "target" | "drafter"
    position: int  # of the token that the logits choose
    gap: float


@dataclasses.dataclass
class Measurement:
    """What one text gives. Lengths are accepted + 1; entry i of a slot list is proposal i + 1."""

    lengths: list[int]
    prompt_lookup: list[int]
    ddtree: dict[int, list[int]]
    slot_hits: list[int]
    slot_counts: list[int]
    checked: int  # tokens of the answers
    not_argmax: int  # those of them that are not the target's argmax in this prefill
    near_ties: list[NearTie]


@torch.inference_mode()
def measure_text(
    target: Target,
    model: DFlashDraftModel,
    head: FrozenHead,
    text: Text,
    *,
    budgets: Sequence[int] = DDTREE_BUDGETS,
    group: int = 256,
) -> Measurement:
    """Walk each answer with the drafter, with draft trees of each node budget, and with n-grams."""
    end = max(answer.last for answer in text.answers) + 1
    ids = torch.tensor(text.ids[:end], device=target.device)
    hidden, last_hidden = _prefill(target, model.spec.target_layer_ids, ids)
    table = _draft_all(model, head, hidden, ids, text.answers, max(budgets, default=0), group)

    lengths, lookup, near_ties = [], [], []
    trees: dict[int, list[int]] = {budget: [] for budget in budgets}
    checked = not_argmax = 0
    for answer in text.answers:
        wrong, ties = _check_greedy(target, last_hidden, ids, answer)
        checked += len(wrong)
        not_argmax += sum(wrong)
        near_ties += ties
        steps = walk(answer.first, answer.last, table.accepted)
        lengths += steps
        near_ties += table.near_ties(answer.first, steps)
        for budget in budgets:
            accepted = functools.partial(table.accepted_in_tree, budget)
            trees[budget] += walk(answer.first, answer.last, accepted)
        answer_ids = text.ids[: answer.last + 1]
        lookup += prompt_lookup_lengths(answer_ids, answer.first, model.spec.block_size)
    hits, counts = table.slot_accuracy()
    return Measurement(lengths, lookup, trees, hits, counts, checked, not_argmax, near_ties)


def _prefill(target: Target, layer_ids: Sequence[int], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Captured hidden states [n, L*H] and final-normed last hidden state [n, H] of one text."""
    layers: list[Tensor] = []
    last = target.forward_capture(
        ids[None], layer_ids, lambda index, hidden: layers.append(hidden[0]), need_last=True
    )
    assert last is not None
    return torch.cat(layers, dim=-1), last[0]


def _check_greedy(
    target: Target, last_hidden: Tensor, ids: Tensor, answer: Answer
) -> tuple[list[bool], list[NearTie]]:
    """For each token of the answer, whether it is not the target's argmax; and the near-ties."""
    values, _, _, rank, _ = ops.lm_head_topk(
        last_hidden[answer.first - 1 : answer.last],
        target.head_weight,
        k=2,
        labels=ids[answer.first : answer.last + 1],
        softcap=target.info.softcap,
        logit_scale=target.info.logit_scale,
    )
    gaps = (values[:, 0] - values[:, 1]).tolist()
    ties = [
        NearTie("target", position, gap)
        for position, gap in enumerate(gaps, start=answer.first)
        if gap < NEAR_TIE
    ]
    return (rank > 0).tolist(), ties


@dataclasses.dataclass(frozen=True)
class _DraftTable:
    """The proposals of every anchor (A rows, P slots) against the text, on the CPU."""

    row: dict[int, int]  # anchor -> row
    log_probs: Tensor  # [A, P, k]
    tokens: Tensor  # [A, P, k]
    labels: Tensor  # [A, P], -1 after the end of the answer
    num_slots: list[int]  # [A]: fewer than P in a shortened block
    accepted_lengths: list[int]  # [A]
    max_budget: int
    pops: dict[int, list[int]] = dataclasses.field(default_factory=dict)  # of the rows asked for

    def accepted(self, anchor: int) -> int:
        return self.accepted_lengths[self.row[anchor]]

    def accepted_in_tree(self, budget: int, anchor: int) -> int:
        return sum(pop < budget for pop in self._path_pops(anchor))

    def _path_pops(self, anchor: int) -> list[int]:
        """When the anchor's tree takes the nodes of the text's path."""
        row = self.row[anchor]
        if row not in self.pops:
            log_probs = self.log_probs[row, : self.num_slots[row]].tolist()
            tokens = self.tokens[row, : self.num_slots[row]].tolist()
            path = []
            for slot_tokens, label in zip(tokens, self.labels[row].tolist(), strict=False):
                if label not in slot_tokens:
                    break
                path.append(slot_tokens.index(label))
            self.pops[row] = path_pops(log_probs, path, self.max_budget)
        return self.pops[row]

    def near_ties(self, first: int, steps: Sequence[int]) -> list[NearTie]:
        """Near-ties of the proposals that decided the walk: the accepted ones and the next."""
        ties, anchor = [], first
        for step in steps:
            row = self.row[anchor]
            best = self.log_probs[row, : min(step, self.num_slots[row])]
            decided = (best[:, 0] - best[:, 1]).tolist()
            ties += [
                NearTie("drafter", position, gap)
                for position, gap in enumerate(decided, start=anchor + 1)
                if gap < NEAR_TIE
            ]
            anchor += step
        return ties

    def slot_accuracy(self) -> tuple[list[int], list[int]]:
        """Per slot, over all anchors: right proposals, and proposals that have a label."""
        slot = torch.arange(self.labels.shape[1])
        drafted = slot < torch.tensor(self.num_slots)[:, None]
        known = drafted & (self.labels >= 0)
        hits = known & (self.tokens[..., 0] == self.labels)
        return hits.sum(dim=0).tolist(), known.sum(dim=0).tolist()


def _draft_all(
    model: DFlashDraftModel,
    head: FrozenHead,
    hidden: Tensor,
    ids: Tensor,
    answers: Sequence[Answer],
    max_budget: int,
    group: int,
) -> _DraftTable:
    """Draft every anchor of every answer, in groups of blocks of one size."""
    block_size = model.spec.block_size
    places = [(a, answer) for answer in answers for a in range(answer.first, answer.last)]
    rows = [(a, answer.last, min(block_size, answer.limit - a)) for a, answer in places]
    anchors, ends, sizes = torch.tensor(rows, dtype=torch.int64).view(-1, 3).unbind(dim=1)
    positions = anchors[:, None] + torch.arange(1, block_size)
    labels = ids.cpu()[positions.clamp(max=len(ids) - 1)]
    labels = labels.masked_fill(positions > ends[:, None], -1)

    ctx_kv = model.context(hidden, torch.arange(len(ids), device=ids.device))
    # A tree of n nodes uses ranks below n; the second best is for the near-ties.
    k = min(max(max_budget, 2), head.valid_vocab or head.head_weight.shape[0])
    log_probs = torch.zeros(len(places), block_size - 1, k)
    tokens = torch.zeros(len(places), block_size - 1, k, dtype=torch.int64)
    for size in sorted(set(sizes.tolist()), reverse=True):
        chosen = (sizes == size).nonzero()[:, 0]
        at = anchors[chosen].to(ids.device)
        start = torch.zeros_like(at)
        best = propose(model, head, ctx_kv, ids[at], start, at, size=size, k=k, group=group)
        log_probs[chosen, : size - 1] = (best.values - best.logsumexp[..., None]).cpu()
        tokens[chosen, : size - 1] = best.indices.cpu()
    drafted = torch.arange(block_size - 1) < sizes[:, None] - 1
    return _DraftTable(
        row={a: row for row, (a, _) in enumerate(places)},
        log_probs=log_probs,
        tokens=tokens,
        labels=labels,
        num_slots=(sizes - 1).tolist(),
        accepted_lengths=accept_lengths(drafted & (tokens[..., 0] == labels)).tolist(),
        max_budget=max_budget,
    )
