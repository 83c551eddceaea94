"""bench_<name>.py has `cases(device) -> Iterable[Case]`; `python -m benchmarks.run` times them."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_SECONDS = 0.5
SUSTAINED_SECONDS = 3.0  # until clocks have come down to what the power limit allows
MIN_REPEATS = 5
TURN = 3  # calls of one side under load; the first of them is not counted
FLUSH_BYTES = 2**30  # many times a GPU's L2 cache
COPY_BYTES = {"cpu": 2**26, "cuda": 2**31}


@dataclass
class Case:
    """One line of the report: an operator at one shape, and what one would call otherwise."""

    op: str
    shape: str
    run: Callable[[], object]
    peer: Callable[[], object]
    peer_name: str
    check: Callable[[], None]  # raises AssertionError unless run's result equals the naive one's
    bytes_moved: int = 0  # read and written, at least
    flops: int = 0
    ceiling: float = 0  # bytes or operations a second that this machine reaches, if measured
    sustained: bool = False  # timed under the load of a training step

    def rate(self, seconds: float) -> str:
        if self.flops:
            return f"{self.flops / seconds / 1e9:.0f} GFLOP/s"
        return f"{self.bytes_moved / seconds / 1e9:.1f} GB/s" if self.bytes_moved else "-"

    def share(self, seconds: float) -> float | None:
        """Part of the ceiling that is reached."""
        if not self.ceiling:
            return None
        return (self.flops or self.bytes_moved) / seconds / self.ceiling


@functools.cache
def flush_buffer(device: torch.device) -> Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call; on a GPU between two events of the current stream, with a cold L2."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Takes the GPU long enough for the host to enqueue the call meanwhile.
        flush_buffer(device).zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def median_seconds(
    calls: tuple[Callable[[], object], ...],
    device: torch.device,
    *,
    min_seconds: float | None = None,
    min_repeats: int = MIN_REPEATS,
    sustained: bool = False,
) -> tuple[float, ...]:
    """Median seconds of each of `calls`, which take turns after one warm-up each.

    sustained: on a GPU the calls follow one another without a pause, for which a rested GPU would
    be faster, and the host is a round ahead, as it is in training. A turn is TURN calls, the first
    of which only brings the clocks to what the power of this side allows: right behind another
    side's, the same product was found to take 5 % longer or shorter. For calls of milliseconds
    that move many times what the L2 cache holds.
    """
    for call in calls:
        call()
    times: tuple[list[float], ...] = tuple([] for _ in calls)
    sustained = sustained and device.type == "cuda"
    if min_seconds is None:
        min_seconds = SUSTAINED_SECONDS if sustained else MIN_SECONDS
    before: list[torch.cuda.Event] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < min_seconds or len(times[0]) < min_repeats:
        if sustained:
            marks = _marked(calls)
            _add_times(times, before)
            before = marks
            continue
        for call, seconds in zip(calls, times, strict=True):
            seconds.append(seconds_of(call, device))
    _add_times(times, before)
    return tuple(statistics.median(seconds) for seconds in times)


def _marked(calls: Sequence[Callable[[], object]]) -> list[torch.cuda.Event]:
    """Enqueues a turn of each of the calls; events of the current stream around each one."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TURN * len(calls) + 1)]
    marks[0].record()
    for i, mark in enumerate(marks[1:]):
        calls[i // TURN]()
        mark.record()
    return marks


def _add_times(times: Sequence[list[float]], marks: Sequence[torch.cuda.Event]) -> None:
    """Waits for the last of the marks, if there are any."""
    if marks:
        marks[-1].synchronize()
        for i, (before, after) in enumerate(itertools.pairwise(marks)):
            if i % TURN > 0:
                times[i // TURN].append(before.elapsed_time(after) / 1e3)


@functools.cache
def copy_rate(source: torch.device, target: torch.device) -> float:
    """Bytes a second of a large copy: read and written on one device, carried between two."""
    size = COPY_BYTES[source.type]
    from_, to = (torch.randint(0, 100, (size // 8,), device=device) for device in (source, target))
    (seconds,) = median_seconds((lambda: to.copy_(from_, non_blocking=True),), source)
    return (2 if source == target else 1) * size / seconds
