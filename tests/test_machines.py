"""Runs of several processes, as on several machines: gloo and a TCP store on this one."""

import json
import multiprocessing
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import machine_process
import pytest
import torch.distributed as dist
from conftest import tiny_chats
from tiny_run import change_a_weight

from dflash_ext import train
from dflash_ext.command import run_command
from dflash_ext.config_values import UserError
from dflash_ext.machines import Machines, join_machines
from dflash_ext.supervisor import RunFailed

STEPS = 20
TIMEOUT_S = 60


class Runs:
    """Runs in one folder, all of the same text and target."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder = folder
        for name, n in (("train", 40), ("heldout", 2)):
            text = "".join(json.dumps(row) + "\n" for row in tiny_chats(n))
            (folder / f"{name}.jsonl").write_text(text)
        (folder / "config.yaml").write_text(
            f"""
model: {{target: {target}, dtype: float32}}
drafter: {{num_layers: 1, block_size: 4}}
data: {{train: [{folder}/train.jsonl], eval: [{folder}/heldout.jsonl], token_budget: 128}}
topology: {{targets: [cpu], drafters: [cpu, cpu], cpu_threads: 1}}
train: {{steps: {STEPS}, lr: 0.003, max_anchors: 8, metrics_every: 1, stall_timeout_s: {TIMEOUT_S}}}
checkpoint: {{every: 5}}
log: {{dir: {folder}, every: 1}}
"""
        )
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["machine_process"])

    def flags(self, name: str, *more: str) -> list[str]:
        return ["--config", str(self.folder / "config.yaml"), f"--log.name={name}", *more]

    def two(
        self, name: str, *flags: str, fate: tuple[int, int, int] | None = None, other: str = ""
    ) -> list[int]:
        """Exit codes of the two processes; `other` is a flag of the second one alone."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes = []
        for rank in range(2):
            mine = self.flags(name, *flags, *([other] if other and rank else []))
            arguments = (rank, port, self.folder, mine, fate)
            processes.append(self.context.Process(target=machine_process.main, args=arguments))
            processes[-1].start()
        ends = []
        for process in reversed(processes):
            process.join(5 * TIMEOUT_S)
            ends.append(time.monotonic())
        self.seconds_between_ends = ends[1] - ends[0]
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        return codes

    def stderr(self, rank: int) -> list[str]:
        return (self.folder / f"stderr_{rank}").read_text().splitlines()

    def hashes(self) -> list[str]:
        """Of the last run's drafters, by rank."""
        found: dict[str, str] = {}
        for rank in range(2):
            found |= json.loads((self.folder / f"weights_{rank}.json").read_text())
        return [found[str(rank)] for rank in range(4)]

    def rows(self, name: str) -> list[dict]:
        text = (self.folder / name / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("machines"), tiny_target_dir)


@pytest.fixture(scope="module")
def whole(runs: Runs) -> list[str]:
    """Hashes of the drafters of a run of two processes."""
    assert runs.two("whole") == [0, 0], runs.stderr(0) + runs.stderr(1)
    return runs.hashes()


def test_two_processes_train_what_one_trains(runs: Runs, whole: list[str]) -> None:
    assert len(whole) == 4 and len(set(whole)) == 1  # bit-identical on all ranks
    one = ["--topology.drafters=[cpu, cpu, cpu, cpu]"]
    assert run_command(lambda: train.main(runs.flags("one", *one))) == 0
    want, got = runs.rows("one"), runs.rows("whole")
    assert [row["step"] for row in got] == list(range(STEPS + 1))
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (got, want)]
    assert len(losses[0]) == STEPS
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name in ("tokens", "batches", "acc", "dropped_metrics"):  # sums over all processes
        assert [row.get(name) for row in got] == [row.get(name) for row in want]
    assert got[-1]["eval_accept_len"] == pytest.approx(want[-1]["eval_accept_len"], rel=1e-5)
    assert (runs.folder / "whole" / "export" / "model.safetensors").exists()


def test_a_lost_process_ends_the_run_and_a_restart_goes_on_exactly(
    runs: Runs, whole: list[str]
) -> None:
    codes = runs.two("parts", fate=(3, 8, signal.SIGKILL))
    assert codes == [1, -signal.SIGKILL]
    assert runs.seconds_between_ends < TIMEOUT_S
    last = runs.stderr(0)[-1]
    assert last.startswith("error: process 1 of 2 is lost: drafter ")

    # A signal in one process ends both behind the same step.
    codes = runs.two("parts", "--resume", fate=(2, 12, signal.SIGTERM))
    assert codes == [128 + signal.SIGTERM] * 2
    stopped = [(runs.folder / f"stdout_{rank}").read_text().splitlines()[-1] for rank in range(2)]
    assert stopped[0] == stopped[1] and "after step 1" in stopped[0]
    assert len(set(runs.hashes())) == 1

    assert runs.two("parts", "--resume") == [0, 0]
    assert runs.hashes() == whole
    names = ("step", "loss", "tokens")
    rows = [[[row.get(n) for n in names] for row in runs.rows(r)] for r in ("parts", "whole")]
    assert rows[0] == rows[1]


def test_processes_that_differ_are_refused(runs: Runs) -> None:
    assert runs.two("differ", other="--train.lr=0.004") == [2, 2]
    line = "error: train.lr: found {} in process {} of 2, want {} as in process {}"
    assert runs.stderr(0) == [line.format(0.003, 0, 0.004, 1)]
    assert runs.stderr(1) == [line.format(0.004, 1, 0.003, 0)]
    assert not (runs.folder / "differ" / "config.yaml").exists()


def test_processes_with_other_targets_are_refused(
    runs: Runs, tiny_target_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "target"
    shutil.copytree(tiny_target_dir, other)
    change_a_weight(other)
    assert runs.two("differ", other=f"--model.target={other}") == [2, 2]
    (line,) = runs.stderr(0)
    assert line.startswith("error: model.target: found weights with checksum ")
    assert "in process 0 of 2, want weights with checksum " in line


def pair(timeout_s: float) -> tuple[Machines, Machines]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return Machines(0, 2, store, timeout_s), Machines(1, 2, store, timeout_s)


def test_silence_is_noticed() -> None:
    one, _ = pair(timeout_s=1.5)
    threading.Timer(15, setattr, (one, "trouble", "nothing was noticed")).start()
    with one, pytest.raises(RunFailed, match="process 1 of 2 is lost: silent for 1.5 s"):
        one.check_same({"train.lr": 1})


def test_process_0_decides_where_a_signal_ends_the_run() -> None:
    one, two = pair(timeout_s=60)
    found: list[int | None] = []
    waiting = threading.Thread(
        target=lambda: found.append(two.ending_signal(3, None, lambda: None))
    )
    waiting.start()
    time.sleep(0.2)
    assert found == []
    assert one.ending_signal(3, None, lambda: None) is None
    waiting.join(10)
    assert found == [None]
    one.ending_signal(4, signal.SIGINT, lambda: None)
    # Its own signal comes too late for this step.
    assert two.ending_signal(4, signal.SIGTERM, lambda: None) == signal.SIGINT


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE in the environment: found '0', want 2 to"),
        ({"RANK": "2"}, "RANK in the environment: found '2', want 0 to 1, as torchrun sets it"),
        ({"RANK": "abc"}, "RANK in the environment: found 'abc', want 0 to 1"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT in the environment: found '99999', want 1 to"),
    ],
)
def test_variables_that_torchrun_would_not_set(
    change: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (variables | change).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=wanted):
        join_machines(1)


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """torch's own wait would end in pages of C++ frames on stderr."""
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunFailed, match=r"process 1 of 2 cannot reach 127\.0\.0\.1:1: .* refused"):
        join_machines(0.3)
    assert capfd.readouterr().err == ""


def test_one_process_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not join_machines(1).several
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(UserError, match="torchrun --nproc-per-node: found 2, want 1"):
        join_machines(1)
