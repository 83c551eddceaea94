"""What --check_data shows and refuses."""

import json
import sys

import pytest
from chat_templates import CHATML, CHATML_TAGGED, chat, chat_tokenizer

from dflash_ext.config import DataConfig, UserError
from dflash_ext.data.check import describe_data
from dflash_ext.data.conversations import load_examples


@pytest.fixture
def describe(tmp_path):
    def describe(rows, template=CHATML, **options) -> list[str]:
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = chat_tokenizer(template)
        examples, report = load_examples(str(path), tokenizer, DataConfig(**options))
        return describe_data(examples, report, tokenizer, 0.125)

    return describe


def tokens(n: int, prompt: int = 2) -> dict:
    return {"input_ids": list(range(n)), "loss_mask": [0] * prompt + [1] * (n - prompt)}


def test_counts_lengths_and_examples(describe, tmp_path, monkeypatch):
    rows = [{"messages": chat(f"{i}?", f"Answer {i}.", "And?", f"That {i}.")} for i in range(5)]
    lines = describe(rows)
    assert lines[0].startswith("5 of 5 rows kept: ") and "12.5% padding" in lines
    length = lines[1].split("longest ")[1]
    assert lines[1] == (
        f"tokens of an example: shortest {length}, median {length}, 90 % {length}, "
        f"99 % {length}, longest {length}"
    )
    text = "\n".join(lines)
    assert [i for i in range(5) if f"[[Answer {i}.<|im_end|>]]" in text] == [0, 2, 4]
    assert f"--- {tmp_path}/a.jsonl:3: {length} tokens, {len('Answer 2.That 2.') + 2} sup" in text
    assert "[[Answer 2.<|im_end|>]]\n<|im_start|>user\nAnd?" in text

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert "[[\x1b[1;32mAnswer 2.<|im_end|>\x1b[0m]]" in "\n".join(describe(rows))


def test_quantiles_of_lengths(describe):
    lines = describe([tokens(n) for n in range(10, 211)])
    assert "shortest 10, median 110, 90 % 190, 99 % 208, longest 210" in lines[1]


def test_long_texts_are_cut_in_the_middle(describe):
    lines = describe([{"messages": chat("x" * 5000 + "?", "Yes.")}], max_length=9000)
    assert len(lines[-1]) < 700 and " … 4,4" in lines[-1] and lines[-1].count("[[Yes.") == 1


def test_masks_of_all_ones_are_refused(describe):
    with pytest.raises(UserError) as error:
        describe([tokens(9, prompt=0), tokens(5, prompt=0)])
    assert str(error.value).startswith(
        "data.train: found every token supervised in all 2 rows, prompts included, want loss_mask 0"
    )
    lines = describe([tokens(9, prompt=0), tokens(5)])
    assert "1 rows supervised from the first token on, prompts included" in lines
    careless = "{% generation %}" + CHATML + "{% endgeneration %}"
    with pytest.raises(UserError, match="found every token supervised in all 1 rows"):
        describe([{"messages": chat("Zero?", "One.")}], template=careless)


def test_masks_of_all_zeros_are_refused(describe):
    with pytest.raises(UserError, match="found no usable row among 2"):
        describe([tokens(9, prompt=9), tokens(5, prompt=5)])
    empty = CHATML_TAGGED.replace("{% generation %}", "").replace(
        "{% endgeneration %}", "{% generation %}{% endgeneration %}"
    )
    with pytest.raises(UserError, match="found no usable row among 1"):
        describe([{"messages": chat("Zero?", "One.")}], template=empty)
