"""Conversations as they are found, in the chat templates of well-known families."""

import json
import time

import pytest
from chat_templates import chat, chat_tokenizer
from wild_templates import WILD

from dflash_ext.config import DataConfig, UserError
from dflash_ext.data.assistant_mask import encode_chat, runs, template_options
from dflash_ext.data.conversations import load_examples

SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"name": "add", "arguments": '{"a": 1}'}  # arguments as JSON text, as the API has them
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
EMPTY = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def tokenizers():
    return {name: chat_tokenizer(text, special=special) for name, (text, special) in WILD.items()}


@pytest.fixture
def learned(tokenizers, tmp_path):
    """learned(name, row, ...) -> the supervised texts of each example, and the report."""

    def load(name, row, **options):
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps(row) + "\n")
        tokenizer = tokenizers[name]
        examples, report = load_examples(str(path), tokenizer, DataConfig(**options))
        found = []
        for example in examples:
            cuts = runs(example.loss_mask)
            found.append([tokenizer.decode(example.input_ids[a:b]) for a, b in cuts])
        return found, report

    return load


def is_what_a_server_sees(tokenizer, messages, tools, **options) -> None:
    """Before each supervised token stands what the server has before it: its prompt and answer."""
    ids, mask, _ = encode_chat(tokenizer, messages, place="x:1", tools=tools, **options)
    text = tokenizer.decode(ids)
    options.pop("last_turn_only", None)
    render = template_options(tokenizer, tools, options.get("enable_thinking"), "x:1")
    assert text == tokenizer.apply_chat_template(messages, tokenize=False, **render)
    prompts = {}
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i:
            prompt = tokenizer.apply_chat_template(
                messages[:i], tokenize=False, add_generation_prompt=True, **render
            )
            answer = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False, **render)
            prompts[len(tokenizer(prompt)["input_ids"])] = (prompt, answer)
    for start, end in runs(mask):
        prompt, answer = prompts[start]
        assert tokenizer.decode(ids[:start]) == prompt
        assert answer.startswith(tokenizer.decode(ids[:end]))


PLAIN = {
    "smollm2": ["One.<|im_end|>", "Three.<|im_end|>"],
    "qwen3": [EMPTY + "Three.<|im_end|>"],
    "qwen3.5": ["\n</think>\n\nThree.<|im_end|>"],
    "llama3": ["One.<|eot_id|>", "Three.<|eot_id|>"],
    "gemma": ["One.<end_of_turn>", "Three.<end_of_turn>"],
    "harmony": [
        "<|channel|>final<|message|>One.",
        "<|channel|>final<|message|>Three.<|return|>",
    ],
    "glm": ["\n<think></think>\nOne.", "\n<think></think>\nThree."],
    "kimi": ["One.<|im_end|>", "Three.<|im_end|>"],
}


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("name", WILD)
def test_two_turns(name, system, learned, tokenizers):
    messages = [*([SYSTEM] if system else []), *chat("Zero?", "One.", "Two?", "Three.")]
    found, report = learned(name, {"messages": messages})
    assert found == [PLAIN[name]]
    assert report.unlearned == (name in ("qwen3", "qwen3.5", "harmony"))
    is_what_a_server_sees(tokenizers[name], messages, None)
    (last,), _ = learned(name, {"messages": messages}, last_turn_only=True)
    assert last == PLAIN[name][-1:]


@pytest.mark.parametrize("name", WILD)
def test_split_turns_learns_every_answer_whole(name, learned):
    row = {"messages": chat("Zero?", "One.", "Two?", "Three.")}
    found, report = learned(name, row, split_turns=True)
    last = PLAIN[name][-1]
    assert found == [[last.replace("Three", "One")], [last]]
    assert (report.rows, report.kept, report.split_rows, report.unlearned) == (1, 2, 1, 0)
    assert "2 of 1 rows and 1 further answers kept" in report.lines()[0]


THINKING_OFF = {
    **PLAIN,
    "qwen3": ["Three.<|im_end|>"],
    "qwen3.5": ["Three.<|im_end|>"],
    "glm": ["\nOne.", "\nThree."],
}


@pytest.mark.parametrize("name", WILD)
def test_without_thinking(name, learned, tokenizers):
    messages = chat("Zero?", "One.", "Two?", "Three.")
    found, _ = learned(name, {"messages": messages}, enable_thinking=False)
    assert found == [THINKING_OFF[name]]
    is_what_a_server_sees(tokenizers[name], messages, None, enable_thinking=False)


@pytest.mark.parametrize(
    ("name", "field", "wanted"),
    [
        ("qwen3", "reasoning_content", "<think>\nHm.\n</think>\n\nOne.<|im_end|>"),
        ("qwen3", "content", "<think>\nHm.\n</think>\n\nOne.<|im_end|>"),
        ("qwen3.5", "reasoning_content", "Hm.\n</think>\n\nOne.<|im_end|>"),
        ("qwen3.5", "content", "Hm.\n</think>\n\nOne.<|im_end|>"),
        ("glm", "reasoning_content", "\n<think>Hm.</think>\nOne."),
        (
            "harmony",
            "thinking",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
            "<|channel|>final<|message|>One.<|return|>",
        ),
    ],
)
def test_reasoning_is_learned(name, field, wanted, learned, tokenizers):
    messages = chat("Zero?", "One.")
    messages[1][field] = "<think>\nHm.\n</think>\n\nOne." if field == "content" else "Hm."
    for thinking in (None, True):
        found, report = learned(name, {"messages": messages}, enable_thinking=thinking)
        assert found == [[wanted]] and report.unlearned == 0
    is_what_a_server_sees(tokenizers[name], messages, None)
    # In history the reasoning is dropped: then the answer behind it has another text before it.
    longer = [*messages, *chat("Two?", "Three.")]
    found, report = learned(name, {"messages": longer})
    assert not any("One." in text for text in found[0]) and report.unlearned == 1
    is_what_a_server_sees(tokenizers[name], longer, None)


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "glm"])
def test_reasoning_without_thinking_is_a_contradiction(name, learned):
    messages = chat("Zero?", "One.")
    messages[1]["reasoning_content"] = "Hm."
    with pytest.raises(UserError, match=r":1: messages\[1\].*another data.enable_thinking"):
        learned(name, {"messages": messages}, enable_thinking=False)


def with_tool_call() -> list[dict]:
    call = {"id": "functions.add:0", "type": "function", "function": CALL}
    return [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "functions.add:0"},
        {"role": "assistant", "content": "Two."},
    ]


QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
TOOL_CALLS = {
    "qwen3": [QWEN_CALL, EMPTY + "Two.<|im_end|>"],
    "qwen3.5": ["\n</think>\n\n" + QWEN_CALL, "\n</think>\n\nTwo.<|im_end|>"],
    "llama3": ['{"name": "add", "parameters": {"a": 1}}<|eot_id|>', "Two.<|eot_id|>"],
    "harmony": [
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        "<|channel|>final<|message|>Two.<|return|>",
    ],
    "kimi": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
        "Two.<|im_end|>",
    ],
}


@pytest.mark.parametrize("name", TOOL_CALLS)
def test_tool_calls_are_learned_and_results_are_not(name, learned, tokenizers):
    found, _ = learned(name, {"messages": with_tool_call(), "tools": TOOLS})
    wanted = TOOL_CALLS[name]
    if name == "qwen3":  # in history the empty thinking block before the call is gone
        wanted = wanted[1:]
    assert found == [wanted]
    messages = with_tool_call()
    messages[1]["tool_calls"][0]["function"] = {**CALL, "arguments": {"a": 1}}
    is_what_a_server_sees(tokenizers[name], messages, TOOLS)
    same, _ = learned(name, {"messages": messages, "tools": TOOLS})
    assert same == found


# Odd conversations


@pytest.mark.parametrize("name", WILD)
def test_an_empty_answer_is_its_end_token(name, learned, tokenizers):
    row = {"messages": chat("Zero?", "", "Two?", "Three.")}
    found, report = learned(name, row)
    assert found[0][-1] == PLAIN[name][-1]
    wanted = [text.replace("One.", "") for text in PLAIN[name]]
    assert found == [[text if name != "glm" else text.rstrip("\n") for text in wanted]]
    is_what_a_server_sees(tokenizers[name], row["messages"], None)


@pytest.mark.parametrize("name", [name for name in WILD if name != "gemma"])
def test_roles_left_out_or_twice(name, learned, tokenizers):
    turns = chat("Zero?", "One.", "Two?", "Three.")
    cases = [turns[1:], [turns[0], *turns[2:]], [*turns[:2], turns[3]], [*turns, turns[3]]]
    if name == "qwen3":  # its history and its prompt then disagree
        cases = cases[:2]
        with pytest.raises(UserError, match=r"messages\[4\].*is not a prefix of it"):
            learned(name, {"messages": [*turns, turns[3]]})
    for messages in cases:
        found, report = learned(name, {"messages": messages})
        assert found[0][-1] == PLAIN[name][-1]
        is_what_a_server_sees(tokenizers[name], messages, None)


def test_a_template_that_wants_roles_in_turn_says_so(learned):
    turns = chat("Zero?", "One.", "Two?", "Three.")
    with pytest.raises(UserError, match=r"roles must alternate.*want messages it accepts") as error:
        learned("gemma", {"messages": [turns[0], *turns[2:]]})
    assert "\n" not in str(error.value)


ODD_TEXT = [
    "a\r\nb\rc\n",
    "\ufeffbyte order mark\ufeff",
    "\u2028\u2029\x85\x0b\x0c\x1c",
    "e\u0301 \u00e9 \U0001f469\u200d\U0001f680 \u202eright to left",
    "\x00\x01\x7f",
    "  leading and trailing  ",
    "{{ messages }} {% raw %}",
]


@pytest.mark.parametrize("name", WILD)
@pytest.mark.parametrize("text", ODD_TEXT, ids=range(len(ODD_TEXT)))
def test_odd_text_comes_back_as_it_is(name, text, learned, tokenizers):
    row = {"messages": chat("Zero?", f"<{text}>", f"[{text}]", f"<{text}>")}
    found, _ = learned(name, row)
    assert all(f"<{text}>" in answer for answer in found[0])
    is_what_a_server_sees(tokenizers[name], row["messages"], None)


@pytest.mark.parametrize("name", WILD)
def test_a_row_of_100_000_tokens_takes_seconds(name, learned):
    start = time.process_time()
    row = {"messages": chat("Zero?", "lorem ipsum " * 8500)}
    found, report = learned(name, row, max_length=200_000, token_budget=200_000, drop_loops=False)
    assert len(found[0][0]) > 100_000 and report.tokens > 100_000
    many = {"messages": chat(*(f"Turn {i}, and so on and on." for i in range(200)))}
    learned(name, many, max_length=200_000, token_budget=200_000)
    assert time.process_time() - start < 8


def test_the_date_in_a_prompt_does_not_change_overnight(tokenizers):
    messages = chat("Zero?", "One.")
    ids, _, _ = encode_chat(tokenizers["llama3"], messages, place="x:1")
    assert "Today Date: 26 Jul 2024\n" in tokenizers["llama3"].decode(ids)
    ids, _, _ = encode_chat(tokenizers["harmony"], messages, place="x:1")
    assert "Current date: 2024-07-26<|end|>" in tokenizers["harmony"].decode(ids)
    today = tokenizers["harmony"].apply_chat_template(messages, tokenize=False)
    assert "2024-07-26" not in today


def test_a_fixed_date_leaves_the_rest_of_a_template_alone():
    template = "\n  a\n{% if 1 %}\n b {{ strftime_now('%A %d %B %Y %H:%M') }}\n{% endif %}\n"
    tokenizer = chat_tokenizer(template)
    options = template_options(tokenizer, None, None, "x:1")
    text = tokenizer.apply_chat_template(chat("x"), tokenize=False, **options)
    today = tokenizer.apply_chat_template(chat("x"), tokenize=False)
    assert text == "\n  a\n b Friday 26 July 2024 00:00\n"
    assert text.split(" b ")[0] == today.split(" b ")[0]
