"""Sums over drafters of one process by copies between their GPUs.

NCCL's kernels hold multiprocessors as long as a transfer lasts, and the backward pass's products,
whose blocks stay to the end, then take two turns. Copy engines hold none: what is left for the
multiprocessors is one addition of each element.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SHARE_GRAIN = 128  # elements: shares begin where a GPU's widest loads may


class Board:
    """Where the threads of one process show each other objects, round by round.

    All ranks show as many objects in the same order; the n-th of each make round n. ``lock`` is for
    what only one of them may do at a time.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.lock = threading.Lock()
        self._changed = threading.Condition()
        self._next = [0] * world
        self._shown: dict[int, dict[int, tuple[str, Any]]] = {}
        self._readers: dict[int, int] = {}  # that have not read a round yet

    def show(self, rank: int, what: str, value: object) -> int:
        """Adds this rank's object and what it is for to its next round; returns that's number."""
        with self._changed:
            number = self._next[rank]
            self._next[rank] += 1
            self._shown.setdefault(number, {})[rank] = what, value
            self._changed.notify_all()
        return number

    def wait(self, number: int, seconds: float) -> bool:
        """Whether all ranks have shown theirs, now or within that time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._missing(number), seconds)

    def missing(self, number: int) -> list[int]:
        """The ranks that have not come to a round."""
        with self._changed:
            return self._missing(number)

    def read(self, number: int) -> list[tuple[str, Any]]:
        """All ranks' objects of a complete round, each with what it is for; to be called once by
        each rank, the last one clears it."""
        with self._changed:
            values = self._shown[number]
            self._readers[number] = self._readers.get(number, self.world) - 1
            if self._readers[number] == 0:
                del self._shown[number], self._readers[number]
        return [values[rank] for rank in range(self.world)]

    def _missing(self, number: int) -> list[int]:
        return [rank for rank in range(self.world) if self._next[rank] <= number]


class Offer(NamedTuple):
    """What a rank lets the others read and write."""

    device: torch.device
    vectors: list[Tensor]
    ready: torch.cuda.Event | None  # the vectors hold its gradients from then on


class CopiedSums:
    """One rank's share of the sums: it alone adds up its part of each vector, in rank order.

    A share is copied from the other ranks, added up and copied back to them: every rank gets the
    same bits, which do not depend on how vectors are cut. Copies have streams of their own
    in either direction: while an addition waits until a product ends, other sums' go on. No stream
    waits for what has not been given to a GPU yet, so that nothing can stand still between two.

    Args:
        numel: as many elements of vectors are worked off at a time, or one longer vector; scratch
            memory is (world - 1) / world of that.
    """

    def __init__(self, rank: int, world: int, device: torch.device, numel: int) -> None:
        self._rank, self._world, self._device, self._numel = rank, world, device, numel
        self._scratch = torch.empty(0)
        self._used = 0  # of scratch, by sums whose additions may still be to come
        self._added: torch.cuda.Event | None = None  # the last addition
        # torch copies between GPUs on the current stream of the source, and lets the destination's
        # current stream wait: of each GPU this rank has streams that nothing else uses.
        self._streams: dict[tuple[str, torch.device], torch.cuda.Stream] = {}

    def offer(self, vectors: list[Tensor]) -> Offer:
        """The vectors with what the current stream has been given for them so far."""
        if self._device.type != "cuda":
            return Offer(self._device, vectors, None)
        ready = torch.cuda.current_stream(self._device).record_event()
        return Offer(self._device, vectors, ready)

    def sum(self, offers: Sequence[Offer]) -> torch.cuda.Event | None:
        """Begins to sum this rank's shares of the offers of all ranks, by rank.

        Returns what a rank must wait for before it reads these shares of its vectors.
        """
        with self._on_streams("fetch", offers) as fetch:
            for offer in offers:
                if fetch is not None and offer.ready is not None:
                    fetch.wait_event(offer.ready)
        for batch in self._batches(offers):
            self._sum_batch(batch, offers)
        with self._on_streams("give back", offers) as give_back:
            return None if give_back is None else give_back.record_event()

    def _batches(self, offers: Sequence[Offer]) -> Iterator[list[list[Tensor]]]:
        """Of shares, by vector and rank: of about `numel` elements of vectors at a time."""
        batch: list[list[Tensor]] = []
        room = self._numel
        for vectors in zip(*(offer.vectors for offer in offers), strict=True):
            if batch and vectors[0].numel() > room:
                yield batch
                batch, room = [], self._numel
            batch.append([self._share(vector) for vector in vectors])
            room -= vectors[0].numel()
        if batch:
            yield batch

    def _sum_batch(self, batch: list[list[Tensor]], offers: Sequence[Offer]) -> None:
        """All transfers before the first addition: that waits until a product ends elsewhere."""
        # Each rank begins with another neighbour: no GPU has to serve all others at once.
        others = [(self._rank + i) % self._world for i in range(1, self._world)]
        with self._on_streams("fetch", offers) as fetch:
            terms_of = self._terms([shares[self._rank] for shares in batch], fetch)
            for shares, terms in zip(batch, terms_of, strict=True):
                for rank in others:
                    terms[rank].copy_(shares[rank], non_blocking=True)
            fetched = None if fetch is None else fetch.record_event()
        with self._on_streams("add") as add:
            if add is not None and fetched is not None:
                add.wait_event(fetched)
            for terms in terms_of:
                self._add(terms)
            self._added = None if add is None else add.record_event()
        with self._on_streams("give back", offers) as give_back:
            if give_back is not None and self._added is not None:
                give_back.wait_event(self._added)
            for shares in batch:
                for rank in others:
                    shares[rank].copy_(shares[self._rank], non_blocking=True)

    def _add(self, terms: list[Tensor]) -> None:
        """((rank 0's + rank 1's) + rank 2's) + ..., whoever adds, in place of this rank's own."""
        mine, before = terms[self._rank], terms[: self._rank]
        for term in before[1:]:
            before[0].add_(term)
        for term in (*before[:1], *terms[self._rank + 1 :]):  # the first two commute
            mine.add_(term)

    def _share(self, vector: Tensor) -> Tensor:
        """This rank's part of any rank's vector; the last ones may be empty."""
        grains = -(-vector.numel() // SHARE_GRAIN)
        size = -(-grains // self._world) * SHARE_GRAIN
        first = min(vector.numel(), self._rank * size)
        return vector[first : first + size]

    def _terms(self, shares: list[Tensor], stream: torch.cuda.Stream | None) -> list[list[Tensor]]:
        """For each of this rank's shares the terms of its sum, by rank: itself and, for the other
        ranks' parts, scratch memory, which the stream may write."""
        grains = [-(-share.numel() // SHARE_GRAIN) for share in shares]
        lengths = [SHARE_GRAIN * n for n in grains for _ in range(self._world - 1)]
        size, dtype = sum(lengths), shares[0].dtype
        if self._used + size > self._scratch.numel() or self._scratch.dtype != dtype:
            self._used = 0
            if stream is not None and self._added is not None:
                stream.wait_event(self._added)
        if self._scratch.numel() < size or self._scratch.dtype != dtype:
            self._scratch = shares[0].new_empty(size)
        rows = iter(self._scratch[self._used : self._used + size].split(lengths))
        self._used += size
        return [
            [
                share if rank == self._rank else next(rows)[: share.numel()]
                for rank in range(self._world)
            ]
            for share in shares
        ]

    @contextlib.contextmanager
    def _on_streams(
        self, purpose: str, offers: Sequence[Offer] = ()
    ) -> Iterator[torch.cuda.Stream | None]:
        """Makes this rank's streams for that current on those GPUs and its own; yields this one."""
        if self._device.type != "cuda":
            yield None
            return
        devices = {offer.device for offer in offers} - {self._device}
        with contextlib.ExitStack() as stack:
            for device in (*sorted(devices, key=str), self._device):  # the last is current
                if (purpose, device) not in self._streams:
                    self._streams[purpose, device] = torch.cuda.Stream(device, priority=-1)
                stack.enter_context(torch.cuda.stream(self._streams[purpose, device]))
            yield self._streams[purpose, self._device]
