"""Kinds of sources: compressed files, JSON arrays, Parquet, data sets, folders, ShareGPT rows."""

import builtins
import gzip
import json
from pathlib import Path

import pytest
from chat_templates import CHATML, chat, chat_tokenizer

from dflash_ext.config import DataConfig, UserError
from dflash_ext.data.conversations import load_examples
from dflash_ext.data.readers import folder_shards
from dflash_ext.data.sources import open_source

ROWS = [{"messages": chat(f"{i}?", f"Answer {i} \u2028 ü.")} for i in range(5)]


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer(CHATML)


def jsonl(rows=ROWS) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def texts(tokenizer, *entries: str, **options) -> list[str]:
    examples, _ = load_examples(entries, tokenizer, DataConfig(**options))
    return [tokenizer.decode(example.input_ids) for example in examples]


@pytest.fixture
def wanted(tokenizer, tmp_path) -> list[str]:
    path = tmp_path / "plain.jsonl"
    path.write_bytes(jsonl())
    return texts(tokenizer, str(path))


def write_parquet(path: Path, rows=ROWS) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)


def zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data)


def zstd_frames(data: bytes) -> bytes:
    """Two frames, one after the other, as `cat a.zst b.zst` gives."""
    half = len(data) // 2
    return zstd(data[:half]) + zstd(data[half:])


FILES = {
    "a.jsonl.gz": lambda: gzip.compress(jsonl()),
    "two-members.jsonl.gz": lambda: gzip.compress(jsonl()[:99]) + gzip.compress(jsonl()[99:]),
    "a.jsonl.zst": lambda: zstd(jsonl()),
    "frames.jsonl.zst": lambda: zstd_frames(jsonl()),
    "a.ndjson": jsonl,
    "unknown.txt": jsonl,
    "lines.json": jsonl,
    "array.json": lambda: b"\xef\xbb\xbf \n" + json.dumps(ROWS, indent=2).encode(),
    "array.json.gz": lambda: gzip.compress(json.dumps(ROWS).encode()),
}


@pytest.mark.parametrize("name", FILES)
def test_kinds_of_files_hold_the_same_rows(name, tokenizer, tmp_path, wanted):
    path = tmp_path / name
    path.write_bytes(FILES[name]())
    assert texts(tokenizer, str(path)) == wanted


def test_parquet(tokenizer, tmp_path, wanted):
    path = tmp_path / "a.parquet"
    write_parquet(path)
    assert texts(tokenizer, str(path)) == wanted
    tokens = [{"input_ids": list(range(n)), "loss_mask": [1] * n} for n in range(2, 600)]
    write_parquet(path, tokens)  # more rows than are read at a time
    examples, _ = load_examples(str(path), tokenizer, DataConfig())
    assert [e.input_ids.tolist() for e in examples] == [row["input_ids"] for row in tokens]
    assert examples[-1].source == f"{path}:598"


def test_fields_that_a_parquet_row_does_not_have_are_left_out(tmp_path):
    # Arrow gives all messages the fields of all: a template must not see them as null.
    template = CHATML.replace("m['content']", "m | tojson")
    rows = [{"messages": [{"role": "user", "content": "hi"}, *chat("", "x")[1:]]}]
    rows[0]["messages"][1]["reasoning_content"] = "hm"
    write_parquet(tmp_path / "a.parquet", rows)
    (text,) = texts(chat_tokenizer(template), str(tmp_path / "a.parquet"))
    assert '{"role": "user", "content": "hi"}' in text and "null" not in text


def test_data_sets_of_hugging_face(tokenizer, tmp_path, wanted, monkeypatch):
    import datasets

    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one")
    splits = datasets.DatasetDict({"train": whole, "test": whole.select([2])})
    splits.save_to_disk(tmp_path / "two")
    for entry in ("one", "hf:{}/one", "two", "hf:{}/two", "hf:{}/two:train"):
        entry = entry.format(tmp_path) if ":" in entry else str(tmp_path / entry)
        assert texts(tokenizer, entry) == wanted, entry
    assert texts(tokenizer, f"hf:{tmp_path}/two:test") == wanted[2:3]
    with pytest.raises(UserError, match="found the splits train, test, want one of them"):
        texts(tokenizer, f"hf:{tmp_path}/two:valid")

    asked = []

    def load_dataset(name, config, *, split):
        asked.append((name, config, split))
        return whole

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert texts(tokenizer, "hf:a/b", "hf:a/b:dev", "hf:a/b:main:train[:10]") == wanted * 3
    assert asked == [("a/b", None, "train"), ("a/b", None, "dev"), ("a/b", "main", "train[:10]")]


def test_a_data_set_that_cannot_be_loaded_is_one_line(tokenizer, monkeypatch):
    import datasets

    def fail(*args, **kwargs):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError) as error:
        texts(tokenizer, "hf:a/b:train")
    wanted = "hf:a/b:train: cannot be loaded (ConnectionError: no route to host), want a data set"
    assert str(error.value) == wanted
    for entry in ("hf:", "hf:a/b:", "hf:a:b:c:d"):
        with pytest.raises(UserError, match="found an odd name, want hf:NAME"):
            texts(tokenizer, entry)


def test_a_folder_is_read_file_by_file(tokenizer, tmp_path, wanted):
    folder = tmp_path / "text"
    (folder / "sub").mkdir(parents=True)
    (folder / ".cache").mkdir()
    (folder / "b.jsonl").write_bytes(jsonl(ROWS[1:2]))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(ROWS[:1])))
    write_parquet(folder / "sub" / "c.parquet", ROWS[2:])
    for name in ("README.md", "b.jsonl.settings.yaml", "dataset_info.json", ".cache/x.jsonl"):
        (folder / name).write_text("no text")
    assert texts(tokenizer, str(folder)) == wanted
    names = [Path(shard.name).name for shard in folder_shards(folder)]
    assert names == ["a.jsonl.gz", "b.jsonl", "c.parquet"]


@pytest.mark.parametrize("package", ["zstandard", "pyarrow", "datasets"])
def test_a_missing_package_names_the_extra(package, tokenizer, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(jsonl()))
    write_parquet(tmp_path / "a.parquet")
    entry = {"zstandard": "a.jsonl.zst", "pyarrow": "a.parquet", "datasets": "hf:a/b"}[package]
    entry = entry if ":" in entry else str(tmp_path / entry)

    def missing(name, *args):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return __import__(name, *args)

    monkeypatch.setattr("dflash_ext.data.readers.import_module", missing)
    with pytest.raises(UserError) as error:
        texts(tokenizer, entry)
    assert str(error.value).endswith(
        f": found no package {package}, want: pip install 'dflash-ext[data]'"
    )
    assert builtins.__import__ is __import__


BAD_FILES = {
    "cut.jsonl.gz": (gzip.compress(jsonl())[:-9], "found damaged gzip data (Compressed file ended"),
    "flip.jsonl.gz": (b"\x1f\x8b\x08" + b"\xff" * 60, "found damaged gzip data ("),
    "plain.jsonl.gz": (jsonl(), "found damaged gzip data (Not a gzipped file"),
    "cut.jsonl.zst": (lambda: zstd(jsonl())[:-5], "found zstd data that ends early, want"),
    "plain.jsonl.zst": (jsonl(), "found damaged zstd data (zstd"),
    "plain.parquet": (jsonl(), "found no readable Parquet behind row 0 (Parquet magic bytes"),
    "open.json": (b'[{"input_ids": [1, 2], "loss_mask": [1, 1]}', ":2: found a line that is not"),
    "number.json": (b"[1]", ":1: found 1, want a JSON object"),
    "null.jsonl": (b"null", ":1: found null, want a JSON object"),
    "array.jsonl": (b"[1]", ":1: found [1], want a JSON object (a file that is one array is named"),
    "behind.json": (json.dumps(ROWS).encode() + b" x", ": found 'x' behind the array, want one"),
    "commas.json": (b'[{"input_ids": [1, 2], "loss_mask": [1, 1]} {}]', "(Expecting ',' delimiter"),
    "utf16.json": ("[]".encode("utf-16"), "found bytes that are not UTF-8 (byte 0), want UTF-8"),
    "empty.json": (b"[]", "found no rows"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_damaged_files_are_one_line(name, tokenizer, tmp_path):
    content, wanted = BAD_FILES[name]
    path = tmp_path / name
    path.write_bytes(content() if callable(content) else content)
    with pytest.raises(UserError) as error:
        texts(tokenizer, str(path))
    text = str(error.value)
    assert text.startswith(f"{path}:") and wanted in text and "\n" not in text


def test_parquet_that_is_cut_off(tokenizer, tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match="a.parquet: found no readable Parquet behind row 0"):
        texts(tokenizer, str(path))


# ShareGPT


def turn(speaker: str, value: str) -> dict:
    return {"from": speaker, "value": value}


def test_sharegpt_rows_are_the_same_conversation(tokenizer, tmp_path):
    turns = [turn("human", "Zero?"), turn("gpt", "One."), turn("user", "Two?"), turn("bing", "3.")]
    system = {"role": "system", "content": "Be brief."}
    rows = [
        {"conversations": turns},
        {"messages": chat("Zero?", "One.", "Two?", "3.")},
        {"conversations": chat("Zero?", "One.", "Two?", "3.")},
        {"conversations": turns, "system": "Be brief."},
        {"conversations": [turn("system", "Be brief."), *turns]},
        {"messages": [system, *chat("Zero?", "One.", "Two?", "3.")]},
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(rows))
    found = texts(tokenizer, str(path))
    assert found[0] == found[1] == found[2] and found[3] == found[4] == found[5]
    assert texts(tokenizer, str(path), format="auto")[0] == found[0]


def test_sharegpt_tool_calls(tmp_path):
    template = CHATML.replace(
        "m['content'] +",
        "m['content'] + (m.tool_calls[0].function | tojson if m.tool_calls else '') +",
    ).replace("{% for", "{{ tools[0].name }}{% for", 1)
    call = {"name": "add", "arguments": {"a": 1}}
    row = {
        "conversations": [
            turn("human", "1+1?"),
            turn("function_call", json.dumps(call)),
            turn("observation", "2"),
            turn("gpt", "Two."),
        ],
        "tools": json.dumps([{"name": "add"}]),
    }
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl([row]))
    tokenizer = chat_tokenizer(template)
    (example,), _ = load_examples(str(path), tokenizer, DataConfig())
    assert tokenizer.decode(example.input_ids).startswith("add<|im_start|>user\n1+1?")
    supervised = tokenizer.decode(example.input_ids[example.loss_mask == 1])
    assert supervised == json.dumps(call) + "<|im_end|>Two.<|im_end|>"


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"conversations": []}, "conversations: found [], want a list of turns"),
        ({"conversations": "hi"}, 'conversations: found "hi", want a list of turns'),
        ({"conversations": ["hi"]}, 'conversations[0]: found "hi", want an object with from and'),
        ({"conversations": [turn("human", 5)]}, "conversations[0]: found {"),  # type: ignore
        ({"conversations": [{"from": "human"}]}, '[0]: found {"from": "human"}, want an object w'),
        (
            {"conversations": [{"from": "human", "vaule": "x"}]},
            "want an object with from and value",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content: found nothing, want a string or"),
        ({"messages": chat("a?") + [{"role": "assistant", "content": None}]}, "[1].content: found"),
        (
            {"messages": [{"role": "asistant", "content": "x"}]},
            '[0].role: found "asistant", want a',
        ),
        ({"conversations": [turn("narrator", "x")]}, '[0].from: found "narrator", want one of hum'),
        ({"conversations": [turn("function_call", "add(")]}, '[0].value: found "add(", want JSON'),
        ({"conversations": [turn("function_call", "[]")]}, "[0].value: found [], want a call with"),
        ({"conversations": chat("a?", "b."), "tools": "{"}, 'tools: found "{", want JSON ('),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "want a part with text"),
    ],
)
def test_odd_conversations_are_one_line(row, wanted, tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl([row]))
    with pytest.raises(UserError) as error:
        texts(tokenizer, str(path))
    assert str(error.value).startswith(f"{path}:1: ") and wanted in str(error.value)


def test_parts_that_are_all_text_are_joined(tokenizer, tmp_path):
    row = {"messages": chat("Zero?", "One.")}
    parts = [{"type": "text", "text": "Ze"}, {"type": "text", "text": "ro?"}]
    other = {"messages": [{"role": "user", "content": parts}, row["messages"][1]]}
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl([row, other]))
    one, two = texts(tokenizer, str(path))
    assert one == two


def test_bad_rows_can_be_skipped_and_are_counted(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl([ROWS[0], {"text": 1}, {"messages": [5]}, ROWS[1]]))
    with pytest.raises(UserError, match=r":2: found the fields 'text'"):
        load_examples(str(path), tokenizer, DataConfig())
    examples, report = load_examples(str(path), tokenizer, DataConfig(bad_rows="skip"))
    assert len(examples) == 2 and (report.rows, report.bad) == (4, 2)
    assert (
        f"2 rows skipped: not usable (data.bad_rows); first: {path}:2: found" in (report.lines()[1])
    )


def test_entries_with_a_weight(tmp_path):
    path = tmp_path / "2 * 3.jsonl"  # a name may hold a star
    path.write_bytes(jsonl())
    for entry, weight in ((str(path), 1), (f"0.5*{path}", 0.5), (f" 2 *  {path}", 2)):
        source = open_source(entry)
        assert source.weight == weight and source.shards[0].name == str(path)
