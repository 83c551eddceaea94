"""Weights & Biases as a sink that training never waits for.

``wandb.Run.log`` is not thread-safe and may hang with the disk, the network or its own service, so
one thread owns the run and takes rows from a bounded queue. What goes wrong in it is said once and
stays in it; metrics.jsonl has all rows in any case.
"""

from __future__ import annotations

import importlib
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from dflash_ext.config import UserError

QUEUE_ROWS = 1000
INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 30.0


class WandbSink:
    """One W&B run, fed by a thread of its own.

    A resumed training is a new W&B run in the same group: resuming does nothing for offline runs,
    and uploading two offline parts under one id overwrites the first.

    Args:
        mode: "online" or "offline". If the server cannot be reached at the start, an online run is
            recorded offline; ``wandb sync`` uploads it later.
        folder: where W&B keeps its files (in ``folder/wandb``).
        settings: the run's configuration, shown by W&B.
        note: takes a line for the user; called from the sink's thread.

    Raises:
        UserError: wandb is not installed, or "online" without credentials.
    """

    def __init__(
        self,
        mode: str,
        project: str,
        name: str,
        folder: Path,
        settings: Mapping[str, Any],
        note: Callable[[str], None],
        *,
        init_timeout_s: float = INIT_TIMEOUT_S,
        finish_timeout_s: float = FINISH_TIMEOUT_S,
        queue_rows: int = QUEUE_ROWS,
    ) -> None:
        self.dropped = 0
        self._note = note
        self._init_timeout_s, self._finish_timeout_s = init_timeout_s, finish_timeout_s
        self._run_args = {"project": project, "name": name, "group": name, "dir": str(folder)}
        self._config = dict(settings)
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(queue_rows)
        self._summary: dict[str, Any] = {}
        self._wandb = _import_wandb(mode, folder)
        self._thread = threading.Thread(target=self._serve, args=(mode,), name="wandb", daemon=True)
        self._thread.start()

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Queues a row; drops and counts it if the queue is full."""
        try:
            self._rows.put_nowait({"step": step, **row})
        except queue.Full:
            self.dropped += 1

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Hands over what is queued and ends the run, within the finish time-out."""
        self._summary = dict(summary or {})
        try:
            self._rows.put(None, timeout=self._finish_timeout_s)
            self._thread.join(self._init_timeout_s + 2 * self._finish_timeout_s)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._note("W&B does not answer: left without its last rows, metrics.jsonl has them")
        elif self.dropped:
            self._note(f"W&B was too slow: {self.dropped} rows dropped, metrics.jsonl has them")

    def _serve(self, mode: str) -> None:
        run = self._open(mode)
        failed = False
        while (row := self._rows.get()) is not None:
            if run is None:
                self.dropped += 1
                continue
            try:
                run.log(row)
            except Exception as error:
                self.dropped += 1
                if not failed:
                    self._note(f"W&B failed to take a row: {error}")
                failed = True
        if run is not None:
            try:
                run.summary.update(self._summary)
                run.finish()
            except Exception as error:
                self._note(f"W&B failed to finish: {error}")

    def _open(self, mode: str) -> Any:
        """The run, offline if the server does not answer, None if even that fails."""
        try:
            run = self._wandb.init(
                mode=mode,
                config=self._config,
                settings=self._wandb.Settings(
                    init_timeout=self._init_timeout_s,
                    finish_timeout=self._finish_timeout_s,
                    console="off",  # it would replace sys.stdout of the whole process
                    silent=True,
                    disable_git=True,
                    disable_code=True,
                    x_disable_stats=True,
                ),
                **self._run_args,
            )
            # Without an axis of our own, W&B silently drops rows whose step is not ascending.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            return run
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            if mode == "online":
                self._note(f"W&B: {reason}; recording offline, `wandb sync` uploads it later")
                return self._open("offline")
            self._note(f"W&B is off: {reason}")
            return None


def _import_wandb(mode: str, folder: Path) -> ModuleType:
    # Staging and logs of W&B go with the run, not into the home folder or /tmp.
    for name in ("CACHE", "DATA"):
        os.environ.setdefault(f"WANDB_{name}_DIR", str(folder / "wandb" / name.lower()))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        wandb = importlib.import_module("wandb")
    except ImportError:
        raise UserError(
            f"log.wandb: found {mode} without wandb, want pip install 'dflash-ext[wandb]'"
        ) from None
    if mode == "online":
        # A login that is not silent asks the server for the user's name, and waits for it.
        wandb.setup(wandb.Settings(silent=True))
        if not wandb.login(prompt=False, verify=False):
            raise UserError(
                "log.wandb: found online without credentials, want WANDB_API_KEY, `wandb login`, "
                "or log.wandb=offline"
            )
    return wandb
