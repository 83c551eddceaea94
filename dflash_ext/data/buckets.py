"""Which examples share a batch in which epoch."""

from __future__ import annotations

import hashlib
import struct
import threading
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch

WINDOW_BATCHES = 32


def seeded_generator(*key: int) -> torch.Generator:
    """A CPU generator that depends on nothing but `key`."""
    digest = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=8).digest()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    return generator


class EpochBatches:
    """Groups examples of similar length into batches of at most `token_budget` tokens.

    Within an epoch's random order, windows of about 32 batches are sorted by length and cut into
    batches; examples that do not fill a window's last batch move on to the next window. The
    batches are then shuffled. Batch ids run on over the epochs. Thread-safe.

    Args:
        lengths: [examples] tokens.
        token_budget: tokens of a batch.
        seed: of the order.
        weights: (number of examples, how often an epoch goes through them) of each source, in
            order; none = once through all.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        token_budget: int,
        seed: int,
        weights: Sequence[tuple[int, float]] = (),
    ) -> None:
        self._lengths = lengths.astype(np.int64)
        self._weights = weights or [(len(lengths), 1.0)]
        self._token_budget = token_budget
        self._seed = seed
        per_window = WINDOW_BATCHES * token_budget / max(1.0, float(lengths.mean()))
        self._window = max(1, round(per_window))
        self._lock = threading.Lock()
        self._first_ids = [0]  # first batch id of each epoch grouped so far, and of the next
        self._recent: dict[int, list[np.ndarray]] = {}

    def locate(self, batch_id: int) -> tuple[int, np.ndarray]:
        """The epoch of a batch and its examples' indices, in packing order."""
        with self._lock:
            while batch_id >= self._first_ids[-1]:
                self._group(len(self._first_ids) - 1)
            epoch = bisect_right(self._first_ids, batch_id) - 1
            return epoch, self._group(epoch)[batch_id - self._first_ids[epoch]]

    def first_id(self, epoch: int) -> int:
        """The first batch id of an epoch, which is the number of batches of all epochs before."""
        with self._lock:
            while epoch >= len(self._first_ids):
                self._group(len(self._first_ids) - 1)
            return self._first_ids[epoch]

    def _group(self, epoch: int) -> list[np.ndarray]:
        if epoch not in self._recent:
            batches = self.epoch(epoch)
            if len(self._first_ids) == epoch + 1:
                self._first_ids.append(self._first_ids[-1] + len(batches))
            # Two, because an optimizer step may reach over the end of an epoch.
            self._recent = {e: b for e, b in self._recent.items() if e == epoch - 1}
            self._recent[epoch] = batches
        return self._recent[epoch]

    def members(self, epoch: int) -> np.ndarray:
        """The examples of an epoch, ascending, as often as their source's weight w says.

        Epoch e takes example i of n floor((e + 1) w + u) - floor(e w + u) times. The phases u are
        (0 + 1/2)/n, (1 + 1/2)/n ... in random order, so an epoch takes w n examples of the source,
        and each example comes up w times an epoch in the long run, evenly spread.
        """
        members, first = [], 0
        for source, (count, weight) in enumerate(self._weights):
            examples = np.arange(first, first + count)
            if weight != 1:
                order = torch.randperm(count, generator=seeded_generator(self._seed, -1, source))
                phase = (order.numpy() + 0.5) / max(1, count)
                ends = np.floor((epoch + 1) * weight + phase) - np.floor(epoch * weight + phase)
                examples = np.repeat(examples, ends.astype(np.int64))
            members.append(examples)
            first += count
        return np.concatenate(members)

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """All batches of an epoch, each an array of example indices.

        Every index occurs once, or as often as `members` has it.
        """
        generator = seeded_generator(self._seed, epoch)
        members = self.members(epoch)
        order = members[torch.randperm(len(members), generator=generator).numpy()]
        batches: list[np.ndarray] = []
        left_over = order[:0]
        for start in range(0, len(order), self._window):
            window = np.concatenate((left_over, order[start : start + self._window]))
            window = window[np.argsort(self._lengths[window], kind="stable")]
            groups = fill_batches(window, self._lengths, self._token_budget)
            is_last = start + self._window >= len(order)
            left_over = order[:0] if is_last else groups.pop()
            batches += groups
        shuffle = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[i] for i in shuffle]


def fill_batches(order: np.ndarray, lengths: np.ndarray, token_budget: int) -> list[np.ndarray]:
    """Cut `order` (example indices) into consecutive groups of at most `token_budget` tokens."""
    ends = np.cumsum(lengths[order])
    groups, start, used = [], 0, 0
    while start < len(order):
        stop = int(np.searchsorted(ends, used + token_budget, side="right"))
        groups.append(order[start:stop])
        start, used = stop, int(ends[stop - 1])
    return groups
