"""Regenerating answers: greedy text, resuming, torn files, servers, bad input."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from dflash_ext import regenerate
from dflash_ext.config import UserError
from dflash_ext.generation import Answer, Messages, ServerGenerator, TargetGenerator
from dflash_ext.target import Target, load_target, load_tokenizer

QUESTIONS = ["Hi", "Count to ten.", "Why?", "A longer question, asked at length.", "2 + 2 ="]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(str(tiny_target_dir), dtype="float32", device="cpu")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [
        {"task": f"t{i}", "messages": [{"role": "user", "content": question}]}
        for i, question in enumerate(QUESTIONS)
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(source: Sequence[str], prompts: Path, out: Path, *more: str) -> int:
    return regenerate.main([*source, "--prompts", str(prompts), "--out", str(out), *more])


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def conversation(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def alone(target: Target, prompt: list[int], steps: int, stops: set[int]) -> list[int]:
    """Greedy tokens of one prompt: no batch, no padding, no cache."""
    tokens: list[int] = []
    with torch.no_grad():
        while len(tokens) < steps and not (tokens and tokens[-1] in stops):
            logits = target.model(torch.tensor([prompt + tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens


# The target as generator


def test_batched_answers_are_each_prompts_own_greedy_text(target: Target, tiny_target_dir: Path):
    tokenizer = load_tokenizer(str(tiny_target_dir))
    generator = TargetGenerator(target, tokenizer, 24)
    ids = [
        tokenizer.apply_chat_template(
            list(conversation(q)), add_generation_prompt=True, return_dict=False
        )
        for q in QUESTIONS
    ]
    free = [alone(target, prompt, 24, set()) for prompt in ids]
    # A random model does not end: make tokens that its answers reach at different steps stop it,
    # so that the batch shrinks on the way.
    stops = {free[0][3], free[1][9], free[2][15]}
    generator.stop_ids = torch.tensor(sorted(stops))
    want = [alone(target, prompt, 24, stops) for prompt in ids]
    assert len({len(tokens) for tokens in want}) > 2
    assert generator._generate(ids) == want

    answers = generator.answer([conversation(q) for q in QUESTIONS])
    for answer, tokens in zip(answers, want, strict=True):
        assert answer.num_tokens == len(tokens)
        assert answer.ended == (tokens[-1] in stops)
        assert answer.text == tokenizer.decode(tokens, skip_special_tokens=True)


def test_sampling_settings_of_the_model_are_not_used(target: Target, tiny_target_dir: Path):
    tokenizer = load_tokenizer(str(tiny_target_dir))
    want = TargetGenerator(target, tokenizer, 8).answer([conversation("Hi")])
    replica = target.replica()
    replica.model.generation_config.update(do_sample=True, temperature=9.0, repetition_penalty=5.0)
    assert TargetGenerator(replica, tokenizer, 8).answer([conversation("Hi")]) == want


# The command


def test_rows_keep_their_fields_and_get_the_answer(
    tiny_target_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out.jsonl"
    source = ["--target", str(tiny_target_dir)]
    assert command(source, prompts, out, "--max_new_tokens", "6", "--batch_size", "2") == 0
    rows = read(out)
    assert [row["task"] for row in rows] == [f"t{i}" for i in range(len(QUESTIONS))]
    for row, question in zip(rows, QUESTIONS, strict=True):
        user, assistant = row["messages"]
        assert user == {"role": "user", "content": question}
        assert assistant["role"] == "assistant" and assistant["content"]
        assert row["finish"] == "length"  # a random model does not end by itself


def test_resuming_gives_the_same_file(tiny_target_dir: Path, prompts: Path, tmp_path: Path) -> None:
    source, limits = ["--target", str(tiny_target_dir)], ["--max_new_tokens", "6"]
    whole = tmp_path / "whole.jsonl"
    assert command(source, prompts, whole, *limits) == 0
    content = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    torn = tmp_path / "torn.jsonl"
    for kept in (0, ends[0], ends[1] + 9, ends[3] - 1, len(content)):
        torn.write_bytes(content[:kept])
        assert command(source, prompts, torn, *limits) == 0
        assert torn.read_bytes() == content


class Scripted:
    """Answers with the question; fails from batch `fail_at` on; counts the rows it was asked."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.batches: list[int] = []
        self.fail_at = fail_at

    def answer(self, batch: Sequence[Messages]) -> list[Answer]:
        if len(self.batches) == self.fail_at:
            raise KeyboardInterrupt
        self.batches.append(len(batch))
        return [Answer(f"re: {messages[-1]['content']}", 3, True) for messages in batch]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scripted]:
    def install(**kwargs: int) -> Scripted:
        fake = Scripted(**kwargs)
        monkeypatch.setattr(regenerate, "ServerGenerator", lambda *args, **kw: fake)
        return fake

    return install


SERVER = ["--server", "http://localhost:1"]


def test_an_interrupt_costs_one_batch_and_done_rows_are_not_asked_again(
    prompts: Path, tmp_path: Path, scripted: Callable[..., Scripted]
) -> None:
    out = tmp_path / "out.jsonl"
    first = scripted(fail_at=2)
    assert command(SERVER, prompts, out, "--batch_size", "2") == 130
    assert first.batches == [2, 2] and len(read(out)) == 4
    second = scripted()
    assert command(SERVER, prompts, out, "--batch_size", "2") == 0
    assert second.batches == [1]
    assert [row["messages"][-1]["content"] for row in read(out)] == [f"re: {q}" for q in QUESTIONS]
    assert all("finish" not in row for row in read(out))
    third = scripted()
    assert command(SERVER, prompts, out) == 0
    assert third.batches == []


def test_a_final_assistant_turn_is_replaced(
    tmp_path: Path, scripted: Callable[..., Scripted]
) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two? \u2028 \u00e9"},
        {"role": "assistant", "content": "old"},
    ]
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    row = {"messages": turns, "finish": "length", "id": 7}
    prompts.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    scripted()
    assert command(SERVER, prompts, out) == 0
    (got,) = [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n") if line]
    new = {"role": "assistant", "content": "re: Two? \u2028 \u00e9"}
    assert got == {"id": 7, "messages": [*turns[:-1], new]}
    assert command(SERVER, prompts, out) == 0  # found again although a line holds U+2028


def test_a_file_of_other_prompts_is_not_continued(
    prompts: Path, tmp_path: Path, scripted: Callable[..., Scripted], capsys: pytest.CaptureFixture
) -> None:
    scripted()
    out = tmp_path / "out.jsonl"
    other = {"messages": [*conversation("Else"), {"role": "assistant", "content": "x"}]}
    out.write_text(json.dumps(other) + "\n")
    assert command(SERVER, prompts, out) == 2
    assert capsys.readouterr().err.startswith(f"error: {out}:1: found an answer to something else")
    assert len(read(out)) == 1


def test_two_runs_on_one_file(
    prompts: Path, tmp_path: Path, scripted: Callable[..., Scripted], capsys: pytest.CaptureFixture
) -> None:
    scripted()
    out = tmp_path / "out.jsonl"
    with regenerate.open_output(out):
        assert command(SERVER, prompts, out) == 2
    assert capsys.readouterr().err == f"error: --out: {out}: another run is writing it\n"


@pytest.mark.parametrize(
    ("content", "want"),
    [
        ("", "found no rows"),
        ('{"messages": []}\n', ":1: found no turn to answer"),
        ('{"text": "hi"}\n', ":1: found no messages"),
        ('{"messages": ["hi"]}\n', ":1: found no messages"),
        ('{"messages": [{"role": "user"}]}\n', ":1: found no messages"),
        ('{"messages": [{"role": "system", "content": "x"}]}\n', ":1: found no turn to answer"),
        ('\n{"messages": [}\n', ":2: found a line that is not JSON"),
        ("[1]\n", ":1: found a JSON list, want an object"),
    ],
)
def test_bad_prompts_end_with_one_line(
    content: str,
    want: str,
    tmp_path: Path,
    scripted: Callable[..., Scripted],
    capsys: pytest.CaptureFixture,
) -> None:
    scripted()
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    assert command(SERVER, path, tmp_path / "out.jsonl") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and str(path) in err and want in err
    assert not (tmp_path / "out.jsonl").exists()


def test_missing_prompts_and_unwritable_out(
    prompts: Path, tmp_path: Path, scripted: Callable[..., Scripted], capsys: pytest.CaptureFixture
) -> None:
    scripted()
    assert command(SERVER, tmp_path / "none.jsonl", tmp_path / "out.jsonl") == 2
    assert "none.jsonl: cannot be read (No such file" in capsys.readouterr().err
    assert command(SERVER, prompts, tmp_path) == 2
    assert "cannot be written (Is a directory)" in capsys.readouterr().err


def test_a_missing_target_is_one_line(prompts: Path, tmp_path: Path, capsys) -> None:
    assert command(["--target", "/no/such"], prompts, tmp_path / "out.jsonl") == 2
    assert capsys.readouterr().err.startswith("error: model.target: found '/no/such'")


@pytest.mark.parametrize("extra", [["--max_new_tokens", "0"], ["--target", "x"]])
def test_bad_options(prompts: Path, tmp_path: Path, capsys, extra: list[str]) -> None:
    assert command(SERVER, prompts, tmp_path / "out.jsonl", *extra) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and extra[0] in err


def test_a_file_that_is_not_rows_is_left_alone(prompts: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "notes.txt"
    out.write_text("precious notes")
    assert command(SERVER, prompts, out) == 2
    assert out.read_text() == "precious notes"
    assert "notes.txt" in capsys.readouterr().err


# A server


class FakeServer(ThreadingHTTPServer):
    """Chat completions that echo the question; `failures` are HTTP codes to answer with first."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.failures: list[int] = []
        self.requests: list[dict] = []
        self.body: bytes | None = None
        self.lock = threading.Lock()


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append({"path": self.path, **request})
            code = self.server.failures.pop(0) if self.server.failures else 200
        text = request["messages"][-1]["content"]
        reason = "length" if text == "Why?" else "stop"
        message = {"role": "assistant", "content": text.upper()}
        choice = {"message": message, "finish_reason": reason}
        self.reply(code, {"choices": [choice], "usage": {"completion_tokens": 4}})

    def reply(self, code: int, body: dict) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(self.server.body or json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, args=(0.01,))
    thread.start()
    yield fake
    fake.shutdown()
    thread.join(timeout=10)
    fake.server_close()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_answers_of_a_server(
    server: FakeServer, suffix: str, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    source = ["--server", server.url + suffix]
    assert command(source, prompts, out, "--max_new_tokens", "5", "--batch_size", "3") == 0
    rows = read(out)
    assert [row["messages"][-1]["content"] for row in rows] == [q.upper() for q in QUESTIONS]
    assert [row.get("finish") for row in rows] == [None, None, "length", None, None]
    for request in server.requests:
        assert request["path"] == "/v1/chat/completions" and request["model"] == "tiny"
        assert request["temperature"] == 0 and request["max_tokens"] == 5


def test_a_server_that_is_busy_is_asked_again(server: FakeServer) -> None:
    server.failures = [503, 429]
    generator = ServerGenerator(server.url, 5, first_wait_s=0.01)
    assert generator.answer([conversation("Hi")]) == [Answer("HI", 4, True)]
    assert len(server.requests) == 3


def test_the_tries_are_bounded(server: FakeServer) -> None:
    generator = ServerGenerator(server.url, 5, tries=3, first_wait_s=0.01)
    server.failures = [500] * 99
    with pytest.raises(UserError, match="found HTTP 500 .* after 3 tries"):
        generator.answer([conversation("Hi")])
    assert len(server.requests) == 3


def test_a_refused_request_is_not_repeated(server: FakeServer) -> None:
    generator = ServerGenerator(server.url, 5, first_wait_s=0.01)
    server.failures = [400]
    with pytest.raises(UserError, match="found HTTP 400 .* after 1 tries"):
        generator.answer([conversation("Hi")])
    assert len(server.requests) == 1


@pytest.mark.parametrize("body", [b"not json", b'{"choices": []}', b'{"choices": [{}]}', b"[]"])
def test_a_reply_that_is_no_completion(server: FakeServer, body: bytes) -> None:
    generator = ServerGenerator(server.url, 5, first_wait_s=0.01)
    server.body = body
    with pytest.raises(UserError, match="/v1/chat/completions: found a reply"):
        generator.answer([conversation("Hi")])


def test_no_server(prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="want http://"):
        ServerGenerator("localhost:8000", 5)
    closed = FakeServer()
    closed.server_close()
    with pytest.raises(UserError, match=r"/v1/models: found .*refused.* after 2 tries"):
        ServerGenerator(closed.url, 5, tries=2, first_wait_s=0.01)
