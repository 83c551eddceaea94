"""The folder of a run: it holds one run, and one training at a time writes there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from dflash_ext.checkpoint import CheckpointManager
from dflash_ext.config import CheckpointConfig
from dflash_ext.config_values import UserError
from dflash_ext.files import naming

LOCK = "lock"
CONFIG, METRICS = "config.yaml", "metrics.jsonl"
CHECKPOINTS, EXPORT = "checkpoints", "export"


@contextlib.contextmanager
def claim(run_dir: Path, resume: bool) -> Iterator[None]:
    """Hold the folder of a run, made if need be, against other trainings; free it at the end.

    The system frees it when the process dies, however it dies. A file system without locks is
    taken as it is.

    Raises:
        UserError: a training is under way there, or a run is there and `resume` is False.
        OSError: the folder cannot be written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / LOCK
    with open(path, "a+", encoding="utf-8", opener=_open_no_link) as file:
        if not _lock(file.fileno()):
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(
                f"log.name: found a training under way in {run_dir} ({holder}), "
                "want another name (--log.name NAME), or its end"
            )
        with naming(path):  # also finds out whether anything can be written there
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
        if not resume and has_run(run_dir):
            raise UserError(
                f"log.name: found a run in {run_dir}, want a new name "
                "(--log.name NAME), or --resume to go on with it"
            )
        yield


def has_run(run_dir: Path) -> bool:
    """Whether a run was begun there."""
    saved = CheckpointManager(run_dir / CHECKPOINTS, CheckpointConfig()).latest() is not None
    return saved or (run_dir / CONFIG).exists()


def _open_no_link(path: str, flags: int) -> int:
    """A link's file, which is emptied below, may be anyone's."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _lock(descriptor: int) -> bool:
    """False if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # ENOLCK, ENOTSUP, ...: some network file systems
        pass
    return True
