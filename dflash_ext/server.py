"""Greedy answers from an OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...)."""

from __future__ import annotations

import http.client
import json
import os
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from dflash_ext.config import UserError
from dflash_ext.config_values import shown
from dflash_ext.generation import Answer, Prompt
from dflash_ext.ordered_pool import OrderedPool

LONGEST_WAIT_S = 60.0
_MAX_REPLY_BYTES = 64 * 2**20
_RETRIED = (408, 409, 425, 429)  # and 5xx
_REFUSED = (400, 413, 422)  # of one row, e.g. a prompt beyond the context
_STOPS = ("stop", "tool_calls", "function_call", "eos_token", "stop_sequence")


class _Failure(Exception):
    """One request that failed. `code` is the HTTP status, 0 for anything else."""

    def __init__(self, text: str, *, retry: bool, code: int = 0, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry, self.code, self.wait_s = retry, code, wait_s


class ServerGenerator:
    """Chat completions at temperature 0, many requests at a time.

    Connection errors, time-outs, cut-off replies and HTTP 408, 409, 425, 429 and 5xx are tried
    again, `tries` times in all, waiting 1, 2, 4 ... 60 s (or what Retry-After says). After that, or
    at any other failure, the generator ends with a UserError.

    Args:
        url: of the server, with or without /v1. `$DFLASH_API_KEY` is sent as a bearer token.
        max_new_tokens: length limit of an answer.
        model: name to ask for; None = the first that the server lists.
        enable_thinking: passed to the server's chat template if not None.
        concurrency: requests in flight.
        tries, first_wait_s, timeout_s: of one request.
        skip_refused: HTTP 400, 413 and 422 leave that prompt without an answer.
    """

    def __init__(
        self,
        url: str,
        max_new_tokens: int,
        *,
        model: str | None = None,
        enable_thinking: bool | None = None,
        concurrency: int = 64,
        tries: int = 8,
        first_wait_s: float = 1.0,
        timeout_s: float = 600.0,
        skip_refused: bool = False,
    ) -> None:
        self.base = base_url(url)
        self.tries, self.first_wait_s, self.timeout_s = tries, first_wait_s, timeout_s
        self.skip_refused = skip_refused
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get("DFLASH_API_KEY"):
            if not (key.isascii() and key.isprintable()):
                raise UserError("$DFLASH_API_KEY: found odd characters, want a plain key")
            self._headers["Authorization"] = f"Bearer {key}"
        self._pool = OrderedPool(self._complete, concurrency)
        self.model = model or self._first_model()
        self._body: dict[str, object] = {
            "model": self.model,
            "temperature": 0,
            "max_tokens": max_new_tokens,
            # Servers take defaults from the model's generation config; penalties change the argmax.
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "repetition_penalty": 1.0,
        }
        if enable_thinking is not None:
            self._body["chat_template_kwargs"] = {"enable_thinking": enable_thinking}

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        return self._pool.map(prompts)

    def _first_model(self) -> str:
        reply = self._request("/models", None)
        try:
            return str(reply["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(f"{self.base}/models: found no model, want --model") from error

    def _complete(self, prompt: Prompt) -> Answer:
        body = {**self._body, "messages": list(prompt.messages)}
        if prompt.tools:
            body["tools"] = prompt.tools
        try:
            return self._request("/chat/completions", body)
        except UserError as error:
            failure = error.__cause__
            if isinstance(failure, _Failure) and failure.code in _REFUSED and self.skip_refused:
                return Answer("", 0, f"HTTP {failure.code}")
            raise UserError(f"{prompt.place}: {error}") from error

    def _request(self, path: str, body: dict[str, object] | None) -> Any:
        """The reply's JSON, or of a completion its Answer; tried again where that may help."""
        for attempt in range(1, self.tries + 1):
            try:
                reply = self._send(path, body)
                return reply if body is None else parse_answer(reply)
            except _Failure as failure:
                if failure.code == 400 and "repetition_penalty" in str(failure) and body:
                    # Not every server knows it. Without it there is none to switch off.
                    self._body.pop("repetition_penalty", None)
                    if body.pop("repetition_penalty", None) is not None:
                        continue
                if not failure.retry or attempt == self.tries:
                    tries = "" if attempt == 1 else f" after {attempt} tries"
                    raise UserError(
                        f"{self.base}{path}: found {failure}{tries}, want {_wanted(failure)}"
                    ) from failure
                if body is None and attempt == 1:  # minutes of silence would look like a hang
                    tried = f"{self.base}{path}: {failure} (try 1 of {self.tries})"
                    print(tried, file=sys.stderr, flush=True)
                wait_s = min(self.first_wait_s * 2 ** (attempt - 1), LONGEST_WAIT_S)
                wait_s = max(wait_s * random.uniform(0.75, 1.0), failure.wait_s)
            if self._pool.stop.wait(wait_s):
                break
        raise UserError(f"{self.base}{path}: given up, want a server that answers")

    def _send(self, path: str, body: dict[str, object] | None) -> Any:
        try:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(self.base + path, data=data, headers=self._headers)
            deadline = time.monotonic() + self.timeout_s
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                text = _read(response, deadline)
        except urllib.error.HTTPError as error:
            raise _http_failure(error) from error
        except (OSError, http.client.HTTPException) as error:  # refused, dropped, cut off, too slow
            raise _Failure(_one_line(error), retry=True) from error
        except ValueError as error:  # what urllib makes of odd headers and names
            raise _Failure(_one_line(error), retry=False) from error
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            start = shown(text[:40].decode(errors="replace"))
            cut_off = text.lstrip()[:1] == b"{"
            raise _Failure(f"a reply that is not JSON ({start})", retry=cut_off) from error


def base_url(url: str) -> str:
    """The address that ends in /v1. Raises UserError for anything but a plain http(s) address."""
    wrong = UserError(f"--server: found {shown(url)}, want http://HOST:PORT or https://HOST")
    try:
        parts = urlsplit(url)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        raise wrong from None
    plain = url.isascii() and url.isprintable() and " " not in url and "\\" not in url
    if (
        not (plain and port_is_fine and parts.hostname and parts.scheme in ("http", "https"))
        or parts.query
        or parts.fragment
        or "@" in parts.netloc
    ):
        raise wrong
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path.rstrip('/')}/v1"


def parse_answer(reply: object) -> Answer:
    """The answer in a chat completion. Raises _Failure for anything that is none."""
    try:
        choice = reply["choices"][0]  # type: ignore[index]
        message, reason = choice["message"], choice["finish_reason"]
        text = message["content"]
        extra = {
            "reasoning_content": message.get("reasoning_content") or message.get("reasoning"),
            "tool_calls": message.get("tool_calls"),
        }
        usage = reply.get("usage")  # type: ignore[attr-defined]
        json.dumps([text, extra], ensure_ascii=False).encode()
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _Failure(
            f"a reply without choices[0].message.content ({shown(reply)})", retry=False
        ) from error
    except UnicodeError as error:
        raise _Failure("an answer that is not valid Unicode", retry=False) from error
    reasoning, calls = extra.values()
    if not (
        isinstance(text, str | None)
        and isinstance(reasoning, str | None)
        and isinstance(calls, list | None)
        and isinstance(reason, str)
    ):
        raise _Failure(f"an odd message ({shown(choice)})", retry=False)
    extra = {name: value for name, value in extra.items() if value}
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if reason in _STOPS:
        finish = "stop" if text or extra else "empty"
    elif reason in ("length", "content_filter"):
        finish = reason
    else:  # "abort" of a server that shuts down
        raise _Failure(f"finish_reason {shown(reason)}", retry=True)
    return Answer(text or "", tokens if isinstance(tokens, int) else 0, finish, extra)


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """All of a reply. The time-out of a socket alone would let a trickle go on for ever."""
    chunks: list[bytes] = []
    while chunk := response.read1(1 << 16):
        chunks.append(chunk)
        if time.monotonic() > deadline:
            raise TimeoutError("timed out in the middle of a reply")
        if sum(map(len, chunks)) > _MAX_REPLY_BYTES:
            raise ValueError("a reply without end")
    if response.length:  # read1 does not mind
        raise http.client.IncompleteRead(b"".join(chunks), response.length)
    return b"".join(chunks)


def _http_failure(error: urllib.error.HTTPError) -> _Failure:
    text = f"HTTP {error.code} {error.reason}"
    try:
        details = error.read(4000).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        details = ""
    if details.strip():
        text += f" ({_short(details)})"
    retry = error.code in _RETRIED or error.code >= 500
    after = error.headers.get("Retry-After", "")
    wait_s = min(float(after), LONGEST_WAIT_S) if after.isdecimal() else 0.0
    return _Failure(_one_line(text), retry=retry, code=error.code, wait_s=wait_s)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."


def _wanted(failure: _Failure) -> str:
    if failure.code in (401, 403):
        return "a server that lets us in (set $DFLASH_API_KEY)"
    if failure.code in _REFUSED:
        return "a request it takes (--skip_refused leaves such rows without an answer)"
    if failure.code == 404:
        return "an OpenAI-compatible server that has this model (--model)"
    if failure.code == 0 and failure.retry:
        return "a server that answers"
    return "a chat completion"


def _one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__
