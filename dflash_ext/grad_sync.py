"""Sum of gradients over drafters: every drafter thread is one rank of a c10d process group."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_ext.grad_buckets import BucketPlan
from dflash_ext.grad_copies import SHARE_GRAIN, Board, CopiedSums
from dflash_ext.grad_groups import make_gloo, make_nccl

# NCCL needs long vectors; Gloo's work on one overlaps with the copy of the next.
BUCKET_BYTES = {"cpu": 16 * 2**20, "cuda": 2**31}
# Copied sums: a layer at once, as each addition waits until a product of the backward pass ends.
COPIED_BYTES = 2**31
POLL_S = 0.05
# The library's own limit comes after ours: our message names the rank that is missing.
GRACE_S = 5.0


def make_store() -> dist.Store:
    """Where the ranks of one process meet. Every group needs its own."""
    return dist.HashStore()


def make_board(devices: Sequence[torch.device]) -> Board | None:
    """Where the ranks of one process meet that sum by copies: those whose GPUs reach each other's
    memory."""
    pairs = list(itertools.combinations(devices, 2))
    if any(a == b or {a.type, b.type} != {"cuda"} for a, b in pairs):
        return None
    reached = all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    return Board(len(devices)) if pairs and reached else None


class SyncError(RuntimeError):
    """Another rank stays away or has gone."""


class GradSync:
    """One rank of the gradient all-reduce: made anywhere, then used by one drafter thread.

    Gradients that lie side by side in memory are summed where they are, the others in flat buckets.
    Gloo (CPU) and NCCL (GPU) hand the same bytes to every rank, and Gloo adds in an order that
    depends only on world size and bucket length: the drafters' weights cannot drift apart.

    On a GPU nothing waits for the sums but the stream that is current in ``finish``. Ranks of one
    process share the driver's locks, and memory that one of them allocates waits for the GPUs of
    all: a sum whose kernel runs on one GPU while another rank has not launched its own could stop
    that rank for good. So the host threads meet before each launch, where a rank that is missing
    is noticed in time, and again behind it.

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
        bucket_bytes: about how long a vector is; None: ``BUCKET_BYTES`` of the device, or
            ``COPIED_BYTES``.
        board: the same one for all ranks, if they are threads of one process (``make_board``): they
            then sum by copies (``CopiedSums``) instead of by a library, and meet there.

    Raises (``connect``, ``all_reduce``, ``start``, ``finish``):
        RuntimeError: names this rank and, where known, the ranks that did not come, when another
            rank stays away longer than ``timeout_s``, fails (both SyncError), or ``stop`` is set.
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
        bucket_bytes: int | None = None,
        board: Board | None = None,
    ) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in [0, {world}), got {rank}")
        if world > 1 and store is None:
            raise ValueError("more than one rank needs a store to meet at")
        self.rank, self.world = rank, world
        self._device, self._dtype = torch.device(device), dtype
        self._on_gpu = self._device.type == "cuda"
        self._timeout_s = timeout_s
        self._stop = stop if stop is not None else threading.Event()
        if bucket_bytes is None:
            bucket_bytes = COPIED_BYTES if board is not None else BUCKET_BYTES[self._device.type]
        self._board = board
        self._bucket_numel = max(1, bucket_bytes // dtype.itemsize)
        self._plans: list[BucketPlan] = []
        # What runs is the library's works, or the board's round in which all end.
        self._started: list[tuple[BucketPlan, Sequence[Tensor], list[dist.Work] | int]] = []
        self._calls = 0
        self._meetings = 0
        self._pending: list[dist.Work] = []
        self._group: Any = None  # torch does not declare what its groups can do
        # A clone has a connection of its own: one that a rank waits on is closed to all others.
        own = (store or make_store()).clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore("grad_sync", own)

    def connect(self) -> None:
        """Forms the group; to be called by every rank's own thread, before anything else."""
        if self.world == 1:
            return
        self._gather_from_all("calls", "0", "rendezvous")
        timeout_s = self._timeout_s + GRACE_S
        if self._board is not None:
            self._group = CopiedSums(self.rank, self.world, self._device, self._bucket_numel)
            # GPUs open their memory to each other, before any step is under way; torch guards that
            # against no other thread.
            size = self.world * SHARE_GRAIN  # all ranks have a share, so that all pairs copy
            first = torch.zeros(size, dtype=self._dtype, device=self._device)
            offers = self._show(self._group.offer([first]), "rendezvous")
            with self._board.lock:
                end = self._group.sum(offers)
            self._finish_copies(self._board.show(self.rank, "rendezvous", end), "rendezvous")
            if self._on_gpu:
                self._synchronize("rendezvous")
        elif self._on_gpu:
            self._group = make_nccl(self._store, self.rank, self.world, timeout_s)
            # Connections are made, and kernels loaded, before any step is under way.
            self._wait(self._start_sum(torch.zeros(1, device=self._device)), "rendezvous")
            self._synchronize("rendezvous")
            self._meet("rendezvous")
        else:
            self._group = make_gloo(self._store, self.rank, self.world, timeout_s)

    def all_reduce(self, grads: Sequence[Tensor]) -> None:
        """Replaces every tensor by its sum over all ranks, in place.

        All ranks pass the same shapes in the same order, the same in every call.

        Raises:
            ValueError: they do not.
        """
        self.start(grads)
        self.finish()

    def start(self, grads: Sequence[Tensor]) -> None:
        """Begins the sum of some gradients, which nobody may touch until ``finish``.

        All ranks call it with the same parts of their gradients in the same order, in every step.

        Raises:
            ValueError: they do not.
        """
        if self.world == 1:
            return
        plan = self._plan(grads)
        vectors = plan.gather(grads)
        if self._board is not None:
            self._started.append((plan, grads, self._start_copies(vectors)))
            return
        if self._on_gpu:
            self._meet("all-reduce")
        # Every vector is under way before the first wait: copies overlap with transfers.
        works = [self._start_sum(vector) for vector in vectors]
        self._started.append((plan, grads, works))
        if self._on_gpu:
            self._meet("all-reduce")

    def finish(self, ended: Callable[[Sequence[Tensor]], None] | None = None) -> None:
        """Ends all sums begun since the last call; on a GPU, for the current stream.

        ended: called with each part in turn as soon as its sums may be used, while later ones run.
        """
        for plan, grads, works in self._started:
            if isinstance(works, int):
                self._finish_copies(works, "all-reduce")
            else:
                for work in works:
                    self._wait(work, "all-reduce")
            plan.scatter(grads)
            if ended is not None:
                ended(grads)
        self._started = []

    def _start_copies(self, vectors: list[Tensor]) -> int:
        """Begins this rank's shares of the sums; the round in which all ranks show their ends."""
        group = self._connected()
        offers = self._show(group.offer(vectors), "all-reduce")
        assert self._board is not None
        return self._board.show(self.rank, "all-reduce", group.sum(offers))

    def _finish_copies(self, number: int, what: str) -> None:
        for end in self._read(number, what):
            if end is not None:
                torch.cuda.current_stream(self._device).wait_event(end)

    def _show(self, value: object, what: str) -> list[Any]:
        """Every rank's object, once all have shown theirs."""
        assert self._board is not None
        return self._read(self._board.show(self.rank, what, value), what)

    def _read(self, number: int, what: str) -> list[Any]:
        board = self._board
        assert board is not None
        self._poll(what, lambda: board.wait(number, POLL_S), lambda: board.missing(number))
        shown = board.read(number)
        for rank, (theirs, _) in enumerate(shown):
            if theirs != what:
                raise SyncError(f"rank {self.rank}: {what} failed: rank {rank} is at its {theirs}")
        return [value for _, value in shown]

    def _connected(self) -> Any:
        """The group."""
        if self._group is None:
            raise RuntimeError(f"rank {self.rank}: not connected")
        return self._group

    def close(self) -> None:
        """Leaves the group without waiting for a rank that failed; later calls raise RuntimeError.

        On a GPU the ranks part together if none has failed: the last one's kernel may still read
        the others' memory.
        """
        if self._group is None:
            return
        if self._on_gpu:
            with contextlib.suppress(RuntimeError):
                if not self._started and not self._stop.is_set():
                    self._synchronize("close")
                    self._meet("close")
            if self._board is None:
                self._group.abort()
        elif self._pending:
            # Its destructor would wait, with the interpreter's lock, for transfers that a missing
            # rank holds up. They fail when that rank's group has gone, or at their time-out.
            rest = self._pending, [self._group]
            threading.Thread(target=_part, args=rest, name="parting", daemon=True).start()
        self._group, self._pending, self._started = None, [], []

    def _plan(self, grads: Sequence[Tensor]) -> BucketPlan:
        """The plan of the next part of a step; made, and compared with all ranks', in the first."""
        index, shapes = len(self._started), [grad.shape for grad in grads]
        if index == len(self._plans):
            # The libraries would hang or read past the end where the ranks' lengths differ.
            mine = str([tuple(shape) for shape in shapes])
            everyone = self._gather_from_all(f"shapes/{index}", mine, "all-reduce")
            for rank, theirs in enumerate(everyone):
                if theirs != mine:
                    raise ValueError(
                        f"rank {self.rank}: gradients of shapes {mine}, rank {rank} has {theirs}"
                    )
            plan = BucketPlan(grads, self._bucket_numel, self._dtype, self._device)
            self._plans.append(plan)
        if shapes != self._plans[index].shapes:
            raise ValueError(f"rank {self.rank}: gradients changed their shapes between calls")
        return self._plans[index]

    def _gather_from_all(self, key: str, value: str, what: str) -> list[str]:
        """Every rank's value of ``key``, once all are there."""
        keys = [f"{key}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], value)

        def all_there() -> bool:
            if isinstance(self._store.underlying_store, dist.HashStore):
                # Ends with the slice or, of course, when all have come.
                with contextlib.suppress(RuntimeError):
                    self._store.wait(keys, datetime.timedelta(seconds=POLL_S))
            elif not self._store.check(keys):
                time.sleep(1e-3)  # a TCPStore's wait writes a warning each time that it ends
            return self._store.check(keys)

        self._poll(what, all_there, lambda: self._without_key(keys))
        return [self._store.get(k).decode() for k in keys]

    def _meet(self, what: str) -> None:
        """Returns when the threads of all ranks have come as far."""
        if self._board is not None:
            self._show(None, what)
            return
        self._meetings += 1
        self._gather_from_all(f"meeting/{self._meetings}", "", what)
        # All have come, so none waits for the meeting before.
        self._store.delete_key(f"meeting/{self._meetings - 1}/{self.rank}")

    def _synchronize(self, what: str) -> None:
        """Waits for the current stream."""
        event = torch.cuda.current_stream(self._device).record_event()

        def done() -> bool:
            if event.query():
                return True
            time.sleep(1e-3)
            return False

        self._poll(what, done, list)

    def _start_sum(self, flat: Tensor) -> dist.Work:
        group = self._connected()
        self._calls += 1
        if not self._on_gpu:
            self._store.set(f"calls/{self.rank}", str(self._calls))
        options = dist.AllreduceOptions()
        options.asyncOp = True
        try:
            work: dist.Work = group.allreduce([flat], options)
            self._pending.append(work)
            return work
        except RuntimeError as error:
            raise SyncError(f"rank {self.rank}: all-reduce failed: {error}") from error

    def _wait(self, work: dist.Work, what: str) -> None:
        def done() -> bool:
            # A wait that runs out of its slice raises too: completion alone tells them apart.
            with contextlib.suppress(RuntimeError):
                work.wait(datetime.timedelta(seconds=POLL_S))
            return work.is_completed()

        if not self._on_gpu:
            self._poll(what, done, self._behind)
        try:
            work.wait()  # on a GPU: of the current stream, not of this thread
        except RuntimeError as error:
            raise SyncError(f"rank {self.rank}: {what} failed: {error}") from error
        self._pending.remove(work)

    def _poll(
        self, what: str, done: Callable[[], bool], missing: Callable[[], Sequence[int]]
    ) -> None:
        """Calls ``done`` (which blocks for about POLL_S) until it holds.

        missing: the ranks that are waited for; none: all have come, and it is the transfer.
        """
        deadline = time.monotonic() + self._timeout_s
        while not done():
            if self._stop.is_set():
                raise RuntimeError(f"rank {self.rank}: left the {what}, the run is stopping")
            if time.monotonic() > deadline:
                late = ", ".join(map(str, missing()))
                raise SyncError(
                    f"rank {self.rank}: {what} timed out after {self._timeout_s:g} s waiting for "
                    + (f"rank {late}" if late else "the transfer: all ranks have come")
                )

    def _without_key(self, keys: Sequence[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

    def _behind(self) -> list[int]:
        """The ranks that made fewer calls than this one."""
        calls = [int(self._store.get(f"calls/{rank}")) for rank in range(self.world)]
        return [rank for rank in range(self.world) if calls[rank] < self._calls]


def _part(pending: list[dist.Work], group: list[Any]) -> None:
    """Drops the last reference to a group once its transfers have ended, well or not."""
    while not all(work.is_completed() for work in pending):
        time.sleep(POLL_S)
    pending.clear()
    group.clear()
