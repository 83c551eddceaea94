"""Tokenised text, in memory or in a cache folder on disk.

A `Part` holds the examples of one shard: ids and masks, one example after the other. On disk a part
is a folder that appears whole, by a rename, under a name that covers everything it depends on:

    ids.bin    int32, all examples      rows.npy  [examples, 2] int64: length, number in the shard
    mask.bin   uint8, all examples      part.json the report and the digest of all of it
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import overload

import numpy as np

from dflash_ext.config import UserError

_OPEN_FILES = 64


@dataclass(slots=True)
class Example:
    """One document: token ids [n] int32, loss mask [n] uint8 (1 = supervised), "file:line"."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    source: str

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(slots=True)
class DataReport:
    """What became of the rows.

    rows + split_rows = kept + no_assistant + loops + dropped_short + bad; split_rows are the
    examples that data.split_turns makes beyond one a row.
    """

    rows: int = 0
    split_rows: int = 0
    kept: int = 0
    no_assistant: int = 0
    loops: int = 0
    dropped_short: int = 0
    bad: int = 0
    truncated: int = 0
    unlearned: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    all_supervised: int = 0
    first_bad: str = ""

    def add(self, other: DataReport) -> None:
        """Count another shard's rows, too."""
        for field in fields(self):
            if field.name != "first_bad":
                total = getattr(self, field.name) + getattr(other, field.name)
                setattr(self, field.name, total)
        self.first_bad = self.first_bad or other.first_bad

    def lines(self, limit: str = "data.max_length") -> list[str]:
        """The counts in words, one line for each thing that happened; `limit` cut rows off."""
        share = 100 * self.supervised_tokens / max(1, self.tokens)
        split = f" and {self.split_rows:,} further answers" if self.split_rows else ""
        lines = [
            f"{self.kept:,} of {self.rows:,} rows{split} kept: {self.tokens:,} tokens, "
            f"{self.supervised_tokens:,} supervised ({share:.0f} %)"
        ]
        for count, what in (
            (self.no_assistant, "rows skipped: no assistant turn"),
            (self.loops, "rows dropped: an answer ends in a loop (data.drop_loops)"),
            (self.dropped_short, "rows dropped: no two supervised tokens in a row"),
            (self.bad, f"rows skipped: not usable (data.bad_rows); first: {self.first_bad}"),
            (self.truncated, f"rows truncated at {limit}"),
            (
                self.unlearned,
                "answers supervised in part or not at all: the chat template shows them "
                "otherwise in history (data.split_turns makes them examples of their own)",
            ),
            (self.all_supervised, "rows supervised from the first token on, prompts included"),
        ):
            if count:
                lines.append(f"{count:,} {what}")
        return lines


@dataclass
class Part:
    """The examples of one shard. `place(number)` names a row of it; `read` gives ids and mask."""

    place: Callable[[int], str]
    lengths: np.ndarray
    numbers: np.ndarray
    report: DataReport
    digest: str
    flat: Callable[[], tuple[np.ndarray, np.ndarray]]

    def __post_init__(self) -> None:
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        end = int(self._ends[index])
        start = end - int(self.lengths[index])
        ids, mask = (np.array(values[start:end]) for values in self.flat())
        return Example(ids, mask, self.place(int(self.numbers[index])))


class Corpus(Sequence[Example]):
    """All examples of several parts, in order; only those that are asked for are read.

    Args:
        parts: the shards.
        weights: how often an epoch goes through each of them.
    """

    def __init__(self, parts: Sequence[Part], weights: Sequence[float]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        self.lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])
        self.weights = [(len(p), weight) for p, weight in zip(parts, weights, strict=True)]

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]  # negative ones, and IndexError
        part, at = self._locate(index)
        return part[at]

    def number(self, index: int) -> int:
        """The example's row in its shard, from 1."""
        part, at = self._locate(index)
        return int(part.numbers[at])

    def _locate(self, index: int) -> tuple[Part, int]:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part], index - int(self._ends[part]) + len(self._parts[part])

    def digest(self) -> str:
        """SHA-256 over all ids and masks, in order, and the weights."""
        digest = hashlib.sha256()
        for part, (_, weight) in zip(self._parts, self.weights, strict=True):
            digest.update(f"{part.digest} {weight!r}\n".encode())
        return digest.hexdigest()


def dataset_hash(examples: Iterable[Example]) -> str:
    """SHA-256 over ids and masks, in order: equal hashes mean the same training data."""
    if isinstance(examples, Corpus):
        return examples.digest()
    digest = hashlib.sha256()
    for example in examples:
        _update(digest, example.input_ids, example.loss_mask)
    return digest.hexdigest()


def _update(digest: hashlib._Hash, ids: np.ndarray, mask: np.ndarray) -> None:
    digest.update(len(ids).to_bytes(8, "little"))
    digest.update(np.ascontiguousarray(ids, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(mask, dtype=np.uint8).tobytes())


Rows = Iterator[tuple[int, np.ndarray, np.ndarray]]  # number in the shard, ids, mask


def part_in_memory(place: Callable[[int], str], rows: Rows, report: DataReport) -> Part:
    """Collect rows; `report` is complete when they end."""
    digest, ids, masks, index = hashlib.sha256(), [], [], []
    for number, row_ids, row_mask in rows:
        _update(digest, row_ids, row_mask)
        ids.append(row_ids)
        masks.append(row_mask)
        index.append((len(row_ids), number))
    flat = (
        np.concatenate([np.zeros(0, np.int32), *ids]),
        np.concatenate([np.zeros(0, np.uint8), *masks]),
    )
    lengths, numbers = np.array(index, dtype=np.int64).reshape(-1, 2).T
    return Part(place, lengths, numbers, report, digest.hexdigest(), lambda: flat)


def part_on_disk(
    folder: Path, place: Callable[[int], str], make_rows: Callable[[DataReport], Rows]
) -> Part:
    """The part kept in `folder`; written there first if it is not there or not whole.

    Raises UserError if the folder cannot be written.
    """
    part = _read_part(folder, place)
    if part is None:
        shutil.rmtree(folder, ignore_errors=True)  # damaged
        _write_part(folder, make_rows)
        part = _read_part(folder, place)
    if part is None:
        raise UserError(f"{folder}: found a part that changes while it is read, want a quiet disk")
    return part


def _write_part(folder: Path, make_rows: Callable[[DataReport], Rows]) -> None:
    report, digest, index = DataReport(), hashlib.sha256(), []
    partial = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name[:8]}-", dir=folder.parent))
        with (
            (partial / "ids.bin").open("wb") as ids_file,
            (partial / "mask.bin").open("wb") as masks,
        ):
            for number, ids, mask in make_rows(report):
                _update(digest, ids, mask)
                ids_file.write(ids.astype("<i4").tobytes())
                masks.write(mask.tobytes())
                index.append((len(ids), number))
        np.save(partial / "rows.npy", np.array(index, dtype="<i8").reshape(-1, 2))
        facts = {"report": asdict(report), "digest": digest.hexdigest()}
        (partial / "part.json").write_text(json.dumps(facts))
        _mapped.cache_clear()
        partial.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another run was faster
            raise UserError(
                f"{folder.parent}: cannot be written ({error.strerror}), want a folder with room "
                "for tokenised text (set $DFLASH_CACHE)"
            ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _read_part(folder: Path, place: Callable[[int], str]) -> Part | None:
    """None if it is not there or damaged."""
    try:
        facts = json.loads((folder / "part.json").read_text())
        lengths, numbers = np.load(folder / "rows.npy").T.astype(np.int64)
        sizes = [os.path.getsize(folder / name) for name in ("ids.bin", "mask.bin")]
        report, digest = DataReport(**facts["report"]), str(facts["digest"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    tokens = int(lengths.sum())
    if sizes != [4 * tokens, tokens]:
        return None
    return Part(place, lengths, numbers, report, digest, functools.partial(_mapped, str(folder)))


@functools.lru_cache(maxsize=_OPEN_FILES)
def _mapped(folder: str) -> tuple[np.ndarray, np.ndarray]:
    if not os.path.getsize(f"{folder}/mask.bin"):  # nothing to map
        return np.zeros(0, np.int32), np.zeros(0, np.uint8)
    return (
        np.memmap(f"{folder}/ids.bin", dtype="<i4", mode="r"),
        np.memmap(f"{folder}/mask.bin", dtype=np.uint8, mode="r"),
    )
