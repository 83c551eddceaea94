"""Bounded waits, first error wins, one stopping step for all, and the watchdog."""

import queue
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from dflash_ext.supervisor import RunFailed, Stopped, Supervisor, Worker


def test_first_error_is_reported_with_its_place_and_ends_the_others() -> None:
    supervisor = Supervisor(stall_timeout_s=60)
    empty: queue.Queue[int] = queue.Queue()

    def waits(worker: Worker) -> None:
        supervisor.get(empty)

    def fails(worker: Worker) -> None:
        worker.at("step 3, batches [7]")
        raise ValueError("the cause")

    waiting = supervisor.spawn("waits", waits)
    supervisor.spawn("target 0", fails)
    start = time.monotonic()
    with pytest.raises(RunFailed, match=r"target 0 \(step 3, batches \[7\]\): ValueError: the cau"):
        supervisor.wait([waiting])
    assert time.monotonic() - start < 5
    assert waiting.thread is not None and not waiting.thread.is_alive()


def test_put_and_get_end_with_the_run() -> None:
    supervisor = Supervisor(60)
    full: queue.Queue[int] = queue.Queue(1)
    full.put(0)
    threading.Timer(0.2, supervisor.stop.set).start()
    with pytest.raises(Stopped):
        supervisor.put(full, 1)
    with pytest.raises(Stopped):
        supervisor.get(queue.Queue())


def test_watchdog_names_what_every_worker_did(capfd: pytest.CaptureFixture[str]) -> None:
    supervisor = Supervisor(stall_timeout_s=0.5)

    def stalls(worker: Worker) -> None:
        worker.at("step 1")
        supervisor.get(queue.Queue())

    worker = supervisor.spawn("drafter 0", stalls)
    threading.Timer(5, supervisor.stop.set).start()  # without a watchdog
    with pytest.raises(RunFailed, match=r"no progress for 0.5 s \(drafter 0: step 1\)"):
        supervisor.wait([worker])


def test_time_in_which_the_process_did_not_run_is_no_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-Z, and fg 100 s later, while a worker waits; then a stall, which is found in time."""
    supervisor, asleep = Supervisor(stall_timeout_s=0.5), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + asleep[0])
    monkeypatch.setattr("dflash_ext.supervisor.time", clock)

    def pauses_and_stalls(worker: Worker) -> None:
        worker.at("step 1")
        time.sleep(0.2)
        asleep[0] = 100.0
        time.sleep(0.2)
        worker.at("step 2")
        supervisor.get(queue.Queue())

    worker = supervisor.spawn("drafter 0", pauses_and_stalls)
    threading.Timer(5, supervisor.stop.set).start()  # without a watchdog
    with pytest.raises(RunFailed, match=r"no progress for 0.5 s \(drafter 0: step 2\)"):
        supervisor.wait([worker])


def test_a_signal_stops_all_ranks_behind_the_furthest_begun_step() -> None:
    supervisor = Supervisor(60)
    assert supervisor.begin_step(4)  # rank 0 is ahead
    supervisor.signum = signal.SIGTERM
    assert supervisor.begin_step(3)  # rank 1 catches up
    assert supervisor.begin_step(4)
    assert not supervisor.begin_step(5)
    assert not supervisor.begin_step(5)


def test_a_signal_before_the_first_step_makes_none() -> None:
    supervisor = Supervisor(60)
    supervisor.signum = signal.SIGINT
    assert not supervisor.begin_step(0)
    assert not supervisor.begin_step(17)


def test_a_worker_that_ends_normally_is_no_error() -> None:
    supervisor = Supervisor(60)
    worker = supervisor.spawn("w", lambda w: None)
    supervisor.wait([worker])
    assert supervisor.stop.is_set()
