"""What the commands share: exit codes, one line for a mistake, checks before the work."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from dflash_ext.config_values import UserError

if TYPE_CHECKING:
    import torch

# Of standard output, as files are written under their names (`files.naming`).
_STREAM_ERRORS = (errno.ENOSPC, errno.EPIPE, errno.EBADF)


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command's body and give its exit code.

    2 and one line on stderr for a ``UserError`` or a file that cannot be used, 130 for Ctrl-C,
    1 and the traceback for any other exception, else what the body returns (None = 0).
    """
    try:
        return command() or 0
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None and error.errno in _STREAM_ERRORS:
            print(
                f"error: output: {error.strerror}, want room for it, or a reader", file=sys.stderr
            )
            return 1
        if error.filename is None:
            traceback.print_exc()
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"error: {error.filename}: {error.strerror}, want a usable path", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        traceback.print_exc()
        print(f"error: {type(error).__name__}:", str(error).partition("\n")[0], file=sys.stderr)
        return 1


def leave(code: int) -> NoReturn:
    """End the process: a thread that is stuck in native code must not keep it alive."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as it is if it was closed before the start
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def losable_output() -> Iterator[None]:
    """Within, standard output and error may go away (a broken pipe, a full disk): from then on
    what is printed there is lost, and no more than that."""
    with contextlib.ExitStack() as stack:
        if sys.stdout is not None:
            stack.enter_context(contextlib.redirect_stdout(cast(TextIO, _Losable(sys.stdout))))
        if sys.stderr is not None:
            stack.enter_context(contextlib.redirect_stderr(cast(TextIO, _Losable(sys.stderr))))
        yield


class _Losable:
    """A text stream whose writes never fail."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._lose()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._lose()

    def _lose(self) -> None:
        # What the stream still holds would fail again, if only at the exit.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


class CommandParser(argparse.ArgumentParser):
    """The parser of the commands without a configuration: a mistake is a ``UserError``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message} (see --help)")


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an argument: an integer of at least that, and at most `most`."""
    wanted = f"from {least} on" if most is None else f"from {least} to {most}"

    def parse(word: str) -> int:
        if not word.isdecimal() or int(word) < least or (most is not None and int(word) > most):
            raise argparse.ArgumentTypeError(f"found {word!r}, want an integer {wanted}")
        return int(word)

    return parse


def true_or_false(word: str) -> bool:
    """The type of an argument."""
    if word not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"found {word!r}, want true or false")
    return word == "true"


def add_target_options(
    options: argparse.ArgumentParser | argparse._ArgumentGroup, whose: str, device: str
) -> None:
    """How a target is loaded: --dtype, --device and --revision."""
    words = f"of {whose} (default: %(default)s)"
    options.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help=words)
    options.add_argument("--device", default=device, help=words)
    options.add_argument("--revision", help="branch, tag or commit of a hub id")


def check_output_file(option: str, path: Path, *, make_parents: bool = False) -> None:
    """Refuse, before the work, a file that could not be written after it.

    `make_parents`: its folder will be made. Raises UserError.
    """
    if path.is_dir():
        raise UserError(f"{option}: found the folder {path}, want a file")
    # A file is replaced as a whole; whoever may write in /dev would lose the device itself.
    if path.absolute().is_relative_to("/dev") or (path.exists() and not path.is_file()):
        raise UserError(f"{option}: found {path}, a device or a pipe, want a file")
    folder = path.absolute().parent
    while make_parents and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"{option}: {path}: found no folder {folder}, want a file in one")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"{option}: {path}: found no permission to write, want a file that has it")


def check_no_input(option: str, path: Path, **inputs: str) -> None:
    """Refuse an output that is an input's file or lies in an input's folder.

    `inputs`: by the option's name, a file, a folder or anything else. Raises UserError.
    """
    for name, word in inputs.items():
        source = Path(os.path.expanduser(word))
        if source.is_dir():
            # A file is replaced under its name, whatever a link of that name points to.
            if path.absolute().parent.resolve().is_relative_to(source.resolve()):
                raise UserError(
                    f"{option}: found {path}, which is in the folder of --{name}, "
                    "want a file elsewhere"
                )
        elif path.exists() and source.exists() and path.samefile(source):
            raise UserError(f"{option}: found {path}, which is --{name}, want another file")


def check_device(option: str, device: str) -> None:
    """Refuse a device that torch does not know, this machine does not have, or cannot compute."""
    import torch

    try:
        torch.zeros(1, device=device).item()  # meta has memory, but no values
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{option}: found {device!r} ({reason}), want a device here") from error


def device_of(option: str, word: str) -> torch.device:
    """The device that a word names, or a GPU's number. Raises UserError as `check_device` does."""
    import torch

    name = f"cuda:{word}" if word.isdecimal() else word
    check_device(option, name)
    device = torch.device(name)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
