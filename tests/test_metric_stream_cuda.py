"""Metrics on a GPU: the same words, and a publisher that waits for nothing."""

import re
import threading
import time
from collections.abc import Callable

import pytest
import torch
from cuda_waits import no_syncs
from torch import Tensor

from dflash_ext import metrics, ops
from dflash_ext.metrics import MetricStream
from dflash_ext.ops.metric_add import NUM_WORDS, WORD, new_accumulator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SLEEP_CYCLES = 500_000_000  # a quarter of a second, or more
ROWS = metrics.STAGING_ROWS
FORBIDDEN = re.compile(
    r"Synchronize|cudaMalloc|cudaFree|cudaHost|cudaMemcpy|Memcpy DtoH|EventQuery"
)


def random_batch(seed: int, blocks: int = 512, device: str = "cuda") -> tuple[Tensor, ...]:
    """(rank, terms, weights)"""
    g = torch.Generator().manual_seed(seed)
    rank = torch.randint(0, 12, (blocks, 16), generator=g)
    terms = torch.rand(blocks, 16, 4, generator=g) * 9
    weights = torch.rand(blocks, 16, generator=g)
    weights[:, 0] = 0
    terms[3, 4, 1] = float("nan")
    return tuple(x.to(device) for x in (rank, terms, weights))


def delivered(stream: MetricStream) -> list[tuple[int, list[int]]]:
    torch.cuda.synchronize()
    return stream.drain()


def block_copies(stream: MetricStream, cycles: int = SLEEP_CYCLES) -> torch.cuda.ExternalStream:
    copies = torch.cuda.ExternalStream(stream._copier.stream)
    with torch.cuda.stream(copies):
        torch.cuda._sleep(cycles)
    return copies


def test_same_words_as_on_the_cpu() -> None:
    streams = [MetricStream("cpu"), MetricStream("cuda")]
    for stream in streams:
        for step in (0, 1, 5, 6, 5000):
            ops.metric_add(stream.acc, *random_batch(step, device=stream.acc.device.type))
            stream.count("tokens", step)
            stream.count("nonfinite_steps", stream.acc[WORD["batches"]])
            stream.publish(step)
    assert delivered(streams[1]) == streams[0].drain()
    assert not streams[1].acc.any()


def test_1000_repeats_and_two_streams_give_the_same_bits() -> None:
    batch = random_batch(0)
    once, acc = new_accumulator("cuda"), new_accumulator("cuda")
    ops.metric_add(once, *batch)
    torch.cuda.synchronize()
    for side in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(side):
            for _ in range(500):
                ops.metric_add(acc, *batch)
    torch.cuda.synchronize()
    assert torch.equal(acc, 1000 * once)


def test_reader_overrun_is_counted() -> None:
    stream = MetricStream("cuda")
    total = metrics.RING_SLOTS + 10
    for step in range(total):
        stream.publish(step)
        if step % (ROWS // 2) == 0:
            torch.cuda.synchronize()
    assert [step for step, _ in delivered(stream)] == list(range(10, total))
    assert stream.dropped == 10


def eager(stream: MetricStream) -> Callable[[int], None]:
    def step(i: int) -> None:
        stream.acc.fill_(i + 1)
        stream.publish(i)

    return step


def captured(stream: MetricStream) -> Callable[[int], None]:
    MetricStream("cuda").publish(0)  # a capture does not load kernels
    torch.cuda.synchronize()
    value = torch.zeros(1, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value += 1
        stream.acc.copy_(value.expand(NUM_WORDS))
        stream.publish(0)

    def step(i: int) -> None:
        graph.replay()
        stream.hand_over(i)

    return step


@pytest.mark.parametrize("mode", [eager, captured])
def test_row_overwritten_before_its_copy_is_dropped_and_counted(mode) -> None:
    stream = MetricStream("cuda")
    step = mode(stream)
    block_copies(stream)
    begin = time.perf_counter()
    for i in range(ROWS + 10):
        step(i)
    torch.cuda.current_stream().synchronize()  # the training stream's work is done ...
    training = time.perf_counter() - begin
    assert stream.drain() == []
    records = delivered(stream)
    assert training < (time.perf_counter() - begin) / 2  # ... long before the copies
    assert records == [(i, [i + 1] * NUM_WORDS) for i in range(10, ROWS + 10)]
    assert stream.dropped == 10
    step(ROWS + 10)
    assert delivered(stream) == [(ROWS + 10, [ROWS + 11] * NUM_WORDS)]
    assert stream.dropped == 10


class Reader:
    """A thread that drains a stream until it is stopped."""

    def __init__(self, stream: MetricStream) -> None:
        self.records: list[tuple[int, list[int]]] = []
        self._stream, self._done = stream, threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._done.is_set():
            self.records += self._stream.drain()

    def stop(self) -> list[tuple[int, list[int]]]:
        """All records, once the GPU has delivered them."""
        torch.cuda.synchronize()
        self._done.set()
        self._thread.join()
        return self.records + self._stream.drain()


@pytest.mark.parametrize("mode", [eager, captured])
def test_late_copies_never_deliver_a_torn_record(mode) -> None:
    stream, rounds, length = MetricStream("cuda"), 8, 500
    step = mode(stream)
    reader = Reader(stream)
    for i in range(rounds * length):
        if i % length == 0:
            torch.cuda.synchronize()
            block_copies(stream, 2_000_000 << (i // length))  # 1 ms to 0.13 s
        step(i)
    records = reader.stop()
    steps = [i for i, _ in records]
    assert steps == sorted(set(steps))
    assert len(records) + stream.dropped == rounds * length
    assert stream.dropped > ROWS
    assert len(records) > ROWS
    assert all(record == [i + 1] * NUM_WORDS for i, record in records)


def test_publishes_beside_a_capture() -> None:
    """Another thread captures, in the mode in which an unsafe call of any thread is an error."""
    stream = MetricStream("cuda")
    batch = random_batch(0)
    reader, done, errors = Reader(stream), threading.Event(), []
    steps = 0
    torch.cuda.synchronize()

    def train() -> None:
        nonlocal steps
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not done.is_set():
                    ops.metric_add(stream.acc, *batch)
                    stream.publish(steps)
                    steps += 1
                    time.sleep(0.0005)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    x = torch.zeros(1000, device="cuda")
    for _ in range(5):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            for _ in range(200):
                x += 1
        graph.replay()
    done.set()
    thread.join()
    assert [step for step, _ in reader.stop()] == list(range(steps))
    assert errors == []
    assert (x == 1000).all()
    assert steps > 0


def test_capture_of_a_hand_over_is_refused() -> None:
    stream = MetricStream("cuda")
    x = torch.zeros(1, device="cuda")
    with (
        pytest.raises(RuntimeError, match="want a call after each replay"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        x += 1
        stream.hand_over(0)


def train_step(stream: MetricStream, batch: tuple[Tensor, ...], step: int) -> None:
    ops.metric_add(stream.acc, *batch)
    stream.count("tokens", 100)
    stream.count("nonfinite_steps", stream.acc[WORD["batches"]])
    stream.publish(step)


def test_training_thread_does_not_wait() -> None:
    stream, batch = MetricStream("cuda"), random_batch(0)
    train_step(stream, batch, 0)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    begin = time.perf_counter()
    for step in range(1, 21):
        train_step(stream, batch, step)
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    assert host < (time.perf_counter() - begin) / 4
    assert len(stream.drain()) == 21


def test_profile_of_100_steps_has_no_sync() -> None:
    from torch.profiler import ProfilerActivity, profile, record_function

    stream, batch = MetricStream("cuda"), random_batch(0)
    for step in range(3):
        train_step(stream, batch, step)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        with no_syncs(), record_function("the steps"):
            for step in range(3, 103):
                train_step(stream, batch, step)
        torch.cuda.synchronize()
    events = prof.events()
    span = next(event for event in events if event.name == "the steps").time_range
    inside = [e.name for e in events if span.start <= e.time_range.start <= span.end]
    launches = sum("LaunchKernel" in name for name in inside)
    assert launches >= 500, set(inside)  # the profile sees the calls of the CUDA runtime
    assert [name for name in inside if FORBIDDEN.search(name)] == []
    assert len(stream.drain()) == 103
