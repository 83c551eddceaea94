"""Greedy answers to conversations, from a loaded target. (From a server: `server`.)"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from dflash_ext.data.assistant_mask import apply_template, template_options
from dflash_ext.data.rows import checked_messages, checked_tools
from dflash_ext.greedy_text import new_cache
from dflash_ext.target import Target, stop_token_ids

Messages = Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class Prompt:
    """A conversation to answer; `place` is "file:line" for messages."""

    messages: Messages
    tools: object = None
    place: str = "prompt"


@dataclass(frozen=True)
class Answer:
    """The reply to one prompt.

    `finish` is "stop" if the model stopped by itself, "length" at the length limit, else why there
    is no usable answer. `extra` holds further fields of the message: reasoning_content, tool_calls.
    """

    text: str
    num_tokens: int
    finish: str
    extra: Mapping[str, object] = field(default_factory=dict)


class Generator(Protocol):
    def answers(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """One answer for each prompt, in order. Raises UserError."""
        ...


class TargetGenerator:
    """Answers by the target itself: rows padded on the left, a key/value cache, argmax.

    Sampling settings, penalties and the like in the model's generation config are not used.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        *,
        batch_size: int = 64,
        enable_thinking: bool | None = None,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        self.enable_thinking = enable_thinking
        self.stop_ids = torch.tensor(stop_token_ids(target.info, tokenizer), device=target.device)

    def answers(self, prompts: Iterable[Prompt]) -> Iterator[Answer]:
        rest = iter(prompts)
        while batch := list(itertools.islice(rest, self.batch_size)):
            yield from self._answer_batch(batch)

    def _answer_batch(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """A prompt that leaves no room in the target's positions gets no answer."""
        ids = [self._encode(prompt) for prompt in prompts]
        room = self.target.info.max_position_embeddings or max(map(len, ids)) + self.max_new_tokens
        fitting = [row for row in ids if len(row) < room]
        tokens = iter(self._generate(fitting, room) if fitting else [])
        for row in ids:
            yield self._answer(next(tokens)) if len(row) < room else Answer("", 0, "length")

    def _encode(self, prompt: Prompt) -> list[int]:
        tools = checked_tools(prompt.tools, prompt.place)
        options = template_options(self.tokenizer, tools, self.enable_thinking, prompt.place)
        messages = checked_messages(list(prompt.messages), prompt.place)
        return apply_template(
            self.tokenizer,
            messages,
            prompt.place,
            add_generation_prompt=True,
            return_dict=False,
            **options,
        )

    def _answer(self, tokens: list[int]) -> Answer:
        ended = bool(tokens) and tokens[-1] in self.stop_ids.tolist()
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Answer(str(text), len(tokens), "stop" if ended else "length")

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Sequence[int]], room: int) -> list[list[int]]:
        """New tokens of each prompt, up to and including a stop token, `room` tokens in all."""
        device = self.target.device
        length = max(map(len, prompts))
        limit = min(self.max_new_tokens, room - length)
        ids = torch.zeros(len(prompts), length, dtype=torch.long)
        mask = torch.zeros(len(prompts), length + limit, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, length - len(prompt) :] = torch.tensor(prompt)
            mask[row, length - len(prompt) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask[:, :length].cumsum(1) - 1).clamp_min(0)

        argument = new_cache(self.target.model)
        (cache,) = argument.values()
        compact = all(hasattr(layer, "batch_select_indices") for layer in cache.layers)
        tokens: list[list[int]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))  # the prompt behind each row of the batch
        alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
        for step in range(limit):
            logits = self._forward(ids, mask[:, : length + step], positions, argument)
            new = logits.argmax(-1)
            for row, token, going in zip(rows, new.tolist(), alive.tolist(), strict=True):
                if going:
                    tokens[row].append(token)
            alive &= ~torch.isin(new, self.stop_ids)
            going = alive.nonzero()[:, 0]
            if len(going) == 0:
                break
            ids, positions = new[:, None], positions[:, -1:] + 1
            # Finished rows cost time; leaving them out copies the cache, so not at every step.
            if compact and len(going) <= 0.8 * len(rows):
                cache.batch_select_indices(going)
                ids, mask, positions = ids[going], mask[going], positions[going]
                alive = alive[going]
                rows = [rows[i] for i in going.tolist()]
        return tokens

    def _forward(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: dict[str, DynamicCache]
    ) -> Tensor:
        """Logits [B, V] of the last position; `cache` grows in place."""
        out = self.target.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **cache,
        )
        return out.logits[:, -1]
