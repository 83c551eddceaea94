"""Checkpoints that are either complete and verified, or not there.

    checkpoints/step_00000100/tensors.safetensors   every tensor of the run's state
                              meta.json             step, counters, configuration, hashes
                              manifest.json         size and SHA-256 of the two files above
    checkpoints/latest                              the name of the newest complete folder

A folder is written as ``step_….tmp``, flushed to the disk file by file, and only then renamed, so a
crash at any point leaves the previous checkpoint as it was. Nothing that is read can execute code.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_ext.config import CheckpointConfig, UserError
from dflash_ext.files import sha256_of
from dflash_ext.files import sync as _fsync

FORMAT_VERSION = 1
TENSORS, META, MANIFEST, LATEST = "tensors.safetensors", "meta.json", "manifest.json", "latest"
MAX_FAILED_SAVES = 3  # in a row; a full disk may be a passing thing, losing a whole run is not
SAVE_AGAIN_S = 10.0  # between the tries of the last save
FREE_SPACE_FACTOR = 1.3

_log = logging.getLogger(__name__)
_STEP_DIR = re.compile(r"step_(\d{8,})")


class DamagedError(Exception):
    """A checkpoint that is not what its manifest says; the message says in what."""


class SaveError(RuntimeError):
    """A checkpoint that could not be saved, in several tries; the message names step and reason."""


class CheckpointManager:
    """Saves and loads the checkpoints of one run.

    Loading changes nothing on the disk, so a running training may be read. One manager at a time
    may save into a folder.

    Args:
        folder: the run's ``checkpoints`` folder; made by the first save.
        cfg: ``keep`` newest are kept (``keep_best``: and the one with the highest score);
            ``async_save`` writes in a thread, one save at a time.
        before_rename: called with the step when all of a checkpoint is written, right before it
            counts: for what must not be older than the checkpoint.
    """

    def __init__(
        self,
        folder: str | Path,
        cfg: CheckpointConfig,
        before_rename: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.folder, self.cfg = Path(folder), cfg
        self._before_rename = before_rename
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        self._failed_saves = 0
        self._unsaved: tuple[int, dict[str, Tensor], str] | None = None
        self._damaged: set[int] = set()
        self._swept = False

    # -- saving --------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        meta: dict[str, Any],
        score: float | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Write checkpoint ``step``, replacing one of the same step, then drop old ones.

        With ``async_save`` the tensors are copied before this returns; the rest happens in a
        thread, whose error is raised by the next ``save`` or ``close``. A save that fails for lack
        of space or another operating-system error is only reported, up to ``MAX_FAILED_SAVES`` in
        a row; then SaveError is raised.

        Args:
            tensors: name -> tensor, any device; aliases of one storage are stored separately.
            meta: JSON values; comes back from ``load`` with ``step`` and ``score`` set.
            score: what ``keep_best`` compares; higher is better.
            last: no other save follows: should this one fail, ``close`` tries it again.
        """
        self._join()
        self._unsaved = None
        host = _host_tensors(tensors, copy=self.cfg.async_save)
        text = json.dumps({**meta, "format_version": FORMAT_VERSION, "step": step, "score": score})
        if not self.cfg.async_save:
            self._try_write(step, host, text, last)
            return
        self._writer = threading.Thread(
            target=self._write_in_thread, args=(step, host, text, last), name="checkpoint"
        )
        self._writer.start()

    def wait(self) -> None:
        """Wait for the save under way, whatever comes of it."""
        if self._writer is not None:
            self._writer.join()

    def close(self) -> None:
        """Wait for the save under way; if the last one failed, try it again a few times.

        The tensors of a save without ``async_save`` must not have changed since.

        Raises:
            SaveError: it still cannot be written.
        """
        self._join()
        tries = 0
        while self._unsaved is not None:
            if tries == MAX_FAILED_SAVES:
                raise SaveError(
                    f"{self.folder}: the last checkpoint, of step {self._unsaved[0]}, was not "
                    "saved, see above"
                )
            tries += 1
            time.sleep(SAVE_AGAIN_S)
            self._try_write(*self._unsaved, last=True)

    def _join(self) -> None:
        self.wait()
        self._writer = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write_in_thread(
        self, step: int, tensors: dict[str, Tensor], meta: str, last: bool
    ) -> None:
        try:
            self._try_write(step, tensors, meta, last)
        except BaseException as error:
            self._error = error

    def _try_write(self, step: int, tensors: dict[str, Tensor], meta: str, last: bool) -> None:
        try:
            self._write(step, tensors, meta)
        except (OSError, SafetensorError) as error:  # safetensors wraps the disk's errors
            self._failed_saves += 1
            self._unsaved = step, tensors, meta
            # As text: a handler that keeps the record would keep the tensors in its traceback.
            _log.warning("checkpoint of step %d not saved: %s", step, str(error))
            if self._failed_saves >= MAX_FAILED_SAVES and not last:
                raise SaveError(
                    f"checkpoint of step {step} not saved, nor those before it: {error}"
                ) from error
            return
        self._failed_saves, self._unsaved = 0, None
        try:
            self._prune(step)
        except OSError as error:
            _log.warning("older checkpoints not removed: %s", error)

    def _write(self, step: int, tensors: dict[str, Tensor], meta: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        self._check_space(sum(t.nbytes for t in tensors.values()))
        final = self._path(step)
        tmp = final.with_name(final.name + ".tmp")
        tmp.mkdir()
        try:
            save_file(tensors, tmp / TENSORS)
            (tmp / META).write_text(meta, encoding="utf-8")
            files = {}
            for name in (TENSORS, META):
                _fsync(tmp / name)
                files[name] = {"size": (tmp / name).stat().st_size, "sha256": sha256_of(tmp / name)}
            _write_synced(tmp / MANIFEST, json.dumps({"files": files}))
            _fsync(tmp)
            self._before_rename(step)
            if final.exists():  # removed when the new one is there; a crash right here costs both
                final.rename(self._old(step))
            tmp.rename(final)
        except BaseException:
            shutil.rmtree(tmp, ignore_errors=True)
            raise
        _fsync(self.folder)
        pointer = self.folder / (LATEST + ".tmp")
        _write_synced(pointer, final.name + "\n")
        pointer.replace(self.folder / LATEST)
        _fsync(self.folder)

    def _sweep(self) -> None:
        """Remove what an earlier process left half written; once, when this one starts to write."""
        if self._swept:
            return
        for left in self.folder.glob("*.tmp"):
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()
        self._swept = True

    def _check_space(self, size: int) -> None:
        need, free = int(size * FREE_SPACE_FACTOR), shutil.disk_usage(self.folder).free
        if free < need:
            found, want = (f"{number / 2**20:,.1f} MiB" for number in (free, need))
            raise OSError(errno.ENOSPC, f"found {found} free in {self.folder}, want {want}")

    def _prune(self, saved: int) -> None:
        """Remove what ``saved`` replaced, and keep the newest up to it. Later ones, of another run
        in this folder, stay, unless loading found them damaged."""
        if self._old(saved).exists():
            shutil.rmtree(self._old(saved))
        keep = set(sorted(s for s in self.steps() if s <= saved)[-self.cfg.keep :])
        if self.cfg.keep_best and (best := self.best()) is not None:
            keep.add(best)
        for step in self.steps():
            if step not in keep and (step < saved or step in self._damaged):
                self._remove(step)
        self._damaged.clear()

    def _remove(self, step: int) -> None:
        # Renamed first: a crash in the middle must not leave a half that looks like a checkpoint.
        self._path(step).rename(self._old(step))
        shutil.rmtree(self._old(step))

    def _old(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.old.tmp"

    # -- loading -------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps with a complete folder, ascending. Contents are verified by ``load``."""
        if not self.folder.is_dir():
            return []
        found = (_STEP_DIR.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> int | None:
        """The step that ``load()`` tries first; None if nothing was saved."""
        steps = self.steps()
        try:
            name = (self.folder / LATEST).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            name = ""
        match = _STEP_DIR.fullmatch(name)
        if match and int(match[1]) in steps:
            return int(match[1])
        return steps[-1] if steps else None

    def best(self) -> int | None:
        """The step with the highest score, the later one of equals; None if none has a score."""
        scores = self.scores()
        return max(scores, key=lambda step: (scores[step], step)) if scores else None

    def scores(self) -> dict[int, float]:
        """Scores by step, of the checkpoints that have one."""
        found = {step: self._score(step) for step in self.steps()}
        return {step: score for step, score in found.items() if score is not None}

    def load(self, step: int | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read and verify a checkpoint.

        Args:
            step: which; None = the latest, or, where that is damaged, the newest intact one before
                it (a warning says so).

        Returns:
            Tensors on the CPU, and the meta data.

        Raises:
            UserError: there is no such checkpoint, or no intact one.
        """
        self._join()
        latest = self.latest()
        if latest is None:
            raise UserError(f"{self.folder}: found no checkpoint, want one to load or resume from")
        if step is not None:
            return self._load_exactly(step)
        problems = []
        for candidate in reversed([s for s in self.steps() if s <= latest]):
            try:
                loaded = self._read(candidate)
            except DamagedError as error:
                problems.append(str(error))
                self._damaged.add(candidate)
                continue
            for problem in problems:
                _log.warning("%s; going back to step %d", problem, candidate)
            return loaded
        raise UserError(f"{problems[0]} (and no intact checkpoint before it)")

    def _load_exactly(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if step not in self.steps():
            known = ", ".join(map(str, self.steps()))
            raise UserError(
                f"{self.folder}: found no checkpoint of step {step}, want one of {known}"
            )
        try:
            return self._read(step)
        except DamagedError as error:
            raise UserError(str(error)) from None

    def _read(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        folder = self._path(step)
        try:
            files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
            for name in (TENSORS, META):
                _verify(folder / name, files[name]["size"], files[name]["sha256"])
            meta = json.loads((folder / META).read_text(encoding="utf-8"))
            version = meta["format_version"]
            if meta["step"] != step:
                raise DamagedError(f"{folder}: found the step {meta['step']} inside, want {step}")
            if version > FORMAT_VERSION:
                raise UserError(
                    f"{folder}: found checkpoint format {version}, want at most {FORMAT_VERSION} "
                    "(a newer dflash_ext wrote it)"
                )
            return load_file(folder / TENSORS), meta
        except OSError as error:
            raise DamagedError(f"{folder}: found {error.strerror}, want a checkpoint") from None
        except (ValueError, KeyError, TypeError, RecursionError, SafetensorError):
            raise DamagedError(f"{folder}: found damaged contents, want a checkpoint") from None

    def _score(self, step: int) -> float | None:
        """None if the checkpoint has none, or none that can be read."""
        try:
            found = json.loads((self._path(step) / META).read_text(encoding="utf-8"))["score"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return found if type(found) in (int, float) and math.isfinite(found) else None

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"


def _host_tensors(tensors: dict[str, Tensor], copy: bool) -> dict[str, Tensor]:
    """Contiguous CPU tensors, one storage each; ``copy``: none of them the caller's own."""
    host: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu").contiguous()
        storage = value.untyped_storage().data_ptr()
        own = storage != tensor.untyped_storage().data_ptr()
        if (
            (copy and not own)
            or storage in storages
            or value.nbytes != len(value.untyped_storage())
        ):
            value = value.clone(memory_format=torch.contiguous_format)
            storage = value.untyped_storage().data_ptr()
        storages.add(storage)
        host[name] = value
    return host


def _verify(path: Path, size: int, sha256: str) -> None:
    found = path.stat().st_size
    if found != size:
        raise DamagedError(f"{path}: found {found} bytes, want {size} as in the manifest")
    if sha256_of(path) != sha256:
        raise DamagedError(f"{path}: found contents whose SHA-256 differs, want the manifest's")


def _write_synced(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _fsync(path)
