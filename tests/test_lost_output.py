"""Standard output that goes away, or was never there, ends no training."""

import os
import sys
from collections.abc import Callable
from typing import TextIO

import pytest
from tiny_run import TinyRun

from dflash_ext import command


def broken_pipe() -> TextIO:
    reading, writing = os.pipe()
    os.close(reading)
    return open(writing, "w")


def full_disk() -> TextIO:
    return open("/dev/full", "w")


class Terminal:
    """For the progress bar; breaks once it has been drawn."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self._reading: int | None = reading
        self._file = os.fdopen(writing, "w")

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if "training" in text and self._reading is not None:
            os.close(self._reading)
            self._reading = None
        return self._file.write(text)


def trains(run: TinyRun) -> None:
    assert run("a", "--data.eval=[]", "--train.steps=2", "--log.every=1") == 0
    folder = run.folder / "a"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert run.steps("a") == [2]
    assert (folder / "export").exists() and (folder / "summary.json").exists()


@pytest.mark.parametrize("lose", [broken_pipe, full_disk, Terminal])
def test_a_run_whose_output_goes_away_goes_on(
    lose: Callable[[], TextIO], run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    lost = lose()
    monkeypatch.setattr(sys, "stdout", lost)
    trains(run)
    lost.close()  # raises if anything is left in it that cannot be written


def test_so_does_one_that_never_had_any(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    trains(run)


@pytest.mark.parametrize("close", [lambda: None, broken_pipe])
def test_so_does_standard_error(
    close: Callable[[], TextIO | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", close())
    with command.losable_output():
        print("lost", file=sys.stderr, flush=True)


def test_checks_whose_output_is_lost_say_so(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have no other output."""
    with monkeypatch.context() as patch, pytest.raises(OSError), broken_pipe() as pipe:
        patch.setattr(sys, "stdout", pipe)
        assert run("a", "--check_data") == 1
    assert capsys.readouterr().err.startswith("error: output: Broken pipe")


def test_a_process_without_standard_output_can_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    command.leave(0)
    assert codes == [0]
