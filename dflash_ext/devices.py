"""What a worker thread needs of its device: a stream of its own, and a clock that never waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch


def set_cpu_threads(count: int) -> None:
    """How many threads this thread's operators on CPU tensors use, whatever others set.

    A thread's first operator takes over the number that any thread has set last, which would be
    that of another one's evaluation. torch has such a first time, and the extension one of its own:
    both come here, before the number is set.
    """
    torch.get_num_threads()
    torch.ops.dflash_ext.lm_head_topk(torch.zeros(1, 1), torch.zeros(1, 1), 1)
    torch.set_num_threads(count)


@contextmanager
def worker_stream(*devices: torch.device) -> Iterator[None]:
    """Gives this thread a stream of its own on each device and makes the first one current; nothing
    on a CPU.

    Current device and stream belong to a thread: a new one starts on device 0, default stream. At
    the end, unless by an error, the stream has done all its work. Nobody waits for a whole device:
    that would break a capture on it, and could wait for a stream that waits for this thread.
    """
    if devices[0].type == "cpu":
        yield
        return
    torch.cuda.set_device(devices[0])
    streams = [torch.cuda.Stream(device) for device in devices]
    with ExitStack() as stack:
        for stream in reversed(streams):
            stack.enter_context(torch.cuda.stream(stream))
        yield
    for stream in streams:
        stream.synchronize()


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` current for a while; nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class BusyClock:
    """Seconds that a device spent on a worker's tasks.

    On a GPU they are measured by events on the worker's stream; work that is not done yet is not
    counted yet. One thread measures, one may read.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._pending.append((start, end))
        else:
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin

    @property
    def seconds(self) -> float:
        while self._pending and self._pending[0][1].query():
            start, end = self._pending.popleft()
            self._seconds += start.elapsed_time(end) / 1000
        return self._seconds
