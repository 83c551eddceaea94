"""A pytest run in a process of its own that need not import torch and transformers again."""

import os
import sys
from pathlib import Path

import pytest

import dflash_ext.train  # noqa: F401  (preloaded by the server that the process is forked from)


def main(arguments: list[str], output: Path) -> None:
    """Runs pytest; what it says goes into `output`."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        code = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(code)
