"""RunLogger: metrics.jsonl stays true through resumes and full disks; the console; the summary."""

import errno
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dflash_ext import logger as logger_module
from dflash_ext.config import Config, UserError
from dflash_ext.logger import (
    MetricsFile,
    RunLogger,
    duration,
    print_summary,
    read_metrics,
    write_summary,
)


def run_logger(
    run_dir: Path, total: int = 100, start: int = 0, terminal: bool = False
) -> tuple[RunLogger, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
    return RunLogger(Config(), run_dir, total, start, console=console), out


def test_rows_are_on_disk_as_soon_as_they_are_logged(tmp_path: Path) -> None:
    logger, _ = run_logger(tmp_path)
    for step in (10, 20):
        logger.log(step, {"loss": 1.5, "tokens": step})
        last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
        assert json.loads(last) == {"step": step, "loss": 1.5, "tokens": step}
    logger.close()
    logger.close()


def test_a_step_has_one_row(tmp_path: Path) -> None:
    logger, _ = run_logger(tmp_path)
    logger.log(0, {"eval_accept_len": 1.25})
    logger.log(10, {"loss": 2.0, "acc": 0.5})
    logger.log(10, {"eval_accept_len": 2.5})
    logger.log(20, {"loss": 1.0})
    logger.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 0, "eval_accept_len": 1.25},
        {"step": 10, "loss": 2.0, "acc": 0.5, "eval_accept_len": 2.5},
        {"step": 20, "loss": 1.0},
    ]


def test_a_step_that_goes_down_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    logger, _ = run_logger(tmp_path)
    logger.log(20, {"loss": 2.0})
    with pytest.raises(ValueError, match="step 10 comes after step 20"):
        logger.log(10, {"loss": 3.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 20, "loss": 2.0}]


def test_resume_cuts_off_what_comes_after_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger, _ = run_logger(tmp_path)
    for step in (10, 20, 30):
        logger.log(step, {"loss": float(step)})
    logger.close()
    with path.open("a") as file:
        file.write('{"step": 40, "lo')  # the crash
    logger, _ = run_logger(tmp_path, start=20)
    logger.log(20, {"eval_accept_len": 1.5})
    logger.log(30, {"loss": 0.5})
    logger.close()
    assert read_metrics(path) == [
        {"step": 10, "loss": 10.0},
        {"step": 20, "loss": 20.0, "eval_accept_len": 1.5},
        {"step": 30, "loss": 0.5},
    ]


def test_new_run_starts_a_new_file(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        logger, _ = run_logger(tmp_path)
        logger.log(0, {"loss": loss})
        logger.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": 2.0}]


def test_non_finite_numbers_are_null(tmp_path: Path) -> None:
    logger, _ = run_logger(tmp_path)
    logger.log(1, {"loss": float("nan"), "norm": float("inf"), "slots": [1.0, float("nan")]})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=refuse)
    assert row == {"step": 1, "loss": None, "norm": None, "slots": [1.0, None]}


@pytest.mark.parametrize("line", ["nonsense", "[1, 2]", '{"loss": 1.0}', '{"step": "x"}'])
def test_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(UserError) as error:
        read_metrics(path)
    assert str(error.value).startswith(f"{path}:2: found ")
    assert "\n" not in str(error.value)


class FullDisk:
    """A file that takes half of a row, like a disk that fills up, while ``full``."""

    def __init__(self, file: Any, *, silent: bool) -> None:
        self.file, self.silent, self.full = file, silent, True

    def write(self, data: bytes) -> int:
        if not self.full:
            return self.file.write(data)
        half = self.file.write(data[: len(data) // 2])
        if self.silent:
            return half
        raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("silent", [True, False])
def test_a_full_disk_costs_no_row_once_there_is_room(tmp_path: Path, silent: bool) -> None:
    logger, out = run_logger(tmp_path)
    logger.log(10, {"loss": 4.0})
    disk = FullDisk(logger._rows._file, silent=silent)
    logger._rows._file = disk  # type: ignore[assignment]
    for step in (20, 30):
        logger.log(step, {"loss": 3.0})
        assert read_metrics(tmp_path / "metrics.jsonl")[0] == {"step": 10, "loss": 4.0}
    assert out.getvalue().count("metrics.jsonl: cannot be written") == 1
    disk.full = False
    logger.log(40, {"loss": 1.0})
    assert "metrics.jsonl: can be written again" in out.getvalue()
    logger.log(40, {"eval_accept_len": 2.0})
    logger.log(50, {"loss": 0.5})
    logger.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 10, "loss": 4.0},
        {"step": 20, "loss": 3.0},
        {"step": 30, "loss": 3.0},
        {"step": 40, "loss": 1.0, "eval_accept_len": 2.0},
        {"step": 50, "loss": 0.5},
    ]


@pytest.mark.parametrize("in_time", [True, False])
def test_full_disk_while_a_row_grows_and_at_the_end(tmp_path: Path, in_time: bool) -> None:
    logger, out = run_logger(tmp_path)
    logger.log(10, {"loss": 3.0})
    logger.log(20, {"loss": 2.0})
    disk = FullDisk(logger._rows._file, silent=False)
    logger._rows._file = disk  # type: ignore[assignment]
    logger.log(20, {"eval_accept_len": 2.0})
    disk.full = not in_time
    logger.close()
    rows = [{"step": 10, "loss": 3.0}, {"step": 20, "loss": 2.0, "eval_accept_len": 2.0}]
    assert read_metrics(tmp_path / "metrics.jsonl") == rows[: 1 + in_time]
    assert ("its last 1 rows cannot be written" in out.getvalue()) is not in_time


def test_resume_survives_a_crash_while_it_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def crash(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        MetricsFile(path, 1)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(logger_module, "time", fake)
    return fake


def test_lines_come_every_ten_seconds_and_at_the_end(tmp_path: Path, clock: Clock) -> None:
    logger, out = run_logger(tmp_path, total=100)
    row = {"loss": 2.5, "acc": 0.125, "tokens_per_s": 1234.5}
    for step in range(0, 101, 10):  # 4 seconds each
        logger.progress(step, row)
        clock.now += 4.0
    logger.close()
    numbers = "loss 2.500  acc 0.125  1,234 tokens/s"
    assert out.getvalue().splitlines() == [
        f"step 0/100  {numbers}",
        f"step 30/100  {numbers}  28 s left",
        f"step 60/100  {numbers}  16 s left",
        f"step 90/100  {numbers}  4 s left",
        f"step 100/100  {numbers}",
    ]


def test_unmeasured_values_are_not_shown(tmp_path: Path) -> None:
    logger, out = run_logger(tmp_path)
    logger.progress(10, {"loss": 2.5, "tokens": 3})
    assert out.getvalue() == "step 10/100  loss 2.500\n"


def test_evaluation_is_always_said(tmp_path: Path, clock: Clock) -> None:
    logger, out = run_logger(tmp_path)
    for step in (0, 10):
        logger.log(step, {"eval_accept_len": 1.5 + step})
    assert out.getvalue().splitlines() == [
        "step 0: acceptance length 1.500",
        "step 10: acceptance length 11.500",
    ]


def test_terminal_shows_a_bar(tmp_path: Path) -> None:
    logger, out = run_logger(tmp_path, total=40, start=20, terminal=True)
    assert out.getvalue() == ""  # what may still fail at the start prints to a clean terminal
    logger.progress(30, {"loss": 2.5, "acc": 0.125})
    logger.note("a [bold]note[/bold]")
    logger.close()
    text = out.getvalue()
    assert "30/40" in text
    assert "loss 2.500  acc 0.125" in text
    assert "a [bold]note[/bold]" in text
    assert "step 30" not in text


def test_logging_costs_little(tmp_path: Path) -> None:
    logger, _ = run_logger(tmp_path, total=1000)
    row = {f"acc_{k}": 0.5 for k in range(40)}
    start = time.perf_counter()
    for step in range(500):
        logger.progress(step, row)
        logger.log(step, row)
    assert (time.perf_counter() - start) / 500 < 5e-3


SUMMARY = {
    "steps": 120,
    "tokens": 1_234_567,
    "seconds": 245.2,
    "tokens_per_s": 5035.4,
    "loss_first": 9.1234,
    "loss_last": 3.2,
    "accept_len_before": 1.0,
    "accept_len_after": 2.345,
    "accept_len_prompt_lookup": 1.512,
    "export": "runs/a/export",
    "evaluate": "python -m dflash_ext.evaluate --drafter runs/a/export --target T --data d.jsonl",
}


def printed(summary: dict[str, Any]) -> list[str]:
    out = io.StringIO()
    print_summary(summary, Console(file=out, width=40))
    return out.getvalue().splitlines()


def test_summary_for_a_reader() -> None:
    assert printed(SUMMARY) == [
        "",
        "trained           120 steps in 4:05 min",
        "tokens            1,234,567 (5,035 per second)",
        "loss              9.123 -> 3.200",
        "acceptance length 1.00 -> 2.35 tokens per target pass, on held-out text",
        "                  1.51 with prompt lookup, no drafter at all",
        "drafter           runs/a/export",
        f"evaluate it with  {SUMMARY['evaluate']}",
    ]


def test_summary_without_evaluation_invents_nothing() -> None:
    unknown = dict.fromkeys(("accept_len_before", "accept_len_after", "loss_first", "loss_last"))
    assert printed({"steps": 3, "seconds": 14.4, **unknown}) == [
        "",
        "trained           3 steps in 14 s",
    ]


def test_summary_json_is_replaced_whole(tmp_path: Path) -> None:
    write_summary(tmp_path, {"steps": 1, "loss_last": float("nan")})
    with pytest.raises(TypeError):
        write_summary(tmp_path, {"steps": 2, "loss_last": object()})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1, "loss_last": None}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (3599.7, "1:00:00 h"), (3723, "1:02:03 h")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
