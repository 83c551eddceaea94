"""Figures of the phases of a pipeline: rates, waits, balance, what metrics cost, memory."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.pipeline_phases import Phase, Recorder, Timed
from dflash_ext.balance import Work

GIB = 2**30
ANCHOR_STEP = 64  # to which a chosen number of anchors is rounded, where it is that large


@dataclass(frozen=True)
class Rate:
    """One stage in one phase, all its workers together.

    tokens_per_s, rows_per_s: the sums over the workers. busy: mean share of the time in which a
    worker neither waits for a batch nor, in the gradients' sum, for another worker that is later.
    step_s, longest_s: seconds between the ends of a worker's batches, their mean and the most.
    exposed_s: of a step, from the end of the last worker's backward pass to the update: the
    gradients' sum, as far as nothing hides it.
    """

    tokens_per_s: float
    rows_per_s: float
    busy: float
    step_s: float
    longest_s: float
    exposed_s: float
    batches: int
    per_worker: tuple[float, ...]

    @property
    def waits(self) -> float:
        return 1 - self.busy


def rate(workers: Iterable[Sequence[Timed]], *, skip: int = 1, skip_last: int = 0) -> Rate:
    """From the end of each worker's batch `skip` on. Raises RuntimeError for too few batches."""
    workers = list(workers)
    sums = exposed_sums(workers)
    tokens, rows, busy, steps, longest, exposed, count = [], [], [], [], [], [], 0
    for timed in workers:
        kept = timed[max(skip, 1) - 1 : len(timed) - skip_last]
        if len(kept) < 2:
            least = max(skip, 1) + 1 + skip_last
            raise RuntimeError(f"found {len(timed)} batches of a phase, want at least {least}")
        span = kept[-1].end - kept[0].end
        tokens.append(sum(t.batch.tokens for t in kept[1:]) / span)
        rows.append(sum(t.batch.rows for t in kept[1:]) / span)
        own_sums = [sums.get(t.batch.step, 0.0) for t in kept[1:]]
        busy.append((sum(t.busy for t in kept[1:]) + sum(own_sums)) / span)
        steps.append(span / (len(kept) - 1))
        longest.append(max(two.end - one.end for one, two in itertools.pairwise(kept)))
        exposed.append(statistics.fmean(own_sums))
        count += len(kept) - 1
    return Rate(
        sum(tokens),
        sum(rows),
        statistics.fmean(busy),
        statistics.fmean(steps),
        max(longest),
        statistics.fmean(exposed),
        count,
        tuple(tokens),
    )


def exposed_sums(workers: Sequence[Sequence[Timed]]) -> dict[int, float]:
    """Seconds of each step that the sum over several drafters takes by itself.

    The last one to come waits for nobody: the shortest gap between backward pass and update is the
    sum's own. Each gap is by one device's clock.
    """
    gaps: dict[int, list[float]] = {}
    for timed in workers:
        for t in timed:
            if len(t.spans) > 1:  # the last one is the update
                gaps.setdefault(t.batch.step, []).append(t.spans[-1][0] - t.spans[-2][1])
    return {step: min(each) for step, each in gaps.items() if len(each) > 1}


def work_of(
    targets: Sequence[Sequence[Timed]],
    drafters: Sequence[Sequence[Timed]],
    *,
    skip: int = 1,
    skip_last: int = 0,
) -> Work:
    """What a run's monitor counts, from the end of the drafters' batch `skip` on; of the targets'
    batches that begin before or end later the part that lies between."""
    kept = [timed[max(skip, 1) - 1 : len(timed) - skip_last] for timed in drafters]
    begin, end = min(k[0].end for k in kept), max(k[-1].end for k in kept)
    trained = [t for k in kept for t in k[1:]]
    filled = [(t, min(t.end, end) - max(t.start, begin)) for timed in targets for t in timed]
    inside = [(t, seconds) for t, seconds in filled if seconds > 0]
    return Work(
        time=end - begin,
        steps=min(len(k) for k in kept) - 1,
        tokens=sum(t.batch.tokens for t in trained),
        busy_s=sum(t.busy for t in trained),
        target_tokens=round(sum(t.batch.tokens * s / (t.end - t.start) for t, s in inside)),
        target_busy_s=sum(seconds for _, seconds in inside),
    )


def own_speed(timed: Sequence[Timed]) -> float | None:
    """Tokens a second of one worker while it is at work; None if it got no batch."""
    busy = sum(t.busy for t in timed)
    return sum(t.batch.tokens for t in timed) / busy if timed else None


def padding(workers: Iterable[Sequence[Timed]]) -> float:
    """Share of the targets' input that is padding."""
    batches = [t.batch for timed in workers for t in timed]
    return 1 - sum(b.tokens for b in batches) / sum(b.rows for b in batches)


@dataclass(frozen=True)
class Balance:
    """A drafter's seconds a step, as a line in the number of anchors."""

    fixed_s: float
    each_s: float

    @classmethod
    def through(cls, small: tuple[int, float], large: tuple[int, float]) -> Balance:
        """From (anchors, seconds a step) of two phases."""
        each = max((large[1] - small[1]) / (large[0] - small[0]), 1e-12)
        return cls(small[1] - each * small[0], each)

    def seconds(self, anchors: int) -> float:
        return self.fixed_s + anchors * self.each_s

    def anchors(self, seconds: float, *, at_least: int, at_most: int) -> int:
        """Anchors with which a step takes so long, within limits."""
        wanted = int((seconds - self.fixed_s) / self.each_s)
        step = ANCHOR_STEP if wanted >= 4 * ANCHOR_STEP else 1
        return min(at_most, max(at_least, round(wanted / step) * step))


def metrics_cost(workers: Iterable[Sequence[Timed]]) -> dict[str, float]:
    """What measuring a batch adds to the drafter's time on it, from batches that take turns.

    Each measured batch is compared with the unmeasured one next to it, by seconds a live row.
    """
    logs = []
    for timed in workers:
        for one, two in itertools.pairwise(timed[1:]):
            if one.batch.measured != two.batch.measured:
                on, off = (one, two) if one.batch.measured else (two, one)
                seconds = [t.busy / max(1, t.batch.rows) for t in (on, off)]
                logs.append(math.log(seconds[0] / seconds[1]))
    if len(logs) < 2:
        return {}
    pairs = len(logs)
    return {
        "extra": math.expm1(statistics.fmean(logs)),
        # Neighbouring pairs share a batch: at most half as many are independent.
        "standard_error": statistics.stdev(logs) / math.sqrt(pairs / 2),
        "pairs": pairs,
    }


@dataclass(frozen=True)
class Sample:
    """Memory at one moment, in bytes; of GPUs what the allocator holds and what is in use."""

    time: float
    phase: str
    rss: int
    reserved: dict[str, int]
    used: dict[str, int]


def sample(phase: str, gpus: Sequence[str]) -> Sample:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    free_and_all = {gpu: torch.cuda.mem_get_info(gpu) for gpu in gpus}
    return Sample(
        time.perf_counter(),
        phase,
        pages * os.sysconf("SC_PAGE_SIZE"),
        {gpu: torch.cuda.memory_reserved(gpu) for gpu in gpus},
        {gpu: total - free for gpu, (free, total) in free_and_all.items()},
    )


def memory(samples: Sequence[Sample]) -> dict[str, Any]:
    """GiB: the process at most, and each GPU in the first and the last quarter of the samples."""
    quarter = max(1, len(samples) // 4)
    ends = samples[:quarter], samples[-quarter:]
    gpus = samples[0].reserved
    return {
        "rss_gib": max(s.rss for s in samples) / GIB,
        "rss_quarters_gib": [statistics.fmean(s.rss for s in end) / GIB for end in ends],
        "gpus": {
            gpu: {
                "reserved_quarters_gib": [max(s.reserved[gpu] for s in end) / GIB for end in ends],
                "used_quarters_gib": [max(s.used[gpu] for s in end) / GIB for end in ends],
            }
            for gpu in gpus
        },
    }


def alone_rate(alone: Mapping[str, Any], phase: Mapping[str, Any]) -> float:
    """Tokens a second that a stage alone would make of a phase's batches.

    An epoch's last batches are less full of tokens, but a drafter has as many rows to train, and a
    target may have more padding: what a stage has to do are rows (`Batch.rows`).
    """
    speed: float = alone["rows_per_s"] * phase["tokens_per_s"] / phase["rows_per_s"]
    return speed


def stage_rows(
    recorder: Recorder, phase: Phase, *, skip: int, skip_last: int = 0
) -> dict[str, Any]:
    """Rates of the stages that ran in a phase, as plain numbers."""
    found: dict[str, Any] = {"anchors": phase.anchors}
    for stage, runs in (("target", phase.targets > 0), ("drafter", phase.drafters)):
        if runs:
            timed = recorder.timed(stage, phase)
            if stage == "target":
                timed = timed[: phase.targets]
            result = rate(timed, skip=skip, skip_last=skip_last)
            found[stage] = {
                "tokens_per_s": result.tokens_per_s,
                "rows_per_s": result.rows_per_s,
                "per_worker": list(result.per_worker),
                "waits": result.waits,
                "step_s": result.step_s,
                "longest_s": result.longest_s,
                "batches": result.batches,
            }
            if stage == "drafter":
                found[stage]["exposed_sum_share"] = result.exposed_s / result.step_s
    return found
