"""Rows of text files: JSONL and JSON (plain, gzip, zstd), Parquet, Hugging Face data sets.

A `Shard` is what is read in one go, and tokenised in one go: a file, or one split of a Hugging Face
data set. Its rows are numbered from 1 (lines of a JSONL file, blank ones included).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from dflash_ext.config import UserError
from dflash_ext.config_values import shown
from dflash_ext.data.rows import Row, short
from dflash_ext.files import sha256_of
from dflash_ext.target_source import quiet_hub

_BOM = b"\xef\xbb\xbf"
_CHUNK = 1 << 20
_PARQUET_ROWS = 256


class Shard(Protocol):
    """One file or data set. `nbytes` is its size in storage."""

    name: str
    nbytes: int

    def fingerprint(self) -> str:
        """Differs when the content differs."""
        ...

    def rows(self) -> Iterator[tuple[int, Row]]:
        """(number, row); raises UserError naming the place."""
        ...

    def place(self, number: int) -> str: ...


class FileShard:
    """A file; its name's ending says what it is, anything unknown is read as JSONL."""

    def __init__(self, path: str) -> None:
        self.name = path
        try:
            self.nbytes = Path(path).stat().st_size
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error

    def fingerprint(self) -> str:
        try:
            return sha256_of(Path(self.name))
        except OSError as error:
            raise _unreadable(self.name, error) from error

    def place(self, number: int) -> str:
        return f"{self.name}:{number}"

    def rows(self) -> Iterator[tuple[int, Row]]:
        ending, packed = _ending(self.name)
        try:
            if ending == ".parquet":
                yield from _parquet_rows(self.name)
            elif ending == ".json" and _starts_with_bracket(self._chunks(packed)):
                yield from self._array_rows(packed)
            else:
                yield from self._line_rows(packed)
        except OSError as error:
            raise _unreadable(self.name, error) from error

    def _line_rows(self, packed: str) -> Iterator[tuple[int, Row]]:
        for number, line in enumerate(_lines(self._chunks(packed)), start=1):
            if number == 1:
                line = line.removeprefix(_BOM)
            if line.strip():
                yield number, parse_line(line, self.place(number))

    def _array_rows(self, packed: str) -> Iterator[tuple[int, Row]]:
        """The items of one JSON array (ShareGPT files are one), decoded one by one."""
        text = _decoded(b"".join(self._chunks(packed)).removeprefix(_BOM), self.name)
        at, number, decoder = text.index("[") + 1, 0, json.JSONDecoder()
        while True:
            at = _skip(text, at)
            if text.startswith("]", at):
                if (end := _skip(text, at + 1)) < len(text):
                    raise UserError(
                        f"{self.name}: found {shown(text[end:])} behind the array, want one array"
                    )
                return
            number += 1
            try:
                if number > 1:
                    if not text.startswith(",", at):
                        raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
                    at = _skip(text, at + 1)
                row, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                raise _not_json(self.place(number), error, "one JSON array of objects") from error
            yield number, _object(row, self.place(number))

    def _chunks(self, packed: str) -> Iterator[bytes]:
        """The unpacked bytes; damage and cut-off ends are errors."""
        opened = gzip.open if packed == ".gz" else open
        with opened(self.name, "rb") as file:
            if packed == ".zst":
                yield from _zstd_chunks(file, self.name)
                return
            try:
                while chunk := file.read(_CHUNK):
                    yield chunk
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise UserError(
                    f"{self.name}: found damaged gzip data ({error}), want a whole file"
                ) from error


class DatasetShard:
    """One split of a Hugging Face data set: from the hub, or a folder of `save_to_disk`."""

    def __init__(self, name: str, dataset: Any) -> None:
        self.name = name
        self.nbytes = int(dataset.dataset_size or sum(_sizes(dataset.cache_files)))
        self._dataset = dataset.with_format(None)  # plain lists, whatever was saved

    def fingerprint(self) -> str:
        return str(self._dataset._fingerprint)

    def place(self, number: int) -> str:
        return f"{self.name}:{number}"

    def rows(self) -> Iterator[tuple[int, Row]]:
        for index, row in enumerate(self._dataset, start=1):
            yield index, _without_nulls(row)


class CkptShard:
    """The ids and masks of a folder of SpecForge's offline features; row N is the N-th file."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self._paths = ckpt_files(folder)
        self.nbytes = sum(path.stat().st_size for path in self._paths)

    def fingerprint(self) -> str:
        """From names, sizes and times: the files are too large to be read for it."""
        stats = [(str(path), path.stat()) for path in self._paths]
        facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def place(self, number: int) -> str:
        return str(self._paths[number - 1])

    def rows(self) -> Iterator[tuple[int, Row]]:
        for number, path in enumerate(self._paths, start=1):
            tensors = load_ckpt(path)
            try:
                ids, mask = (
                    tensors[name].flatten().tolist() for name in ("input_ids", "loss_mask")
                )
            except (KeyError, AttributeError) as error:
                found = ", ".join(map(str, tensors))
                raise UserError(
                    f"{path}: found the fields {found}, want input_ids and loss_mask tensors"
                ) from error
            # Of any dtype; what is neither is refused as in any other row.
            zeros_and_ones = [0 if value == 0 else 1 if value == 1 else value for value in mask]
            yield number, {"input_ids": ids, "loss_mask": zeros_and_ones}


def ckpt_files(folder: Path) -> list[Path]:
    """SpecForge's feature files below a folder, in the order of the numbers in their names."""

    def key(path: Path) -> tuple[list[int], str]:
        name = str(path.relative_to(folder))
        return [int(number) for number in re.findall(r"\d+", name)], name

    found = [path for end in (".ckpt", ".ckpt.gz") for path in folder.rglob(f"*{end}")]
    return sorted(found, key=key)


def load_ckpt(path: Path) -> dict[str, Any]:
    """The tensors of one file; code in it is not run. Raises UserError."""
    import torch  # readers of text do without

    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                tensors = torch.load(io.BytesIO(file.read()), weights_only=True, map_location="cpu")
        else:
            tensors = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:  # pickle, zip and gzip errors of many kinds
        reason = _one_line(error) or type(error).__name__
        raise UserError(f"{path}: cannot be read ({reason}), want tensors of SpecForge") from error
    if not isinstance(tensors, dict):
        raise UserError(f"{path}: found a {type(tensors).__name__}, want a dict of tensors")
    return tensors


def load_dataset_shard(name: str, config: str | None, split: str | None) -> DatasetShard:
    """A hub data set, or a folder that `save_to_disk` wrote. Raises UserError."""
    place = f"hf:{name}" + "".join(f":{part}" for part in (config, split) if part)
    datasets = needs("datasets", "data", place)
    try:
        if Path(name).is_dir() and _is_saved_dataset(Path(name)):
            found = datasets.load_from_disk(name)
        else:
            with quiet_hub():
                found = datasets.load_dataset(name, config, split=split or "train")
    except Exception as error:  # network, hub and Arrow errors have no common type
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"{place}: cannot be loaded ({reason}), want a data set") from error
    if isinstance(found, dict):
        if (split or "train") not in found:
            raise UserError(
                f"{place}: found the splits {', '.join(found)}, want one of them: hf:{name}:SPLIT"
            )
        found = found[split or "train"]
    return DatasetShard(place, found)


def _is_saved_dataset(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def folder_shards(folder: Path) -> list[Shard]:
    """All text files below a folder, by path; or the data set that `save_to_disk` wrote there; or
    the ids of SpecForge's features."""
    if _is_saved_dataset(folder):
        return [load_dataset_shard(str(folder), None, None)]
    if ckpt_files(folder):
        return [CkptShard(folder)]
    paths = sorted(
        path
        for path in folder.rglob("*")
        if _ending(path.name)[0] and path.name not in _METADATA and path.is_file()
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not paths:
        raise UserError(f"{folder}: found no text files, want {', '.join(_ENDINGS)} files in it")
    return [FileShard(str(path)) for path in paths]


_ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet")
_METADATA = ("dataset_info.json", "dataset_infos.json")


def _ending(name: str) -> tuple[str, str]:
    """(kind of file, compression), each "" if the name says nothing of it."""
    name = name.lower()
    packed = next((end for end in (".gz", ".zst") if name.endswith(end)), "")
    name = name.removesuffix(packed)
    return next((end for end in _ENDINGS if name.endswith(end)), ""), packed


def parse_line(raw: bytes, place: str) -> Row:
    """The JSON object of one line. Raises UserError naming `place`."""
    try:
        row = json.loads(_decoded(raw, place))
    except (ValueError, RecursionError) as error:
        raise _not_json(place, error, "one JSON object a line") from error
    return _object(row, place)


def _decoded(raw: bytes, place: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place}: found bytes that are not UTF-8 (byte {error.start}), want UTF-8 text"
        ) from error


def _not_json(place: str, error: Exception, want: str) -> UserError:
    return UserError(f"{place}: found a line that is not JSON ({error}), want {want}")


def _object(row: object, place: str) -> Row:
    if not isinstance(row, dict):
        hint = " (a file that is one array is named .json)" if isinstance(row, list) else ""
        raise UserError(f"{place}: found {short(row)}, want a JSON object{hint}")
    return row


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Split at line feeds only: JSON strings may hold characters that text mode splits at."""
    rest: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        rest.append(first)
        if others:
            yield b"".join(rest)
            yield from others[:-1]
            rest = [others[-1]]
    last = b"".join(rest)
    if last:
        yield last


def _starts_with_bracket(chunks: Iterable[bytes]) -> bool:
    first = next(iter(chunks), b"")
    return first.removeprefix(_BOM).lstrip().startswith(b"[")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _zstd_chunks(file: Any, name: str) -> Iterator[bytes]:
    """All frames of a zstd file. A stream reader would take a cut-off frame for a whole one."""
    zstandard = needs("zstandard", "data", name)
    frame, data = None, b""
    try:
        while data or (data := file.read(_CHUNK)):
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(data)
            data = frame.unused_data
            frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise UserError(f"{name}: found damaged zstd data ({error}), want a whole file") from error
    if frame is not None:
        raise UserError(f"{name}: found zstd data that ends early, want a whole file")


def _parquet_rows(path: str) -> Iterator[tuple[int, Row]]:
    arrow = needs("pyarrow", "data", path)
    parquet = import_module("pyarrow.parquet")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _without_nulls(row)
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{path}: found no readable Parquet behind row {number} ({_one_line(error)}), "
            "want a whole Parquet file"
        ) from error


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct all fields of its column: those a row does not have are null."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def needs(package: str, extra: str, place: str) -> Any:
    """An optional package. Raises UserError naming the extra that brings it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(
            f"{place}: found no package {package}, want: pip install 'dflash-ext[{extra}]'"
        ) from error


def _sizes(files: Iterable[Mapping[str, str]]) -> Iterator[int]:
    return (Path(file["filename"]).stat().st_size for file in files)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _unreadable(path: str, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or error
    return UserError(f"{path}: cannot be read ({reason}), want a readable file")
