"""Which tokens of a conversation are supervised, for several families of chat templates."""

import numpy as np
import pytest
from chat_templates import CHATML, CHATML_TAGGED, LLAMA3, MISTRAL, QWEN3, chat, chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ext.config import UserError
from dflash_ext.data.assistant_mask import encode_chat, runs

PLACE = "data.jsonl:7"


def supervised(tokenizer, messages, **options) -> list[str]:
    """The text of each run of supervised tokens."""
    ids, mask, _ = encode_chat(tokenizer, messages, place=PLACE, **options)
    assert ids.dtype == np.int32 and mask.dtype == np.uint8 and ids.shape == mask.shape
    return [tokenizer.decode(ids[start:end]) for start, end in runs(mask)]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (CHATML, ["One.<|im_end|>", "Three.<|im_end|>"]),
        (CHATML_TAGGED, ["One.<|im_end|>", "Three.<|im_end|>"]),
        (LLAMA3, ["One.<|eot_id|>", "Three.<|eot_id|>"]),
        (MISTRAL, [" One.</s>", " Three.</s>"]),
    ],
    ids=["chatml", "chatml-generation", "llama3", "mistral"],
)
def test_answers_with_their_end_of_turn_token_are_supervised(template, wanted):
    tokenizer = chat_tokenizer(template)
    messages = chat("Zero?", "One.", "Two?", "Three.")
    assert supervised(tokenizer, messages) == wanted
    assert supervised(tokenizer, messages, last_turn_only=True) == wanted[1:]

    ids, _, _ = encode_chat(tokenizer, messages, place=PLACE)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_the_answer_starts_where_the_generation_prompt_ends():
    tokenizer = chat_tokenizer(CHATML)
    messages = chat("Zero?", "One.")
    ids, mask, _ = encode_chat(tokenizer, messages, place=PLACE)
    prompt = tokenizer.apply_chat_template(
        messages[:1], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert mask.argmax() == len(prompt)
    assert ids[: len(prompt)].tolist() == prompt


def test_derived_and_tagged_masks_agree():
    messages = chat("Zero?", "Ünï 🙂.", "Two?", "Three.\n")
    derived = encode_chat(chat_tokenizer(CHATML), messages, place=PLACE)
    tagged = encode_chat(chat_tokenizer(CHATML_TAGGED), messages, place=PLACE)
    np.testing.assert_array_equal(derived[:2], tagged[:2])


def test_a_generation_tag_is_taken_as_it_is():
    template = CHATML_TAGGED.replace(
        "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    assert template != CHATML_TAGGED
    assert supervised(chat_tokenizer(template), chat("Zero?", "One.")) == ["One."]


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED], ids=["derived", "tagged"])
def test_messages_after_the_last_answer_are_left_out(template):
    tokenizer = chat_tokenizer(template)
    long = encode_chat(tokenizer, chat("Zero?", "One.", "Two?"), place=PLACE)
    short = encode_chat(tokenizer, chat("Zero?", "One."), place=PLACE)
    np.testing.assert_array_equal(long[:2], short[:2])


def test_thinking_is_supervised_unless_the_prompt_closes_it():
    tokenizer = chat_tokenizer(QWEN3)
    messages = chat("Zero?", "One.")
    assert supervised(tokenizer, messages) == ["<think>\n\n</think>\n\nOne.<|im_end|>"]
    assert supervised(tokenizer, messages, enable_thinking=False) == ["One.<|im_end|>"]

    messages[1]["reasoning_content"] = "Hm."
    thought = ["<think>\nHm.\n</think>\n\nOne.<|im_end|>"]
    assert supervised(tokenizer, messages) == thought
    assert supervised(tokenizer, messages, enable_thinking=True) == thought


@pytest.mark.parametrize("thinking", [None, True, False])
def test_answers_that_a_template_rewrites_in_history_are_not_supervised(thinking):
    tokenizer = chat_tokenizer(QWEN3)
    messages = chat("Zero?", "One.", "Two?", "Three.")
    block = "" if thinking is False else "<think>\n\n</think>\n\n"
    for last_turn_only in (False, True):
        options = {"enable_thinking": thinking, "last_turn_only": last_turn_only}
        assert supervised(tokenizer, messages, **options) == [f"{block}Three.<|im_end|>"]


def test_an_answer_is_supervised_up_to_where_history_shows_it_otherwise():
    closing = (
        "{% if m['role'] == 'assistant' and loop.last %}<|return|>{% else %}<|im_end|>{% endif %}"
    )
    template = CHATML.replace("+ m['content'] + '<|im_end|>\n' }}", "+ m['content'] }}" + closing)
    assert template != CHATML
    tokenizer = chat_tokenizer(template, special=("<|im_start|>", "<|im_end|>", "<|return|>"))
    messages = chat("Zero?", "One.", "Two?", "Three.")
    assert supervised(tokenizer, messages) == ["One.", "Three.<|return|>"]
    assert encode_chat(tokenizer, messages, place=PLACE).unlearned == 1  # its end token


def test_tokens_count_where_history_is_rewritten_not_characters():
    """The target says the token <think>; that it starts with "<" is no reason to learn "<"."""
    tokenizer = chat_tokenizer(QWEN3, special=("<|im_start|>", "<|im_end|>", "<think>"))
    messages = chat("Zero?", "<b>One.", "Two?", "Three.")
    assert supervised(tokenizer, messages) == ["<think>\n\n</think>\n\nThree.<|im_end|>"]


def test_reasoning_that_the_prompt_contradicts_is_an_error():
    messages = chat("Zero?", "One.")
    messages[1]["reasoning_content"] = "Hm."
    with pytest.raises(UserError, match=r"the generation prompt before it.*data.enable_thinking"):
        supervised(chat_tokenizer(QWEN3), messages, enable_thinking=False)


def test_a_token_across_the_border_is_cut_as_a_server_would():
    tokenizer = chat_tokenizer(CHATML, merges=[("Ċ", "Ċ"), ("t", "Ċ")])
    messages = chat("Zero?", "\nOne.", "Two?", "Three.", "Four?", "\n\nFive.")
    ids, mask, _ = encode_chat(tokenizer, messages, place=PLACE)
    prompts = [
        tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for i in (1, 5)
    ]
    starts = runs(mask)[:, 0]
    assert ids[: len(prompts[0])].tolist() == prompts[0] and starts[0] == len(prompts[0])
    assert len(starts) == 3
    assert supervised(tokenizer, messages) == [
        "\nOne.<|im_end|>",
        "Three.<|im_end|>",
        "\n\nFive.<|im_end|>",
    ]
    whole = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]
    assert whole != ids.tolist()  # the merges do reach over the border


# Text without special tokens in it; surrogates are not text.
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(answers=st.lists(_TEXT, min_size=1, max_size=3))
def test_any_answer_comes_back_from_the_mask(answers):
    tokenizer = chat_tokenizer(CHATML, merges=[("Ċ", "Ċ"), ("t", "Ċ"), ("Ġ", "Ġ")])
    messages = chat(*(text for answer in answers for text in ("Tell.", answer)))
    assert supervised(tokenizer, messages) == [answer + "<|im_end|>" for answer in answers]


def test_tools_reach_the_template():
    template = CHATML.replace("{% for", "{{ tools | tojson if tools else '' }}{% for", 1)
    tokenizer = chat_tokenizer(template)
    ids, _, _ = encode_chat(tokenizer, chat("Zero?", "One."), place=PLACE, tools=[{"name": "add"}])
    assert tokenizer.decode(ids).startswith('[{"name": "add"}]<|im_start|>user')


def test_a_failing_template_is_named_in_one_line():
    messages = [{"role": "system", "content": "Be brief."}, *chat("Zero?", "One.")]
    with pytest.raises(UserError) as error:
        supervised(chat_tokenizer(MISTRAL), messages)
    text = str(error.value)
    assert text.startswith(
        f"{PLACE}: the chat template failed on 3 message(s) (TemplateError: only"
    )
    assert "\n" not in text


@pytest.mark.parametrize(
    ("template", "messages", "wanted"),
    [
        (None, chat("Zero?", "One."), "the tokenizer has no usable chat template"),
        (5, chat("Zero?", "One."), "the tokenizer has no usable chat template"),
        (CHATML, chat("Zero?", "One.")[1:], "an assistant turn as the first message"),
        (CHATML, chat("Zero?", "One.", "Two?")[1:], "an assistant turn as the first message"),
        (CHATML, chat("Zero?", "One\ud800."), "text that is not valid Unicode"),
        (CHATML, [{"role": "user"}, {"role": "assistant", "content": "One."}], "template failed"),
    ],
    ids=["no-template", "no-text", "assistant-first", "user-after", "surrogate", "no-content"],
)
def test_what_cannot_be_encoded_is_refused(template, messages, wanted):
    with pytest.raises(UserError, match=wanted) as error:
        supervised(chat_tokenizer(template), messages)
    assert str(error.value).startswith(f"{PLACE}: ")


def test_a_tokenizer_without_offsets_is_refused(monkeypatch):
    tokenizer = chat_tokenizer(CHATML)
    monkeypatch.setattr(type(tokenizer), "is_fast", property(lambda _: False))
    with pytest.raises(UserError, match="want a fast tokenizer"):
        supervised(tokenizer, chat("Zero?", "One."))


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [
        ([], []),
        ([0, 0], []),
        ([1, 1], [[0, 2]]),
        ([0, 1, 1, 0, 1], [[1, 3], [4, 5]]),
    ],
)
def test_runs(mask, wanted):
    assert runs(np.asarray(mask, dtype=np.uint8)).tolist() == wanted
