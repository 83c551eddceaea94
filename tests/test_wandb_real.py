"""W&B itself: its offline files, a server that is away, back, or that a killed run has left."""

import functools
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Self
from unittest.mock import ANY

import pytest
import wandb  # noqa: F401  for the children
from fake_wandb_server import FakeWandbServer

from dflash_ext import logger
from dflash_ext.command import run_command
from dflash_ext.config import Config
from dflash_ext.wandb_sink import WandbSink


def train(mode: str, folder: Path, rows: list[dict[str, Any]], start: int, ending: str) -> int:
    """Logs rows like a training that goes on from step `start`."""
    short = {"init_timeout_s": 2.0, "finish_timeout_s": 5.0, "first_wait_s": 0.1}
    logger.WandbSink = functools.partial(WandbSink, **short)  # type: ignore[misc]
    cfg = Config()
    cfg.log.wandb, cfg.log.name = mode, "trial"  # type: ignore[assignment]
    run_logger = logger.RunLogger(cfg, folder, 30, start or None, resume=start > 0)
    slowest = 0.0
    for row in rows:
        begin = time.perf_counter()
        run_logger.log(row["step"], {k: v for k, v in row.items() if k != "step"})
        slowest = max(slowest, time.perf_counter() - begin)
    print("slowest", slowest)
    while ending == "wait":  # for a signal
        time.sleep(0.1)
    run_logger.close({"steps": 20, "accept_len_after": 2.0})
    return 0


class Process:
    """``train(...)`` in a child, forked: it has torch and wandb already."""

    def __init__(self, *args: Any, env: dict[str, str]) -> None:
        self.file = args[1].parent / "output"
        self.pid = os.fork()
        if self.pid == 0:
            self._run(args, env)

    def _run(self, args: tuple[Any, ...], env: dict[str, str]) -> NoReturn:
        output = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
        for name in [name for name in os.environ if name.startswith("WANDB")]:
            del os.environ[name]
        os.environ |= env
        code = run_command(lambda: train(*args))
        os._exit(code)  # as the train command does: W&B's exit hook waits for the server

    def output(self) -> str:
        return self.file.read_text() if self.file.exists() else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid:
            self.kill()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        pid, self.pid = self.pid, 0
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


ROWS = [
    {"step": 0, "eval_accept_len": 1.0},
    {"step": 10, "loss": 2.0},
    {"step": 20, "loss": 1.5},
    {"step": 20, "eval_accept_len": 2.0},
]
MERGED = [*ROWS[:2], ROWS[2] | ROWS[3]]


def start_wandb(
    mode: str, run_dir: Path, rows: Any = ROWS, start: int = 0, ending: str = "close", **env: str
) -> Process:
    home = run_dir.parent / "home"
    home.mkdir(exist_ok=True)
    env |= {"HOME": str(home), "NETRC": str(home / "netrc")}
    return Process(mode, run_dir, rows, start, ending, env=env)


def run_wandb(*args: Any, **kwargs: Any) -> tuple[int, str]:
    with start_wandb(*args, **kwargs) as process:
        return process.wait(), process.output()


def steps_and_values(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Rows by step. A value that came twice is an error."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        values = {key: value for key, value in row.items() if key != "step"}
        before = found.setdefault(row["step"], {})
        assert not before.keys() & values.keys(), rows
        before |= values
    return found


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


def test_offline_writes_all_rows_into_the_run_folder(tmp_path: Path) -> None:
    run_dir = tmp_path / "trial"
    assert run_wandb("offline", run_dir) == (0, ANY)
    (file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    assert steps_and_values(history(file)) == steps_and_values(MERGED)
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
    # A resumed run: the part synced last replaces the others, so it holds all rows.
    more = [{"step": 20, "loss": 1.6}, {"step": 30, "loss": 1.0}]
    assert run_wandb("offline", run_dir, more, 10) == (0, ANY)
    (second,) = set(run_dir.glob("wandb/offline-run-*/run-*.wandb")) - {file}
    assert steps_and_values(history(second)) == steps_and_values([*MERGED[:2], *more])
    assert file.name == second.name  # it is named for the id


@pytest.mark.parametrize("server", ["refuses", "is silent"])
def test_online_without_a_server_records_offline(tmp_path: Path, server: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if server == "is silent":
            listener.listen(16)
        port = listener.getsockname()[1]
        code, output = run_wandb(
            "online",
            tmp_path / "trial",
            WANDB_BASE_URL=f"http://127.0.0.1:{port}",
            WANDB_API_KEY="0" * 40,
        )
    assert code == 0
    assert "its rows wait in metrics.jsonl" in output
    assert "W&B: recorded offline, `wandb sync` uploads it later" in output
    assert float(output.split("slowest")[1].split()[0]) < 0.5
    (file,) = (tmp_path / "trial").glob("wandb/offline-run-*/run-*.wandb")
    assert steps_and_values(history(file)) == steps_and_values(MERGED)
    assert len((tmp_path / "trial" / "metrics.jsonl").read_text().splitlines()) == 3


def test_online_without_credentials_is_refused(tmp_path: Path) -> None:
    code, output = run_wandb("online", tmp_path / "trial")
    assert code == 2
    assert "log.wandb: found online without credentials, want WANDB_API_KEY" in output
    assert not (tmp_path / "trial" / "metrics.jsonl").exists()


@pytest.fixture
def server() -> Iterator[FakeWandbServer]:
    server = FakeWandbServer()
    yield server
    server.close()


def online(server: FakeWandbServer) -> dict[str, str]:
    return {
        "WANDB_BASE_URL": server.url,
        "WANDB_API_KEY": "0" * 40,
        "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "0.1",
    }


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_killed_behind_its_checkpoint_goes_on_without_a_row_twice(
    tmp_path: Path, server: FakeWandbServer
) -> None:
    with start_wandb("online", tmp_path / "trial", ending="wait", **online(server)):
        wait_until(lambda: any(r.summary.get("step") == 20 for r in server.runs.values()))
    (run,) = server.runs.values()
    # Its last checkpoint was that of step 10; step 20 is made again, and is there already.
    more = [{"step": 20, "loss": 1.6}, {"step": 30, "loss": 1.0}]
    assert run_wandb("online", tmp_path / "trial", more, 10, **online(server)) == (0, ANY)
    assert list(server.runs) == [run.name]
    assert steps_and_values(run.rows()) == steps_and_values([*MERGED, more[1]])
    assert [row["_step"] for row in run.history] == list(range(len(run.history)))
    assert run.summary["step"] == 30 and run.summary["accept_len_after"] == 2.0


def test_a_server_that_is_back_gets_all_rows(tmp_path: Path, server: FakeWandbServer) -> None:
    server.status = 403  # as when out of quota
    with start_wandb("online", tmp_path / "trial", ending="wait", **online(server)) as process:
        wait_until(lambda: "its rows wait in metrics.jsonl" in process.output())
        server.status = 200
        wait_until(lambda: any(r.summary.get("step") == 20 for r in server.runs.values()))
    assert "W&B answers again" in process.output()
    (run,) = server.runs.values()
    assert steps_and_values(run.rows()) == steps_and_values(MERGED)
