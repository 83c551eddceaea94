"""A W&B that fails in every way, and a training that never notices."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_ext import logger
from dflash_ext.config import UserError
from dflash_ext.wandb_sink import WandbSink


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class FakeRun:
    def __init__(self, log: Callable[[dict[str, Any]], None]) -> None:
        self._log = log
        self.rows: list[dict[str, Any]] = []
        self.threads: set[str] = set()
        self.summary: dict[str, Any] = {}
        self.finished = False

    def define_metric(self, *_: str, **__: str) -> None:
        self.threads.add(threading.current_thread().name)

    def log(self, row: dict[str, Any]) -> None:
        self.threads.add(threading.current_thread().name)
        self._log(row)
        self.rows.append(row)
        self.summary["step"] = row["step"]  # as the server's, which a resumed run begins with

    def finish(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.finished = True


class FakeWandb:
    """The module. One run online, and one for each time that it is opened offline."""

    def __init__(
        self, log: Callable[[dict[str, Any]], None], init_errors: dict[str, list[Exception]]
    ) -> None:
        self.run, self.offline_runs = FakeRun(log), []
        self.init_errors, self.modes = init_errors, []
        self.Settings = dict

    def init(self, mode: str, **_: object) -> FakeRun:
        self.modes.append(mode)
        if errors := self.init_errors.get(mode):
            raise errors.pop(0)
        if mode == "online":
            return self.run
        self.offline_runs.append(FakeRun(lambda row: None))
        return self.offline_runs[-1]

    def login(self, **_: object) -> bool:
        return True

    def setup(self, *_: object) -> None:
        pass

    def teardown(self) -> None:
        pass


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeWandb]:
    def install(
        log: Callable[[dict[str, Any]], None] = lambda row: None, **init_errors: list[Exception]
    ) -> FakeWandb:
        module = FakeWandb(log, init_errors)
        monkeypatch.setitem(sys.modules, "wandb", module)  # type: ignore[arg-type]
        monkeypatch.setenv("WANDB_CACHE_DIR", "x")
        monkeypatch.setenv("WANDB_DATA_DIR", "x")
        return module

    return install


class Training:
    """A metrics.jsonl and its sink."""

    def __init__(self, folder: Path, mode: str = "online", start: int = 0, **options: Any) -> None:
        self.notes: list[str] = []
        fixed = (mode, "project", "name", folder, {"seed": 0}, self.notes.append)
        options = {"first_wait_s": 0.01, "resume": start > 0, **options}
        self.sink = WandbSink(*fixed, **options)
        self.file = logger.MetricsFile(folder / "metrics.jsonl", start or None)
        self.sink.start()

    def log(self, step: int, row: dict[str, Any]) -> None:
        self.file.append(step, row)
        self.sink.wake()

    def close(self, summary: dict[str, Any] | None = None) -> None:
        self.file.close()
        self.sink.close(summary)


def rows_of(steps: range) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 1.0} for step in steps]


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_one_thread_owns_the_run(
    tmp_path: Path, fake_wandb: Callable[..., FakeWandb], mode: str
) -> None:
    module = fake_wandb()
    training = Training(tmp_path, mode)
    for step in range(100):
        training.log(step, {"loss": 1.0})
    training.close({"steps": 100})
    (run,) = module.offline_runs if mode == "offline" else [module.run]
    assert run.rows == rows_of(range(100))
    assert run.threads == {"wandb"} and run.finished
    assert run.summary == {"step": 99, "steps": 100}
    assert training.notes == []


def test_a_row_that_grows_is_handed_over_once(
    tmp_path: Path, fake_wandb: Callable[..., FakeWandb]
) -> None:
    module = fake_wandb()
    training = Training(tmp_path)
    training.log(10, {"loss": 1.0})
    wait_until(lambda: len(module.run.rows) == 1)
    training.log(10, {"eval_accept_len": 2.0})
    training.log(20, {"loss": 0.5})
    training.close()
    assert module.run.rows == [
        {"step": 10, "loss": 1.0},
        {"step": 10, "eval_accept_len": 2.0},
        {"step": 20, "loss": 0.5},
    ]


def test_a_service_that_dies_is_started_again_and_loses_nothing(
    tmp_path: Path, fake_wandb: Callable[..., FakeWandb]
) -> None:
    failures: list[int] = []

    def fail_at_times(row: dict[str, Any]) -> None:
        if row["step"] % 3 == 0 and row["step"] not in failures:
            failures.append(row["step"])
            raise RuntimeError("dictionary changed size during iteration")

    module = fake_wandb(fail_at_times, online=[OSError("no route to host\nmore")])
    training = Training(tmp_path)
    for step in range(10):
        training.log(step, {"loss": 1.0})
    wait_until(lambda: len(module.run.rows) == 10)
    training.close()
    assert module.run.rows == rows_of(range(10)) and len(failures) == 4
    assert training.notes[0] == "W&B: no route to host; its rows wait in metrics.jsonl"
    assert "W&B answers again and gets the rows that it has missed" in training.notes
    assert module.run.finished and module.offline_runs == []


def test_a_resumed_run_sends_what_the_server_does_not_have(
    tmp_path: Path, fake_wandb: Callable[..., FakeWandb]
) -> None:
    module = fake_wandb()
    training = Training(tmp_path)
    for step in range(6):
        training.log(step, {"loss": 1.0})
    wait_until(lambda: len(module.run.rows) == 6)
    known = (tmp_path / "wandb_run_id").read_text()
    for lost, start in ((0, 3), (3, 5)):  # killed behind a checkpoint; rows that never got there
        del module.run.rows[6 - lost :]
        module.run.summary["step"] = 5 - lost
        training = Training(tmp_path, start=start)
        for step in range(start + 1, 8):
            training.log(step, {"loss": 1.0})
        training.close()
        assert module.run.rows == rows_of(range(8))
        assert (tmp_path / "wandb_run_id").read_text() == known
    Training(tmp_path).close()  # another run in an old folder
    assert (tmp_path / "wandb_run_id").read_text() != known


def test_a_server_that_never_answers_leaves_an_offline_record(
    tmp_path: Path, fake_wandb: Callable[..., FakeWandb]
) -> None:
    module = fake_wandb(online=[OSError("no route to host")] * 1000)
    training = Training(tmp_path)
    for step in range(10):
        training.log(step, {"loss": 1.0})
    training.close({"steps": 9})
    (run,) = module.offline_runs
    assert run.rows == rows_of(range(10)) and run.finished and run.summary["steps"] == 9
    assert training.notes == [
        "W&B: no route to host; its rows wait in metrics.jsonl",
        "W&B: recorded offline, `wandb sync` uploads it later",
    ]


def test_hanging_service_costs_a_bounded_wait(
    tmp_path: Path, fake_wandb: Callable[..., FakeWandb]
) -> None:
    forever = threading.Event()
    fake_wandb(lambda row: forever.wait(60) and None)
    training = Training(tmp_path, finish_timeout_s=0.2, init_timeout_s=0.2)
    start = time.monotonic()
    for step in range(100):
        begin = time.monotonic()
        training.log(step, {"loss": 1.0})
        assert time.monotonic() - begin < 0.5
    training.close()
    assert time.monotonic() - start < 10.0
    notes = ["W&B does not answer: left without its last rows, metrics.jsonl has them"]
    assert training.notes == notes
    forever.set()


def test_a_disk_that_wandb_cannot_use_ends_in_a_note(
    tmp_path: Path, fake_wandb: Callable[..., FakeWandb]
) -> None:
    fake_wandb(offline=[OSError("disk quota exceeded\nmore")] * 1000)
    training = Training(tmp_path, "offline")
    training.log(0, {"loss": 1.0})
    training.close()
    assert training.notes == [
        "W&B: disk quota exceeded; its rows wait in metrics.jsonl",
        "W&B has no record of this run (disk quota exceeded), metrics.jsonl has it",
    ]


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError) as error:
        Training(tmp_path, "offline")
    assert str(error.value) == (
        "log.wandb: found offline without wandb, want pip install 'dflash-ext[wandb]'"
    )
