"""One training process to be killed, as `python -m dflash_ext.train` is one, without its imports.

A forkserver preloads this module: a process then starts in milliseconds, not seconds.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from fault_switches import turn_off_in_child

from dflash_ext import train
from dflash_ext.command import run_command
from dflash_ext.drafter.loop import DrafterTrainLoop


def main(flags: list[str], output: Path, killed_at: int | None = None) -> None:
    """Trains; `output` gets what it prints. killed_at: it kills itself behind that step."""
    sys.stdout = sys.stderr = output.open("w")
    torch.set_num_threads(1)
    turn_off_in_child()
    if killed_at is not None:
        _kill_behind(killed_at)
    code = run_command(lambda: train.main(flags))
    sys.stdout.flush()
    os._exit(code)


def _kill_behind(step: int) -> None:
    publish = DrafterTrainLoop._publish

    def publish_and_die(self: DrafterTrainLoop, done: int, stopping: bool = False) -> None:
        publish(self, done, stopping)
        if done == step:
            os.kill(os.getpid(), signal.SIGKILL)

    DrafterTrainLoop._publish = publish_and_die
