"""What a run says: metrics.jsonl (the truth), the console, and W&B.

``RunLogger`` is called by the monitor thread only, then closed. Training never waits for it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dflash_ext.config import Config, UserError, to_dict
from dflash_ext.files import replace_file
from dflash_ext.run_folder import METRICS
from dflash_ext.wandb_sink import WandbSink

Row = Mapping[str, Any]
PLAIN_EVERY_S = 10.0


class RunLogger:
    """Logs the rows of one run.

    Args:
        run_dir: gets ``metrics.jsonl``.
        total_steps: length of the whole run, earlier parts included.
        start_step: the step the run goes on from; later rows of an earlier part are cut off. None:
            it starts, without any rows.
        resume: whether the run goes on, and with it its W&B run.

    Raises:
        UserError: ``log.wandb`` is on and cannot work (see ``WandbSink``).
    """

    def __init__(
        self,
        cfg: Config,
        run_dir: Path,
        total_steps: int,
        start_step: int | None = None,
        *,
        resume: bool = False,
        console: Console | None = None,
    ) -> None:
        self._console = _Console(console or Console(), total_steps, start_step or 0)
        self._wandb: WandbSink | None = None
        if cfg.log.wandb != "off":
            self._wandb = WandbSink(
                cfg.log.wandb,
                cfg.log.wandb_project,
                cfg.log.name,
                run_dir,
                to_dict(cfg),
                self._console.note,
                resume=resume,
            )
        self._rows = MetricsFile(run_dir / METRICS, start_step)
        if self._rows.set_aside is not None:
            self.note(f"metrics.jsonl: the rows of before are kept in {self._rows.set_aside}")
        if self._wandb is not None:
            self._wandb.start()

    def log(self, step: int, row: Row) -> None:
        """Writes a row; one more for the same step joins the first. Steps never go down.

        Values are numbers or lists of them; a non-finite one is written as null.
        """
        missing = self._rows.unwritten
        try:
            self._rows.append(step, row)
            if missing:
                self._console.note("metrics.jsonl: can be written again, and holds all rows")
        except OSError as error:
            if not missing:
                self._console.note(f"metrics.jsonl: cannot be written, its rows wait: {error}")
        if "eval_accept_len" in row:
            self._console.note(f"step {step}: acceptance length {row['eval_accept_len']:.3f}")
        if self._wandb is not None:
            self._wandb.wake()

    def sync(self) -> None:
        """Returns when the rows written so far outlive a power cut; any thread."""
        with contextlib.suppress(OSError):  # a full disk was reported with the row
            self._rows.sync()

    def progress(self, step: int, row: Row) -> None:
        """Shows how far the run is; writes nothing to files."""
        self._console.progress(step, row)

    def note(self, line: str) -> None:
        """Prints a line for the user above the progress bar; any thread."""
        self._console.note(line)

    def close(self, summary: Row | None = None) -> None:
        """Ends all outputs; W&B within its time-out. A second call does nothing."""
        self._console.close()
        try:
            self._rows.close()
        except OSError as error:
            lost = self._rows.unwritten
            self._console.note(f"metrics.jsonl: its last {lost} rows cannot be written: {error}")
        if self._wandb is not None:
            sink, self._wandb = self._wandb, None
            sink.close(summary)


class MetricsFile:
    """metrics.jsonl: one JSON object per step, steps unique and ascending, each flushed.

    Rows that cannot be written are held, and written with the next one. Where a run begins again,
    the rows of before become the file ``set_aside``: its steps are counted from 0 again.
    """

    def __init__(self, path: Path, start_step: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = []
        self.set_aside = _set_aside(path) if start_step is None else None
        if start_step is not None and path.exists():
            rows = [row for row in read_metrics(path) if row["step"] <= start_step]
        replace_file(path, "".join(_json_line(row) for row in rows))
        # Unbuffered: after a write that failed, nothing is left behind that a later one would add.
        self._file = path.open("r+b", buffering=0)
        self._end = self._file.seek(0, os.SEEK_END)
        # The newest row, which may still grow, and those before it that are not in the file
        self._held = rows[-1:]
        self._start = self._end - len("".join(map(_json_line, self._held)).encode())
        self.unwritten = 0

    def append(self, step: int, row: Row) -> None:
        """Raises OSError if the file cannot be written."""
        last = self._held[-1]["step"] if self._held else -1
        if step < last:
            raise ValueError(f"step {step} comes after step {last}")
        if step == last:
            self._held[-1] |= row
        elif self.unwritten:
            self._held.append({"step": step, **row})
        else:
            self._held = [{"step": step, **row}]
            self._start = self._end
        self._write()

    def _write(self) -> None:
        self.unwritten = len(self._held)
        self._file.seek(self._start)
        self._file.truncate()
        lines = "".join(map(_json_line, self._held)).encode()
        if self._file.write(lines) != len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end = self._start + len(lines)
        self.unwritten = 0

    def sync(self) -> None:
        if not self._file.closed:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Raises OSError if rows are left that cannot be written."""
        try:
            if self.unwritten:
                self._write()
        finally:
            self._file.close()


def _set_aside(path: Path) -> Path | None:
    """The new name of a file with rows, metrics.1.jsonl if that is free."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    names = (path.with_name(f"{path.stem}.{i}{path.suffix}") for i in itertools.count(1))
    free = next(name for name in names if not name.exists())
    return path.rename(free)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, without a last line that a crash cut short.

    Raises:
        UserError: another line is not a row; names file and line.
    """
    rows = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            row["step"] = int(row["step"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise UserError(
                f"{path}:{number}: found {line.strip()[:60]!r}, want a JSON object with a step"
            ) from None
        rows.append(row)
    return rows


def write_summary(run_dir: Path, summary: Row) -> None:
    """Writes ``run_dir/summary.json`` in one piece or not at all."""
    replace_file(run_dir / "summary.json", json.dumps(_finite(summary), indent=2) + "\n")


def print_summary(summary: Row, console: Console | None = None) -> None:
    """Prints the end of a run for a reader: time, loss, acceptance, and what to do next.

    Takes summary.json's keys and, if known, ``accept_len_prompt_lookup``, ``export`` (the folder),
    ``evaluate`` and ``export_best`` (commands).
    """
    console = console or Console()

    def say(label: str, text: str) -> None:
        console.print(f"{label:<18}{text}", markup=False, highlight=False, soft_wrap=True)

    def known(*keys: str) -> bool:
        return all(summary.get(key) is not None for key in keys)

    console.print()
    say("trained", f"{summary['steps']} steps in {duration(summary['seconds'])}")
    if known("tokens", "tokens_per_s"):
        say("tokens", f"{summary['tokens']:,} ({summary['tokens_per_s']:,.0f} per second)")
    if known("balance"):
        say("balance", summary["balance"]["line"])
    if known("loss_first", "loss_last"):
        say("loss", f"{summary['loss_first']:.3f} -> {summary['loss_last']:.3f}")
    if known("accept_len_before", "accept_len_after"):
        before, after = summary["accept_len_before"], summary["accept_len_after"]
        say(
            "acceptance length",
            f"{before:.2f} -> {after:.2f} tokens per target pass, on held-out text",
        )
    if known("accept_len_prompt_lookup"):
        say("", f"{summary['accept_len_prompt_lookup']:.2f} with prompt lookup, no drafter at all")
    if known("export"):
        say("drafter", summary["export"])
    if known("evaluate"):
        say("evaluate it with", summary["evaluate"])
    if known("export_best"):
        say("export the best", summary["export_best"])


def duration(seconds: float) -> str:
    """14 s, 3:05 min or 1:02:03 h."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    if minutes == 0:
        return f"{whole} s"
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"


def _json_line(row: Row) -> str:
    return json.dumps(_finite(row)) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class _Console:
    """A progress bar on a terminal; else a line about every ``PLAIN_EVERY_S`` seconds."""

    def __init__(self, console: Console, total_steps: int, start_step: int) -> None:
        self._console, self._total = console, total_steps
        self._origin: tuple[int, float] | None = None
        self._last_line = -math.inf
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                console=console,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task("", total=total_steps, completed=start_step, text="")

    def progress(self, step: int, row: Row) -> None:
        now = time.monotonic()
        text = "  ".join([*_describe(row), *self._left(step, now)])
        if self._bar is not None:
            self._bar.start()
            self._bar.update(self._task, completed=step, text=text)
        elif now - self._last_line >= PLAIN_EVERY_S or step == self._total:
            self._last_line = now
            self.note(f"step {step}/{self._total}  {text}")

    def _left(self, step: int, now: float) -> list[str]:
        """Time left at the pace since the first call: what comes before it is start-up."""
        if self._origin is None:
            self._origin = step, now
        first_step, first_time = self._origin
        if step <= first_step or step >= self._total:
            return []
        left = (now - first_time) / (step - first_step) * (self._total - step)
        return [f"{duration(left)} left"]

    def note(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _describe(row: Row) -> list[str]:
    parts = []
    if "loss" in row:
        parts.append(f"loss {row['loss']:.3f}")
    if "acc" in row:
        parts.append(f"acc {row['acc']:.3f}")
    if "tokens_per_s" in row:
        parts.append(f"{row['tokens_per_s']:,.0f} tokens/s")
    if "target_wait" in row:
        parts.append(f"waits {row['target_wait']:.0%} target, {row['drafter_wait']:.0%} drafter")
    if "queue_depth" in row:
        parts.append(f"queue {row['queue_depth']}")
    return parts
