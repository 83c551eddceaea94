"""Runs with seeded random faults, one behind the other in one process: what they leave in it."""

import gc
import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tiny_run import TinyRun

from dflash_ext.data.packing import BatchPlanner
from dflash_ext.drafter.loop import DrafterTrainLoop
from dflash_ext.logger import RunLogger
from dflash_ext.target import Target
from dflash_ext.target_loop import TargetForwardLoop

Patch = pytest.MonkeyPatch
STEPS = 4
FLAGS = [f"--train.steps={STEPS}", "--checkpoint.every=2", "--train.noise_std=0.01"]
WORKERS = {
    "prefetcher": (BatchPlanner, "step_plans"),
    "target": (TargetForwardLoop, "_fill"),
    "drafter": (DrafterTrainLoop, "_train_batch"),
    "monitor": (RunLogger, "log"),
}


def at_call(patch: Patch, owner: type, name: str, number: int, act: Callable[[Any], None]) -> None:
    """`act` gets the object before its method's call of that number."""
    original, calls = getattr(owner, name), [0]

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            act(self)
        return original(self, *args, **kwargs)

    patch.setattr(owner, name, patched)


def fail(_: Any) -> None:
    raise ZeroDivisionError("injected")


def send(loop: DrafterTrainLoop) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    while loop.supervisor.signum is None and not loop.supervisor.stop.is_set():
        time.sleep(0.001)


def nan_batch(patch: Patch) -> None:
    forward = Target.forward_capture

    def poisoned(self: Any, ids: Any, layers: Any, on_layer: Any, **kwargs: Any) -> Any:
        return forward(self, ids, layers, lambda i, h: on_layer(i, h * torch.nan), **kwargs)

    patch.setattr(Target, "forward_capture", poisoned)


@dataclass
class Chaos:
    """run() makes one run after the other; all that is random comes from the seed."""

    runs: TinyRun
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    curve: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.begin = time.monotonic()

    def run(self) -> None:
        fault = self.rng.choice([*WORKERS, "none", "nan", "disk", "signal", "damage", "stall"])
        flags = [*FLAGS, f"--checkpoint.async_save={self.rng.choice(['true', 'false'])}"]
        if self.rng.random() < 0.5:
            flags += ["--topology.drafters=[cpu, cpu]", "--topology.targets=[cpu, cpu]"]
        with pytest.MonkeyPatch.context() as patch:
            self.inject(fault, patch, flags)
            code = self.runs("soak", *flags)
        if fault == "damage":
            file = self.runs.folder / "soak/checkpoints/step_00000004/tensors.safetensors"
            file.write_bytes(file.read_bytes()[:-7])
        resumed = self.runs("soak", *flags, "--resume") if fault in ("damage", "signal") else None
        self.counts[f"{fault} -> {code}{'' if resumed is None else f', resumed -> {resumed}'}"] += 1
        shutil.rmtree(self.runs.folder / "soak")
        self.measure()

    def inject(self, fault: str, patch: Patch, flags: list[str]) -> None:
        number = self.rng.randint(1, 3)
        if fault in WORKERS:
            at_call(patch, *WORKERS[fault], number, fail)
        elif fault == "signal":
            at_call(patch, DrafterTrainLoop, "_train_step", number, send)
        elif fault == "stall":
            flags.append("--train.stall_timeout_s=0.5")
            at_call(patch, TargetForwardLoop, "_fill", number, lambda _: time.sleep(1.5))
        elif fault == "nan":
            flags.append("--train.max_nonfinite_steps=2")
            nan_batch(patch)
        elif fault == "disk":
            usage = namedtuple("usage", "total used free")
            patch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
            patch.setattr("dflash_ext.checkpoint.SAVE_AGAIN_S", 0.01)

    def measure(self) -> None:
        for _ in range(100):  # groups of drafters that failed part in the background
            if all(thread.name != "parting" for thread in threading.enumerate()):
                break
            time.sleep(0.1)
        gc.collect()
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        self.curve.append(
            {
                "seconds": round(time.monotonic() - self.begin, 1),
                "rss_mib": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
                "threads": len(os.listdir("/proc/self/task")),
                "handles": len(os.listdir("/proc/self/fd")),
                "tensors": sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()),
            }
        )

    def report(self) -> str:
        facts = {"seed": self.seed, "runs": len(self.curve), "outcomes": dict(self.counts)}
        return json.dumps({**facts, "curve": self.curve})
