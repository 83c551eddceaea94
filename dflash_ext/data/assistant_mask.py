"""Token ids of a conversation and which of them the assistant wrote.

Where the chat template marks the assistant's text with `{% generation %}`, its marks are taken as
they are. Other templates are rendered turn by turn: what the conversation up to a turn gains when
that turn is added is the turn, provided that each rendering is a prefix of the next. That is
checked for every turn, because templates that rewrite history (thinking templates drop old
reasoning) would otherwise shift the mask silently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_ext.config import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, object]
Render = Callable[..., str]

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    place: str,
    tools: Sequence[Mapping[str, object]] | None = None,
    enable_thinking: bool | None = None,
    last_turn_only: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Apply the tokenizer's chat template and mark the assistant's tokens.

    The supervised part of a turn runs from the first token after the header (the generation
    prompt) to its end-of-turn token; the newline that many templates put after that is not part
    of it. Messages after the last assistant turn are left out: nothing in them is learned.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        messages: the conversation, at least one message of it with role "assistant".
        place: "file:line", for error messages.
        tools: passed to the template.
        enable_thinking: passed to the template if not None.
        last_turn_only: mark only the last assistant turn.

    Returns:
        ids [n] int32 and mask [n] uint8, 1 on the supervised tokens.

    Raises:
        UserError: there is no template, it fails, or it renders prefixes inconsistently.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    messages = messages[: turns[-1] + 1]
    options: dict[str, object] = {"tools": tools}
    if enable_thinking is not None:
        options["enable_thinking"] = enable_thinking

    if _has_generation_tag(tokenizer, tools, place):
        ids, mask = _encode_with_tag(tokenizer, messages, options, place)
        if last_turn_only:
            mask[: _last_run_start(mask)] = 0
        return ids, mask

    def render(part: Sequence[Message], add_generation_prompt: bool = False) -> str:
        return _apply(
            tokenizer,
            part,
            place,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **options,
        )

    text = render(messages)
    spans = _turn_spans(render, text, messages, turns[-1:] if last_turn_only else turns, place)
    return _encode_spans(tokenizer, text, spans, place)


def runs(mask: np.ndarray) -> np.ndarray:
    """Start and end (exclusive) of each run of non-zero values: [number of runs, 2] int64."""
    edges = np.diff(np.concatenate(([0], mask != 0, [0])).astype(np.int8))
    return np.stack((np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)), axis=1)


def _last_run_start(mask: np.ndarray) -> int:
    found = runs(mask)
    return int(found[-1, 0]) if len(found) else 0


def _has_generation_tag(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, object]] | None,
    place: str,
) -> bool:
    try:
        template = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        raise UserError(
            f"{place}: found messages, but the tokenizer has no usable chat template, "
            "want a tokenizer with one, or rows with input_ids and loss_mask"
        ) from error
    return _GENERATION_TAG.search(template) is not None


def _apply(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], place: str, **options: object
) -> Any:
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except Exception as error:  # a template is the user's program: it may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{place}: the chat template failed on {len(messages)} message(s) ({reason}), "
            "want messages it accepts"
        ) from error


def _encode_with_tag(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    options: Mapping[str, object],
    place: str,
) -> tuple[np.ndarray, np.ndarray]:
    encoded = _apply(
        tokenizer,
        messages,
        place,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **options,
    )
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    return ids, np.asarray(encoded["assistant_masks"], dtype=np.uint8)


def _turn_spans(
    render: Render, text: str, messages: Sequence[Message], turns: Sequence[int], place: str
) -> list[tuple[int, int]]:
    """Character ranges of the assistant turns in `text`, the rendering of all messages."""
    spans = []
    for i in turns:
        if i == 0:
            raise UserError(
                f"{place}: found an assistant turn as the first message, which this chat template "
                "gives no prompt for, want a system or user message before it"
            )
        before = render(messages[:i], add_generation_prompt=True)
        after = text if i == len(messages) - 1 else render(messages[: i + 1])
        end = len(after.rstrip())
        if not after.startswith(before):
            raise _inconsistent(place, i, "the generation prompt before it", before, after)
        if not text.startswith(after[:end]):
            raise _inconsistent(place, i, "the conversation up to it", after[:end], text)
        if end > len(before):
            spans.append((len(before), end))
    return spans


def _inconsistent(place: str, turn: int, what: str, prefix: str, text: str) -> UserError:
    at = len(os.path.commonprefix((prefix, text)))
    return UserError(
        f"{place}: messages[{turn}] (assistant): {what} is not a prefix of the rest in this chat "
        f"template (at character {at}: found {text[at : at + 24]!r}, "
        f"want {prefix[at : at + 24]!r}); use data.last_turn_only, another data.enable_thinking, "
        "or a template with {% generation %}"
    )


def _encode_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[tuple[int, int]], place: str
) -> tuple[np.ndarray, np.ndarray]:
    ids, offsets = _encode(tokenizer, [text], place)
    starts = np.asarray([start for start, _ in spans], dtype=np.int64)
    # A server encodes the prompt by itself. Where a token of the whole text reaches over the
    # border between a prompt and its answer, the text is therefore encoded in pieces.
    first_past = np.searchsorted(offsets[:, 1], starts, side="right").clip(max=len(offsets) - 1)
    straddled = (offsets[first_past, 0] < starts) & (offsets[first_past, 1] > starts)
    if straddled.any():
        cuts = [0, *starts[straddled].tolist(), len(text)]
        pieces = [text[a:b] for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        ids, offsets = _encode(tokenizer, pieces, place)

    mask = np.zeros(len(ids), dtype=np.uint8)
    for start, end in spans:
        mask[(offsets[:, 1] > start) & (offsets[:, 0] < end)] = 1
    return ids, mask


def _encode(
    tokenizer: PreTrainedTokenizerBase, pieces: Sequence[str], place: str
) -> tuple[np.ndarray, np.ndarray]:
    """Ids [n] and character offsets [n, 2] (within the joined pieces)."""
    if not tokenizer.is_fast:
        raise UserError(
            f"{place}: found a tokenizer without character offsets, want a fast tokenizer, "
            "a chat template with {% generation %}, or rows with input_ids and loss_mask"
        )
    ids, offsets, base = [], [], 0
    for piece in pieces:
        try:
            encoded = tokenizer(
                piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        except (TypeError, UnicodeError) as error:  # lone surrogates
            raise UserError(
                f"{place}: found text that is not valid Unicode, want UTF-8 without lone surrogates"
            ) from error
        ids.append(np.asarray(encoded["input_ids"], dtype=np.int32))
        offsets.append(np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2) + base)
        base += len(piece)
    return np.concatenate(ids), np.concatenate(offsets)
