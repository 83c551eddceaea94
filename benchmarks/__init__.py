"""Each bench_<name>.py has `cases(device) -> list[Case]`; `python -m benchmarks.run` times them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

MIN_SECONDS = 0.5
MIN_REPEATS = 5


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

    def rate(self, seconds: float) -> str:
        if self.flops:
            return f"{self.flops / seconds / 1e9:.0f} GFLOP/s"
        return f"{self.bytes_moved / seconds / 1e9:.1f} GB/s" if self.bytes_moved else "-"


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call; on a GPU between two events of the current stream."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def time_both(case: Case, device: torch.device) -> tuple[float, float]:
    """Median seconds of the operator and of its peer, called in turns after one warm-up each."""
    calls = (case.run, case.peer)
    for call in calls:
        call()
    times: tuple[list[float], list[float]] = ([], [])
    begin = time.perf_counter()
    while time.perf_counter() - begin < MIN_SECONDS or len(times[0]) < MIN_REPEATS:
        for call, seconds in zip(calls, times, strict=True):
            seconds.append(seconds_of(call, device))
    return statistics.median(times[0]), statistics.median(times[1])
