"""Tokenised text: the cache on disk, weights of sources, memory, and who pays for what."""

import json
import shutil
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_templates import CHATML, chat, chat_tokenizer

from dflash_ext.config import DataConfig, TrainConfig, UserError
from dflash_ext.data import conversations, corpus
from dflash_ext.data.buckets import EpochBatches
from dflash_ext.data.conversations import load_examples
from dflash_ext.data.corpus import dataset_hash
from dflash_ext.data.packing import BatchPlanner
from dflash_ext.layout import BlockLayout


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer(CHATML)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Everything goes through the cache folder."""
    monkeypatch.setattr(conversations, "CACHE_ABOVE_BYTES", 0)
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three files of chats and ids, each with rows that are not kept."""
    path = tmp_path / "text"
    path.mkdir()
    for name in "abc":
        rows = [{"messages": chat(f"{name}{i}?", f"Answer {i}.")} for i in range(4)]
        rows.insert(2, {"messages": chat("Nobody answers?")})
        rows.append({"input_ids": list(range(9)), "loss_mask": [0, *[1] * 8]})
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(tokenizer, *entries: object, **options):
    return load_examples([str(e) for e in entries], tokenizer, DataConfig(**options))


def contents(examples) -> list[tuple]:
    return [(e.source, e.input_ids.tolist(), e.loss_mask.tolist()) for e in examples]


def test_the_cache_holds_the_same_examples(tokenizer, folder, cache, monkeypatch):
    first, report = load(tokenizer, folder)
    again, report_again = load(tokenizer, folder)
    monkeypatch.setattr(conversations, "CACHE_ABOVE_BYTES", 10**9)
    plain, report_plain = load(tokenizer, folder)
    assert contents(first) == contents(again) == contents(plain)
    assert report == report_again == report_plain and report.no_assistant == 3
    assert first.digest() == again.digest() == plain.digest() == dataset_hash(first)
    assert first.lengths.tolist() == plain.lengths.tolist() == [len(e) for e in plain]
    assert all(e.input_ids.dtype == np.int32 for e in first)
    assert contents([first[-1]]) == contents(plain[-1:]) and len(first) == 15
    with pytest.raises(IndexError):
        first[15]


def test_only_what_changed_is_tokenised_again(tokenizer, folder, cache, monkeypatch):
    load(tokenizer, folder)
    assert len(list(cache.iterdir())) == 3
    seen = []
    encode = conversations.encode_row

    def counting(row, place, *args):
        seen.append(Path(place).name.split(":")[0])
        return encode(row, place, *args)

    monkeypatch.setattr(conversations, "encode_row", counting)
    load(tokenizer, folder)
    assert seen == []
    with (folder / "b.jsonl").open("a") as file:
        file.write('{"input_ids": [7, 8], "loss_mask": [1, 1]}\n')
    examples, _ = load(tokenizer, folder)
    assert set(seen) == {"b.jsonl"} and len(examples) == 16
    seen.clear()
    (folder / "c.jsonl").rename(folder / "0.jsonl")  # the same text under another name
    examples, _ = load(tokenizer, folder)
    assert seen == [] and examples[0].source == f"{folder}/0.jsonl:1"


def test_whatever_the_tokens_depend_on_is_in_the_key(tokenizer, folder, cache):
    load(tokenizer, folder / "a.jsonl")
    variants = [
        {"max_length": 12},
        {"last_turn_only": True},
        {"enable_thinking": False},
        {"drop_loops": False},
        {"bad_rows": "skip"},
    ]
    for i, options in enumerate(variants, start=2):
        load(tokenizer, folder / "a.jsonl", **options)
        assert len(list(cache.iterdir())) == i, options
    count = len(variants) + 1
    load(chat_tokenizer(CHATML.replace("\n", "")), folder / "a.jsonl")
    load(chat_tokenizer(CHATML, merges=[("e", "r")]), folder / "a.jsonl")
    path = [str(folder / "a.jsonl")]
    load_examples(path, tokenizer, DataConfig(), mask_token_id=258)
    load_examples(path, tokenizer, DataConfig(), vocab_size=300)
    assert len(list(cache.iterdir())) == count + 4
    load(tokenizer, folder / "a.jsonl", token_budget=100, seed=5)
    assert len(list(cache.iterdir())) == count + 4


@pytest.mark.parametrize("damage", ["ids.bin", "mask.bin", "rows.npy", "part.json", "cut", "text"])
def test_a_damaged_part_is_made_again(damage, tokenizer, folder, cache):
    wanted = contents(load(tokenizer, folder / "a.jsonl")[0])
    corpus._mapped.cache_clear()
    (part,) = cache.iterdir()
    if damage == "cut":
        (part / "ids.bin").write_bytes((part / "ids.bin").read_bytes()[:-4])
    elif damage == "text":
        (part / "part.json").write_text('{"report": {"rows": 1, "odd": 2}, "digest": ""}')
    else:
        (part / damage).unlink()
    assert contents(load(tokenizer, folder / "a.jsonl")[0]) == wanted
    assert [path.name for path in cache.iterdir()] == [part.name]


def test_a_part_that_fails_leaves_nothing_behind(tokenizer, folder, cache):
    (folder / "b.jsonl").write_text('{"messages": 5}\n')
    with pytest.raises(UserError, match="b.jsonl:1: messages: found int"):
        load(tokenizer, folder)
    assert len(list(cache.iterdir())) == 1  # the file before it


def test_a_cache_that_cannot_be_written_is_one_line(tokenizer, folder, cache):
    cache.parent.mkdir()
    cache.write_text("a file in the way")
    with pytest.raises(UserError, match=r"tokens: cannot be written \(.*set \$DFLASH_CACHE"):
        load(tokenizer, folder)


def test_runs_may_fill_the_cache_at_once(tokenizer, folder, cache):
    wanted, found = contents(load(tokenizer, folder)[0]), {}
    shutil.rmtree(cache)
    corpus._mapped.cache_clear()
    tokenizers = [chat_tokenizer(CHATML) for _ in range(4)]

    def work(i: int) -> None:
        found[i] = contents(load(tokenizers[i], folder)[0])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[i] == wanted for i in range(4))
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("on_disk", [True, False])
def test_memory_does_not_grow_with_the_text(on_disk, tokenizer, tmp_path, cache, monkeypatch):
    if not on_disk:
        monkeypatch.setattr(conversations, "CACHE_ABOVE_BYTES", 10**9)
    row = json.dumps({"input_ids": list(range(250)) * 8, "loss_mask": [1] * 2000}) + "\n"
    paths = [tmp_path / f"{name}.jsonl" for name in "abcd"]
    for path in paths:
        path.write_text(row * 30)

    def peak(*paths: Path) -> int:
        tracemalloc.start()
        examples, report = load(tokenizer, *paths, max_length=2000)
        assert report.tokens == len(paths) * 60_000
        data = DataConfig(token_budget=10_000)
        planner = BatchPlanner(examples, data, TrainConfig(max_anchors=8), BlockLayout(4), 1)
        for i in range(5):
            planner.batch(i)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    more_text = 3 * 60_000 * 5  # bytes of ids and mask in three more files
    peak(paths[0])  # whatever is only made once
    assert (peak(*paths) - peak(paths[0]) < more_text / 10) == on_disk


# Weights


def counts_of(weights, epochs: int, seed: int = 0) -> np.ndarray:
    total = sum(count for count, _ in weights)
    batches = EpochBatches(np.full(total, 10), 50, seed, weights)
    counts = np.zeros((epochs, total), dtype=int)
    for epoch in range(epochs):
        for batch in batches.epoch(epoch):
            np.add.at(counts[epoch], batch, 1)
    return counts


def test_each_example_comes_as_often_as_its_weight_says():
    counts = counts_of([(10, 1), (20, 2), (40, 0.25), (30, 1.5)], epochs=8)
    assert (counts[:, :10] == 1).all() and (counts[:, 10:30] == 2).all()
    assert (counts[:, 30:70].sum(axis=1) == 10).all()
    assert (counts[:4, 30:70].sum(axis=0) == 1).all()  # four epochs, each example once
    assert (counts[4:, 30:70].sum(axis=0) == 1).all()
    assert set(counts[:, 70:].flatten()) == {1, 2}
    assert (counts[:, 70:].sum(axis=1) == 45).all()
    assert (counts[:2, 70:].sum(axis=0) == 3).all()
    assert not np.array_equal(counts[0, 30:70], counts[1, 30:70])
    assert not np.array_equal(counts, counts_of([(10, 1), (20, 2), (40, 0.25), (30, 1.5)], 8, 1))


def test_weight_one_changes_nothing():
    lengths = np.random.default_rng(0).integers(3, 40, 60)
    for one in (EpochBatches(lengths, 80, 3), EpochBatches(lengths, 80, 3, [(20, 1), (40, 1.0)])):
        order = torch.cat([torch.from_numpy(batch) for batch in one.epoch(2)])
        assert sorted(order.tolist()) == list(range(60))
    batches = EpochBatches(lengths, 80, 3), EpochBatches(lengths, 80, 3, [(20, 1), (40, 1.0)])
    for left, right in zip(batches[0].epoch(2), batches[1].epoch(2), strict=True):
        assert left.tolist() == right.tolist()


def test_weights_reach_the_batches_and_the_hash(tokenizer, folder):
    a, b = folder / "a.jsonl", folder / "b.jsonl"
    plain, _ = load(tokenizer, a, b)
    mixed, _ = load(tokenizer, f"2 * {a}", f"0.5 * {b}")
    assert contents(plain) == contents(mixed) and plain.digest() != mixed.digest()
    planner = BatchPlanner(
        mixed, DataConfig(token_budget=200), TrainConfig(max_anchors=8), BlockLayout(4), 1
    )
    docs: list[int] = []
    for i in range(planner.total_steps()):
        plan = planner.batch(i)
        docs += plan.doc_ids
        for doc, (start, end) in zip(plan.doc_ids, plan.doc_ranges, strict=True):
            source = plan.src_index[start:end]
            ids = plan.input_ids.flatten()[source]
            assert ids.tolist() == mixed[doc].input_ids.tolist()
    assert sorted(doc for doc in docs if doc < 5) == sorted([*range(5), *range(5)])
    assert len([doc for doc in docs if doc >= 5]) in (2, 3)
    assert 0 <= planner.padding_share() < 0.5


def test_weights_that_leave_no_example_to_an_epoch_are_refused(tokenizer, folder):
    """Else the batches of ever more empty epochs would be looked for."""
    settings = DataConfig(token_budget=200), TrainConfig(max_anchors=8), BlockLayout(4), 1
    rare, _ = load(tokenizer, f"1e-6 * {folder / 'a.jsonl'}", f"0.03 * {folder / 'b.jsonl'}")
    with pytest.raises(UserError, match=r"data.train: found weights that take 0.15 examples in an"):
        BatchPlanner(rare, *settings)
    some, _ = load(tokenizer, f"0.01 * {folder / 'a.jsonl'}", f"0.2 * {folder / 'b.jsonl'}")
    BatchPlanner(some, *settings).batch(0)
