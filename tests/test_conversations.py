"""Reading JSONL: formats, counts, truncation, loops, and one line for each kind of bad input."""

import json

import numpy as np
import pytest
from chat_templates import CHATML, CHATML_TAGGED, MISTRAL, chat, chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ext.config import DataConfig, UserError
from dflash_ext.data.conversations import has_loop, load_examples, prompt_and_answer
from dflash_ext.data.corpus import Example, dataset_hash

EOT = 257  # <|im_end|> of the ChatML tokenizer
NO_SPECIAL = np.zeros(0, dtype=np.int32)


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer(CHATML)


def row(*turns: str) -> dict:
    return {"messages": chat(*turns)}


def tokens(ids: list, mask: list | None = None) -> dict:
    return {"input_ids": ids, "loss_mask": [1] * len(ids) if mask is None else mask}


def example(ids: list[int], mask: list[int]) -> Example:
    return Example(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.uint8), "x:1")


@pytest.fixture
def write(tmp_path):
    def write(*rows: object, name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
        return str(path)

    return write


def test_both_formats_in_file_order(tokenizer, write):
    first = write(row("Add?", "One two."), tokens([5, 6, 7, 8], [0, 1, 1, 0]))
    second = write(row("Sub?", "Three."), name="more.jsonl")
    examples, report = load_examples([first, second], tokenizer, DataConfig(), vocab_size=300)

    assert [e.source for e in examples] == [f"{first}:1", f"{first}:2", f"{second}:1"]
    assert all(e.input_ids.dtype == np.int32 for e in examples)
    assert all(e.loss_mask.dtype == np.uint8 for e in examples)
    assert examples[1].input_ids.tolist() == [5, 6, 7, 8]
    assert examples[1].loss_mask.tolist() == [0, 1, 1, 0]
    prompt, answer = prompt_and_answer(examples[0])
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(answer) == "One two.<|im_end|>"

    assert (report.rows, report.kept) == (3, 3)
    assert report.tokens == sum(map(len, examples))
    assert report.supervised_tokens == sum(int(e.loss_mask.sum()) for e in examples)
    assert len(report.lines()) == 1 and report.lines()[0].startswith("3 of 3 rows kept: ")


def test_token_ids_win_over_messages_unless_a_format_is_set(tokenizer, write):
    path = write(row("Add?", "One two.") | tokens([1, 2, 3]))
    auto, _ = load_examples(path, tokenizer, DataConfig())
    assert auto[0].input_ids.tolist() == [1, 2, 3]
    messages, _ = load_examples(path, tokenizer, DataConfig(format="messages"))
    assert len(messages[0]) > 3


def test_prompt_and_answer_take_the_last_answer():
    prompt, answer = prompt_and_answer(example([1, 2, 3, 4, 5, 6], [0, 1, 1, 0, 1, 1]))
    assert prompt.tolist() == [1, 2, 3, 4] and answer.tolist() == [5, 6]


def test_byte_order_mark_crlf_blank_lines_and_odd_line_separators(tokenizer, tmp_path):
    answer = "Ünï 🙂\u2028second\x85third\r\nfourth"
    path = tmp_path / "odd.jsonl"
    lines = [json.dumps(row("Add?", text), ensure_ascii=False) for text in (answer, "Plain.")]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode())  # no newline at the end
    examples, report = load_examples(str(path), tokenizer, DataConfig())
    assert report.rows == 2
    assert [e.source for e in examples] == [f"{path}:1", f"{path}:3"]
    texts = [tokenizer.decode(prompt_and_answer(e)[1]) for e in examples]
    assert texts == [answer + "<|im_end|>", "Plain.<|im_end|>"]


def test_rows_that_teach_nothing_are_counted(tokenizer, write):
    path = write(
        {"messages": [{"role": "user", "content": "Hello?"}]},
        tokens([1, 2, 3], [0, 0, 0]),
        tokens([1, 2, 3, 4, 5], [1, 0, 1, 0, 1]),
        row("Say it.", "no " * 40),
        row("Add?", "One."),
    )
    examples, report = load_examples(path, tokenizer, DataConfig())
    assert [e.source for e in examples] == [f"{path}:5"]
    assert (report.rows, report.kept) == (5, 1)
    assert (report.no_assistant, report.dropped_short, report.loops) == (2, 1, 1)
    assert report.lines()[1:] == [
        "2 rows skipped: no assistant turn",
        "1 rows dropped: an answer ends in a loop (data.drop_loops)",
        "1 rows dropped: no two supervised tokens in a row",
    ]
    kept, report = load_examples(path, tokenizer, DataConfig(drop_loops=False))
    assert len(kept) == 2 and report.loops == 0


def test_truncation_is_counted_and_may_leave_nothing(tokenizer, write):
    path = write(
        tokens(list(range(20)), [0] * 10 + [1] * 10),
        tokens(list(range(12)), [0] * 11 + [1]),
        tokens(list(range(30)), [0] * 25 + [1] * 5),
        tokens(list(range(12)), [0] * 2 + [1] * 10),
    )
    examples, report = load_examples(path, tokenizer, DataConfig(max_length=12))
    assert [len(e) for e in examples] == [12, 12]
    assert examples[0].input_ids.tolist() == list(range(12))
    assert examples[0].loss_mask.tolist() == [0] * 10 + [1, 1]
    assert (report.truncated, report.dropped_short, report.kept) == (2, 2, 2)
    assert report.supervised_tokens == 12


def test_last_turn_only_in_both_formats(tokenizer, write):
    path = write(row("A?", "One.", "B?", "Two."), tokens([1, 2, 3, 4, 5], [1, 1, 0, 1, 1]))
    examples, _ = load_examples(path, tokenizer, DataConfig(last_turn_only=True))
    assert tokenizer.decode(examples[0].input_ids[examples[0].loss_mask == 1]) == "Two.<|im_end|>"
    assert examples[1].loss_mask.tolist() == [0, 0, 0, 1, 1]


def test_the_loop_is_looked_for_before_truncation(tokenizer, write):
    path = write(tokens([*range(100), *[1, 2, 3] * 4]), tokens([7, 8]))
    _, report = load_examples(path, tokenizer, DataConfig(max_length=50))
    assert (report.loops, report.truncated) == (1, 0)


@settings(deadline=None)
@given(
    ngram=st.lists(st.integers(0, 3), min_size=1, max_size=16),
    phase=st.integers(0, 15),
    before=st.lists(st.integers(0, 3), max_size=40),
)
def test_any_ngram_up_to_16_said_four_times_is_a_loop(ngram, phase, before):
    shift = phase % len(ngram)
    tail = (ngram * 5)[shift : shift + 4 * len(ngram)]
    ids = np.asarray([*before, *tail, EOT], dtype=np.int32)
    assert has_loop(ids, np.ones_like(ids), np.asarray([EOT]))


@pytest.mark.parametrize(
    "answer",
    [
        [*range(17)] * 4,  # n-gram too long
        [*range(16)] * 3,  # said three times
        [1, 2] * 10 + [3],  # not at the end
        [1, 2, 3],
        [],
        [EOT] * 8,  # only end-of-turn tokens
    ],
)
def test_what_is_no_loop(answer):
    ids = np.asarray([9, *answer], dtype=np.int32)
    mask = np.asarray([0] + [1] * len(answer), dtype=np.uint8)
    assert not has_loop(ids, mask, np.asarray([EOT]))


def test_only_answers_are_searched_for_loops_and_all_of_them_are():
    ids = np.asarray([1, 1, 1, 1, 5, 6, 7, 2, 2, 2, 2, 8], dtype=np.int32)
    answers_at = lambda *at: np.isin(np.arange(len(ids)), at).astype(np.uint8)  # noqa: E731
    assert not has_loop(ids, answers_at(4, 5, 6, 11), NO_SPECIAL)
    assert has_loop(ids, answers_at(0, 1, 2, 3, 5, 6), NO_SPECIAL)
    assert not has_loop(ids, answers_at(1, 2, 3, 5, 6), NO_SPECIAL)


def test_the_hash_covers_ids_masks_and_borders():
    base = dataset_hash([example([1, 2, 3], [0, 1, 1]), example([4, 5], [1, 1])])
    assert base == dataset_hash([example([1, 2, 3], [0, 1, 1]), example([4, 5], [1, 1])])
    others = [
        [example([1, 2, 4], [0, 1, 1]), example([4, 5], [1, 1])],
        [example([1, 2, 3], [1, 1, 1]), example([4, 5], [1, 1])],
        [example([4, 5], [1, 1]), example([1, 2, 3], [0, 1, 1])],
        [example([1, 2], [0, 1]), example([3, 4, 5], [1, 1, 1])],
        [example([1, 2, 3], [0, 1, 1])],
    ]
    assert len({base, *map(dataset_hash, others)}) == 6


BAD_ROWS = {
    "neither": ({"text": "hi"}, "found the fields 'text', want 'input_ids' or 'messages' or 'c"),
    "empty-object": ({}, "found the fields none, want 'input_ids' or 'messages' or 'c"),
    "not-an-object": ([1, 2], "found [1, 2], want a JSON object"),
    "messages-text": ({"messages": "hi"}, "messages: found str, want a list of messages"),
    "messages-empty": ({"messages": []}, "messages: found an empty list, want a list of messages"),
    "no-role": (
        {"messages": [{"content": "hi"}]},
        'messages[0]: found {"content": "hi"}, want an object with a role and a content',
    ),
    "content-number": (
        {"messages": [*chat("hi"), {"role": "assistant", "content": 5}]},
        "messages[1].content: found 5, want a string or a list of parts",
    ),
    "tools-text": (
        row("Zero?", "One.") | {"tools": "add"},
        'tools: found "add", want a list of objects',
    ),
    "no-mask": ({"input_ids": [1, 2]}, "loss_mask: found nothing, want a list of integers"),
    "mask-length": (tokens([1, 2, 3], [1, 1]), "loss_mask: found 2 values for 3 input_ids, want"),
    "mask-value": (tokens([1, 2], [1, 2]), "loss_mask[1]: found 2, want 0 or 1"),
    "id-text": (tokens([1, "a"]), 'input_ids[1]: found "a", want an integer'),
    "id-fraction": (tokens([1, 2.5]), "input_ids[1]: found 2.5, want an integer"),
    "id-huge": (tokens([1, 2**70]), "want an integer"),
    "id-outside": (tokens([1, 300]), "token 1: found id 300, want 0 to 299 (the target's vocabul"),
    "id-beyond-32-bits": (tokens([1, 2**40]), f"token 1: found id {2**40}, want 0 to 299"),
    "id-negative": (tokens([1, -4]), "token 1: found id -4, want 0 to 299"),
    "mask-token-id": (
        tokens([1, 258, 3]),
        "token 1: found the drafter's mask token 258, want text",
    ),
    "mask-token-text": (row("Zero?", "<|mask|>"), "found the drafter's mask token 258, want text"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(name, tokenizer, write):
    bad, wanted = BAD_ROWS[name]
    path = write(row("Zero?", "One."), bad)
    with pytest.raises(UserError) as error:
        load_examples(path, tokenizer, DataConfig(), mask_token_id=258, vocab_size=300)
    text = str(error.value)
    assert text.startswith(f"{path}:2: ") and "\n" not in text
    assert wanted in text


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b'{"messages": [}\n', "found a line that is not JSON (Expecting value"),
        (b"[" * 100_000 + b"\n", "found a line that is not JSON"),
        (b'{"a": "\xff"}\n', "found bytes that are not UTF-8 (byte 7), want UTF-8 text"),
    ],
    ids=["syntax", "nesting", "latin-1"],
)
def test_a_line_that_is_not_json(content, wanted, tokenizer, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n" + content)
    with pytest.raises(UserError) as error:
        load_examples(str(path), tokenizer, DataConfig())
    assert str(error.value).startswith(f"{path}:2: {wanted}")
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tokenizer, tmp_path, write):
    missing, folder = tmp_path / "missing.jsonl", tmp_path / "folder"
    folder.mkdir()
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"\xef\xbb\xbf\r\n  \n")
    good = write(row("Zero?", "One."))
    for path, wanted in (
        (missing, "cannot be read (No such file or directory), want a readable file"),
        (folder, "found no text files, want .jsonl, .ndjson, .json, .parquet files in it"),
        (empty, "found no rows, want one JSON object a line"),
    ):
        with pytest.raises(UserError) as error:
            load_examples([good, str(path)], tokenizer, DataConfig())
        assert str(error.value) == f"{path}: {wanted}"
    with pytest.raises(UserError, match="found an empty list of files"):
        load_examples([], tokenizer, DataConfig())


def test_a_set_format_refuses_the_other_kind(tokenizer, write):
    path = write(tokens([1, 2, 3]))
    with pytest.raises(UserError, match="found the fields 'input_ids', 'loss_mask', want 'messag"):
        load_examples(path, tokenizer, DataConfig(format="messages"))


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED], ids=["derived", "tagged"])
def test_no_usable_row_at_all_is_an_error(template, write):
    path = write({"messages": chat("Zero?")}, {"messages": chat("One?")}, tokens([1, 2], [1, 0]))
    with pytest.raises(UserError) as error:
        load_examples(path, chat_tokenizer(template), DataConfig())
    assert str(error.value) == (
        f"{path}: found no usable row among 3 (2 without an assistant turn, 0 ending in a loop, "
        "1 too short), want at least one with an assistant's answer"
    )


def test_answers_that_are_all_cut_off_name_the_limit(tokenizer, write):
    with pytest.raises(UserError, match=r"answer within data\.max_length, 2 tokens$"):
        load_examples(write(row("Zero?", "One.")), tokenizer, DataConfig(max_length=2))


def test_a_template_that_fails_is_named_by_file_and_line(write):
    system = {"role": "system", "content": "Be brief."}
    path = write(row("Zero?", "One."), {"messages": [system, *chat("Zero?", "One.")]})
    with pytest.raises(UserError, match="the chat template failed") as error:
        load_examples(path, chat_tokenizer(MISTRAL), DataConfig())
    assert str(error.value).startswith(f"{path}:2: ")


def test_the_token_budget_must_hold_the_longest_kept_example(tokenizer, write):
    path = write(tokens([1, 2, 3]), tokens(list(range(40))), tokens(list(range(30))))
    with pytest.raises(UserError) as error:
        load_examples(path, tokenizer, DataConfig(token_budget=32))
    assert str(error.value).startswith(
        f"data.token_budget: found 32, want at least 40, the length of {path}:2"
    )
    examples, _ = load_examples(path, tokenizer, DataConfig(token_budget=32, max_length=32))
    assert len(examples) == 3


def test_an_answer_cut_at_the_length_limit_does_not_teach_its_end_token(tokenizer, write):
    whole = row("Add?", "One two.")
    (ended, cut), _ = load_examples(
        [write(whole, {**whole, "finish": "length"})], tokenizer, DataConfig()
    )
    assert ended.input_ids.tolist() == cut.input_ids.tolist()
    assert ended.loss_mask.sum() == cut.loss_mask.sum() + 1
    assert ended.input_ids[np.flatnonzero(ended.loss_mask)[-1]] == EOT
    assert EOT not in cut.input_ids[cut.loss_mask == 1]
