"""One row of training text as token ids and loss mask.

Rows are `{"messages": [...], "tools": [...]?}` (OpenAI style), `{"conversations": [...]}`
(ShareGPT: `from` and `value`, or `role` and `content`), or
`{"input_ids": [...], "loss_mask": [...]}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dflash_ext.config import DataConfig, UserError
from dflash_ext.data.assistant_mask import EncodedChat, Message, encode_chat, runs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, object]

# What a message may have in place of a content; without either, templates print "None", or fail.
_INSTEAD_OF_CONTENT = ("tool_calls", "reasoning_content", "reasoning", "thinking", "function_call")
KINDS = ("input_ids", "messages", "conversations")
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
    "developer": "developer",
    "function_call": "function_call",
}


def encode_row(
    row: Row, place: str, tokenizer: PreTrainedTokenizerBase, cfg: DataConfig
) -> list[EncodedChat]:
    """The examples of a row; their ids may be any integers.

    One, or none for a conversation without an assistant turn (or one that `regenerate` got no
    answer to), or with `split_turns` one for each
    assistant turn that has a message before it.

    With `format: auto` a row that has several kinds counts as the first of `KINDS`.

    Raises:
        UserError: naming `place`, what was found and what is wanted.
    """
    kinds = KINDS if cfg.format == "auto" else (cfg.format,)
    kind = next((kind for kind in kinds if row.get(kind) is not None), None)
    if kind is None:
        fields = ", ".join(map(repr, row)) or "none"
        raise UserError(f"{place}: found the fields {fields}, want {' or '.join(map(repr, kinds))}")
    if kind == "input_ids":
        ids, mask = _token_row(row, place)
        if cfg.last_turn_only and mask.any():
            mask[: runs(mask)[-1, 0]] = 0
        return [EncodedChat(ids, mask, 0)]
    found, tools = conversation_of(row, place, kind)
    messages = checked_messages(found, place)
    if row.get("finish") is not None and messages[-1]["role"] != "assistant":
        return []  # `regenerate` got no answer to it; what stands before is not the target's
    return _encode_messages(
        messages,
        checked_tools(tools, place),
        place,
        tokenizer,
        cfg,
        cut_off=row.get("finish") == "length",
    )


def conversation_of(row: Row, place: str, kind: str) -> tuple[object, object]:
    """Messages and tools of a row of this kind, not checked yet."""
    if kind == "conversations":
        return _from_sharegpt(row, place), _parsed_tools(row.get("tools"), place)
    return row[kind], row.get("tools")


def _encode_messages(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]] | None,
    place: str,
    tokenizer: PreTrainedTokenizerBase,
    cfg: DataConfig,
    cut_off: bool,
) -> list[EncodedChat]:
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not ends:
        _check_roles(messages, place)
    if cfg.split_turns and not cfg.last_turn_only:
        wholes = [end for end in ends if end > 1]  # nothing prompts an answer that comes first
    else:
        wholes = ends[-1:]
    examples = []
    for end in wholes:
        example = encode_chat(
            tokenizer,
            messages[:end],
            place=place,
            tools=tools,
            enable_thinking=cfg.enable_thinking,
            last_turn_only=cfg.last_turn_only or cfg.split_turns,
        )
        if cut_off and end == ends[-1]:
            # The template's end of turn is not a token of the target's.
            example.mask[np.flatnonzero(example.mask)[-1:]] = 0
        examples.append(example)
    return examples


def _check_roles(messages: Sequence[Message], place: str) -> None:
    """Refuse a conversation that nobody answers because the answering role has another name."""
    for i, message in enumerate(messages):
        if message["role"] not in _SHAREGPT_ROLES.values():
            raise UserError(
                f"{place}: messages[{i}].role: found {short(message['role'])}, want assistant "
                "for the one that answers"
            )


def checked_messages(messages: object, place: str) -> list[Message]:
    """Messages with a role and text; parts that are all text are joined."""
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else type(messages).__name__
        raise UserError(f"{place}: messages: found {found}, want a list of messages")
    return [
        _checked_message(message, f"{place}: messages[{i}]") for i, message in enumerate(messages)
    ]


def _checked_message(message: object, place: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(
            f"{place}: found {short(message)}, want an object with a role and a content"
        )
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise UserError(
            f"{place}.content: found {short(content)}, want a string or a list of parts"
        )
    if content is None and not any(message.get(name) for name in _INSTEAD_OF_CONTENT):
        raise UserError(f"{place}.content: found nothing, want a string or a list of parts")
    message = dict(message)
    if isinstance(content, list):
        message["content"] = _joined(content, place)
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
    return message


def _with_parsed_arguments(call: object) -> object:
    """The API has the arguments of a call as JSON text, templates want them as an object.

    Servers parse them, too, before they render a history.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    try:
        parsed = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": parsed}}


def _joined(parts: list[object], place: str) -> str:
    texts = []
    for i, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise UserError(f"{place}.content[{i}]: found {short(part)}, want a part with text")
        texts.append(text)
    return "".join(texts)


def checked_tools(tools: object, place: str) -> list[Mapping[str, object]] | None:
    """The `tools` of a row, None if there are none."""
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{place}: tools: found {short(tools)}, want a list of objects")
    return tools


def _from_sharegpt(row: Row, place: str) -> list[Message]:
    """OpenAI messages of `conversations`, after the row's `system` text if it has one."""
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{place}: conversations: found {short(turns)}, want a list of turns")
    system = row.get("system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    return messages + [_turn(turn, f"{place}: conversations[{i}]") for i, turn in enumerate(turns)]


def _turn(turn: object, place: str) -> Message:
    if isinstance(turn, dict) and "role" in turn:
        return turn
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise UserError(f"{place}: found {short(turn)}, want an object with from and value")
    role, text = _SHAREGPT_ROLES.get(str(turn.get("from"))), turn["value"]
    if role is None:
        known = ", ".join(_SHAREGPT_ROLES)
        raise UserError(f"{place}.from: found {short(turn.get('from'))}, want one of {known}")
    if role != "function_call":
        return {"role": role, "content": text}
    call = _json(text, f"{place}.value")
    if not isinstance(call, dict) or "name" not in call:
        raise UserError(f"{place}.value: found {short(call)}, want a call with name and arguments")
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call}],
    }


def _parsed_tools(tools: object, place: str) -> object:
    """LLaMA-Factory keeps them as JSON text."""
    if isinstance(tools, str):
        return _json(tools, f"{place}: tools") if tools.strip() else None
    return tools


def _json(text: str, place: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: found {short(text)}, want JSON ({error})") from error


def _token_row(row: Row, place: str) -> tuple[np.ndarray, np.ndarray]:
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
        found = "nothing" if values is None else short(values)
        raise UserError(f"{name}: found {found}, want a list of integers")
    for i, value in enumerate(values):
        if not isinstance(value, int) or abs(value) >= 2**63:
            raise UserError(f"{name}[{i}]: found {short(value)}, want an integer")
    return np.asarray(values, dtype=np.int64)


def check_ids(
    ids: np.ndarray, place: str, mask_token_id: int | None, vocab_size: int | None
) -> None:
    """Refuse ids outside the vocabulary, and the drafter's mask token."""
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


def short(value: object) -> str:
    """A value of a row as an error message shows it."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
