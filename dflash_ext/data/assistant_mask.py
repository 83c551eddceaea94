"""Token ids of a conversation and which of them the assistant wrote.

Where the chat template marks the assistant's text with `{% generation %}`, its marks are taken as
they are. Other templates are rendered turn by turn: what the conversation up to a turn gains when
that turn is added is the turn. Templates that rewrite history (thinking templates drop old
reasoning, Harmony closes old answers with another token) would shift such a mask silently, so it
only covers tokens that the whole conversation and the conversation up to that turn have in common:
whatever is supervised follows exactly the text that a server would have before it.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflash_ext.config import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, object]
Render = Callable[..., str]

# The day that templates which print "today" get: with the real one, a run could not be resumed
# tomorrow on the same text. It is the date that Llama 3.1's template falls back to.
_TODAY = datetime.datetime(2024, 7, 26)
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class EncodedChat(NamedTuple):
    """Ids [n] int32; mask [n] uint8, 1 on supervised tokens; how many of the answers that were to
    be supervised are so in part or not at all."""

    ids: np.ndarray
    mask: np.ndarray
    unlearned: int


def template_options(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, object]] | None,
    enable_thinking: bool | None,
    place: str,
) -> dict[str, Any]:
    """What `apply_chat_template` takes beside the messages. UserError if there is no template."""
    try:
        template = tokenizer.get_chat_template(tools=tools)
        if not isinstance(template, str):
            raise ValueError(f"found {template!r}, want text")
    except ValueError as error:
        raise UserError(
            f"{place}: found messages, but the tokenizer has no usable chat template, "
            "want a tokenizer with one, or rows with input_ids and loss_mask"
        ) from error
    if "strftime_now" in template:
        template = _FIXED_DATE + template
    options: dict[str, Any] = {"tools": tools, "chat_template": template}
    if enable_thinking is not None:
        options["enable_thinking"] = enable_thinking
    return options


def _fixed_date() -> str:
    """Jinja text that replaces `strftime_now`: a macro, because callables cannot be passed."""
    directives = "".join(
        f" | replace('%{d}', '{_TODAY.strftime('%' + d)}')" for d in "aAbBdHIjmMpSyY"
    )
    # The empty expression keeps the line break that may follow; behind a block it would be cut.
    macro = f"{{% macro strftime_now(format) %}}{{{{ format{directives} }}}}{{% endmacro %}}"
    return macro + "{{ '' }}"


_FIXED_DATE = _fixed_date()


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    place: str,
    tools: Sequence[Mapping[str, object]] | None = None,
    enable_thinking: bool | None = None,
    last_turn_only: bool = False,
) -> EncodedChat:
    """Apply the tokenizer's chat template and mark the assistant's tokens.

    The supervised part of a turn runs from the first token after the header (the generation
    prompt) to its end-of-turn token; the newline that many templates put after that is not part
    of it. Messages after the last assistant turn are left out: nothing in them is learned. An
    earlier turn that the template rewrites is supervised up to where it differs (often not at
    all), and one with no message before it is not supervised.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        messages: the conversation, at least one message of it with role "assistant".
        place: "file:line", for error messages.
        tools: passed to the template.
        enable_thinking: passed to the template if not None.
        last_turn_only: mark only the last assistant turn.

    Raises:
        UserError: there is no template, it fails, or its generation prompt contradicts the last
            turn.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    messages = messages[: turns[-1] + 1]
    options = template_options(tokenizer, tools, enable_thinking, place)
    if _GENERATION_TAG.search(options["chat_template"]):
        ids, mask = _encode_with_tag(tokenizer, messages, options, place)
        if last_turn_only:
            mask[: _last_run_start(mask)] = 0
        wanted = 1 if last_turn_only else len(turns)
        return EncodedChat(ids, mask, max(0, wanted - len(runs(mask))))

    def render(part: Sequence[Message], add_generation_prompt: bool = False) -> str:
        return apply_template(
            tokenizer,
            part,
            place,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **options,
        )

    text = render(messages)
    turns = turns[-1:] if last_turn_only else turns
    spans = _turn_spans(render, text, messages, turns, place)
    ids, mask = _encode_spans(tokenizer, text, spans, place)
    return EncodedChat(ids, mask, len(turns) - sum(not span.rewritten for span in spans))


def runs(mask: np.ndarray) -> np.ndarray:
    """Start and end (exclusive) of each run of non-zero values: [number of runs, 2] int64."""
    edges = np.diff(np.concatenate(([0], mask != 0, [0])).astype(np.int8))
    return np.stack((np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)), axis=1)


def _last_run_start(mask: np.ndarray) -> int:
    found = runs(mask)
    return int(found[-1, 0]) if len(found) else 0


def apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], place: str, **options: object
) -> Any:
    """`tokenizer.apply_chat_template`, whatever goes wrong in it as a UserError."""
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
    encoded = apply_template(
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


@dataclass(frozen=True)
class _Span:
    """Where a turn is in the text. `rewritten`: what it was before, if the text shows another."""

    start: int
    end: int
    rewritten: str = ""


def _turn_spans(
    render: Render, text: str, messages: Sequence[Message], turns: Sequence[int], place: str
) -> list[_Span]:
    """Where the assistant turns are in `text`, the rendering of all messages."""
    spans = []
    for i in turns:
        is_last = i == len(messages) - 1
        if i == 0:
            if is_last:
                raise UserError(
                    f"{place}: found an assistant turn as the first message, which this chat "
                    "template gives no prompt for, want a system or user message before it"
                )
            continue
        before = render(messages[:i], add_generation_prompt=True)
        if not text.startswith(before):
            if is_last:
                raise _contradiction(place, i, before, text)
            continue
        turn = text if is_last else render(messages[: i + 1])
        end = len(turn.rstrip())
        if not text.startswith(turn[:end]):
            spans.append(_Span(len(before), len(text), turn[len(before) : end]))
        elif end > len(before):
            spans.append(_Span(len(before), end))
    return spans


def _contradiction(place: str, turn: int, prompt: str, text: str) -> UserError:
    at = len(os.path.commonprefix((prompt, text)))
    return UserError(
        f"{place}: messages[{turn}] (assistant): the generation prompt before it is not a prefix "
        f"of it in this chat template (at character {at}: found {text[at : at + 24]!r}, "
        f"want {prompt[at : at + 24]!r}); use another data.enable_thinking, or a template with "
        "{% generation %}"
    )


def _encode_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[_Span], place: str
) -> tuple[np.ndarray, np.ndarray]:
    ids, offsets = _encode(tokenizer, [text], place)
    starts = np.asarray([span.start for span in spans], dtype=np.int64)
    # A server encodes the prompt by itself. Where a token of the whole text reaches over the
    # border between a prompt and its answer, the text is therefore encoded in pieces.
    first_past = np.searchsorted(offsets[:, 1], starts, side="right").clip(max=len(offsets) - 1)
    straddled = (offsets[first_past, 0] < starts) & (offsets[first_past, 1] > starts)
    if straddled.any():
        cuts = [0, *starts[straddled].tolist(), len(text)]
        pieces = [text[a:b] for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        ids, offsets = _encode(tokenizer, pieces, place)

    mask = np.zeros(len(ids), dtype=np.uint8)
    for span in spans:
        if span.rewritten:
            first = int(np.searchsorted(offsets[:, 0], span.start))
            answer, _ = _encode(tokenizer, [span.rewritten], place)
            answer = answer[: len(ids) - first]
            same = ids[first : first + len(answer)] == answer
            mask[first : first + int(np.logical_and.accumulate(same).sum())] = 1
        else:
            mask[(offsets[:, 1] > span.start) & (offsets[:, 0] < span.end)] = 1
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
