"""What the entries of data.train and data.eval name.

An entry is a file, a folder, or `hf:NAME[:SPLIT]` or `hf:NAME:CONFIG:SPLIT` (NAME: a data set of
the Hugging Face hub, or a folder that `save_to_disk` wrote). `2 * chat.jsonl` goes through a file
twice in each epoch, `0.5 * code.parquet` through half of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_ext.config import UserError
from dflash_ext.config_values import HUB_PREFIX, split_weight
from dflash_ext.data.readers import FileShard, Shard, folder_shards, load_dataset_shard

_COLON = re.compile(r":(?![^\[]*\])")  # not those of a slice: train[:1000]


@dataclass(frozen=True)
class Source:
    """The shards of one entry, and how often an epoch goes through them."""

    shards: Sequence[Shard]
    weight: float


def open_source(entry: str) -> Source:
    """Find what an entry names; reads nothing yet. Raises UserError."""
    weight, name = split_weight(entry)
    if name.startswith(HUB_PREFIX):
        return Source([_hub(name.removeprefix(HUB_PREFIX))], weight)
    try:
        is_folder = Path(name).is_dir()
    except ValueError as error:  # a null byte
        raise UserError(f"{name!r}: cannot be read ({error}), want a file or a folder") from error
    return Source(folder_shards(Path(name)) if is_folder else [FileShard(name)], weight)


def text_files(entries: Sequence[str]) -> list[str]:
    """The files that entries name, also in folders. Raises UserError for one that is not there."""
    local = [entry for entry in entries if not split_weight(entry)[1].startswith(HUB_PREFIX)]
    return [shard.name for entry in local for shard in open_source(entry).shards]


def _hub(text: str) -> Shard:
    name, *rest = _COLON.split(text)
    if not name or len(rest) > 2 or "" in rest:
        raise UserError(
            f"{HUB_PREFIX}{text}: found an odd name, "
            "want hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT"
        )
    config = rest[0] if len(rest) == 2 else None
    return load_dataset_shard(name, config, rest[-1] if rest else None)
