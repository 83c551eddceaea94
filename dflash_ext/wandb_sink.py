"""Weights & Biases as a sink that training never waits for.

``wandb.Run.log`` is not thread-safe and may hang with the disk, the network or its own service, so
one thread owns the run. It is fed from metrics.jsonl, which holds every row: whatever W&B has
missed, because it was slow, away, or killed with the training, is read there and handed over later.
What goes wrong is said once and stays in that thread.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from dflash_ext.config import UserError
from dflash_ext.files import replace_file
from dflash_ext.run_folder import METRICS

RUN_ID = "wandb_run_id"
INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 30.0
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 300.0  # between tries to reach the service


class WandbSink:
    """One W&B run, fed by a thread of its own with the rows of ``folder/metrics.jsonl``.

    A resumed training goes on with the same run: what the server already has of the rows is not
    sent again, also where the training was killed behind its last checkpoint. An offline part holds
    all rows from the first one on, because ``wandb sync`` replaces a run by the part synced last.

    Args:
        mode: "online" or "offline". If the server cannot be reached, an online run is tried again
            until the end of the training, then recorded offline for ``wandb sync``.
        folder: the run's; W&B keeps its files in ``folder/wandb``.
        settings: the run's configuration, shown by W&B.
        note: takes a line for the user; called from the sink's thread.
        resume: go on with the W&B run of this folder, if it has one.

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
        resume: bool = False,
        init_timeout_s: float = INIT_TIMEOUT_S,
        finish_timeout_s: float = FINISH_TIMEOUT_S,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        self._mode, self._note, self._first_wait_s = mode, note, first_wait_s
        self._init_timeout_s, self._finish_timeout_s = init_timeout_s, finish_timeout_s
        self._rows = folder / METRICS
        self._config = dict(settings)
        self._summary: dict[str, Any] = {}
        self._news, self._ended = threading.Event(), threading.Event()
        self._wandb = _import_wandb(mode, folder)
        self._run_args = {"project": project, "name": name, "group": name, "dir": str(folder)}
        self._run_args["id"] = _run_id(folder / RUN_ID, resume)
        self._thread = threading.Thread(target=self._serve, name="wandb", daemon=True)

    def start(self) -> None:
        """Begins to hand over rows; metrics.jsonl must be there."""
        self._thread.start()

    def wake(self) -> None:
        """Says that metrics.jsonl has grown."""
        self._news.set()

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Hands over what is left and ends the run, within the time-outs."""
        self._summary = dict(summary or {})
        self._ended.set()
        self._news.set()
        self._thread.join(self._init_timeout_s + 2 * self._finish_timeout_s)
        if self._thread.is_alive():
            self._note("W&B does not answer: left without its last rows, metrics.jsonl has them")

    def _serve(self) -> None:
        """Opens the run and feeds it; where that fails, again after growing waits."""
        wait, troubled = self._first_wait_s, False
        while not self._ended.is_set():
            try:
                run = self._open(self._mode)
                if troubled:
                    self._note("W&B answers again and gets the rows that it has missed")
                wait, troubled = self._first_wait_s, False
                return self._feed(run)
            except Exception as error:
                if not troubled:
                    self._note(f"W&B: {_reason(error)}; its rows wait in metrics.jsonl")
                troubled = True
                self._forget()
            self._ended.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)
        try:
            self._feed(self._open("offline"))
            self._note("W&B: recorded offline, `wandb sync` uploads it later")
        except Exception as error:
            self._note(f"W&B has no record of this run ({_reason(error)}), metrics.jsonl has it")

    def _open(self, mode: str) -> Any:
        """The run. Raises whatever wandb raises."""
        self._wandb.setup(self._wandb.Settings(silent=True))
        run = self._wandb.init(
            mode=mode,
            resume="allow" if mode == "online" else None,
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

    def _feed(self, run: Any) -> None:
        """Hands over rows, first those that the server does not have, until the training ends."""
        last = run.summary.get("step")
        rows = _Rows(self._rows, after=last if isinstance(last, int) else -1)
        while True:
            ended = self._ended.is_set()  # all rows are there then
            self._news.clear()
            for row in rows.new():
                run.log(row)
            if ended:
                break
            self._news.wait()
        run.summary.update(self._summary)
        run.finish()

    def _forget(self) -> None:
        """Ends W&B's own process: it would refuse to open the run a second time."""
        with contextlib.suppress(Exception):
            self._wandb.teardown()


class _Rows:
    """The rows of a metrics.jsonl that is being written, each once.

    Args:
        after: rows up to this step are left out.
    """

    def __init__(self, path: Path, after: int) -> None:
        self._path, self._after = path, after
        self._start = 0  # of the line of `_row`, which may still grow
        self._row: dict[str, Any] = {}

    def new(self) -> Iterator[dict[str, Any]]:
        """What has come since the last call; of a row that grew, the new values and the step."""
        with self._path.open("rb") as file:
            start = file.seek(self._start)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    return
                row = json.loads(line)
                known = self._row if row["step"] == self._row.get("step") else {}
                fresh = {key: value for key, value in row.items() if key not in known}
                if row["step"] > self._after and fresh:
                    yield {"step": row["step"], **fresh}
                self._start, self._row = start, row
                start += len(line)


def _run_id(path: Path, resume: bool) -> str:
    """The id of the folder's W&B run; a new one for a run that begins."""
    if resume:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if (known := path.read_text(encoding="utf-8").strip()).isalnum():
                return known
    fresh = secrets.token_hex(4)
    replace_file(path, fresh + "\n")
    return fresh


def _reason(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


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
