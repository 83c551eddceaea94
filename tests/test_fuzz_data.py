"""Fuzzing of what users hand over: text files, rows, entries, configurations. Only clean errors.

A few seconds each; `python -m pytest -m slow` takes ten minutes for the readers together and ten
for the configuration.
"""

import gzip
import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch
import yaml
import zstandard
from chat_templates import CHATML, chat, chat_tokenizer
from hypothesis import HealthCheck
from hypothesis import strategies as st
from wild_templates import WILD

from dflash_ext import regenerate
from dflash_ext.config import (
    TYPES,
    DataConfig,
    UserError,
    from_dict,
    load_config,
    parse_config,
    validate,
)
from dflash_ext.data.check import describe_data
from dflash_ext.data.conversations import load_examples
from dflash_ext.data.text_settings import read_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SECONDS = {"short": 3.0, "long": 600.0}
READERS = 10  # tests that share the ten minutes


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Callable[..., None]:
    """fuzz(function, strategy, ...): tries the function on new examples until the time is up."""
    asked = request.config.getoption("-m") == "slow"

    def run(
        function: Callable[..., None], *strategies: st.SearchStrategy, share: int = READERS
    ) -> None:
        seconds = SECONDS["long"] / share if asked else SECONDS["short"]
        end, seed = time.monotonic() + seconds, 0
        options = hypothesis.settings(
            max_examples=100,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        while time.monotonic() < end:
            test = hypothesis.given(st.tuples(*strategies))(lambda values: function(*values))
            hypothesis.seed(seed)(options(test))()
            seed += 1
        print(f"{seed * 100} examples")

    return run


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


def _parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS[:2]), sink)
    return sink.getvalue().to_pybytes()


JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
FILES = {
    "a.jsonl": JSONL,
    "a.jsonl.gz": gzip.compress(JSONL),
    "a.jsonl.zst": zstandard.compress(JSONL[:200]) + zstandard.compress(JSONL[200:]),
    "a.json": json.dumps(ROWS).encode(),
    "a.parquet": _parquet(),
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


@pytest.mark.parametrize("name", FILES)
def test_damaged_files(name: str, fuzz: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / name

    def attempt(content: bytes, bad_rows: str) -> None:
        path.write_bytes(content)
        cfg = DataConfig(bad_rows=bad_rows)  # type: ignore[arg-type]
        clean(lambda: load_examples(str(path), TOKENIZERS["chatml"], cfg, vocab_size=300))

    fuzz(attempt, damaged(FILES[name]), st.sampled_from(["error", "skip"]))


def _features() -> bytes:
    ids = torch.arange(6)
    sink = io.BytesIO()
    torch.save(
        {"input_ids": ids, "loss_mask": ids.clamp(max=1), "hidden_states": torch.ones(1, 6, 8)},
        sink,
    )
    return sink.getvalue()


@pytest.mark.parametrize("name", ["data_0.ckpt", "data_0.ckpt.gz"])
def test_damaged_features(name: str, fuzz: Callable[..., None], tmp_path: Path) -> None:
    contents = _features()

    def attempt(content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        clean(lambda: load_examples(str(tmp_path), TOKENIZERS["chatml"], DataConfig()))

    whole = damaged(contents)
    fuzz(attempt, whole.map(gzip.compress) if name.endswith("gz") else whole, share=2 * READERS)


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


def test_odd_rows(fuzz: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def attempt(rows: list, options: dict, template: str) -> None:
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

    fuzz(attempt, st.lists(ROW, max_size=3), OPTIONS, st.sampled_from(sorted(TOKENIZERS)))


def test_odd_entries(fuzz: Callable[..., None], tmp_path: Path) -> None:
    def attempt(entry: str) -> None:
        clean(
            lambda: load_examples(str(tmp_path) + "/" + entry, TOKENIZERS["chatml"], DataConfig())
        )
        clean(
            lambda: load_examples("2*" + str(tmp_path) + entry, TOKENIZERS["chatml"], DataConfig())
        )
        clean(lambda: validate(from_dict({"data": {"train": [entry]}, "model": {"target": "t"}})))

    fuzz(attempt, st.text(max_size=12).filter(lambda text: ".." not in text))


def test_odd_prompts_and_outputs(fuzz: Callable[..., None], tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"

    def attempt(rows: list, written: bytes) -> None:
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        out.write_bytes(written)

        def read() -> None:
            found = regenerate.read_prompts(str(prompts))
            with regenerate.open_output(out) as file:
                regenerate.resume_point(file, out, found)

        clean(read)

    fuzz(attempt, st.lists(ROW, max_size=3), damaged(JSONL))


def test_odd_settings(fuzz: Callable[..., None], tmp_path: Path) -> None:
    beside = tmp_path / "a.jsonl.settings.yaml"
    written = yaml.safe_dump({"target": "t", "temperature": 0, "enable_thinking": None}).encode()

    def attempt(content: bytes) -> None:
        beside.write_bytes(content)
        clean(lambda: read_settings(tmp_path / "a.jsonl"))

    fuzz(attempt, damaged(written) | JSON.map(lambda value: json.dumps(value).encode()))


def test_odd_configurations(fuzz: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    good = b"model: {target: t}\ndata:\n  train: [a.jsonl, 2 * b]\ntrain: {lr: 1e-3, steps: 5}\n"
    sections = st.dictionaries(st.sampled_from(sorted(TYPES)), JSON, max_size=4)

    def nested(fields: dict) -> bytes:
        found: dict = {}
        for key, value in fields.items():
            section, name = key.split(".")
            found.setdefault(section, {})[name] = value
        return json.dumps(found).encode()

    def attempt(content: bytes, words: list[str]) -> None:
        path.write_bytes(content)
        clean(lambda: validate(load_config(path)))
        clean(lambda: parse_config(["--config", str(path), *words]))

    word = st.sampled_from([f"--{key}" for key in TYPES]) | st.text(max_size=8)
    harmless = word.filter(lambda text: not text.startswith(("-h", "--h", "--print", "--config")))
    fuzz(attempt, damaged(good) | sections.map(nested), st.lists(harmless, max_size=3), share=1)
