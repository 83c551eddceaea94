"""GradSync with a Board: sums by copies between threads of one process."""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from grad_sync_cases import gradients, run_ranks

from dflash_ext.grad_copies import SHARE_GRAIN, Board, CopiedSums, Offer
from dflash_ext.grad_sync import GradSync, make_board


@pytest.mark.parametrize(
    "places, world",
    [
        ("cuda:0 cuda:1 cuda:2", 3),
        ("cuda:0 cuda:1 cuda:9", None),  # one that the others do not reach
        ("cuda:0 cuda:0", None),
        ("cuda:0 cpu", None),
        ("cpu cpu", None),
        ("cuda:0", None),
    ],
)
def test_who_sums_by_copies(
    monkeypatch: pytest.MonkeyPatch, places: str, world: int | None
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: b.index < 9)
    board = make_board([torch.device(place) for place in places.split()])
    assert (board and board.world) == world


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("bucket_bytes", [4, 1000, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_added_in_rank_order(world: int, bucket_bytes: int, dtype: torch.dtype) -> None:
    def body(sync: GradSync) -> list[list[torch.Tensor]]:
        found = []
        for call in range(3):
            if call % world == sync.rank:
                time.sleep(0.06)
            grads = gradients(sync.rank, call)
            grads[0] = grads[0].T.contiguous().T  # not contiguous
            sync.start(grads[3:])
            sync.start(grads[:3])
            sync.finish()
            found.append(grads)
        return found

    options = {"bucket_bytes": bucket_bytes, "dtype": dtype, "board": Board(world)}
    results, errors = run_ranks(world, body, **options)
    assert errors == [None] * world
    for call in range(3):
        by_rank = [gradients(rank, call, dtype) for rank in range(world)]
        for i, parts in enumerate(zip(*by_rank, strict=True)):
            want = parts[0]
            for part in parts[1:]:
                want = want + part
            for rank in range(world):
                assert torch.equal(results[rank][call][i], want.float())


def test_all_pairs_of_ranks_copy_when_they_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs open their memory to each other then."""
    seen: list[tuple[int, bool]] = []
    sum_batch = CopiedSums._sum_batch

    def noted(self: CopiedSums, batch: list[list[torch.Tensor]], offers: list[Offer]) -> None:
        seen.append((self._rank, all(share.numel() > 0 for share in batch[0])))
        sum_batch(self, batch, offers)

    monkeypatch.setattr(CopiedSums, "_sum_batch", noted)
    assert run_ranks(3, lambda sync: None, board=Board(3))[1] == [None] * 3
    assert sorted(seen) == [(0, True), (1, True), (2, True)]


@pytest.mark.parametrize("numel", [1, 600, 1000, 5000])
def test_batches_of_vectors(numel: int) -> None:
    """Scratch memory for one batch, whatever the number of vectors; the same bits."""
    lengths = (300, 200, 0, 700, 1, 400, 129)
    vectors = [[torch.randn(n) for n in lengths] for _ in range(3)]
    wanted = [(a + b) + c for a, b, c in zip(*vectors, strict=True)]
    offers = [Offer(torch.device("cpu"), mine, None) for mine in vectors]
    ranks = [CopiedSums(rank, 3, torch.device("cpu"), numel) for rank in range(3)]
    for rank in ranks:
        rank.sum(offers)
    for mine in vectors:
        assert all(torch.equal(got, want) for got, want in zip(mine, wanted, strict=True))
    longest = {1: 700, 600: 700, 1000: 701 + 300, 5000: sum(lengths)}[numel]
    assert ranks[0]._scratch.numel() <= 2 * (longest // 3 + len(lengths) * SHARE_GRAIN)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_shares_cover_a_vector_of_any_length(world: int) -> None:
    ranks = [CopiedSums(rank, world, torch.device("cpu"), 100) for rank in range(world)]
    for size in (0, 1, SHARE_GRAIN - 1, SHARE_GRAIN, world * SHARE_GRAIN + 1, 10 * SHARE_GRAIN - 7):
        vector = torch.arange(size)
        shares = [rank._share(vector) for rank in ranks]
        assert torch.equal(torch.cat(shares), vector)
        assert all(share.numel() == 0 or share[0] % SHARE_GRAIN == 0 for share in shares)


def test_neighbours_in_memory_are_summed_where_they_are() -> None:
    def body(sync: GradSync) -> torch.Tensor:
        flat = torch.cat([g.flatten() for g in gradients(sync.rank, 0)])
        sync.all_reduce(list(flat.split(50)))
        return flat

    results, errors = run_ranks(2, body, board=Board(2), bucket_bytes=800)
    assert errors == [None, None]
    a, b = (torch.cat([g.flatten() for g in gradients(rank, 0)]) for rank in range(2))
    assert torch.equal(results[0], a + b) and torch.equal(results[1], a + b)


def test_no_gradients() -> None:
    def body(sync: GradSync) -> None:
        sync.all_reduce([])

    assert run_ranks(2, body, board=Board(2))[1] == [None, None]


def test_time_out_names_the_rank_that_is_missing() -> None:
    def body(sync: GradSync) -> None:
        sync.all_reduce([torch.ones(3)])
        if sync.rank == 1:
            time.sleep(1.0)
        else:
            sync.all_reduce([torch.ones(3)])

    _, errors = run_ranks(3, body, timeout_s=0.3, board=Board(3))
    assert str(errors[0]) == "rank 0: all-reduce timed out after 0.3 s waiting for rank 1"
    assert errors[1] is None
    assert str(errors[2]) == "rank 2: all-reduce timed out after 0.3 s waiting for rank 1"


def test_rank_that_fails_between_start_and_finish_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_of = CopiedSums.sum

    def broken(self: CopiedSums, offers: list) -> None:
        if self._rank == 0 and offers[0].vectors[0].numel() == 3:
            raise ZeroDivisionError("rank 0 is broken")
        sum_of(self, offers)

    monkeypatch.setattr(CopiedSums, "sum", broken)
    _, errors = run_ranks(
        2, lambda sync: sync.all_reduce([torch.ones(3)]), timeout_s=0.3, board=Board(2)
    )
    assert isinstance(errors[0], ZeroDivisionError)
    assert str(errors[1]) == "rank 1: all-reduce timed out after 0.3 s waiting for rank 0"


def test_stop_frees_ranks_that_wait() -> None:
    stop = threading.Event()

    def body(sync: GradSync) -> None:
        sync.all_reduce([torch.ones(1000)])
        if sync.rank == 1:
            time.sleep(0.2)
            stop.set()
            raise ZeroDivisionError("rank 1 is broken")
        sync.all_reduce([torch.ones(1000)])

    begin = time.monotonic()
    _, errors = run_ranks(2, body, stop=stop, timeout_s=60, board=Board(2))
    assert str(errors[0]) == "rank 0: left the all-reduce, the run is stopping"
    assert isinstance(errors[1], ZeroDivisionError)
    assert time.monotonic() - begin < 10.0


def test_ranks_at_different_places_are_named() -> None:
    def body(sync: GradSync) -> None:
        sync.all_reduce([torch.ones(2)])  # the first also compares shapes
        if sync.rank == 1:
            sync._meet("meeting")
        else:
            sync.all_reduce([torch.ones(2)])

    _, errors = run_ranks(3, body, board=Board(3), timeout_s=2.0)
    assert str(errors[0]) == "rank 0: all-reduce failed: rank 1 is at its meeting"
    assert str(errors[1]) == "rank 1: meeting failed: rank 0 is at its all-reduce"
    assert str(errors[2]) == "rank 2: all-reduce failed: rank 1 is at its meeting"


def test_meeting_and_calls_out_of_turn() -> None:
    arrived = []

    def body(sync: GradSync) -> int:
        time.sleep(0.1 * sync.rank)
        arrived.append(sync.rank)
        sync._meet("meeting")
        seen = len(arrived)
        sync.close()
        with pytest.raises(RuntimeError, match=f"rank {sync.rank}: not connected"):
            sync.all_reduce([torch.ones(2)])
        return seen

    results, errors = run_ranks(3, body, board=Board(3))
    assert errors == [None] * 3
    assert results == [3, 3, 3]


def test_board_keeps_nothing_that_all_have_read() -> None:
    board = Board(2)

    def body(sync: GradSync) -> None:
        for call in range(5):
            sync.all_reduce(gradients(sync.rank, call))

    _, errors = run_ranks(2, body, board=board)
    assert errors == [None, None]
    assert not board._shown and not board._readers


def test_order_on_the_streams_of_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 1 gives to its streams in two sums, with stand-ins for GPUs."""
    log: list[tuple[str, str]] = []  # operation, and the streams it is given to or that are current
    current: list[str] = ["training"]
    names = iter(
        ["cuda:0, fetch", "cuda:1, fetch", "cuda:1, add", "cuda:0, give back", "cuda:1, give back"]
    )
    events = itertools.count()

    class Stream:
        def __init__(self, device: torch.device, priority: int) -> None:
            self.name = next(names)
            assert self.name.startswith(str(device))

        def wait_event(self, event: object) -> None:
            log.append((f"wait for {event}", self.name))

        def record_event(self) -> str:
            event = f"event {next(events)}"
            log.append((event, self.name))
            return event

    @contextlib.contextmanager
    def stream(of: Stream) -> Iterator[None]:
        current.append(of.name)
        yield
        current.pop()

    class Noted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func in (torch.Tensor.copy_, torch.Tensor.add_):
                log.append((func.__name__, " and ".join(current[1:])))
            return super().__torch_function__(func, types, args, kwargs)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    gpus = [torch.device("cuda", i) for i in range(2)]
    group = CopiedSums(1, 2, gpus[1], 1000)

    def sum_of(size: int) -> str:
        log.clear()
        vectors = [torch.full((size,), rank + 1.0).as_subclass(Noted) for rank in range(2)]
        offers = [
            Offer(gpu, [vector], f"rank {i}")
            for i, (gpu, vector) in enumerate(zip(gpus, vectors, strict=True))
        ]
        end = group.sum(offers)
        assert current == ["training"]
        cut = -(-size // 256) * 128
        assert all(vector[cut:].eq(3).all() and vector[:cut].lt(3).all() for vector in vectors)
        return end

    def wanted(first: int, *waits: tuple[str, str]) -> list[tuple[str, str]]:
        return [
            ("wait for rank 0", "cuda:1, fetch"),
            ("wait for rank 1", "cuda:1, fetch"),
            *waits,
            ("copy_", "cuda:0, fetch and cuda:1, fetch"),
            (f"event {first}", "cuda:1, fetch"),
            (f"wait for event {first}", "cuda:1, add"),
            ("add_", "cuda:1, add"),
            (f"event {first + 1}", "cuda:1, add"),
            (f"wait for event {first + 1}", "cuda:1, give back"),
            ("copy_", "cuda:0, give back and cuda:1, give back"),
            (f"event {first + 2}", "cuda:1, give back"),
        ]

    assert sum_of(700) == "event 2"
    assert log == wanted(0)
    # Scratch memory of 384 elements is taken: the last addition must have read it.
    sum_of(300)
    assert log == wanted(3, ("wait for event 1", "cuda:1, fetch"))
    for first in (6, 9):  # beside the last one's 128
        sum_of(300)
        assert log == wanted(first)
    sum_of(300)
    assert log == wanted(12, ("wait for event 10", "cuda:1, fetch"))
    sum_of(1400)  # a longer one
    assert log == wanted(15, ("wait for event 13", "cuda:1, fetch"))
