"""Sum of gradients over drafters: every drafter thread is one rank of a c10d process group."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

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

    Raises:
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
        self._buckets: list[_Bucket] | None = None
        self._shapes: list[torch.Size] = []
        self._calls = 0
        self._group = None
        self._store = dist.PrefixStore("grad_sync", store) if store is not None else None

    def connect(self) -> None:
        """Forms the group; to be called by every rank's own thread, before anything else.

        NCCL for GPUs belongs here.
        """
        if self.world == 1:
            return
        if self._device.type != "cpu":
            raise NotImplementedError(f"no gradient all-reduce for {self._device.type} yet")
        self._store.set(f"calls/{self.rank}", "0")
        keys = [f"calls/{rank}" for rank in range(self.world)]
        self._poll("rendezvous", lambda: self._store.check(keys) or bool(time.sleep(POLL_S)))
        options = dist.ProcessGroupGloo._Options()
        options._timeout = datetime.timedelta(seconds=self._timeout_s + GRACE_S)
        # A HashStore cannot leave the process: neither need the connections, whatever the host
        # is called and whatever its network.
        local = isinstance(self._store.underlying_store, dist.HashStore)
        create = dist.ProcessGroupGloo.create_device
        options._devices = [create(hostname="127.0.0.1") if local else create()]
        self._group = dist.ProcessGroupGloo(self._store, self.rank, self.world, options)

    def all_reduce(self, grads: Sequence[torch.Tensor]) -> None:
        """Replaces every tensor by its sum over all ranks, in place.

        All ranks pass the same shapes in the same order, the same in every call.
        """
        if self.world == 1:
            return
        if self._buckets is None:
            self._shapes = [g.shape for g in grads]
            self._buckets = _make_buckets(grads, self._bucket_numel, self._dtype, self._device)
        if [g.shape for g in grads] != self._shapes:
            raise ValueError(f"rank {self.rank}: gradients changed their shapes between calls")
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
            self._wait(self._start_sum(torch.zeros(1)), "barrier")

    def abort(self) -> None:
        """Makes every rank that shares ``stop`` leave its wait. Any thread may call it."""
        self._stop.set()

    def close(self) -> None:
        """Leaves the group without waiting; later calls raise RuntimeError."""
        if self._group is not None:
            # The destructor joins workers which may still wait for a rank that hangs.
            holder, self._group = [self._group], None
            threading.Thread(target=holder.clear, name="grad-sync-close", daemon=True).start()

    def _start_sum(self, flat: torch.Tensor) -> dist.Work:
        if self._group is None:
            raise RuntimeError(f"rank {self.rank}: not connected")
        self._calls += 1
        self._store.set(f"calls/{self.rank}", str(self._calls))
        options = dist.AllreduceOptions()
        options.asyncOp = True
        return self._group.allreduce([flat], options)

    def _wait(self, work: dist.Work, what: str) -> None:
        slice_ = datetime.timedelta(seconds=POLL_S)

        def done() -> bool:
            # A wait that runs out of its slice raises too: completion alone tells them apart.
            with contextlib.suppress(RuntimeError):
                work.wait(slice_)
            return work.is_completed()

        self._poll(what, done)
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"rank {self.rank}: {what} failed: {error}") from error

    def _poll(self, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not done():
            if self._stop.is_set():
                raise RuntimeError(f"rank {self.rank}: left the {what}, the run is stopping")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {self.rank}: {what} timed out after {self._timeout_s:g} s"
                    f" waiting for {self._laggards()}"
                )

    def _laggards(self) -> str:
        late = []
        for rank in range(self.world):
            key = f"calls/{rank}"
            calls = int(self._store.get(key)) if self._store.check([key]) else -1
            if calls < self._calls:
                late.append(str(rank))
        return f"rank {', '.join(late)}" if late else "ranks that have come: the transfer hangs"


class _Bucket:
    """A flat buffer and, for each gradient in it, a view of that gradient's shape."""

    def __init__(self, first: int, shapes: list[torch.Size], flat: torch.Tensor) -> None:
        self.flat = flat
        self._slice = slice(first, first + len(shapes))
        parts = flat.split([shape.numel() for shape in shapes])
        self._views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def gather(self, grads: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(self._views, list(grads[self._slice]))

    def scatter(self, grads: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(list(grads[self._slice]), self._views)


def _make_buckets(
    grads: Sequence[torch.Tensor], numel: int, dtype: torch.dtype, device: torch.device
) -> list[_Bucket]:
    """Consecutive runs of at most ``numel`` elements; a gradient larger than that stays whole."""
    buckets: list[_Bucket] = []
    first, shapes, used = 0, [], 0
    for index, grad in enumerate(grads):
        if shapes and used + grad.numel() > numel:
            buckets.append(_Bucket(first, shapes, torch.empty(used, dtype=dtype, device=device)))
            first, shapes, used = index, [], 0
        shapes.append(grad.shape)
        used += grad.numel()
    if shapes:
        buckets.append(_Bucket(first, shapes, torch.empty(used, dtype=dtype, device=device)))
    return buckets
