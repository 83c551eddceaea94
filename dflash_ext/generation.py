"""Greedy answers to conversations, in batches: from a loaded target or from a server."""

from __future__ import annotations

import inspect
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from dflash_ext.config import UserError
from dflash_ext.target import Target

Messages = Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class Answer:
    """`ended`: the model stopped by itself (else at the length limit)."""

    text: str
    num_tokens: int
    ended: bool


class Generator(Protocol):
    def answer(self, batch: Sequence[Messages]) -> list[Answer]: ...


class TargetGenerator:
    """Answers by the target itself: rows padded on the left, a key/value cache, argmax.

    Sampling settings, penalties and the like in the model's generation config are not used.
    """

    def __init__(
        self, target: Target, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        parameters = inspect.signature(type(target.model).forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        stops = [*target.info.eos_token_ids, tokenizer.eos_token_id]
        self.stop_ids = torch.tensor([s for s in stops if s is not None], device=target.device)

    def answer(self, batch: Sequence[Messages]) -> list[Answer]:
        prompts = [
            self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=False
            )
            for messages in batch
        ]
        return [self._answer(tokens) for tokens in self._generate(prompts)]

    def _answer(self, tokens: list[int]) -> Answer:
        ended = bool(tokens) and tokens[-1] in self.stop_ids.tolist()
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Answer(str(text), len(tokens), ended)

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """New tokens of each prompt, up to and including a stop token."""
        device = self.target.device
        length = max(map(len, prompts))
        ids = torch.zeros(len(prompts), length, dtype=torch.long)
        mask = torch.zeros(len(prompts), length + self.max_new_tokens, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, length - len(prompt) :] = torch.tensor(prompt)
            mask[row, length - len(prompt) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask[:, :length].cumsum(1) - 1).clamp_min(0)

        cache = DynamicCache(config=self.target.model.config)
        compact = all(hasattr(layer, "batch_select_indices") for layer in cache.layers)
        tokens: list[list[int]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))  # the prompt behind each row of the batch
        alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
        for step in range(self.max_new_tokens):
            logits = self._forward(ids, mask[:, : length + step], positions, cache)
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

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Logits [B, V] of the last position; `cache` grows in place."""
        out = self.target.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_argument: cache},
        )
        return out.logits[:, -1]


class ServerGenerator:
    """Answers by an OpenAI-compatible server (chat completions, temperature 0).

    A batch is sent at once, one request a row. Connection errors and HTTP 429 and 5xx are tried
    again, `tries` times in all, waiting 1, 2, 4 ... s; then, or at any other answer, UserError.
    """

    def __init__(
        self,
        url: str,
        max_new_tokens: int,
        *,
        model: str | None = None,
        tries: int = 5,
        first_wait_s: float = 1.0,
        timeout_s: float = 600.0,
    ) -> None:
        self.base = url.rstrip("/").removesuffix("/v1") + "/v1"
        if not self.base.startswith(("http://", "https://")):
            raise UserError(f"--server: found {url!r}, want http://... or https://...")
        self.max_new_tokens = max_new_tokens
        self.tries, self.first_wait_s, self.timeout_s = tries, first_wait_s, timeout_s
        self.model = model or self._first_model()

    def answer(self, batch: Sequence[Messages]) -> list[Answer]:
        with ThreadPoolExecutor(max_workers=len(batch)) as pool:
            return list(pool.map(self._complete, batch))

    def _first_model(self) -> str:
        reply = self._request("/models", None)
        try:
            return str(reply["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(f"{self.base}/models: found no model, want --model") from error

    def _complete(self, messages: Messages) -> Answer:
        reply = self._request(
            "/chat/completions",
            {
                "model": self.model,
                "messages": list(messages),
                "temperature": 0,
                "max_tokens": self.max_new_tokens,
            },
        )
        try:
            choice = reply["choices"][0]
            text = choice["message"]["content"] or ""
            tokens = (reply.get("usage") or {}).get("completion_tokens", 0)
            return Answer(text, tokens, choice.get("finish_reason") != "length")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.base}/chat/completions: found a reply without "
                "choices[0].message.content, want a chat completion"
            ) from error

    def _request(self, path: str, body: dict[str, object] | None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.base + path, data=data, headers={"Content-Type": "application/json"}
        )
        for attempt in range(self.tries):
            if attempt:
                time.sleep(self.first_wait_s * 2 ** (attempt - 1))
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                failure = f"HTTP {error.code} {error.reason}"
                if error.code != 429 and error.code < 500:
                    break
            except ValueError as error:
                failure = f"a reply that is not JSON ({error})"
                break
            except OSError as error:  # URLError, refused or dropped connections, time-outs
                failure = str(error)
        raise UserError(f"{self.base}{path}: found {failure} after {attempt + 1} tries, want 200")
