"""Read training text: JSONL rows of messages or of token ids, checked, masked and counted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dflash_ext.config import DataConfig, UserError
from dflash_ext.data.assistant_mask import encode_chat, runs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOOP_REPEATS = 4
_LOOP_MAX_NGRAM = 16


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
    """What became of the rows: rows = kept + no_assistant + loops + dropped_short."""

    rows: int = 0
    kept: int = 0
    no_assistant: int = 0
    loops: int = 0
    dropped_short: int = 0
    truncated: int = 0
    tokens: int = 0
    supervised_tokens: int = 0

    def lines(self) -> list[str]:
        """The counts in words, one line for each thing that happened."""
        share = 100 * self.supervised_tokens / max(1, self.tokens)
        lines = [
            f"{self.kept:,} of {self.rows:,} rows kept: {self.tokens:,} tokens, "
            f"{self.supervised_tokens:,} supervised ({share:.0f} %)"
        ]
        for count, what in (
            (self.no_assistant, "skipped: no assistant turn"),
            (self.loops, "dropped: an answer ends in a loop (data.drop_loops)"),
            (self.dropped_short, "dropped: no two supervised tokens in a row"),
            (self.truncated, "truncated at data.max_length"),
        ):
            if count:
                lines.append(f"{count:,} rows {what}")
        return lines


def load_examples(
    paths: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    cfg: DataConfig,
    *,
    mask_token_id: int | None = None,
    vocab_size: int | None = None,
) -> tuple[list[Example], DataReport]:
    """Read JSONL files into examples, in file order, on the calling thread.

    A row is `{"messages": [...], "tools": [...]?}` (OpenAI style, rendered with the tokenizer's
    chat template) or `{"input_ids": [...], "loss_mask": [...]}`; with `format: auto` a row that
    has both counts as token ids. Blank lines, CRLF and a byte order mark are allowed.

    Args:
        paths: one file or several.
        tokenizer: the target's tokenizer.
        cfg: format, max_length, token_budget, last_turn_only, enable_thinking, drop_loops.
        mask_token_id: the drafter's mask token; text must not contain it.
        vocab_size: rows of the target's embedding table.

    Returns:
        The kept examples, at least one, each with at least one valid anchor; and the counts.

    Raises:
        UserError: one line naming file and line, what was found and what is wanted.
    """
    paths = [paths] if isinstance(paths, str) else list(paths)
    if not paths:
        raise UserError("data: found an empty list of files, want at least one JSONL file")
    special_ids = _special_ids(tokenizer)
    report = DataReport()
    examples = []
    for place, row in _rows(paths):
        report.rows += 1
        encoded = _encode_row(row, place, tokenizer, cfg)
        if encoded is None or not encoded[1].any():
            report.no_assistant += 1
            continue
        ids, mask = encoded
        _check_ids(ids, place, mask_token_id, vocab_size)
        ids = ids.astype(np.int32)
        if cfg.drop_loops and has_loop(ids, mask, special_ids):
            report.loops += 1
            continue
        if len(ids) > cfg.max_length:
            report.truncated += 1
            ids, mask = ids[: cfg.max_length].copy(), mask[: cfg.max_length].copy()
        if not (mask[:-1] & mask[1:]).any():
            report.dropped_short += 1
            continue
        report.kept += 1
        report.tokens += len(ids)
        report.supervised_tokens += int(mask.sum())
        examples.append(Example(ids, mask, place))
    _check_result(paths, examples, report, cfg.token_budget)
    return examples, report


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


def dataset_hash(examples: Iterable[Example]) -> str:
    """SHA-256 over ids and masks, in order: equal hashes mean the same training data."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(len(example).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(example.input_ids, dtype="<i4").tobytes())
        digest.update(np.ascontiguousarray(example.loss_mask, dtype=np.uint8).tobytes())
    return digest.hexdigest()


def _rows(paths: Sequence[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """("file:line", JSON object) of every line that is not blank."""
    for path in paths:
        empty = True
        try:
            # Bytes, because JSON strings may hold characters that text mode takes for line ends.
            with Path(path).open("rb") as file:
                for number, raw in enumerate(file, start=1):
                    if number == 1:
                        raw = raw.removeprefix(b"\xef\xbb\xbf")
                    if raw.strip():
                        empty = False
                        place = f"{path}:{number}"
                        yield place, _parse_line(raw, place)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read ({error.strerror}), want a readable JSONL file"
            ) from error
        if empty:
            raise UserError(f"{path}: found no rows, want one JSON object a line")


def _parse_line(raw: bytes, place: str) -> Mapping[str, object]:
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place}: found bytes that are not UTF-8 (byte {error.start}), want UTF-8 text"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{place}: found a line that is not JSON ({error}), want one JSON object a line"
        ) from error
    if not isinstance(row, dict):
        raise UserError(f"{place}: found a JSON {type(row).__name__}, want a JSON object")
    return row


def _encode_row(
    row: Mapping[str, object],
    place: str,
    tokenizer: PreTrainedTokenizerBase,
    cfg: DataConfig,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Ids and mask of a row, or None if it is a conversation without an assistant turn."""
    kinds = ("input_ids", "messages") if cfg.format == "auto" else (cfg.format,)
    kind = next((kind for kind in kinds if row.get(kind) is not None), None)
    if kind is None:
        found = ", ".join(map(repr, row)) or "none"
        raise UserError(f"{place}: found the fields {found}, want {' or '.join(map(repr, kinds))}")
    if kind == "input_ids":
        ids, mask = _token_row(row, place)
        if cfg.last_turn_only and mask.any():
            mask[: runs(mask)[-1, 0]] = 0
        return ids, mask
    messages = _checked_messages(row["messages"], place)
    if not any(message["role"] == "assistant" for message in messages):
        return None
    ids, mask = encode_chat(
        tokenizer,
        messages,
        place=place,
        tools=_checked_tools(row.get("tools"), place),
        enable_thinking=cfg.enable_thinking,
        last_turn_only=cfg.last_turn_only,
    )
    if row.get("finish") == "length":
        # The answer was cut off: the template's end of turn is not a token of the target's.
        mask[np.flatnonzero(mask)[-1:]] = 0
    return ids, mask


def _checked_messages(messages: object, place: str) -> list[Mapping[str, object]]:
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else type(messages).__name__
        raise UserError(f"{place}: messages: found {found}, want a list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(
                f"{place}: messages[{i}]: found {_short(message)}, "
                "want an object with a role and a content"
            )
        if not isinstance(message.get("content"), str | list | None):
            raise UserError(
                f"{place}: messages[{i}].content: found {_short(message['content'])}, "
                "want a string or a list of parts"
            )
    return messages


def _checked_tools(tools: object, place: str) -> list[Mapping[str, object]] | None:
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{place}: tools: found {_short(tools)}, want a list of objects")
    return tools


def _token_row(row: Mapping[str, object], place: str) -> tuple[np.ndarray, np.ndarray]:
    ids = _integers(row["input_ids"], f"{place}: input_ids")
    mask = _integers(row.get("loss_mask"), f"{place}: loss_mask")
    if len(mask) != len(ids):
        raise UserError(
            f"{place}: loss_mask: found {len(mask)} values for {len(ids)} input_ids, "
            "want one for each"
        )
    wrong = np.flatnonzero((mask < 0) | (mask > 1))
    if len(wrong):
        at = int(wrong[0])
        raise UserError(f"{place}: loss_mask[{at}]: found {mask[at]}, want 0 or 1")
    return ids, mask.astype(np.uint8)


def _integers(values: object, name: str) -> np.ndarray:
    if not isinstance(values, list):
        found = "nothing" if values is None else _short(values)
        raise UserError(f"{name}: found {found}, want a list of integers")
    for i, value in enumerate(values):
        if not isinstance(value, int) or abs(value) >= 2**63:
            raise UserError(f"{name}[{i}]: found {_short(value)}, want an integer")
    return np.asarray(values, dtype=np.int64)


def _check_ids(
    ids: np.ndarray, place: str, mask_token_id: int | None, vocab_size: int | None
) -> None:
    limit = 2**31 - 1 if vocab_size is None else vocab_size
    outside = np.flatnonzero((ids < 0) | (ids >= limit))
    if len(outside):
        at = int(outside[0])
        raise UserError(
            f"{place}: token {at}: found id {ids[at]}, want 0 to {limit - 1} (the target's "
            "vocabulary)"
        )
    if mask_token_id is not None and (ids == mask_token_id).any():
        at = int(np.flatnonzero(ids == mask_token_id)[0])
        raise UserError(
            f"{place}: token {at}: found the drafter's mask token {mask_token_id}, want text "
            "without it, or another drafter.mask_token_id"
        )


def _check_result(
    paths: Sequence[str], examples: Sequence[Example], report: DataReport, token_budget: int
) -> None:
    if not examples:
        raise UserError(
            f"{', '.join(paths)}: found no usable row among {report.rows} "
            f"({report.no_assistant} without an assistant turn, {report.loops} ending in a loop, "
            f"{report.dropped_short} too short), want at least one with an assistant's answer"
        )
    longest = max(examples, key=len)
    if len(longest) > token_budget:
        raise UserError(
            f"data.token_budget: found {token_budget}, want at least {len(longest)}, the length "
            f"of {longest.source} (or a smaller data.max_length)"
        )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
