"""The monitor thread: turns what the workers publish into log rows. Nobody waits for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dflash_ext.acceptance import accept_len, accept_len_pooled
from dflash_ext.balance import LoadMeter, Work
from dflash_ext.drafter.loop import DrafterTrainLoop, Mark
from dflash_ext.hs_queue import BufferedHSQueue
from dflash_ext.logger import RunLogger
from dflash_ext.machines import Machines
from dflash_ext.metrics import merge_words, summarise
from dflash_ext.nonfinite import NonfiniteSteps
from dflash_ext.supervisor import Worker
from dflash_ext.target_loop import TargetForwardLoop

POLL_S = 0.1
LOGGED_S = 5.0  # less than the supervisor's last wait for a worker


@dataclass(frozen=True)
class Share:
    """What one process adds to the row of a step: counters, and totals since it began.

    nonfinite: each step since the last row that was skipped, with this process's suspects.
    """

    step: int
    words: list[int]
    tokens: int
    busy_s: float
    paused_s: float
    target_tokens: int
    target_busy_s: float
    planning_s: float
    queue_depth: int
    dropped: int
    nonfinite: list[tuple[int, list[int]]]


class Monitor:
    """Merges the drafters' metric records by step, adds rates, logs rows in order of step.

    With several processes, process 0 logs the sums over all; the others send it their shares.

    Args:
        logger: None in a process that sends its shares.
        machines: all processes of the run, each with as many drafters and targets.
        load: makes metrics of what both sides have done.
        first_batch: the first batch id of an optimizer step.
        tokens_before: tokens trained by the run's earlier parts (resume).
        finished: whether all drafters have ended.
    """

    def __init__(
        self,
        logger: RunLogger | None,
        *,
        drafters: list[DrafterTrainLoop],
        targets: list[TargetForwardLoop],
        queues: list[BufferedHSQueue],
        lr_at: Callable[[int], float],
        block_size: int,
        first_batch: Callable[[int], int],
        max_nonfinite_steps: int,
        tokens_before: int,
        finished: Callable[[], bool],
        machines: Machines,
        load: LoadMeter,
    ) -> None:
        self.logger = logger
        self.drafters, self.targets, self.queues = drafters, targets, queues
        self.lr_at, self.block_size = lr_at, block_size
        self.first_batch, self.max_nonfinite_steps = first_batch, max_nonfinite_steps
        self.tokens_before = tokens_before
        self.finished, self.machines, self.load = finished, machines, load
        self.evals: dict[int, dict[str, float]] = {}
        self.tokens = tokens_before
        self.train_seconds = 0.0
        self._logged_step = -1
        self._look = threading.Event()  # now, not at the next poll
        self._shared_step = self._checked_step = drafters[0].steps.start
        self._nonfinite: dict[int, set[int]] = {}  # suspects by skipped step
        self.skipped_last: dict[int, set[int]] = {}  # steps in a row up to the last logged one
        self._words: dict[int, list[list[int]]] = {}
        self._times: dict[int, float] = {}
        self._world = len(drafters) * machines.count
        self._shares: dict[int, list[Share]] = {}
        self._rows: dict[int, dict[str, Any]] = {}
        self._marks: dict[int, list[Mark]] = {}
        self._works: list[Work] = []  # before training, at the first row, at the last one

    def run(self, worker: Worker) -> None:
        worker.where = "logging"
        start = time.perf_counter()
        self._works = [Work(time=start, steps=self.drafters[0].steps.start)]
        while True:
            finished = self.finished()
            self._collect()
            self._flush(everything=finished)
            if finished:
                self.train_seconds = time.perf_counter() - start
                if self.logger is None:
                    self.machines.send("")
                return
            self._look.wait(POLL_S)
            self._look.clear()

    def wait_logged(self, step: int) -> None:
        """Returns when the rows up to that of ``step``, if it has one, are in the log for good.

        A checkpoint that counted before them would cost these rows if the process were killed: a
        resumed run goes on behind it. Does not wait for ever: a row may have been lost.
        """
        deadline = time.monotonic() + LOGGED_S
        last = min(step, self.drafters[0].last_row)
        while self._logged_step < last and time.monotonic() < deadline:
            self._look.set()
            time.sleep(POLL_S / 20)
        if self.logger is not None:
            self.logger.sync()

    def _collect(self) -> None:
        for loop in self.drafters:
            for step, words in loop.stream.drain():
                self._words.setdefault(step, []).append(words)
            while loop.marks:
                mark = loop.marks.popleft()
                self._marks.setdefault(mark.step, []).append(mark)
            while loop.evals:
                step, lengths = loop.evals.popleft()
                self.evals[step] = {}
                if lengths is not None:
                    self.evals[step] = {
                        "eval_accept_len": accept_len(lengths),
                        "eval_accept_len_pooled": accept_len_pooled(lengths),
                    }
        for step in [s for s, w in self._words.items() if len(w) == len(self.drafters)]:
            if len(self._marks.get(step, [])) == len(self.drafters):
                self._add_share(self._share(step, self._words.pop(step), self._marks.pop(step)))
        if self.logger is not None:
            for text in self.machines.receive():
                self._add_share(Share(**json.loads(text)))

    def _share(self, step: int, words: list[list[int]], marks: list[Mark]) -> Share:
        self._times[step] = max(mark.time for mark in marks)
        return Share(
            step=step,
            words=merge_words(words),
            tokens=sum(mark.tokens for mark in marks),
            busy_s=sum(mark.busy_s for mark in marks),
            paused_s=max(mark.paused_s for mark in marks),
            target_tokens=sum(loop.tokens for loop in self.targets),
            target_busy_s=sum(loop.busy_s for loop in self.targets),
            planning_s=sum(loop.planning_s for loop in self.targets),
            queue_depth=sum(q.depth() for q in self.queues),
            dropped=sum(loop.stream.dropped for loop in self.drafters),
            nonfinite=self._nonfinite_up_to(step),
        )

    def _nonfinite_up_to(self, step: int) -> list[tuple[int, list[int]]]:
        """Steps that were skipped since the last share, each with the batches of this process whose
        loss was not finite."""
        first, self._shared_step = self._shared_step, step
        found: dict[int, list[int]] = {}
        for loop in self.drafters:
            for bad, indices in loop.nonfinite.between(first, step).items():
                first_id = self.first_batch(bad)
                first_id += (loop.rank - first_id) % self._world  # of this drafter
                ids = [first_id + i * self._world for i in indices]
                found.setdefault(bad, []).extend(ids)
        return sorted(found.items())

    def _add_share(self, share: Share) -> None:
        """Makes the row of a step once all processes' shares are there."""
        if self.logger is None:
            self.machines.send(json.dumps(asdict(share)))
            return
        shares = self._shares.setdefault(share.step, [])
        shares.append(share)
        if len(shares) == self.machines.count:
            self._forget_before(share.step)
            row = self._training_row(share.step, self._shares.pop(share.step))
            self._rows[share.step] = row
            self.logger.progress(share.step, row)

    def _training_row(self, step: int, shares: list[Share]) -> dict[str, Any]:
        row: dict[str, Any] = summarise(
            merge_words([share.words for share in shares]), self.block_size
        )
        work = Work(
            time=self._times.pop(step),  # by this process's clock
            paused_s=max(share.paused_s for share in shares),
            steps=step,
            tokens=sum(share.tokens for share in shares),
            busy_s=sum(share.busy_s for share in shares),
            target_tokens=sum(share.target_tokens for share in shares),
            target_busy_s=sum(share.target_busy_s for share in shares),
            planning_s=sum(share.planning_s for share in shares),
        )
        since = work - self._works[-1]
        self._works[2:] = []
        self._works.append(work)
        self.tokens = self.tokens_before + work.tokens
        if "nonfinite_steps" in row:  # every drafter has counted it
            row["nonfinite_steps"] //= self._world
        if batches := self._nonfinite_batches(shares):
            row["nonfinite_batches"] = batches
        row |= {
            "lr": self.lr_at(step - 1),
            "tokens": self.tokens,
            "dropped_metrics": sum(share.dropped for share in shares),
            "queue_depth": sum(share.queue_depth for share in shares),
        }
        return row | self.load.row(since)

    def balance(self) -> dict[str, Any] | None:
        """Of the whole run but for its first row, in which kernels are compiled and queues fill."""
        start = self._works[1] if len(self._works) == 3 else self._works[0]
        return self.load.summary(self._works[-1] - start)

    def _nonfinite_batches(self, shares: list[Share]) -> list[int]:
        """The suspects of the skipped steps; of a step without any, all its batches."""
        suspects: dict[int, set[int]] = {}
        for share in shares:
            for step, ids in share.nonfinite:
                suspects.setdefault(step, set()).update(ids)
        self._nonfinite |= suspects
        every = {s: range(self.first_batch(s), self.first_batch(s + 1)) for s in suspects}
        return sorted(i for step, ids in suspects.items() for i in ids or every[step])

    def _forget_before(self, step: int) -> None:
        """A record lost in a full ring must not keep its step's other records for ever."""
        waiting: dict[int, Any]
        for waiting in (self._words, self._marks, self._shares, self._times):
            for old in [s for s in waiting if s < step]:
                del waiting[old]

    def _check_finite(self, step: int, row: dict[str, Any]) -> None:
        """Says which steps before ``step`` were skipped; enough of them in a row end the run."""
        made, self._checked_step = range(self._checked_step, step), step
        skipped = {n: self._nonfinite.pop(n) for n in made if n in self._nonfinite}
        if skipped and self.logger is not None:
            self.logger.note(
                f"skipped without a finite gradient: {_listed('step', list(skipped))} "
                f"({_listed('batch', row.get('nonfinite_batches', []))})"
            )
        for number in made:
            if number not in skipped:
                self.skipped_last.clear()
                continue
            self.skipped_last[number] = skipped[number]
            if len(self.skipped_last) >= self.max_nonfinite_steps:
                suspects = set[int]().union(*self.skipped_last.values())
                raise NonfiniteSteps(self.skipped_last, suspects, self.max_nonfinite_steps)

    def _flush(self, everything: bool) -> None:
        """Logs complete rows in ascending order; an evaluation joins the row of its step."""
        if self.logger is None:
            return
        new_evals = {step for step, row in self.evals.items() if row and step > self._logged_step}
        newest = max(self._rows, default=-1)
        for step in sorted(self._rows.keys() | new_evals):
            awaits_eval = step in self.drafters[0].eval_steps and step not in self.evals
            # A later row is there if the step's own is lost; before the first step there is none.
            awaits_row = newest < step > self.drafters[0].steps.start
            if (awaits_eval or awaits_row) and not everything:
                return
            row = self._rows.pop(step, {})
            self.logger.log(step, row | self.evals.get(step, {}))
            self._logged_step = step
            if row:
                self._check_finite(step, row)


def _listed(what: str, numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{what} {shown}{', ...' if len(numbers) > 8 else ''}"
