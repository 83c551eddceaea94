"""Threads that stop together: bounded waits, first error wins, signals set a flag, a watchdog.

Every wait of a worker goes through :class:`Supervisor`, so that a run never hangs on a dead peer:
waits wake up each ``POLL_S`` seconds and raise :class:`Stopped` once the run is ending.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TypeVar

from dflash_ext.config_values import UserError
from dflash_ext.nonfinite import NonfiniteWeights

T = TypeVar("T")

POLL_S = 0.1
JOIN_S = 8.0
PAUSE_S = 1.0  # a poll that takes so much longer: the process was stopped or frozen
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXPLAINED = (UserError, NonfiniteWeights)  # by their one line: no traceback
EndingSignal = Callable[[int, int | None], int | None]


class Stopped(Exception):
    """Raised inside a worker's wait when the run is ending; never an error of its own."""


class RunFailed(RuntimeError):
    """A worker failed. The message names the thread, what it worked on, and its own error."""


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGINT before there is anything to save; see ``end_at_signals``."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"signal {signum}")
        self.signum = signum


@contextlib.contextmanager
def end_at_signals() -> Iterator[None]:
    """Until ``install_signal_handlers``: SIGTERM and SIGINT raise ``Interrupted``, so that files
    half written are removed on the way out. At the end they do what they did before."""

    def handler(signum: int, _frame: FrameType | None) -> None:
        raise Interrupted(signum)

    before = {s: signal.signal(s, handler) for s in _SIGNALS} if _gets_signals() else {}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


def _gets_signals() -> bool:
    """They are the main thread's: a run in another one is not ended by them."""
    return threading.current_thread() is threading.main_thread()


@dataclass
class Worker:
    """One thread and what it is doing, for error messages and the watchdog."""

    name: str
    target: Callable[[Worker], None]
    where: str = "starting"
    beats: int = 0
    thread: threading.Thread | None = field(default=None, repr=False)

    def at(self, where: str) -> None:
        """Says what the worker does now; counts as progress."""
        self.where = where
        self.beats += 1


class Supervisor:
    """Starts the workers of a run, ends them together, and reports the first error.

    Args:
        stall_timeout_s: seconds without progress of any worker after which all stacks are
            dumped to stderr and the run fails.
        ending_signal: asked once a step, with the step and the signal that this process knows of:
            the signal that ends the run before that step, or None. Several processes agree here.
    """

    def __init__(
        self, stall_timeout_s: float, ending_signal: EndingSignal = lambda _step, signum: signum
    ) -> None:
        self.stall_timeout_s = stall_timeout_s
        self._ending_signal = ending_signal
        self.stop = threading.Event()
        self.signum: int | None = None
        self._workers: list[Worker] = []
        self._lock = threading.Lock()
        self._step_lock = threading.Lock()
        self._signalled = False
        self._error: tuple[str, BaseException] | None = None
        self._started_step = -1
        self._stop_at: int | None = None

    # -- for workers ---------------------------------------------------------------------------

    def check(self) -> None:
        if self.stop.is_set():
            raise Stopped

    def put(self, q: queue.Queue[T], item: T) -> None:
        while True:
            self.check()
            try:
                return q.put(item, timeout=POLL_S)
            except queue.Full:
                continue

    def get(self, q: queue.Queue[T]) -> T:
        while True:
            self.check()
            try:
                return q.get(timeout=POLL_S)
            except queue.Empty:
                continue

    def wait_for(self, condition: threading.Condition, predicate: Callable[[], bool]) -> None:
        """Waits, with ``condition`` held, until ``predicate()``; raises Stopped at the end."""
        while not predicate():
            self.check()
            condition.wait(POLL_S)

    def begin_step(self, step: int) -> bool:
        """Whether optimizer step ``step`` is to be made.

        After a signal, every drafter stops behind the furthest step that any of them has begun,
        so that all ranks end with the same weights.
        """
        with self._step_lock:
            if step > self._started_step and self._stop_at is None:
                signum = self._ending_signal(step, self.signum)
                if signum is not None:
                    self.signum, self._stop_at = signum, step
            if self._stop_at is not None and step >= self._stop_at:
                return False
            self._started_step = max(self._started_step, step)
            return True

    # -- for the main thread -------------------------------------------------------------------

    def install_signal_handlers(self) -> None:
        def handler(signum: int, _frame: FrameType | None) -> None:
            if self._signalled:
                os._exit(128 + signum)
            self._signalled = True
            self.signum = signum

        for signum in _SIGNALS if _gets_signals() else ():
            signal.signal(signum, handler)

    def spawn(self, name: str, target: Callable[[Worker], None]) -> Worker:
        worker = Worker(name, target)
        worker.thread = threading.Thread(target=self._body, args=(worker,), name=name, daemon=True)
        self._workers.append(worker)
        worker.thread.start()
        return worker

    def beats(self) -> int:
        """How often the workers have made progress, in all."""
        return sum(worker.beats for worker in self._workers)

    def fail(self, place: str, error: BaseException) -> None:
        """Records the first error and ends the run."""
        with self._lock:
            if self._error is None:
                self._error = (place, error)
        self.stop.set()

    def wait(self, until_done: list[Worker]) -> None:
        """Blocks until the workers ``until_done`` have ended, then ends all others.

        Raises:
            RunFailed: if any worker failed, or none made progress for ``stall_timeout_s``
                in which this process ran.
        """
        seen, since = -1, time.monotonic()
        polled = since
        while not self.stop.is_set() and any(w.thread.is_alive() for w in until_done if w.thread):
            self.stop.wait(POLL_S)
            now = time.monotonic()
            if (paused := now - polled - POLL_S) > PAUSE_S:
                since += paused  # in it no worker could make progress
            polled, beats = now, self.beats()
            if beats != seen:
                seen, since = beats, now
            elif now - since > self.stall_timeout_s:
                self._stalled()
        self.stop.set()
        deadline = time.monotonic() + JOIN_S
        for worker in self._workers:
            if worker.thread is not None:
                worker.thread.join(max(0.0, deadline - time.monotonic()))
        if self._error is not None:
            place, error = self._error
            first_line = str(error).partition("\n")[0]
            raise RunFailed(f"{place}: {type(error).__name__}: {first_line}") from error

    # -- private -------------------------------------------------------------------------------

    def _body(self, worker: Worker) -> None:
        try:
            worker.target(worker)
        except Stopped:
            pass
        except BaseException as error:
            if not self.stop.is_set() and not isinstance(error, _EXPLAINED):
                traceback.print_exc()
            self.fail(f"{worker.name} ({worker.where})", error)

    def _stalled(self) -> None:
        state = "; ".join(f"{w.name}: {w.where}" for w in self._workers)
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        self.fail("watchdog", TimeoutError(f"no progress for {self.stall_timeout_s} s ({state})"))
