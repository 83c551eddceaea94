"""Runs that are signalled at random moments, then resumed until they end, beside one left alone."""

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kill_process
from conftest import tiny_chats

STEPS = 12
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
LIMIT_S = 240
LATER = 1.2  # a signalled run may take longer than the one that was measured
# What a run trains, and the flags of it that change no bit.
KINDS = {
    "one drafter": [],
    "two drafters, two targets": [
        "--topology.drafters=[cpu, cpu]",
        "--topology.targets=[cpu, cpu]",
    ],
    "muon": ["--train.optimizer=muon"],
}
SAVES = ["--checkpoint.async_save=false", "--checkpoint.async_save=true"]
TIMES = ("_per_s", "_busy", "_wait", "queue_depth")  # ends of the names of what depends on time


@dataclass
class Ended:
    """What a run leaves, without what depends on time."""

    checkpoints: dict[str, str]
    files: set[str]
    rows: list[dict[str, Any]]
    summary: dict[str, Any]

    def __init__(self, folder: Path) -> None:
        saved = sorted(folder.glob("checkpoints/*/tensors.safetensors"))
        saved.append(folder / "export" / "model.safetensors")
        self.checkpoints = {str(p.relative_to(folder)): _sha256(p) for p in saved}
        self.files = {str(p.relative_to(folder)) for p in folder.rglob("*")}
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        self.rows = [{k: v for k, v in row.items() if not k.endswith(TIMES)} for row in rows]
        summary = json.loads((folder / "summary.json").read_text())
        names = ("steps", "tokens", "loss_first", "loss_last")
        self.summary = {name: summary[name] for name in names}
        self.summary |= {k: v for k, v in summary.items() if k.startswith("accept_len")}

    def beside(self, other: "Ended", name: str) -> Any:
        """What is compared: a stop between two checkpoints leaves one of its own, in place of the
        older one that is kept otherwise."""
        if name == "checkpoints":
            last = {f"checkpoints/step_{STEPS:08d}/tensors.safetensors", "export/model.safetensors"}
            names = last | (self.checkpoints.keys() & other.checkpoints.keys())
            return {path: self.checkpoints.get(path) for path in sorted(names)}
        if name == "files":
            return {path for path in self.files if not path.startswith("checkpoints/step_")}
        return getattr(self, name)

    def differences(self, other: "Ended") -> list[str]:
        """Where another run's remains differ from these."""
        steps = [row["step"] for row in other.rows]
        found = [] if steps == sorted(set(steps)) else [f"steps of metrics.jsonl: {steps}"]
        for name in ("checkpoints", "files", "summary"):
            mine, theirs = self.beside(other, name), other.beside(self, name)
            if mine != theirs:
                found.append(f"{name}: {theirs} instead of {mine}")
        by_step = [{row["step"]: row for row in ended.rows} for ended in (self, other)]
        for step in sorted(by_step[0].keys() | by_step[1].keys()):
            mine, theirs = (rows.get(step) for rows in by_step)
            if mine != theirs:
                found.append(f"row of step {step}: {theirs} instead of {mine}")
        return found


@dataclass
class Rounds:
    """Kills and resumes in one folder; `counts` says which signals came when.

    `python`: every how many rounds the processes are whole `python -m dflash_ext.train`.
    """

    folder: Path
    target: Path
    python: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _whole: dict[tuple[str, bool], tuple[Ended, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, n in (("train", 10), ("heldout", 2)):
            text = "".join(json.dumps(row) + "\n" for row in tiny_chats(n))
            (self.folder / f"{name}.jsonl").write_text(text)
        self.config = self.folder / "config.yaml"
        self.config.write_text(
            f"""
model: {{target: {self.target}, dtype: float32}}
drafter: {{num_layers: 1, block_size: 4}}
data: {{train: [{self.folder}/train.jsonl], eval: [{self.folder}/heldout.jsonl], token_budget: 200}}
topology: {{targets: [cpu], drafters: [cpu], cpu_threads: 1}}
train: {{steps: {STEPS}, lr: 0.003, max_anchors: 8, noise_std: 0.05, grad_accum: 2, eval_every: 4,
        metrics_every: 2, stall_timeout_s: 60}}
checkpoint: {{every: 3, keep: 2, keep_best: true}}
log: {{dir: {self.folder}, every: 1}}
"""
        )
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["kill_process"])

    def round(self, seed: int) -> list[str]:
        """One run, signalled one to three times, each time resumed, until it ends: what differs
        from a run of its kind that was left alone. All that is random comes from the seed."""
        rng = random.Random(seed)
        kind, python = rng.choice(list(KINDS)), bool(self.python) and seed % self.python == 0
        whole, seconds = self._left_alone(kind, python)
        name, flags = f"round{seed}", [*KINDS[kind], rng.choice(SAVES)]
        signals = [rng.choice(SIGNALS) for _ in range(rng.choice((1, 1, 2, 3)))]
        story, code = [f"seed {seed}", kind, flags[-1].removeprefix("--checkpoint.")], -1
        for i, signum in enumerate(signals):
            while True:
                moment = rng.uniform(0, LATER * seconds)
                code, in_time = self._process(name, flags, python, signum, moment)
                if i > 0 or in_time:
                    break
                shutil.rmtree(self.folder / name)  # a round has a signal: once more
            story.append(f"{signum.name} at {moment:.2f} s -> {code}")
            flags = [*flags, "--resume"] if "--resume" not in flags else flags
            if code == 0:
                break
        if code != 0:
            code, _ = self._process(name, flags, python)
            story.append(f"left alone -> {code}")
        print("; ".join(story))
        if code != 0:
            return ["\n".join([*story, self._output(name)])]
        found = whole.differences(Ended(self.folder / name))
        shutil.rmtree(self.folder / name)
        return found and [*story, *found]

    def killed_at(self, *steps: int) -> list[str]:
        """What differs if a run with one drafter is killed behind each of these steps."""
        whole, _ = self._left_alone("one drafter", False)
        name, flags = "killed", ["--config", str(self.config), "--log.name=killed", "--resume"]
        for step in steps:
            code = self._forked(flags, self.folder / "killed.out", step).wait(LIMIT_S)
            assert code == -signal.SIGKILL, self._output(name)
        code, _ = self._process(name, ["--resume"], False)
        assert code == 0, self._output(name)
        return whole.differences(Ended(self.folder / name))

    def _left_alone(self, kind: str, python: bool) -> tuple[Ended, float]:
        """What a run of this kind leaves, and how long it takes, in seconds."""
        with self._lock:
            return self._left_alone_once(kind, python)

    def _left_alone_once(self, kind: str, python: bool) -> tuple[Ended, float]:
        if (kind, python) not in self._whole:
            begin, name = time.monotonic(), kind.split(",")[0].replace(" ", "_") + str(python)
            code, _ = self._process(name, KINDS[kind], python)
            assert code == 0, self._output(name)
            seconds = time.monotonic() - begin
            self._whole[kind, python] = Ended(self.folder / name), seconds
        return self._whole[kind, python]

    def _process(
        self,
        name: str,
        flags: list[str],
        python: bool,
        signum: signal.Signals | None = None,
        moment: float = LIMIT_S,
    ) -> tuple[int, bool]:
        """Exit code of a run that gets a signal after `moment` seconds; whether it still ran."""
        flags = ["--config", str(self.config), f"--log.name={name}", *flags]
        output = self.folder / f"{name}.out"
        output.unlink(missing_ok=True)
        process = self._whole_python(flags, output) if python else self._forked(flags, output)
        code = process.wait(moment)
        in_time = code is None
        if code is None:
            assert signum is not None, f"no end after {LIMIT_S} s"
            os.kill(process.pid, signum)
            code = process.wait(LIMIT_S)
            assert code is not None, f"no end {LIMIT_S} s after {signum.name}"
            self._count(signum, name, output)
            # By the signal itself before the run handles it; Ctrl-C's exception before it begins.
            ends = {0, -signum, 128 + signum, *([1] if signum == signal.SIGINT and python else [])}
            assert code in ends or not output.exists(), f"{code}: {self._output(name)}"
        return code, in_time

    def _count(self, signum: signal.Signals, name: str, output: Path) -> None:
        """Which signal came in which part of a run's life."""
        begun = output.exists() and "\nthreads " in output.read_text()
        last = (self.folder / name / "checkpoints" / f"step_{STEPS:08d}").exists()
        phase = "end" if last and begun else "training" if begun else "start-up"
        self.counts[f"{signum.name} in {phase}"] += 1

    def _output(self, name: str) -> str:
        output = self.folder / f"{name}.out"
        return output.read_text() if output.exists() else ""

    def _forked(self, flags: list[str], output: Path, killed_at: int | None = None) -> "_Forked":
        arguments = (flags, output, killed_at)
        return _Forked(self._context.Process(target=kill_process.main, args=arguments))

    def _whole_python(self, flags: list[str], output: Path) -> "_WholePython":
        command = [sys.executable, "-m", "dflash_ext.train", *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with output.open("w") as file:
            return _WholePython(subprocess.Popen(command, stdout=file, stderr=file, env=env))


class _Forked:
    def __init__(self, process: Any) -> None:
        process.start()
        self._process, self.pid = process, process.pid

    def wait(self, seconds: float) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode


class _WholePython:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process, self.pid = process, process.pid

    def wait(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
