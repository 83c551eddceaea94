"""Files that are there whole or not at all, and errors of the disk that name their file."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path` in one piece or not at all. Raises OSError, which names the file."""
    temporary = path.with_name(f"{path.name}.tmp")
    with naming(path):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put `path` into the system's errors that name no file, as that of a write to a full disk.

    Others (a library's OSError with a text alone) stay as they are.
    safetensors' own error, which wraps those of the disk, becomes an OSError, too.
    """
    try:
        yield
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def sha256_of(path: Path) -> str:
    """Of a file's contents, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
