"""W&B: real offline files, servers that do not answer, and a training that never notices."""

import json
import os
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_ext.config import UserError
from dflash_ext.wandb_sink import WandbSink

# -- the real thing, in a process of its own: W&B keeps global state ------------------------------

PROGRAM = """
    import functools, os, sys, time
    from pathlib import Path
    from dflash_ext import logger
    from dflash_ext.config import Config, run_command

    logger.WandbSink = functools.partial(logger.WandbSink, init_timeout_s=2.0)

    def main():
        cfg = Config()
        cfg.log.wandb, cfg.log.name = sys.argv[1], "trial"
        run_logger = logger.RunLogger(cfg, Path(sys.argv[2]), 30)
        slowest = 0.0
        for step, row in [(0, {"eval_accept_len": 1.0}), (10, {"loss": 2.0}),
                          (20, {"loss": 1.5}), (20, {"eval_accept_len": 2.0})]:
            start = time.perf_counter()
            run_logger.log(step, row)
            slowest = max(slowest, time.perf_counter() - start)
        run_logger.close({"steps": 20, "accept_len_after": 2.0})
        print("slowest", slowest)
        return 0

    code = run_command(main)
    sys.stdout.flush()
    os._exit(code)  # as the train command does: W&B's exit hook waits for the server
"""


def run_wandb(mode: str, run_dir: Path, **env: str) -> subprocess.CompletedProcess[str]:
    home = run_dir.parent / "home"
    home.mkdir(exist_ok=True)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    clean |= {"HOME": str(home), "NETRC": str(home / "netrc"), **env}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), mode, str(run_dir)],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean,
        stdin=subprocess.DEVNULL,
    )


def records(file: Path) -> list[Any]:
    """The protobuf records of a .wandb file: a LevelDB log after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    block, data, position, parts, found = 32768, file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left = block - position % block
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def history(file: Path) -> list[dict[str, Any]]:
    """The rows, without what W&B adds to them."""
    rows = []
    for record in records(file):
        if record.HasField("history"):
            items = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append({k: v for k, v in items.items() if not k.startswith("_")})
    return rows


ROWS = [
    {"step": 0, "eval_accept_len": 1.0},
    {"step": 10, "loss": 2.0},
    {"step": 20, "loss": 1.5},
    {"step": 20, "eval_accept_len": 2.0},
]


def test_offline_writes_all_rows_into_the_run_folder(tmp_path: Path) -> None:
    run_dir = tmp_path / "trial"
    done = run_wandb("offline", run_dir)
    assert done.returncode == 0, done.stderr
    (file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    assert history(file) == ROWS
    metrics = [r.metric for r in records(file) if r.HasField("metric")]
    assert {m.glob_name: m.step_metric for m in metrics if m.glob_name} == {"*": "step"}
    (run,) = [r.run for r in records(file) if r.HasField("run")][:1]
    assert (run.project, run.display_name, run.run_group) == ("dflash-ext", "trial", "trial")
    summary = {
        update.key or ".".join(update.nested_key): json.loads(update.value_json)
        for record in records(file)
        if record.HasField("summary")
        for update in record.summary.update
    }
    assert summary["accept_len_after"] == 2.0
    assert [p for p in (tmp_path / "home").rglob("*") if p.is_file()] == []
    # The second part of a resumed run lies beside the first one.
    assert run_wandb("offline", run_dir).returncode == 0
    assert len(list(run_dir.glob("wandb/offline-run-*/run-*.wandb"))) == 2


@pytest.mark.parametrize("server", ["refuses", "is silent"])
def test_online_without_a_server_records_offline(tmp_path: Path, server: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if server == "is silent":
            listener.listen(16)
        port = listener.getsockname()[1]
        done = run_wandb(
            "online",
            tmp_path / "trial",
            WANDB_BASE_URL=f"http://127.0.0.1:{port}",
            WANDB_API_KEY="0" * 40,
        )
    assert done.returncode == 0, done.stderr
    assert "recording offline, `wandb sync` uploads it later" in done.stdout
    assert float(done.stdout.split("slowest")[1]) < 0.5
    (file,) = (tmp_path / "trial").glob("wandb/offline-run-*/run-*.wandb")
    assert history(file) == ROWS
    assert len((tmp_path / "trial" / "metrics.jsonl").read_text().splitlines()) == 3


def test_online_without_credentials_is_refused(tmp_path: Path) -> None:
    done = run_wandb("online", tmp_path / "trial")
    assert done.returncode == 2
    assert "log.wandb: found online without credentials, want WANDB_API_KEY" in done.stderr
    assert not (tmp_path / "trial" / "metrics.jsonl").exists()


# -- a W&B that fails in every way ----------------------------------------------------------------


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

    def finish(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.finished = True


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRun]:
    def install(
        log: Callable[[dict[str, Any]], None] = lambda row: None,
        init_error: Exception | None = None,
    ) -> FakeRun:
        run = FakeRun(log)

        def init(**_: object) -> FakeRun:
            if init_error is not None:
                raise init_error
            return run

        module = SimpleNamespace(init=init, Settings=dict, login=lambda **_: True)
        monkeypatch.setitem(sys.modules, "wandb", module)
        monkeypatch.setenv("WANDB_CACHE_DIR", "x")
        monkeypatch.setenv("WANDB_DATA_DIR", "x")
        return run

    return install


def make_sink(folder: Path, notes: list[str], mode: str = "offline", **options: Any) -> WandbSink:
    return WandbSink(mode, "project", "name", folder, {"seed": 0}, notes.append, **options)


def test_one_thread_owns_the_run(tmp_path: Path, fake_wandb: Callable[..., FakeRun]) -> None:
    run, notes = fake_wandb(), []
    sink = make_sink(tmp_path, notes)
    for step in range(100):
        sink.log(step, {"loss": 1.0})
    sink.close({"steps": 100})
    assert [row["step"] for row in run.rows] == list(range(100))
    assert run.threads == {"wandb"}
    assert run.finished
    assert run.summary == {"steps": 100}
    assert notes == []


def test_errors_are_said_once_and_go_no_further(
    tmp_path: Path, fake_wandb: Callable[..., FakeRun]
) -> None:
    def refuse_even(row: dict[str, Any]) -> None:
        if row["step"] % 2 == 0:
            raise RuntimeError("dictionary changed size during iteration")

    run, notes = fake_wandb(refuse_even), []
    sink = make_sink(tmp_path, notes)
    for step in range(10):
        sink.log(step, {})
    sink.close()
    assert [row["step"] for row in run.rows] == [1, 3, 5, 7, 9]
    assert sink.dropped == 5
    assert notes[0] == "W&B failed to take a row: dictionary changed size during iteration"
    assert len(notes) == 2
    assert "5 rows" in notes[1]
    assert run.finished


def test_hanging_service_costs_rows_and_a_bounded_wait(
    tmp_path: Path, fake_wandb: Callable[..., FakeRun]
) -> None:
    forever = threading.Event()
    fake_wandb(lambda row: forever.wait(60) and None)
    notes: list[str] = []
    sink = make_sink(tmp_path, notes, finish_timeout_s=0.2, init_timeout_s=0.2, queue_rows=5)
    start = time.monotonic()
    for step in range(1000):
        sink.log(step, {"loss": 1.0})
    assert time.monotonic() - start < 1.0
    assert sink.dropped >= 1000 - 5 - 1
    sink.close()
    assert time.monotonic() - start < 5.0
    assert notes == ["W&B does not answer: left without its last rows, metrics.jsonl has them"]
    forever.set()


def test_init_that_fails_turns_the_sink_off(
    tmp_path: Path, fake_wandb: Callable[..., FakeRun]
) -> None:
    fake_wandb(init_error=OSError("disk quota exceeded\nmore"))
    notes: list[str] = []
    sink = make_sink(tmp_path, notes, queue_rows=5)
    for step in range(100):
        sink.log(step, {})
    sink.close()
    assert notes[0] == "W&B is off: disk quota exceeded"


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError) as error:
        make_sink(tmp_path, [])
    assert str(error.value) == (
        "log.wandb: found offline without wandb, want pip install 'dflash-ext[wandb]'"
    )
