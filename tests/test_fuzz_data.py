"""Fuzzing of what users hand over: text files, rows, entries, features. Only clean errors.

`python -m pytest -m slow` runs it for ten minutes.
"""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from chat_templates import CHATML, chat, chat_tokenizer
from fuzzing import DURATIONS, fuzz
from hypothesis import given
from hypothesis import strategies as st
from wild_templates import WILD

from dflash_ext import regenerate
from dflash_ext.config import DataConfig, UserError, from_dict, validate
from dflash_ext.data.check import describe_data
from dflash_ext.data.conversations import load_examples
from dflash_ext.data.text_settings import read_settings

READERS = 11  # tests that share the ten minutes


def attempt(action: Callable[..., None], seconds: float, *strategies: st.SearchStrategy) -> None:
    """Calls the action with examples of the strategies until its share of the time is up."""
    check = given(st.tuples(*strategies))(lambda values: action(*values))
    count = fuzz(check, seconds if seconds < 10 else seconds / READERS)
    print(f"{count} examples")
    assert count >= 100


def clean(action: Callable[[], object]) -> None:
    """The action works, or ends in one line (`run_command` puts it on one)."""
    try:
        action()
    except UserError as error:
        assert 0 < len(" ".join(str(error).split())) < 2000, error


TOKENIZERS = {name: chat_tokenizer(text, special=special) for name, (text, special) in WILD.items()}
TOKENIZERS["chatml"] = chat_tokenizer(CHATML)

ROWS = [
    {"messages": [{"role": "system", "content": "Be."}, *chat("a?", "b.", "c?", "d.")]},
    {"messages": chat("é\u2028", "🙂"), "tools": [{"name": "f"}], "finish": "length"},
    {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y z"}]},
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]},
]


def _zstd() -> bytes:
    import zstandard

    return zstandard.compress(JSONL[:200]) + zstandard.compress(JSONL[200:])


def _parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS[:2]), sink)
    return sink.getvalue().to_pybytes()


JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
FILES = {
    "a.jsonl": lambda: JSONL,
    "a.jsonl.gz": lambda: gzip.compress(JSONL),
    "a.jsonl.zst": _zstd,
    "a.json": lambda: json.dumps(ROWS).encode(),
    "a.parquet": _parquet,
}


@st.composite
def damaged(draw: st.DrawFn, contents: bytes) -> bytes:
    """A file with bytes changed, cut out, put in or said twice."""
    data = bytearray(contents)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        size = draw(st.integers(0, 40))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "repeat", "end"]))
        if kind == "flip" and data:
            data[at] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del data[at : at + size]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=40))
        elif kind == "repeat":
            data[at:at] = data[at : at + size]
        else:
            del data[at:]
    return bytes(data)


@DURATIONS
@pytest.mark.parametrize("name", FILES)
def test_damaged_files(name: str, seconds: float, tmp_path: Path) -> None:
    path = tmp_path / name

    def check(content: bytes, bad_rows: str) -> None:
        path.write_bytes(content)
        cfg = DataConfig(bad_rows=bad_rows)  # type: ignore[arg-type]
        clean(lambda: load_examples(str(path), TOKENIZERS["chatml"], cfg, vocab_size=300))

    attempt(check, seconds, damaged(FILES[name]()), st.sampled_from(["error", "skip"]))


def _features() -> bytes:
    ids = torch.arange(6)
    sink = io.BytesIO()
    torch.save(
        {"input_ids": ids, "loss_mask": ids.clamp(max=1), "hidden_states": torch.ones(1, 6, 8)},
        sink,
    )
    return sink.getvalue()


@DURATIONS
@pytest.mark.parametrize("name", ["data_0.ckpt", "data_0.ckpt.gz"])
def test_damaged_features(name: str, seconds: float, tmp_path: Path) -> None:
    contents = _features()

    def check(content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        clean(lambda: load_examples(str(tmp_path), TOKENIZERS["chatml"], DataConfig()))

    whole = damaged(contents)
    attempt(check, seconds, whole.map(gzip.compress) if name.endswith("gz") else whole)


TEXT = st.text(st.characters(), max_size=8)  # lone surrogates included
SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
JSON = st.recursive(
    SCALAR, lambda x: st.lists(x, max_size=4) | st.dictionaries(TEXT, x, max_size=4), max_leaves=8
)
WORDS = st.sampled_from(
    ["", "user", "assistant", "system", "tool", "human", "gpt", "function_call"]
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("role", "from"), WORDS | JSON),
        **dict.fromkeys(("content", "value"), TEXT | JSON),
        "tool_calls": JSON | st.lists(st.fixed_dictionaries({"function": JSON}), max_size=2),
        "reasoning_content": JSON,
        "thinking": JSON,
    },
)
MESSAGES = st.lists(MESSAGE | JSON, max_size=5) | JSON
ROW = st.fixed_dictionaries(
    {},
    optional={
        "messages": MESSAGES,
        "conversations": MESSAGES,
        "tools": JSON,
        "system": JSON,
        "finish": JSON,
        "input_ids": st.lists(st.integers(-2, 310) | SCALAR, max_size=6) | JSON,
        "loss_mask": st.lists(st.integers(0, 2) | SCALAR, max_size=6) | JSON,
    },
)
OPTIONS = st.fixed_dictionaries(
    {
        "format": st.sampled_from(["auto", "auto", "messages", "conversations", "input_ids"]),
        "bad_rows": st.sampled_from(["error", "skip"]),
        "last_turn_only": st.booleans(),
        "split_turns": st.booleans(),
        "enable_thinking": st.none() | st.booleans(),
        "max_length": st.integers(2, 50),
    }
)


@DURATIONS
def test_odd_rows(seconds: float, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def check(rows: list, options: dict, template: str) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = TOKENIZERS[template]

        def load() -> None:
            cfg = DataConfig(**options)
            examples, report = load_examples(
                str(path), tokenizer, cfg, mask_token_id=258, vocab_size=300
            )
            assert len(examples) == report.kept > 0
            total = report.no_assistant + report.loops + report.dropped_short + report.bad
            assert report.rows + report.split_rows == report.kept + total
            for example in examples:
                assert 2 <= len(example) <= cfg.max_length
                assert len(example.loss_mask) == len(example)
                assert set(example.loss_mask.tolist()) <= {0, 1}
                assert example.input_ids.min() >= 0 and example.input_ids.max() < 300
            describe_data(examples, report, tokenizer, 0.0)

        clean(load)

    attempt(check, seconds, st.lists(ROW, max_size=3), OPTIONS, st.sampled_from(sorted(TOKENIZERS)))


@DURATIONS
def test_odd_entries(seconds: float, tmp_path: Path) -> None:
    def check(entry: str) -> None:
        clean(
            lambda: load_examples(str(tmp_path) + "/" + entry, TOKENIZERS["chatml"], DataConfig())
        )
        clean(
            lambda: load_examples("2*" + str(tmp_path) + entry, TOKENIZERS["chatml"], DataConfig())
        )
        clean(lambda: validate(from_dict({"data": {"train": [entry]}, "model": {"target": "t"}})))

    attempt(check, seconds, st.text(max_size=12).filter(lambda text: ".." not in text))


@DURATIONS
def test_odd_prompts_and_outputs(seconds: float, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"

    def check(rows: list, written: bytes) -> None:
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        out.write_bytes(written)

        def read() -> None:
            found = regenerate.read_prompts(str(prompts))
            with regenerate.open_output(out) as file:
                regenerate.resume_point(file, out, found)

        clean(read)

    attempt(check, seconds, st.lists(ROW, max_size=3), damaged(JSONL))


@DURATIONS
def test_odd_settings(seconds: float, tmp_path: Path) -> None:
    beside = tmp_path / "a.jsonl.settings.yaml"
    written = yaml.safe_dump({"target": "t", "temperature": 0, "enable_thinking": None}).encode()

    def check(content: bytes) -> None:
        beside.write_bytes(content)
        clean(lambda: read_settings(tmp_path / "a.jsonl"))

    attempt(check, seconds, damaged(written) | JSON.map(lambda value: json.dumps(value).encode()))
