"""Phases of one running pipeline: which stages work, how large batches are, and when they did.

A pipeline runs without a break while phases follow each other, so that its stages alone and all of
it together are measured in the same process, on warm kernels and under the same load. A phase is a
range of optimizer steps: every stage looks up the phase of a batch by its step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import record_function

from dflash_ext.data.packing import BatchPlan, Ticket
from dflash_ext.devices import BusyClock
from dflash_ext.drafter.loop import DrafterTrainLoop
from dflash_ext.hs_queue import Slot
from dflash_ext.pipeline import Pipeline
from dflash_ext.supervisor import Worker
from dflash_ext.target_loop import TargetForwardLoop

PLAN_S = 120.0
TARGET, DRAFTER = "target batch", "drafter batch"  # their names in a profile


@dataclass(frozen=True, eq=False)
class Phase:
    """What `steps` optimizer steps do.

    targets: so many of the targets run; the others hand their slots over as they are.
    drafters: False gives the slots back unread.
    """

    name: str
    steps: int
    anchors: int
    targets: int
    drafters: bool = True
    metrics_every: int = 1


class Schedule:
    """The phase of every step, fixed when the prefetcher plans it."""

    def __init__(self, first: Phase) -> None:
        self._planned = threading.Condition()
        self._coming: deque[Phase] = deque()
        self._phase, self._left = first, first.steps
        self._of_step: dict[int, Phase] = {}

    def add(self, *phases: Phase) -> None:
        with self._planned:
            self._coming.extend(phases)

    def plan(self, step: int) -> Phase:
        """The phase of a step that is now planned: the one at work goes on until another waits."""
        with self._planned:
            if self._left <= 0 and self._coming:
                self._phase = self._coming.popleft()
                self._left = self._phase.steps
            self._left -= 1
            self._of_step[step] = self._phase
            self._planned.notify_all()
            return self._phase

    def of(self, step: int) -> Phase:
        """The phase of a step, which a drafter asks for before the prefetcher may have planned it.

        Raises KeyError if that takes longer than PLAN_S.
        """
        with self._planned:
            self._planned.wait_for(lambda: step in self._of_step, PLAN_S)
            return self._of_step[step]


class RecordedClock(BusyClock):
    """A stage's clock that also keeps when it was at work.

    `spans()` are seconds on the clock of time.perf_counter, as far as the device has done the work.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._origin = time.perf_counter()
        self._zero: torch.cuda.Event | None = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.synchronize()
                self._zero = torch.cuda.Event(enable_timing=True)
                self._zero.record()
                torch.cuda.synchronize()
                self._origin = time.perf_counter()
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spans: list[tuple[float, float]] = []
        self.started = 0

    @contextmanager
    def measure(self) -> Iterator[None]:
        self.started += 1
        if self._zero is None:
            begin = time.perf_counter()
            with super().measure():
                yield
            self._spans.append((begin, time.perf_counter()))
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with super().measure():
            yield
        end.record()
        self._open.append((start, end))

    def spans(self) -> list[tuple[float, float]]:
        """(start, end) of each measured task that is done, in order."""
        while self._zero is not None and self._open and self._open[0][1].query():
            start, end = (self._zero.elapsed_time(e) / 1e3 for e in self._open.popleft())
            self._spans.append((self._origin + start, self._origin + end))
        return self._spans


@dataclass(frozen=True)
class Batch:
    """A batch in one stage; `spans` are the stage's measured tasks first ... last - 1."""

    step: int
    phase: Phase
    tokens: int
    rows: int
    measured: bool
    first: int
    last: int


@dataclass
class Recorder:
    """Puts phases into a pipeline that is built but does not run yet, and records its stages."""

    pipeline: Pipeline
    schedule: Schedule
    clocks: dict[str, list[RecordedClock]] = field(init=False)
    batches: dict[str, list[list[Batch]]] = field(init=False)

    def __post_init__(self) -> None:
        pipeline = self.pipeline
        self._plan_steps()
        targets, drafters = pipeline.target_loops, pipeline.drafter_loops
        self.clocks = {
            "target": [RecordedClock(loop.target.device) for loop in targets],
            "drafter": [RecordedClock(loop.device) for loop in drafters],
        }
        self.batches = {stage: [[] for _ in clocks] for stage, clocks in self.clocks.items()}
        for index, target in enumerate(targets):
            self._record_target(index, target)
        for index, drafter in enumerate(drafters):
            self._record_drafter(index, drafter)
            drafter.save = None  # a checkpoint of this size takes longer than a phase

    def _plan_steps(self) -> None:
        planner, train = self.pipeline.planner, self.pipeline.cfg.train
        plans_of = planner.step_plans

        def step_plans(step: int) -> list[BatchPlan]:
            train.max_anchors = self.schedule.plan(step).anchors  # the planner reads it there
            return plans_of(step)

        planner.step_plans = step_plans  # type: ignore[method-assign]

    def _record_target(self, index: int, loop: TargetForwardLoop) -> None:
        clock = self.clocks["target"][index]
        records, forward = self.batches["target"][index], loop._forward
        loop.clock = clock

        def recorded(slot: Slot, ticket: Ticket) -> None:
            phase = self.schedule.of(ticket.step)
            if index < phase.targets:
                with record_function(TARGET):
                    forward(slot, ticket)
            done = clock.started
            tokens, rows = ticket.plan.n_tokens, ticket.plan.input_ids.numel()
            records.append(Batch(ticket.step, phase, tokens, rows, True, done - 1, done))

        loop._forward = recorded  # type: ignore[method-assign]

    def _record_drafter(self, index: int, loop: DrafterTrainLoop) -> None:
        clock = self.clocks["drafter"][index]
        records, train = self.batches["drafter"][index], self.pipeline.cfg.train
        train_step, train_batch = loop._train_step, loop._train_batch
        loop.clock = clock
        plans: list[BatchPlan] = []

        def recorded_step(step: int, worker: Worker) -> None:
            first, phase = clock.started, self.schedule.of(step)
            train.metrics_every = phase.metrics_every
            plans.clear()
            train_step(step, worker)
            tokens = sum(plan.n_tokens for plan in plans)
            rows = sum(int(plan.n_rows) for plan in plans)
            every = phase.metrics_every
            measured = all((p.batch_id // loop.world) % every == 0 for p in plans)
            records.append(Batch(step, phase, tokens, rows, measured, first, clock.started))

        def recorded_batch(slot: Slot, batch: int) -> Tensor | None:
            assert slot.ticket is not None
            plans.append(slot.ticket.plan)
            if not self.schedule.of(slot.ticket.step).drafters:
                return torch.zeros((), device=loop.device)  # a norm: nothing is summed or updated
            with record_function(DRAFTER):
                return train_batch(slot, batch)

        loop._train_step = recorded_step  # type: ignore[method-assign]
        loop._train_batch = recorded_batch  # type: ignore[method-assign]

    def finished(self, phase: Phase) -> int:
        """Optimizer steps of a phase that every drafter's device has done."""
        return min(len(self._done("drafter", i, phase)) for i in range(len(self.clocks["drafter"])))

    def _done(self, stage: str, index: int, phase: Phase) -> list[Batch]:
        spans = self.clocks[stage][index].spans()
        batches = list(self.batches[stage][index])
        return [b for b in batches if b.phase is phase and b.last <= len(spans)]

    def timed(self, stage: str, phase: Phase) -> list[list[Timed]]:
        """For each of the stage's workers the batches of a phase, with their times."""
        found = []
        for index, clock in enumerate(self.clocks[stage]):
            spans = clock.spans()
            done = self._done(stage, index, phase)
            found.append([Timed(b, spans[b.first : b.last]) for b in done])
        return found


@dataclass(frozen=True)
class Timed:
    """A batch and when its stage worked on it; a drafter sums gradients between the spans."""

    batch: Batch
    spans: list[tuple[float, float]]

    @property
    def start(self) -> float:
        return self.spans[0][0]

    @property
    def end(self) -> float:
        return self.spans[-1][1]

    @property
    def busy(self) -> float:
        return sum(end - start for start, end in self.spans)
