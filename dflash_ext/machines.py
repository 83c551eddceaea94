"""What the processes of a run on several machines tell each other, besides gradients.

``torchrun`` starts one process a machine and names a store that all of them reach. Through it
they agree on what they train and on the step that a signal ends the run at, send their share of
the metrics to process 0, and notice when one of them fails or goes silent.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

import torch.distributed as dist

from dflash_ext.config_values import UserError
from dflash_ext.grad_sync import SyncError
from dflash_ext.supervisor import RunFailed, Supervisor, Worker

BEAT_S = 0.5
SLICE_S = 0.05
POLL_S = 1e-3
EXPLAIN_S = 4 * BEAT_S  # a process that beats would have been heard of by then
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Machines:
    """All processes of the run, seen from one of them. Use it as a context manager.

    A thread says every ``BEAT_S`` seconds that this process lives and listens to the others.

    Args:
        rank, count: of this process, and how many there are. With one, every call is trivial.
        store: shared by all processes; None with one.
        timeout_s: silence after which a process counts as lost.

    Attributes:
        trouble: what another process failed with, or that it is lost; None while all is well.
        signum: a signal that any process has received.
    """

    def __init__(
        self, rank: int = 0, count: int = 1, store: dist.Store | None = None, timeout_s: float = 0
    ) -> None:
        if not 0 <= rank < count or (store is None) != (count == 1):
            raise ValueError(f"process {rank} of {count} with store {store}")
        self.rank, self.count, self.store = rank, count, store
        self.timeout_s = timeout_s
        self.trouble: str | None = None
        self.signum: int | None = None
        self.progress: Callable[[], int] = lambda: 0
        self._others = [r for r in range(count) if r != rank]
        self._heard = dict.fromkeys(self._others, ("", time.monotonic()))
        self._ended: set[int] = set()
        self._compared = 0
        self._sent = 0
        self._received = dict.fromkeys(self._others, 0)
        self._close = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="machines", daemon=True)
        if store is not None:
            self._notes = dist.PrefixStore("machines", store.clone())  # type: ignore[attr-defined]

    @property
    def several(self) -> bool:
        return self.count > 1

    def __enter__(self) -> Machines:
        if self.several:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Tells the others how this process ended, unless one of them was the reason.

        The store may end with process 0: it gives the others time to read why.
        """
        if not self.several:
            return
        with contextlib.suppress(RuntimeError):  # the store may have gone before
            if error is not None and self.trouble is None:
                self._notes.set(f"failed/{self.rank}", str(error).partition("\n")[0] or repr(error))
            self._notes.set(f"end/{self.rank}", "")
            deadline = time.monotonic() + EXPLAIN_S
            ends = [f"end/{rank}" for rank in self._others]
            while self.rank == 0 and not self._notes.check(ends) and time.monotonic() < deadline:
                time.sleep(SLICE_S)
        self._close.set()
        self._thread.join(2 * BEAT_S)

    # -- agreeing ------------------------------------------------------------------------------

    def check_same(self, facts: Mapping[str, object]) -> None:
        """Compares facts, by the field that decides them, with all processes'.

        Raises:
            UserError: one differs.
            RunFailed: a process failed or is lost.
        """
        if not self.several:
            return
        self._compared += 1
        key = f"same/{self._compared}"
        mine = {field: str(value) for field, value in facts.items()}
        self._notes.set(f"{key}/{self.rank}", json.dumps(mine))
        for rank in range(self.count):
            theirs = json.loads(self._wait_for(f"{key}/{rank}", self._raise_trouble))
            for field, value in mine.items():
                if theirs[field] != value:
                    raise UserError(
                        f"{field}: found {value} in process {self.rank} of {self.count}, "
                        f"want {theirs[field]} as in process {rank}"
                    )

    def ending_signal(self, step: int, signum: int | None, check: Callable[[], None]) -> int | None:
        """The signal that ends the run before step ``step``, the same in every process, or None.

        Process 0 decides, when its first drafter comes to the step.

        Args:
            signum: a signal that this process knows of.
            check: called while waiting; raises when the run is ending.
        """
        if not self.several:
            return signum
        if self.rank == 0:
            self._notes.set(f"step/{step}", str(signum or 0))
            # The sum of its gradients is behind all: everyone has read it.
            self._notes.delete_key(f"step/{step - 1}")
            return signum
        return int(self._wait_for(f"step/{step}", check)) or None

    def watch(self, worker: Worker, supervisor: Supervisor) -> None:
        """A worker's body: passes signals on, ends the run with another process's trouble.

        Other processes' progress is this worker's, so that the watchdog does not take a wait for
        process 0's evaluation for a stall.
        """
        if self.several:
            self.progress = lambda: supervisor.beats() - worker.beats
        heard: dict[int, str] = {}
        while not supervisor.stop.wait(SLICE_S):
            if self.trouble is not None:
                supervisor.fail("machines", RunFailed(self.trouble))
                return
            supervisor.signum = supervisor.signum or self.signum
            if supervisor.signum is not None and self.signum is None:
                self.signum = supervisor.signum
                self._notes.set("signal", str(self.signum))
            progress = {rank: said.partition(" ")[2] for rank, (said, _) in self._heard.items()}
            if progress != heard:
                heard = progress
                worker.at("listening to the other processes")

    def explain(self, error: RunFailed) -> str:
        """The message of an error; if others caused it, which process and why."""
        if not self.several or not isinstance(
            error.__cause__, RunFailed | SyncError | dist.DistError
        ):
            return str(error)
        deadline = time.monotonic() + EXPLAIN_S
        while self.trouble is None and time.monotonic() < deadline:
            time.sleep(SLICE_S)
        if self.trouble is not None:
            return self.trouble
        silent = ", ".join(map(str, self._silent_for(EXPLAIN_S - BEAT_S)))
        return f"process {silent} of {self.count} is lost: {error}" if silent else str(error)

    # -- metrics -------------------------------------------------------------------------------

    def send(self, text: str) -> None:
        """Hands a text to process 0; an empty one is the last."""
        self._notes.set(f"mail/{self.rank}/{self._sent}", text)
        self._sent += 1

    def receive(self) -> Iterator[str]:
        """Process 0: the texts that have come since the last call."""
        for rank in self._others:
            while rank not in self._ended:
                key = f"mail/{rank}/{self._received[rank]}"
                if not self._notes.check([key]):
                    break
                text = self._notes.get(key).decode()
                self._notes.delete_key(key)
                self._received[rank] += 1
                if text:
                    yield text
                else:
                    self._ended.add(rank)

    @property
    def all_ended(self) -> bool:
        """Process 0: whether every other process has sent its last text."""
        return len(self._ended) == len(self._others)

    # -- private -------------------------------------------------------------------------------

    def _raise_trouble(self) -> None:
        if self.trouble is not None:
            raise RunFailed(self.trouble)

    def _wait_for(self, key: str, check: Callable[[], None]) -> str:
        # What has come counts, even from a process that has failed since.
        try:
            while not self._notes.check([key]):
                check()
                time.sleep(POLL_S)  # the store's own wait writes a warning each time that it ends
            return self._notes.get(key).decode()
        except dist.DistError as error:
            raise RunFailed(self._lost_store(error)) from error

    def _beat(self) -> None:
        number = 0
        while not self._close.wait(BEAT_S):
            number += 1
            try:
                self._notes.set(f"beat/{self.rank}", f"{number} {self.progress()}")
                self._listen()
            except RuntimeError as error:
                self.trouble = self._lost_store(error)
                return

    def _lost_store(self, error: RuntimeError) -> str:
        reason = str(error).partition("\n")[0]
        return f"process 0 of {self.count} is lost, or its store: {reason}"

    def _listen(self) -> None:
        now = time.monotonic()
        for rank in self._others:
            said = self._text(f"beat/{rank}")
            if said not in ("", self._heard[rank][0]) or self._notes.check([f"end/{rank}"]):
                self._heard[rank] = (said, now)
            if failure := self._text(f"failed/{rank}"):
                self.trouble = f"process {rank} of {self.count} failed: {failure}"
        if self.signum is None and (signum := self._text("signal")):
            self.signum = int(signum)
        for rank in self._silent_for(self.timeout_s):
            self.trouble = (
                f"process {rank} of {self.count} is lost: silent for {self.timeout_s:g} s"
            )

    def _silent_for(self, seconds: float) -> list[int]:
        now = time.monotonic()
        return [rank for rank, (_, heard) in self._heard.items() if now - heard > seconds]

    def _text(self, key: str) -> str:
        return self._notes.get(key).decode() if self._notes.check([key]) else ""


def _check_torchrun(env: Mapping[str, str]) -> None:
    """Refuse variables that torchrun would not set so."""
    limits = {"WORLD_SIZE": (2, 2**31), "MASTER_PORT": (1, 65535)}
    for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"):
        low, high = limits.get(name) or (0, int(env["WORLD_SIZE"]) - 1)
        if not env[name].isdecimal() or not low <= int(env[name]) <= high:
            raise UserError(
                f"{name} in the environment: found {env[name]!r}, want {low} to {high}, "
                "as torchrun sets it"
            )


def _reach(host: str, port: int, timeout_s: float) -> None:
    """Wait until process 0 listens; torch's own wait would end in pages of C++ frames."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def join_machines(timeout_s: float) -> Machines:
    """The processes that torchrun started, once all are there; without torchrun, this one alone.

    Raises:
        UserError: torchrun started several processes on this machine, or its variables are none.
        RunFailed: the others do not come within ``timeout_s``.
    """
    env = os.environ
    if any(name not in env for name in _TORCHRUN) or env["WORLD_SIZE"] == "1":
        return Machines()
    _check_torchrun(env)
    local = env.get("LOCAL_WORLD_SIZE", "1")
    if local != "1":
        raise UserError(
            f"torchrun --nproc-per-node: found {local}, want 1: "
            "topology.targets and topology.drafters list a machine's devices"
        )
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        if env["RANK"] != "0":
            _reach(env["MASTER_ADDR"], int(env["MASTER_PORT"]), timeout_s)
        store, rank, count = next(dist.rendezvous("env://", timeout=timeout))
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise RunFailed(
            f"process {env['RANK']} of {env['WORLD_SIZE']} cannot reach "
            f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}: {reason}"
        ) from error
    return Machines(rank, count, store, timeout_s)
