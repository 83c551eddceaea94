"""One process of a run on several machines, as torchrun would start it, for test_machines.py."""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import fault_switches
import torch
from torch import nn

from dflash_ext import train
from dflash_ext.command import run_command
from dflash_ext.drafter.loop import DrafterTrainLoop
from dflash_ext.pipeline import Pipeline


def main(
    rank: int, port: int, folder: Path, flags: list[str], fate: tuple[int, int, int] | None
) -> None:
    """Trains; leaves `weights_RANK.json`, a hash per drafter, and `stderr_RANK`.

    fate: (drafter's rank, step, signal): what the drafter's process sends itself behind that
        step. No drafter goes on before its process has heard of a signal that it survives.
    """
    here = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in here.items()})
    sys.stdout = (folder / f"stdout_{rank}").open("w")
    sys.stderr = (folder / f"stderr_{rank}").open("w")
    torch.set_num_threads(1)
    fault_switches.turn_off_in_child()
    run, publish = Pipeline.run, DrafterTrainLoop._publish

    def run_and_hash(self, logger):
        monitor = run(self, logger)
        hashes = {loop.rank: hash_of(loop.model) for loop in self.drafter_loops}
        (folder / f"weights_{rank}.json").write_text(json.dumps(hashes))
        return monitor

    def publish_and_signal(self, done, stopping=False):
        publish(self, done, stopping)
        if fate is None or done != fate[1] or stopping:
            return
        if self.rank == fate[0]:
            os.kill(os.getpid(), fate[2])
        while fate[2] != signal.SIGKILL and self.supervisor.signum is None:
            time.sleep(0.01)

    Pipeline.run, DrafterTrainLoop._publish = run_and_hash, publish_and_signal
    code = run_command(lambda: train.main(flags))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def hash_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()
