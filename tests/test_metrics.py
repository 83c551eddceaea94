"""Metrics: exact definitions, nothing invented, and a publisher that never waits."""

import math
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_ext import metrics, ops
from dflash_ext.metrics import Metrics, MetricStream, merge_words, summarise
from dflash_ext.ops.metric_add import NUM_WORDS, WORD

BLOCK = 5
UNMEASURED = torch.zeros(0, 0, dtype=torch.int64)
Batch = tuple[Tensor, Tensor, Tensor]


def random_batch(seed: int, blocks: int = 6) -> Batch:
    """(rank, terms, weights): slot 0 has no weight, and blocks end early or are padding."""
    g = torch.Generator().manual_seed(seed)
    rank = (
        torch.randint(0, 12, (blocks, BLOCK), generator=g)
        // 2
        * torch.randint(0, 2, (blocks, BLOCK), generator=g)
    )
    terms = torch.rand(blocks, BLOCK, 4, generator=g) * 9
    weights = torch.rand(blocks, BLOCK, generator=g) + 0.1
    weights[:, 0] = 0
    weights[1, 3:] = 0
    weights[2, 2] = 0
    weights[-1] = 0
    return rank, terms, weights


def by_hand(batches: list[Batch]) -> dict[str, float]:
    """The definitions, slot by slot."""
    sums = dict.fromkeys(("w", "loss", "ce", "kl", "cap", "n", "r1", "r4", "r8", "blocks"), 0.0)
    streaks = {1: 0, 4: 0, 8: 0}
    slots = [[0, 0] for _ in range(BLOCK)]
    for rank, terms, weights in batches:
        for a in range(rank.shape[0]):
            supervised = [k for k in range(BLOCK) if weights[a, k] > 0]
            sums["blocks"] += bool(supervised)
            for k in supervised:
                w, r = float(weights[a, k]), int(rank[a, k])
                sums["w"] += w
                for i, name in enumerate(("loss", "ce", "kl", "cap")):
                    sums[name] += w * float(terms[a, k, i])
                sums["n"] += 1
                for width in (1, 4, 8):
                    sums[f"r{width}"] += r < width
                slots[k][0] += r == 0
                slots[k][1] += 1
            for width in streaks:
                for k in range(1, BLOCK):
                    if k not in supervised or rank[a, k] >= width:
                        break
                    streaks[width] += 1
    wanted = {name: sums[name] / sums["w"] for name in ("loss", "ce", "kl", "cap")}
    wanted |= {"acc": sums["r1"] / sums["n"], "top4": sums["r4"] / sums["n"]}
    wanted |= {"top8": sums["r8"] / sums["n"], "streak": streaks[1] / sums["blocks"]}
    wanted |= {f"ddtree_streak{width}": streaks[width] / sums["blocks"] for width in (4, 8)}
    return wanted | {f"acc_{k}": hit / n for k, (hit, n) in enumerate(slots) if n}


def add(stream: MetricStream, batch: Batch, *, measured: bool = True, tokens: int = 0) -> None:
    rank, terms, weights = batch
    ops.metric_add(stream.acc, rank if measured else UNMEASURED, terms, weights)
    if tokens:
        stream.count("tokens", tokens)


def words(**counts: int) -> list[int]:
    record = [0] * NUM_WORDS
    for name, value in counts.items():
        record[WORD[name]] = value
    return record


def test_definitions() -> None:
    batches = [random_batch(seed) for seed in range(3)]
    stream = MetricStream("cpu")
    for batch in batches:
        add(stream, batch, tokens=100)
    stream.publish(7)
    ((step, record),) = stream.drain()
    wanted = by_hand(batches)
    wanted |= {"tokens": 300, "batches": 3, "nonfinite_steps": 0, "nonfinite_values": 0}
    assert step == 7
    # Fixed point rounds each addend to 2^-24.
    assert summarise(record, BLOCK) == pytest.approx(wanted, rel=1e-6)


def test_drafters_and_steps_merge_as_if_they_were_one() -> None:
    streams = [MetricStream("cpu"), MetricStream("cpu")]
    batches = [random_batch(seed, blocks=3 + seed) for seed in range(4)]
    for i, batch in enumerate(batches):
        add(streams[i % 2], batch, tokens=10)
        streams[i % 2].publish(i // 2)
    got = Metrics(streams, BLOCK).get_metrics()
    wanted = by_hand(batches) | {"tokens": 40, "batches": 4, "dropped_metrics": 0}
    assert got == pytest.approx(wanted | {"nonfinite_steps": 0, "nonfinite_values": 0}, rel=1e-6)


def test_unmeasured_values_are_absent() -> None:
    stream = MetricStream("cpu")
    rank, terms, weights = random_batch(0)
    add(stream, (rank, terms, weights), measured=False)
    stream.publish(0)
    terms[..., 2] = 0.0  # no teacher
    weights[:, 4] = 0.0  # no supervised slot 4
    add(stream, (rank, terms, weights))
    stream.publish(1)
    (_, first), (_, second) = stream.drain()
    counts = {"batches", "nonfinite_steps", "nonfinite_values"}
    assert summarise(first, BLOCK).keys() == {"loss"} | counts
    ranks = {"acc", "top4", "top8", "streak", "ddtree_streak4", "ddtree_streak8"}
    slots = {"acc_1", "acc_2", "acc_3"}
    assert summarise(second, BLOCK).keys() == {"loss", "ce", "cap"} | ranks | slots | counts


def test_loss_counts_every_batch_and_terms_only_measured_ones() -> None:
    batches = [random_batch(0), random_batch(1)]
    stream = MetricStream("cpu")
    add(stream, batches[0])
    add(stream, batches[1], measured=False)
    stream.publish(0)
    got = summarise(stream.drain()[0][1], BLOCK)
    assert got["loss"] == pytest.approx(by_hand(batches)["loss"], rel=1e-6)
    assert got["ce"] == pytest.approx(by_hand(batches[:1])["ce"], rel=1e-6)
    assert got["acc"] == by_hand(batches[:1])["acc"]
    assert got["batches"] == 2


def test_nothing_counted_is_an_empty_dict() -> None:
    stream = MetricStream("cpu")
    collector = Metrics([stream], BLOCK, lr_at=lambda _: 1e-3)
    assert summarise([0] * NUM_WORDS, BLOCK) == {}
    assert collector.get_metrics() == {}
    stream.publish(3)
    assert collector.get_metrics() == {}
    add(stream, random_batch(0))
    stream.publish(4)
    assert "loss" in collector.get_metrics()
    assert collector.get_metrics() == {}


def test_batch_without_any_supervised_slot_has_no_loss() -> None:
    stream = MetricStream("cpu")
    rank, terms, weights = random_batch(0)
    add(stream, (rank, terms, torch.zeros_like(weights)), tokens=5)
    stream.publish(0)
    got = summarise(stream.drain()[0][1], BLOCK)
    assert got == {"tokens": 5, "batches": 1, "nonfinite_steps": 0, "nonfinite_values": 0}


def test_non_finite_values_are_counted_and_never_added() -> None:
    stream = MetricStream("cpu")
    rank, terms, weights = random_batch(0)
    terms[0, 1, 0] = math.nan
    terms[0, 2, 1] = math.inf
    add(stream, (rank, terms, weights))
    stream.count("nonfinite_steps", torch.ones((), dtype=torch.int64))
    stream.publish(0)
    got = summarise(stream.drain()[0][1], BLOCK)
    assert got["nonfinite_values"] == 2
    assert got["nonfinite_steps"] == 1
    assert all(math.isfinite(value) for value in got.values())


def test_records_carry_their_step_and_nothing_of_the_step_before() -> None:
    stream = MetricStream("cpu")
    for step in (10, 20, 21, 22, 5000):  # logged steps, then a resumed run
        stream.count("tokens", step)
        stream.publish(step)
    assert [(s, r[WORD["tokens"]]) for s, r in stream.drain()] == [
        (step, step) for step in (10, 20, 21, 22, 5000)
    ]
    assert stream.drain() == []
    assert not stream.acc.any()


def test_learning_rate_of_the_newest_record() -> None:
    stream = MetricStream("cpu")
    for step in (3, 4):
        stream.count("tokens", 1)
        stream.publish(step)
    assert Metrics([stream], BLOCK, lr_at=lambda step: step / 10).get_metrics()["lr"] == 0.4


def test_overrun_drops_the_oldest_records_and_counts_them() -> None:
    stream = MetricStream("cpu")
    collector = Metrics([stream], BLOCK)
    total = metrics.RING_SLOTS + 10
    for step in range(total):
        stream.count("tokens", 1)
        stream.publish(step)
    got = collector.get_metrics()
    assert got["tokens"] == metrics.RING_SLOTS
    assert got["dropped_metrics"] == stream.dropped == 10
    stream.count("tokens", 1)
    stream.publish(total)
    assert collector.get_metrics()["dropped_metrics"] == 0


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_switches")
def test_reader_beside_a_publisher_sees_whole_records_in_order() -> None:
    stream, total = MetricStream("cpu"), 3000

    def publisher() -> None:
        for step in range(total):
            stream.acc.fill_(step + 1)
            stream.publish(step)

    thread = threading.Thread(target=publisher)
    thread.start()
    records: list[tuple[int, list[int]]] = []
    while thread.is_alive():
        records += stream.drain()
    records += stream.drain()
    steps = [step for step, _ in records]
    assert steps == sorted(set(steps))
    assert len(records) + stream.dropped == total
    assert all(record == [step + 1] * NUM_WORDS for step, record in records)


@pytest.mark.usefixtures("frequent_switches")
def test_concurrent_readers_share_out_every_count_once() -> None:
    streams = [MetricStream("cpu"), MetricStream("cpu")]
    collector = Metrics(streams, BLOCK)
    total, seen, done = 2000, [], threading.Event()

    def publisher(stream: MetricStream) -> None:
        for step in range(total):
            stream.count("tokens", 1)
            stream.publish(step)

    def reader() -> None:
        last = False
        while not last:
            last = done.is_set()
            got = collector.get_metrics()
            seen.append((got.get("tokens", 0), got.get("dropped_metrics", 0)))

    publishers = [threading.Thread(target=publisher, args=(stream,)) for stream in streams]
    readers = [threading.Thread(target=reader) for _ in range(2)]
    for thread in publishers + readers:
        thread.start()
    for thread in publishers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert sum(tokens + dropped for tokens, dropped in seen) == 2 * total


def test_one_reader_at_a_time_in_the_streams() -> None:
    class Stream:
        dropped = 0
        inside = 0
        most = 0

        def drain(self) -> list[tuple[int, list[int]]]:
            self.inside += 1
            self.most = max(self.most, self.inside)
            time.sleep(0.02)
            self.inside -= 1
            return []

    stream = Stream()
    collector = Metrics([stream], BLOCK)  # type: ignore[list-item]
    readers = [threading.Thread(target=collector.get_metrics) for _ in range(4)]
    for thread in readers:
        thread.start()
    for thread in readers:
        thread.join()
    assert stream.most == 1


def test_formatting_happens_outside_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = MetricStream("cpu")
    collector = Metrics([stream], BLOCK)
    locked = []

    def spy(*args: object) -> dict[str, float]:
        locked.append(collector._lock.locked())
        return {}

    monkeypatch.setattr(metrics, "summarise", spy)
    collector.get_metrics()
    assert locked == [False]


class NoReadback(TorchDispatchMode):
    """Fails where a tensor's value would be read by the host: a sync on a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert "_local_scalar_dense" not in str(func), "reads a value back"
        assert not str(func).startswith(("aten._to_copy", "aten.nonzero")), str(func)
        return func(*args, **(kwargs or {}))


def test_publishing_reads_nothing_back() -> None:
    stream = MetricStream("cpu")
    batch = random_batch(0)
    with NoReadback():
        for step in (0, 1, 10):
            add(stream, batch, tokens=3)
            stream.count("nonfinite_steps", stream.acc[0])
            stream.publish(step)
    assert [step for step, _ in stream.drain()] == [0, 1, 10]


def test_merge_words() -> None:
    assert merge_words([words(tokens=3, batches=1), words(tokens=4)]) == words(tokens=7, batches=1)
    assert merge_words([]) == words()
