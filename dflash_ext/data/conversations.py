"""Training text: rows of several sources, masked, checked and counted, as examples."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dflash_ext.config import DataConfig, UserError
from dflash_ext.data.assistant_mask import EncodedChat, runs
from dflash_ext.data.corpus import (
    Corpus,
    DataReport,
    Example,
    Part,
    Rows,
    part_in_memory,
    part_on_disk,
)
from dflash_ext.data.readers import Shard
from dflash_ext.data.rows import check_ids, encode_row
from dflash_ext.data.sources import open_source
from dflash_ext.target_source import cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IdsAndMask = tuple[np.ndarray, np.ndarray]

# Less than this is tokenised in seconds and kept in memory, more goes through the cache folder.
CACHE_ABOVE_BYTES = 64 * 2**20
_LOOP_REPEATS = 4
_LOOP_MAX_NGRAM = 16


def load_examples(
    paths: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    cfg: DataConfig,
    *,
    mask_token_id: int | None = None,
    vocab_size: int | None = None,
    limit: str = "data.max_length",
) -> tuple[Corpus, DataReport]:
    """Read files, folders and data sets into examples, in order, on the calling thread.

    What an entry may be: see `sources`; what a row may be: see `rows`. Blank lines, CRLF and a byte
    order mark are allowed. More than 64 MiB of text are tokenised once into the cache folder
    (`$DFLASH_CACHE`/tokens) and read from there, shard by shard, so memory holds a few bytes a row.

    Args:
        paths: one entry or several.
        tokenizer: the target's tokenizer.
        cfg: format, bad_rows, max_length, token_budget, last_turn_only, split_turns,
            enable_thinking, drop_loops.
        mask_token_id: the drafter's mask token; text must not contain it.
        vocab_size: rows of the target's embedding table.
        limit: what errors call `cfg.max_length`.

    Returns:
        The kept examples, at least one, each with at least one valid anchor; and the counts.

    Raises:
        UserError: one line naming file and line, what was found and what is wanted.
    """
    paths = [paths] if isinstance(paths, str) else list(paths)
    if not paths:
        raise UserError("data: found an empty list of files, want at least one text file")
    encoder = _Encoder(tokenizer, cfg, mask_token_id, vocab_size)
    shards = []
    for source in map(open_source, paths):
        shards += [(shard, source.weight) for shard in source.shards]
    cached = sum(shard.nbytes for shard, _ in shards) > CACHE_ABOVE_BYTES
    parts = [encoder.part(shard, cached) for shard, _ in shards]
    corpus = Corpus(parts, [weight for _, weight in shards])
    report = DataReport()
    for part in parts:
        report.add(part.report)
    _check_result(paths, corpus, report, cfg, limit)
    return corpus, report


class _Encoder:
    """Turns the rows of a shard into examples."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        cfg: DataConfig,
        mask_token_id: int | None,
        vocab_size: int | None,
    ) -> None:
        self.tokenizer, self.cfg = tokenizer, cfg
        self.mask_token_id, self.vocab_size = mask_token_id, vocab_size
        self.special_ids = _special_ids(tokenizer)

    def part(self, shard: Shard, cached: bool) -> Part:
        if not cached:
            report = DataReport()
            return part_in_memory(shard.place, self.rows(shard, report), report)
        key = hashlib.sha256(f"{self.fingerprint} {shard.fingerprint()}".encode()).hexdigest()
        folder = cache_dir() / "tokens" / key[:32]

        def rows(report: DataReport) -> Rows:
            size = shard.nbytes / 2**20
            print(f"tokenising {shard.name} ({size:,.0f} MiB)", file=sys.stderr, flush=True)
            return self.rows(shard, report)

        return part_on_disk(folder, shard.place, rows)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Everything but the text that the examples of a shard depend on, this code included."""
        tokenizer, cfg = self.tokenizer, self.cfg
        core = getattr(tokenizer, "backend_tokenizer", None)
        settings = [
            *(cfg.format, cfg.max_length, cfg.last_turn_only, cfg.enable_thinking, cfg.drop_loops),
            *(cfg.split_turns, cfg.bad_rows, self.mask_token_id, self.vocab_size),
            *(type(tokenizer).__name__, tokenizer.special_tokens_map, tokenizer.chat_template),
            sorted(tokenizer.get_vocab().items()) if core is None else core.to_str(),
        ]
        digest = hashlib.sha256(json.dumps(settings, default=str).encode())
        for module in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(module.read_bytes())
        return digest.hexdigest()

    def rows(self, shard: Shard, report: DataReport) -> Rows:
        """The kept examples of a shard; counts all of its rows in `report`."""
        for number, row in shard.rows():
            report.rows += 1
            try:
                encoded = encode_row(row, shard.place(number), self.tokenizer, self.cfg)
                kept = self._checked(encoded, shard.place(number), report)
            except UserError as error:
                if self.cfg.bad_rows == "error":
                    raise
                report.bad += 1
                report.first_bad = report.first_bad or str(error)
                continue
            for ids, mask in kept:
                report.kept += 1
                report.tokens += len(ids)
                report.supervised_tokens += int(mask.sum())
                report.all_supervised += bool(mask.all())
                yield number, ids, mask
        if not report.rows:
            raise UserError(f"{shard.name}: found no rows, want one JSON object a line")

    def _checked(
        self, encoded: Sequence[EncodedChat], place: str, report: DataReport
    ) -> list[IdsAndMask]:
        if not encoded:
            report.no_assistant += 1
        for example in encoded:
            check_ids(example.ids, place, self.mask_token_id, self.vocab_size)
        # All is well from here on, and can be counted.
        report.split_rows += max(0, len(encoded) - 1)
        kept = [self._kept(example, report) for example in encoded]
        return [example for example in kept if example is not None]

    def _kept(
        self, example: EncodedChat, report: DataReport
    ) -> tuple[np.ndarray, np.ndarray] | None:
        ids, mask = example.ids.astype(np.int32), example.mask
        report.unlearned += example.unlearned
        if not mask.any():
            report.no_assistant += 1
            return None
        if self.cfg.drop_loops and has_loop(ids, mask, self.special_ids):
            report.loops += 1
            return None
        limit = self.cfg.max_length
        if len(ids) > limit:
            report.truncated += 1
            ids, mask = ids[:limit].copy(), mask[:limit].copy()
        if not (mask[:-1] & mask[1:]).any():
            report.dropped_short += 1
            return None
        return ids, mask


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    added = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return np.asarray(sorted({*tokenizer.all_special_ids, *added}), dtype=np.int32)


def has_loop(ids: np.ndarray, mask: np.ndarray, special_ids: np.ndarray) -> bool:
    """True if an answer (a run of supervised tokens) ends in an n-gram said four times, n <= 16.

    Special tokens at its end are not looked at: a template closes an answer that was cut off in
    the middle of a loop with an end-of-turn token too.
    """
    for start, end in runs(mask):
        answer = ids[start:end]
        plain = np.flatnonzero(~np.isin(answer, special_ids))
        if len(plain) and _ends_in_loop(answer[: plain[-1] + 1]):
            return True
    return False


def _ends_in_loop(answer: np.ndarray) -> bool:
    for n in range(1, min(_LOOP_MAX_NGRAM, len(answer) // _LOOP_REPEATS) + 1):
        tail = answer[-_LOOP_REPEATS * n :]
        if np.array_equal(tail[n:], tail[:-n]):
            return True
    return False


def prompt_and_answer(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """The last answer's ids (its run of supervised tokens) and all ids before it."""
    start, end = runs(example.loss_mask)[-1]
    return example.input_ids[:start], example.input_ids[start:end]


def _check_result(
    paths: Sequence[str], corpus: Corpus, report: DataReport, cfg: DataConfig, limit: str
) -> None:
    if not corpus:
        within = f" within {limit}, {cfg.max_length} tokens" if report.truncated else ""
        bad = f", {report.bad} that cannot be used: {report.first_bad}" if report.bad else ""
        raise UserError(
            f"{', '.join(paths)}: found no usable row among {report.rows} "
            f"({report.no_assistant} without an assistant turn, {report.loops} ending in a loop, "
            f"{report.dropped_short} too short{bad}), want at least one with an assistant's answer"
            f"{within}"
        )
    longest = int(corpus.lengths.argmax())
    if corpus.lengths[longest] > cfg.token_budget:
        raise UserError(
            f"data.token_budget: found {cfg.token_budget}, want at least "
            f"{corpus.lengths[longest]}, the length of {corpus[longest].source} "
            "(or a smaller data.max_length)"
        )
