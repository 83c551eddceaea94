"""Regenerating answers: greedy text, resuming, torn files, servers, bad input."""

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import yaml
from fake_server import FakeServer

from dflash_ext import regenerate
from dflash_ext.config import DataConfig
from dflash_ext.data.conversations import load_examples
from dflash_ext.generation import Answer, Messages, Prompt, TargetGenerator
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
    assert generator._generate(ids, 512) == want

    answers = generator.answers([Prompt(conversation(q)) for q in QUESTIONS])
    for answer, tokens in zip(answers, want, strict=True):
        assert answer.num_tokens == len(tokens)
        assert answer.finish == ("stop" if tokens[-1] in stops else "length")
        assert answer.text == tokenizer.decode(tokens, skip_special_tokens=True)


def test_sampling_settings_of_the_model_are_not_used(target: Target, tiny_target_dir: Path):
    tokenizer = load_tokenizer(str(tiny_target_dir))
    want = list(TargetGenerator(target, tokenizer, 8).answers([Prompt(conversation("Hi"))]))
    replica = target.replica()
    replica.model.generation_config.update(do_sample=True, temperature=9.0, repetition_penalty=5.0)
    generator = TargetGenerator(replica, tokenizer, 8)
    assert list(generator.answers([Prompt(conversation("Hi"))])) == want


def test_a_prompt_beyond_the_targets_positions_gets_no_answer(
    target: Target, tiny_target_dir: Path
) -> None:
    generator = TargetGenerator(target, load_tokenizer(str(tiny_target_dir)), 40)
    prompts = [Prompt(conversation("x" * n)) for n in (3, 480, 600, 5)]  # of 512 positions
    answers = list(generator.answers(prompts))
    assert [answer.num_tokens > 0 for answer in answers] == [True, True, False, True]
    assert answers[2] == Answer("", 0, "length")
    assert answers[1].num_tokens < 40  # as much as there is room


def test_thinking_and_tools_reach_the_template(target: Target, tiny_target_dir: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_target_dir))
    tokenizer.chat_template += "{{ enable_thinking }}{{ tools[0].name if tools }}"
    generator = TargetGenerator(target, tokenizer, 4, enable_thinking=False)
    ids = generator._encode(Prompt(conversation("Hi"), [{"name": "add"}]))
    assert tokenizer.decode(ids).endswith("assistant\nFalseadd")


# The command


def test_rows_keep_their_fields_and_get_the_answer(
    tiny_target_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out.jsonl"
    source = ["--target", str(tiny_target_dir)]
    flags = ["--max_new_tokens", "6", "--batch_size", "2"]
    assert command(source, prompts, out, *flags, "--keep_truncated") == 0
    rows = read(out)
    assert [row["task"] for row in rows] == [f"t{i}" for i in range(len(QUESTIONS))]
    for row, question in zip(rows, QUESTIONS, strict=True):
        user, assistant = row["messages"]
        assert user == {"role": "user", "content": question}
        assert assistant["role"] == "assistant" and assistant["content"]
        assert row["finish"] == "length"  # a random model does not end by itself
    settings = yaml.safe_load((tmp_path / "new" / "out.jsonl.settings.yaml").read_text())
    assert settings.pop("template") and settings == {
        **{"target": str(tiny_target_dir), "revision": None, "dtype": "float32"},
        **{"enable_thinking": None, "temperature": 0, "max_new_tokens": 6, "keep_truncated": True},
    }


def test_answers_cut_off_are_refused_and_training_passes_over_them(
    tiny_target_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out, source = tmp_path / "out.jsonl", ["--target", str(tiny_target_dir)]
    assert command(source, prompts, out, "--max_new_tokens", "6") == 0
    assert all(len(row["messages"]) == 1 and row["finish"] == "length" for row in read(out))
    said = capsys.readouterr().out
    assert f"{len(QUESTIONS)} of them without an answer, mostly cut off at 6 tokens" in said
    assert command(source, prompts, out, "--max_new_tokens", "6") == 0  # all there
    assert f"{len(QUESTIONS)} of them without an answer" in capsys.readouterr().out

    history = [*conversation("a?"), {"role": "assistant", "content": "b"}, *conversation("c?")]
    whole = {"messages": [*history, {"role": "assistant", "content": "d"}]}
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(
            json.dumps(row) + "\n" for row in ({"messages": history, "finish": "length"}, whole)
        )
    )
    tokenizer = load_tokenizer(str(tiny_target_dir))
    examples, report = load_examples([str(out), str(text)], tokenizer, DataConfig())
    assert len(examples) == 1 and report.no_assistant == len(QUESTIONS) + 1


def test_resuming_gives_the_same_file(tiny_target_dir: Path, prompts: Path, tmp_path: Path) -> None:
    source = ["--target", str(tiny_target_dir)]
    limits = ["--max_new_tokens", "6", "--keep_truncated"]
    whole = tmp_path / "whole.jsonl"
    assert command(source, prompts, whole, *limits) == 0
    content = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    torn = tmp_path / "torn.jsonl"
    for kept in (0, ends[0], ends[1] + 9, ends[3] - 1, len(content)):
        torn.write_bytes(content[:kept])
        assert command(source, prompts, torn, *limits) == 0
        assert torn.read_bytes() == content


def test_a_file_is_not_continued_with_other_settings(
    tiny_target_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out, source = tmp_path / "out.jsonl", ["--target", str(tiny_target_dir)]
    assert command(source, prompts, out, "--max_new_tokens", "6") == 0
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:2]))
    capsys.readouterr()
    for flags, wanted in (
        (["--max_new_tokens", "7"], "found max_new_tokens 6, this command has 7"),
        (["--max_new_tokens", "6", "--keep_truncated"], "found keep_truncated False"),
        (["--max_new_tokens", "6", "--enable_thinking", "true"], "found enable_thinking None"),
        (["--max_new_tokens", "6", "--dtype", "bfloat16"], "found dtype 'float32'"),
    ):
        assert command(source, prompts, out, *flags) == 2
        err = capsys.readouterr().err
        assert f"error: {out}.settings.yaml: {wanted}" in err
    assert command(source, prompts, out, "--max_new_tokens", "6") == 0


class Scripted:
    """Answers with the question; is interrupted at row `fail_at`; counts the rows it was asked."""

    model = "scripted"

    def __init__(self, fail_at: int | None = None) -> None:
        self.asked = 0
        self.fail_at = fail_at

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        for prompt in prompts:
            if self.asked == self.fail_at:
                raise KeyboardInterrupt
            self.asked += 1
            yield Answer(f"re: {prompt.messages[-1]['content']}", 3, "stop")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scripted]:
    def install(**kwargs: int) -> Scripted:
        fake = Scripted(**kwargs)
        monkeypatch.setattr(regenerate, "ServerGenerator", lambda *args, **kw: fake)
        return fake

    return install


SERVER = ["--server", "http://localhost:1"]


def test_an_interrupt_costs_nothing_that_was_answered(
    prompts: Path, tmp_path: Path, scripted: Callable[..., Scripted]
) -> None:
    out = tmp_path / "out.jsonl"
    scripted(fail_at=3)
    assert command(SERVER, prompts, out) == 130
    assert len(read(out)) == 3
    second = scripted()
    assert command(SERVER, prompts, out) == 0
    assert second.asked == len(QUESTIONS) - 3
    assert [row["messages"][-1]["content"] for row in read(out)] == [f"re: {q}" for q in QUESTIONS]
    assert all("finish" not in row for row in read(out))
    third = scripted()
    assert command(SERVER, prompts, out) == 0
    assert third.asked == 0


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
        ('{"messages": []}\n', ":1: messages: found an empty list"),
        ('{"text": "hi"}\n', ":1: found the fields 'text', want 'messages' or 'conversations'"),
        ('{"messages": ["hi"]}\n', ":1: messages[0]: found"),
        ('{"messages": [{"role": "user"}]}\n', ":1: messages[0].content: found nothing"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}\n', ":1: found no turn to answer"),
        ('{"messages": [{"role": "system", "content": "x"}]}\n', ":1: found no turn to answer"),
        ('\n{"messages": [}\n', ":2: found a line that is not JSON"),
        ("[1]\n", ":1: found [1], want a JSON object"),
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
    assert f"--out: found the folder {tmp_path}, want a file" in capsys.readouterr().err


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
    for rows in ('{"precious": 1}', '{"precious": '):
        out.write_text(rows)
        assert command(SERVER, prompts, out) == 2
        assert out.read_text() == rows
        assert "without its end and no " in capsys.readouterr().err


def test_prompts_may_be_sharegpt_and_compressed(
    tmp_path: Path, scripted: Callable[..., Scripted]
) -> None:
    turns = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "old"}]
    path, out = tmp_path / "p.json.gz", tmp_path / "o.jsonl"
    path.write_bytes(gzip.compress(json.dumps([{"id": 1, "conversations": turns}]).encode()))
    scripted()
    assert command(SERVER, path, out) == 0
    reply = {"role": "assistant", "content": "re: One?"}
    assert read(out) == [{"id": 1, "messages": [*conversation("One?"), reply]}]


def test_text_that_is_not_unicode_is_written_as_it_came(
    tmp_path: Path, scripted: Callable[..., Scripted]
) -> None:
    path, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "\\ud800"}]}\n')
    scripted()
    assert command(SERVER, path, out) == 0
    assert read(out)[0]["messages"][0]["content"] == "\ud800"


def test_answers_of_a_server_and_what_is_kept(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with FakeServer() as server:
        source = ["--server", server.url]
        flags = ["--max_new_tokens", "5", "--concurrency", "3", "--enable_thinking", "false"]
        assert command(source, prompts, out, *flags) == 0
        rows = read(out)
        assert [row.get("finish") for row in rows] == [None, None, "length", None, None]
        answers = [row["messages"][-1]["content"] for row in rows if "finish" not in row]
        assert answers == [q.upper() for q in QUESTIONS if q != "Why?"]
        assert rows[2]["messages"] == conversation("Why?")
        for request in server.requests:
            assert request["chat_template_kwargs"] == {"enable_thinking": False}
        kept = tmp_path / "kept.jsonl"
        assert command(source, prompts, kept, "--keep_truncated") == 0
        assert read(kept)[2]["messages"][-1]["content"] == "WHY?"
    settings = yaml.safe_load(Path(f"{out}.settings.yaml").read_text())
    assert settings == {
        **{"model": "tiny", "enable_thinking": False, "temperature": 0, "max_new_tokens": 5},
        **{"keep_truncated": False},
    }
