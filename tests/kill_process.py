"""One training process to be killed, as `python -m dflash_ext.train` is one, without its imports.

A forkserver preloads this module: a process then starts in milliseconds, not seconds.
"""

import os
import sys
from pathlib import Path

import torch

from dflash_ext import train
from dflash_ext.config import run_command


def main(flags: list[str], output: Path) -> None:
    """Trains; `output` gets what it prints."""
    sys.stdout = sys.stderr = output.open("w")
    torch.set_num_threads(1)
    code = run_command(lambda: train.main(flags))
    sys.stdout.flush()
    os._exit(code)
