"""Asking a server: concurrency, order, retries, time-outs, deaths, odd replies and addresses."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_server import FakeServer, answer, completion, fail, hang_up, say, trickle

from dflash_ext import regenerate
from dflash_ext.config import UserError
from dflash_ext.generation import Answer, Prompt
from dflash_ext.ordered_pool import OrderedPool
from dflash_ext.server import ServerGenerator, base_url


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


def generator(server: FakeServer, **options) -> ServerGenerator:
    return ServerGenerator(server.url, 5, **{"first_wait_s": 0.01, "tries": 4, **options})


def prompt(text: str) -> Prompt:
    return Prompt([{"role": "user", "content": text}], place=f"p.jsonl:{text}")


def ask(server: FakeServer, *texts: str, **options) -> list[Answer]:
    return list(generator(server, **options).answers([prompt(text) for text in texts]))


def test_requests_are_greedy_and_without_penalties(server: FakeServer) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    asked = Prompt([{"role": "user", "content": "hi"}], tools)
    assert list(generator(server).answers([asked])) == [Answer("HI", 4, "stop")]
    assert server.requests == [
        {
            "path": "/v1/chat/completions",
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "tools": tools,
            "temperature": 0,
            "max_tokens": 5,
            **{"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1.0},
        }
    ]
    ask(server, "hi", model="other", enable_thinking=True)
    assert server.requests[1]["model"] == "other"
    assert server.requests[1]["chat_template_kwargs"] == {"enable_thinking": True}


def test_a_server_that_does_not_know_repetition_penalty(server: FakeServer) -> None:
    server.script = [fail(400, {"error": {"message": "Unknown field: repetition_penalty"}})]
    assert [a.text for a in ask(server, "a", "b", concurrency=1)] == ["A", "B"]
    assert ["repetition_penalty" in r for r in server.requests] == [True, False, False]


def test_the_key_is_sent(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_API_KEY", "open sesame")
    ask(server, "hi")
    assert server.headers[0]["Authorization"] == "Bearer open sesame"
    monkeypatch.setenv("DFLASH_API_KEY", "secret\n")
    with pytest.raises(UserError, match="DFLASH_API_KEY: found odd characters") as error:
        generator(server)
    assert "secret" not in str(error.value)


def test_many_at_a_time_and_in_order(server: FakeServer) -> None:
    server.script = [answer(after_s=0.03 * (7 * i % 5)) for i in range(20)]
    texts = [f"t{i}" for i in range(40)]
    assert [a.text for a in ask(server, *texts, concurrency=5)] == [t.upper() for t in texts]
    assert 3 <= server.most_in_flight <= 5
    assert len(server.requests) == 40


def test_a_slow_answer_does_not_hold_up_the_others(server: FakeServer) -> None:
    server.script = [answer(after_s=0.6)]
    start = time.monotonic()
    assert len(ask(server, *"abcdefgh", concurrency=2)) == 8
    assert time.monotonic() - start < 1.0
    assert max(server.times) - server.times[0] < 0.5  # asked while the first was still waited for


# What is tried again


@pytest.mark.parametrize(
    "trouble",
    [
        *(fail(code) for code in (408, 429, 500, 502, 503, 504)),
        hang_up(),
        hang_up(b"HTTP/1.0 200 OK\r\nContent-Length: 500\r\n\r\n{"),
        hang_up(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(completion("cut"))[:30].encode()),
        hang_up(b"nonsense\r\n\r\n"),
        answer(after_s=1.2),
        trickle(every_s=0.1, count=30),
        say(completion("half an ans", "abort")),
    ],
    ids=[
        *("408", "429", "500", "502", "503", "504", "hang-up", "cut-off", "cut-off-no-length"),
        *("no-http", "time-out", "trickle", "abort"),
    ],
)
def test_trouble_that_passes(trouble, server: FakeServer) -> None:
    server.script = [trouble, trouble]
    assert ask(server, "hi", timeout_s=0.5) == [Answer("HI", 4, "stop")]
    assert len(server.requests) == 3


def test_waits_double_and_retry_after_is_heard(server: FakeServer) -> None:
    server.script = [fail(503)] * 3
    ask(server, "hi", first_wait_s=0.1)
    waits = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    assert [0.07 < w / 2**i < 0.2 for i, w in enumerate(waits)] == [True] * 3
    server.times.clear()
    server.script = [fail(429, **{"Retry-After": "1"})]
    ask(server, "hi")
    assert server.times[1] - server.times[0] > 0.9


def test_the_tries_are_bounded(server: FakeServer) -> None:
    server.script = [fail(500, b"CUDA\nerror")] * 99
    with pytest.raises(UserError) as error:
        ask(server, "hi", tries=3)
    assert str(error.value) == (
        f"p.jsonl:hi: {server.url}/v1/chat/completions: found HTTP 500 Internal Server Error "
        "(CUDA error) after 3 tries, want a chat completion"
    )
    assert len(server.requests) == 3


# What is not


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        (400, "want a request it takes (--skip_refused leaves such rows without an answer)"),
        (401, "want a server that lets us in (set $DFLASH_API_KEY)"),
        (404, "want an OpenAI-compatible server that has this model (--model)"),
        (405, "want a chat completion"),
        (307, "want a chat completion"),
    ],
)
def test_a_refused_request_is_not_repeated(code: int, wanted: str, server: FakeServer) -> None:
    server.script = [fail(code, {"error": {"message": "context length"}})] * 9
    with pytest.raises(UserError) as error:
        ask(server, "hi")
    text = str(error.value)
    assert text.startswith(f"p.jsonl:hi: {server.url}/v1/chat/completions: found HTTP {code} ")
    assert "context length" in text and text.endswith(wanted) and "\n" not in text
    assert len(server.requests) == 1


def test_refused_rows_can_be_skipped(server: FakeServer) -> None:
    server.script = [answer(), fail(400, b"too long"), answer(), fail(413)]
    found = ask(server, *"abcde", concurrency=1, skip_refused=True)
    assert [a.finish for a in found] == ["stop", "HTTP 400", "stop", "HTTP 413", "stop"]
    server.script = [fail(404)]
    with pytest.raises(UserError, match="HTTP 404"):
        ask(server, "hi", skip_refused=True)


ODD_REPLIES = {
    "html": (b"<html>login</html>", "a reply that is not JSON ('<html>login</html>')"),
    "empty": (b"", "a reply that is not JSON ('')"),
    "latin-1": (b"[\xff\xfe", "a reply that is not JSON"),
    "deep": (b"[" * 100_000, "a reply that is not JSON"),
    "null": (None, "a reply without choices[0].message.content (None)"),
    "text": ("hi", "a reply without choices[0].message.content ('hi')"),
    "no-choices": ({"choices": []}, "a reply without choices[0].message.content"),
    "null-choices": ({"choices": None}, "a reply without choices[0].message.content"),
    "no-message": ({"choices": [{}]}, "a reply without choices[0].message.content"),
    "text-message": ({"choices": [{"message": "x", "finish_reason": "stop"}]}, "a reply without"),
    "no-reason": ({"choices": [{"message": {"content": "x"}}]}, "a reply without choices[0]"),
    "null-reason": (completion("x", None), "an odd message ({"),
    "number": (completion(5), "an odd message ({"),
    "parts": (completion([{"text": "x"}]), "an odd message ({"),
    "calls": (completion("x", tool_calls="add"), "an odd message ({"),
    "reasoning": (completion("x", reasoning_content=["x"]), "an odd message ({"),
    "surrogate": (completion("\ud800"), "an answer that is not valid Unicode"),
}


@pytest.mark.parametrize("name", ODD_REPLIES)
def test_odd_replies_are_one_line(name: str, server: FakeServer) -> None:
    body, wanted = ODD_REPLIES[name]
    server.script = [say(body)] * 9
    with pytest.raises(UserError) as error:
        ask(server, "hi")
    text = str(error.value)
    place = f"p.jsonl:hi: {server.url}/v1/chat/completions: found "
    assert text.startswith(place + wanted) and "\n" not in text and len(text) < 400
    assert len(server.requests) == 1


def test_kinds_of_answers(server: FakeServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    replies = [
        completion("a", "tool_calls", tool_calls=[call]),
        completion(None, "tool_calls", tool_calls=[call]),
        completion("a", reasoning_content="hm"),
        completion("a", reasoning="hm", reasoning_content=None),
        completion("a", "content_filter"),
        completion(None),
        completion(None, "length", reasoning_content="hm"),
        {**completion("a"), "usage": None},
        {**completion("a"), "usage": {"completion_tokens": "many"}},
    ]
    server.script = [say(reply) for reply in replies]
    found = ask(server, *"abcdefghi", concurrency=1)
    assert found == [
        Answer("a", 4, "stop", {"tool_calls": [call]}),
        Answer("", 4, "stop", {"tool_calls": [call]}),
        Answer("a", 4, "stop", {"reasoning_content": "hm"}),
        Answer("a", 4, "stop", {"reasoning_content": "hm"}),
        Answer("a", 4, "content_filter"),
        Answer("", 4, "empty"),
        Answer("", 4, "length", {"reasoning_content": "hm"}),
        Answer("a", 0, "stop"),
        Answer("a", 0, "stop"),
    ]


@pytest.mark.parametrize(
    "models", [None, [], {"data": []}, {"data": [{}]}, {"data": ["x"]}, "x", {"data": {"0": 1}}]
)
def test_a_server_without_models(models: object, server: FakeServer) -> None:
    server.models = models
    with pytest.raises(UserError, match=r"/v1/models: found no model, want --model"):
        generator(server)
    assert [a.text for a in ask(server, "hi", model="tiny")] == ["HI"]


def test_a_server_that_is_not_there_says_so_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """All tries take two minutes: silence would look like a hang."""
    with pytest.raises(UserError, match=r"/v1/models: found .*refused.* after 3 tries, want"):
        ServerGenerator("http://127.0.0.1:9", 4, tries=3, first_wait_s=0.01)
    (line,) = capsys.readouterr().err.splitlines()
    assert "127.0.0.1:9/v1/models: " in line and line.endswith("(try 1 of 3)")


# A server that dies


def test_a_server_that_dies_loses_nothing(tmp_path: Path, capsys, monkeypatch) -> None:
    texts = [f"question {i}" for i in range(30)]
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(server: FakeServer) -> int:
        flags = ["--server", server.url, "--prompts", str(prompts), "--out", str(out)]
        return regenerate.main([*flags, "--concurrency", "3", "--tries", "2"])

    monkeypatch.setattr("dflash_ext.server.LONGEST_WAIT_S", 0.05)
    with FakeServer() as server:
        server.script = [answer(after_s=0.01)] * 10 + [hang_up()] * 90
        assert run(server) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith(f"error: {prompts}:") and "2 tries" in err
    done = out.read_text().splitlines()
    assert 7 <= len(done) <= 10
    assert run(server) == 2  # now there is none at all
    err = capsys.readouterr().err
    assert "/v1/models: found <urlopen error [Errno 111] Connection refused> after 2 tries" in err
    assert out.read_text().splitlines() == done

    with FakeServer() as again:
        assert run(again) == 0
        assert len(again.requests) == len(texts) - len(done)
    answers = [json.loads(line)["messages"][-1]["content"] for line in out.read_text().splitlines()]
    assert answers == [text.upper() for text in texts]


def test_waiting_requests_do_not_outlive_the_run(server: FakeServer) -> None:
    def act(handler, request):
        code = 400 if request["messages"][-1]["content"] == "a" else 503
        fail(code)(handler, request)

    before = threading.active_count()
    server.script = [act] * 99
    with pytest.raises(UserError, match="HTTP 400"):
        ask(server, *"abcdefgh", concurrency=4, first_wait_s=60.0)
    deadline = time.monotonic() + 5
    while threading.active_count() > before + 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before + 4  # the server's own


# Addresses


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://h:80", "http://h:80/v1"),
        ("http://h/", "http://h/v1"),
        ("https://h/v1", "https://h/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("https://h/api/v1/chat/completions", "https://h/api/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
        ("HTTP://h", "http://h/v1"),
    ],
)
def test_addresses(url: str, wanted: str) -> None:
    assert base_url(url) == wanted


@pytest.mark.parametrize(
    "url",
    [
        *("", "h", "localhost:8000", "ftp://h", "file:///etc/passwd", "http://", "http:///v1"),
        *("http://[::1", "http://h:99999", "http://h:x", "http://h:0", "http://h h", "http://h\n"),
        *("http://h\x00", "http://ü", "http://user:pass@h", "http://h?a=b", "http://h#x", "//h"),
        *("http://[h]", "http://h\\v1", "http://" + "[" * 50),
    ],
)
def test_odd_addresses_are_one_line(url: str, tmp_path: Path, capsys) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    out = tmp_path / "o.jsonl"
    flags = [f"--server={url}", "--prompts", str(prompts), "--out", str(out)]
    assert regenerate.main(flags) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "want http://HOST:PORT or https://HOST" in err


def test_a_name_that_nobody_has(server: FakeServer) -> None:
    with pytest.raises(UserError, match=r"http://nobody.invalid/v1/models: found .* after 2 tries"):
        ServerGenerator("http://nobody.invalid", 5, tries=2, first_wait_s=0.01)
    with pytest.raises(UserError, match=r"http://a\.{2,}.*/models: found "):
        ServerGenerator("http://a..b", 5, tries=2, first_wait_s=0.01)


# The pool


def test_the_pool_keeps_the_order_and_the_first_error() -> None:
    pool: OrderedPool[int, int] = OrderedPool(lambda i: time.sleep(i % 3 / 100) or 10 * i, 4)
    assert list(pool.map(range(50))) == [10 * i for i in range(50)]

    def odd(i: int) -> int:
        if i in (5, 7):
            raise ValueError(i)
        return i

    results = OrderedPool(odd, 4).map(range(50))
    assert [next(results) for _ in range(5)] == list(range(5))
    with pytest.raises(ValueError, match="5"):
        next(results)


def test_the_pool_takes_items_as_they_are_needed() -> None:
    taken = []

    def items() -> Iterator[int]:
        for i in range(1000):
            taken.append(i)
            yield i

    pool: OrderedPool[int, int] = OrderedPool(lambda i: i, 2)
    results = pool.map(items())
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    assert len(taken) < 20
    results.close()
    assert pool.stop.is_set()
    assert list(OrderedPool(lambda i: i, 3).map([])) == []
