"""Which positions of a batch become anchors, and how many clean tokens their blocks show."""

from __future__ import annotations

import numpy as np
import torch

from dflash_ext.config import DataConfig, TrainConfig


def anchor_budget(train: TrainConfig, data: DataConfig) -> int:
    """Blocks of one batch: train.max_anchors, but a batch has no more anchors than tokens."""
    return min(train.max_anchors, data.token_budget)


def valid_anchors(mask: np.ndarray, document: np.ndarray) -> np.ndarray:
    """Packed indices a, ascending, where a and a + 1 are supervised and in the same document.

    Args:
        mask: [n], 1 = supervised.
        document: [n], the number of each token's document, ascending.
    """
    both = (mask[:-1] != 0) & (mask[1:] != 0) & (document[:-1] == document[1:])
    return np.flatnonzero(both)


def anchor_quotas(valid: np.ndarray, budget: int) -> np.ndarray:
    """Share `budget` anchors equally among documents.

    No document gets more than its valid positions; what that leaves over goes to the others, and
    what cannot be divided to the earliest. Acceptance is a mean over prompts, to which long
    answers count no more than short ones. Shares in proportion to a document's tokens trained
    worse (benchmarks/results/quality_h200_202611.md).

    Args:
        valid: [documents] valid anchors.
        budget: anchors of the batch; their sum is min(budget, sum of valid).

    Returns:
        [documents] int64.
    """
    low, high = 0, int(valid.max(initial=0))
    while low < high:  # the highest level to which every document can be served
        middle = (low + high + 1) // 2
        if np.minimum(valid, middle).sum() <= budget:
            low = middle
        else:
            high = middle - 1
    quotas = np.minimum(valid, low).astype(np.int64)
    quotas[np.flatnonzero(valid > low)[: budget - int(quotas.sum())]] += 1
    return quotas


def sample_anchors(
    mask: np.ndarray, document: np.ndarray, budget: int, generator: torch.Generator
) -> np.ndarray:
    """Draw at most `budget` valid anchors without replacement, by quota per document; ascending."""
    valid = valid_anchors(mask, document)
    documents = int(document[-1]) + 1
    available = np.bincount(document[valid], minlength=documents)
    quotas = anchor_quotas(available, budget)

    # A random order of all candidates, then stably by document: each document's candidates in
    # random order, of which it takes the first ones.
    order = torch.randperm(len(valid), generator=generator).numpy()
    order = order[np.argsort(document[valid][order], kind="stable")]
    rank = np.arange(len(valid)) - np.repeat(np.cumsum(available) - available, available)
    chosen = order[rank < np.repeat(quotas, available)]
    return np.sort(valid[chosen])


def sample_prefixes(last: np.ndarray, base: float, generator: torch.Generator) -> np.ndarray:
    """Clean tokens l of each block: Pr(l) ~ base^l over 2 <= l <= last, as D2SD's second drafter
    (arXiv 2606.04446) is trained; 1, the anchor alone, where last < 2.

    There it runs up to block_size - 1; here up to the block's last supervised slot, so that no
    block is without a loss.

    Args:
        last: [A] each block's last slot with a loss.
        base: above 0; below 1, short prefixes are the likelier ones.

    Returns:
        [A] int64.
    """
    weight = np.zeros(max(2, int(last.max(initial=0)) + 1))
    weight[2:] = np.cumprod(np.full(len(weight) - 2, base))
    below = np.cumsum(weight)
    drawn = torch.rand(len(last), generator=generator, dtype=torch.float64).numpy() * below[last]
    found = np.searchsorted(below, drawn, side="right")
    return np.minimum(found, np.maximum(last, 1)).astype(np.int64)
