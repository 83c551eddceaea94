"""Sum of gradients over drafters: every drafter thread is one rank of a c10d process group."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 16 * 2**20
POLL_S = 0.05
# Gloo's own limit comes after ours: our message names the rank that is missing.
GRACE_S = 5.0


def make_store() -> dist.Store:
    """Where the ranks of one process meet. Every group needs its own."""
    return dist.HashStore()


class GradSync:
    """One rank of the gradient all-reduce: made anywhere, then used by one drafter thread.

    Gradients are copied into flat buckets, summed by the process group and copied back. Gloo adds
    in an order that depends only on world size and bucket length, and hands the same bytes to
    every rank: runs repeat bit for bit, and the drafters' weights cannot drift apart.

    Args:
        rank, world: place of this drafter among all drafters of all machines. With ``world == 1``
            every call is a no-op and no group is made.
        store: rendezvous shared by all ranks: ``make_store()`` for threads of one process, a
            ``dist.TCPStore`` (torchrun's) for several machines.
        device: where the gradients live.
        dtype: element type on the wire and of the sum (float32 or bfloat16).
        timeout_s: longest wait for the other ranks, in every call.
        stop: event that makes every wait leave with an error; give the same one to all threads of
            a process so that ``abort()`` of one frees the others.

    Raises (``connect``, ``all_reduce``, ``barrier``):
        RuntimeError: names this rank and, where known, the ranks that did not come, when another
            rank stays away longer than ``timeout_s``, fails, or ``stop`` is set.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        store: dist.Store | None = None,
        device: torch.device | str = "cpu",
        *,
        dtype: torch.dtype = torch.float32,
        timeout_s: float = 300.0,
        stop: threading.Event | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in [0, {world}), got {rank}")
        if world > 1 and store is None:
            raise ValueError("more than one rank needs a store to meet at")
        self.rank, self.world = rank, world
        self._device, self._dtype = torch.device(device), dtype
        self._timeout_s = timeout_s
        self._stop = stop if stop is not None else threading.Event()
        self._bucket_numel = max(1, bucket_bytes // dtype.itemsize)
        self._shapes: list[torch.Size] | None = None
        self._buckets: list[_Bucket] = []
        self._calls = 0
        self._unfinished = 0
        self._group: dist.ProcessGroupGloo | None = None
        # A clone has a connection of its own: one that a rank waits on is closed to all others.
        own = (store or make_store()).clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore("grad_sync", own)

    def connect(self) -> None:
        """Forms the group; to be called by every rank's own thread, before anything else."""
        if self.world == 1:
            return
        self._gather_from_all("calls", "0", "rendezvous")
        self._group = _make_group(
            self._store, self.rank, self.world, self._device, self._timeout_s + GRACE_S
        )

    def all_reduce(self, grads: Sequence[Tensor]) -> None:
        """Replaces every tensor by its sum over all ranks, in place.

        All ranks pass the same shapes in the same order, the same in every call.

        Raises:
            ValueError: they do not.
        """
        if self.world == 1:
            return
        self._check_shapes(grads)
        # Every bucket is under way before the first wait: copies overlap with transfers.
        works = []
        for bucket in self._buckets:
            bucket.gather(grads)
            works.append(self._start_sum(bucket.flat))
        for bucket, work in zip(self._buckets, works, strict=True):
            self._wait(work, "all-reduce")
            bucket.scatter(grads)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self.world > 1:
            self._wait(self._start_sum(torch.zeros(1, device=self._device)), "barrier")

    def abort(self) -> None:
        """Makes every rank that shares ``stop`` leave its wait. Any thread may call it."""
        self._stop.set()

    def close(self) -> None:
        """Leaves the group without waiting; later calls raise RuntimeError."""
        if self._group is not None:
            if self._unfinished:
                # Its destructor would wait for transfers that a missing rank holds up: never run it
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            self._group = None

    def _check_shapes(self, grads: Sequence[Tensor]) -> None:
        shapes = [grad.shape for grad in grads]
        if self._shapes is None:
            # Gloo would hang or read past the end where the ranks' lengths differ.
            mine = str([tuple(shape) for shape in shapes])
            for rank, theirs in enumerate(self._gather_from_all("shapes", mine, "all-reduce")):
                if theirs != mine:
                    raise ValueError(
                        f"rank {self.rank}: gradients of shapes {mine}, rank {rank} has {theirs}"
                    )
            self._shapes = shapes
            self._buckets = _make_buckets(shapes, self._bucket_numel, self._dtype, self._device)
        if shapes != self._shapes:
            raise ValueError(f"rank {self.rank}: gradients changed their shapes between calls")

    def _gather_from_all(self, key: str, value: str, what: str) -> list[str]:
        """Every rank's value of ``key``, once all are there."""
        keys = [f"{key}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], value)

        def all_there() -> bool:
            there = self._store.check(keys)
            if not there:
                time.sleep(POLL_S)
            return there

        self._poll(what, all_there, keys)
        return [self._store.get(k).decode() for k in keys]

    def _start_sum(self, flat: Tensor) -> dist.Work:
        if self._group is None:
            raise RuntimeError(f"rank {self.rank}: not connected")
        self._calls += 1
        self._unfinished += 1
        self._store.set(f"calls/{self.rank}", str(self._calls))
        options = dist.AllreduceOptions()
        options.asyncOp = True
        return self._group.allreduce([flat], options)  # type: ignore[attr-defined]

    def _wait(self, work: dist.Work, what: str) -> None:
        def done() -> bool:
            # A wait that runs out of its slice raises too: completion alone tells them apart.
            with contextlib.suppress(RuntimeError):
                work.wait(datetime.timedelta(seconds=POLL_S))
            return work.is_completed()

        self._poll(what, done)
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"rank {self.rank}: {what} failed: {error}") from error
        self._unfinished -= 1

    def _poll(self, what: str, done: Callable[[], bool], keys: Sequence[str] = ()) -> None:
        """Calls ``done`` (which blocks for about POLL_S) until it holds."""
        deadline = time.monotonic() + self._timeout_s
        while not done():
            if self._stop.is_set():
                raise RuntimeError(f"rank {self.rank}: left the {what}, the run is stopping")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {self.rank}: {what} timed out after {self._timeout_s:g} s"
                    f" waiting for {self._laggards(keys)}"
                )

    def _laggards(self, keys: Sequence[str]) -> str:
        """The ranks without their key or, without keys, those that made fewer calls than this."""
        if keys:
            late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        else:
            calls = [int(self._store.get(f"calls/{rank}")) for rank in range(self.world)]
            late = [rank for rank in range(self.world) if calls[rank] < self._calls]
        if not late:
            return "the transfer: all ranks have come"
        return f"rank {', '.join(map(str, late))}"


def _make_group(
    store: dist.PrefixStore, rank: int, world: int, device: torch.device, timeout_s: float
) -> dist.ProcessGroupGloo:
    """The process group for gradients on ``device``; NCCL for GPUs belongs here."""
    if device.type != "cpu":
        raise NotImplementedError(f"no gradient all-reduce for {device.type} yet")
    timeout = datetime.timedelta(seconds=timeout_s)
    if not isinstance(store.underlying_store, dist.HashStore):
        return dist.ProcessGroupGloo(store, rank, world, timeout)
    # A HashStore cannot leave the process: neither need the connections, whatever the host is
    # called and whatever its network.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, world, options)


class _Bucket:
    """A flat buffer and, for each gradient in it, a view of that gradient's shape."""

    def __init__(self, first: int, shapes: Sequence[torch.Size], flat: Tensor) -> None:
        self.flat = flat
        self._slice = slice(first, first + len(shapes))
        parts = flat.split([shape.numel() for shape in shapes])
        self._views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def gather(self, grads: Sequence[Tensor]) -> None:
        torch._foreach_copy_(self._views, list(grads[self._slice]))

    def scatter(self, grads: Sequence[Tensor]) -> None:
        torch._foreach_copy_(list(grads[self._slice]), self._views)


def _make_buckets(
    shapes: Sequence[torch.Size], numel: int, dtype: torch.dtype, device: torch.device
) -> list[_Bucket]:
    """Consecutive runs of at most ``numel`` elements; a gradient larger than that stays whole."""
    runs: list[list[torch.Size]] = []
    room = 0
    for shape in shapes:
        if not runs or shape.numel() > room:
            runs.append([])
            room = numel
        runs[-1].append(shape)
        room -= shape.numel()
    buckets, first = [], 0
    for run in runs:
        flat = torch.empty(sum(s.numel() for s in run), dtype=dtype, device=device)
        buckets.append(_Bucket(first, run, flat))
        first += len(run)
    return buckets
