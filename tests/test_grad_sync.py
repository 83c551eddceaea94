"""GradSync: exact sums in every rank and the same bits everywhere."""

import time

import pytest
import torch
import torch.distributed as dist
from grad_sync_cases import gradients, run_ranks

from dflash_ext import grad_buckets
from dflash_ext.grad_buckets import BucketPlan
from dflash_ext.grad_sync import GradSync, make_store


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("bucket_bytes", [4, 256, 2**20])
def test_sum_is_right_and_has_the_same_bits_everywhere(world: int, bucket_bytes: int) -> None:
    calls = 3

    def body(sync: GradSync) -> list[list[torch.Tensor]]:
        reduced = []
        for call in range(calls):
            # Ranks take turns in coming late, by more than a slice of the wait.
            if call % world == sync.rank:
                time.sleep(0.12)
            grads = gradients(sync.rank, call)
            grads[0] = grads[0].T.contiguous().T  # not contiguous
            sync.all_reduce(grads)
            reduced.append(grads)
        return reduced

    results, errors = run_ranks(world, body, bucket_bytes=bucket_bytes)
    again, _ = run_ranks(world, body, bucket_bytes=bucket_bytes)
    assert errors == [None] * world
    for call in range(calls):
        parts = zip(*(gradients(rank, call) for rank in range(world)), strict=True)
        wanted = [sum(g.double() for g in part) for part in parts]
        for rank in range(world):
            for got, want, first, second in zip(
                results[rank][call], wanted, results[0][call], again[rank][call], strict=True
            ):
                torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
                assert torch.equal(got, first), "ranks differ"
                assert torch.equal(got, second), "runs differ"


def test_two_ranks_sum_exactly() -> None:
    def body(sync: GradSync) -> list[torch.Tensor]:
        grads = gradients(sync.rank, 0)
        sync.all_reduce(grads)
        return grads

    results, _ = run_ranks(2, body)
    for got, a, b in zip(results[0], gradients(0, 0), gradients(1, 0), strict=True):
        assert torch.equal(got, a + b)


def test_bfloat16_on_the_wire() -> None:
    def body(sync: GradSync) -> list[torch.Tensor]:
        grads = gradients(sync.rank, 0)
        sync.all_reduce(grads)
        return grads

    results, errors = run_ranks(2, body, dtype=torch.bfloat16)
    assert errors == [None, None]
    for got, a, b in zip(results[0], gradients(0, 0), gradients(1, 0), strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, (a.bfloat16() + b.bfloat16()).float())


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    def body(sync: GradSync) -> list[torch.Tensor]:
        grads = gradients(sync.rank, 0, torch.bfloat16)
        sync.all_reduce(grads)
        return grads

    results, errors = run_ranks(3, body)
    assert errors == [None] * 3
    parts = zip(*(gradients(rank, 0, torch.bfloat16) for rank in range(3)), strict=True)
    for got, part in zip(results[0], parts, strict=True):
        want = sum(g.double() for g in part).bfloat16()
        # One rounding at the end; rounding after each addition would often be off by two ulps.
        torch.testing.assert_close(got, want, rtol=2**-8, atol=1e-6)


def flat_gradients(rank: int, call: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gradients that are neighbours in one buffer."""
    parts = gradients(rank, call)
    flat = torch.cat([part.flatten() for part in parts])
    views = flat.split([part.numel() for part in parts])
    return flat, [view.view(part.shape) for view, part in zip(views, parts, strict=True)]


@pytest.mark.parametrize("bucket_bytes", [4, 256, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_in_memory_are_summed_where_they_are(
    bucket_bytes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda into, out: copied.append(len(into)) or copy(into, out)
    )

    def body(sync: GradSync) -> list[torch.Tensor]:
        sums = []
        for call in range(2):
            flat, grads = flat_gradients(sync.rank, call)
            sync.all_reduce(grads)
            sums.append(flat)
        return sums

    results, errors = run_ranks(2, body, bucket_bytes=bucket_bytes, dtype=dtype)
    assert errors == [None, None]
    for call in range(2):
        a, b = (flat_gradients(rank, call)[0].to(dtype) for rank in range(2))
        assert torch.equal(results[0][call], (a + b).float())
        assert torch.equal(results[1][call], (a + b).float())
    assert bool(copied) == (dtype == torch.bfloat16)


def test_one_gradient_is_summed_where_it_is() -> None:
    """However short it is beside a vector."""
    grad = torch.arange(12.0).view(3, 4)[1:]
    (vector,) = BucketPlan([grad], 1000, torch.float32, torch.device("cpu")).gather([grad])
    assert vector.data_ptr() == grad.data_ptr() and vector.shape == (8,)


def test_a_long_gradient_needs_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long vectors may be."""
    monkeypatch.setattr(grad_buckets, "LONG", 100)
    grads = [torch.zeros(n) for n in (40, 100, 30, 20)]
    plan = BucketPlan(grads, 10**6, torch.float32, torch.device("cpu"))
    vectors = plan.gather(grads)
    assert [v.numel() for v in vectors] == [40, 100, 50]
    assert [v.data_ptr() == grads[1].data_ptr() for v in vectors] == [False, True, False]


def test_neighbours_that_move_apart_are_refused() -> None:
    def body(sync: GradSync) -> None:
        sync.all_reduce(flat_gradients(sync.rank, 0)[1])
        sync.all_reduce(gradients(sync.rank, 1))

    _, errors = run_ranks(2, body, timeout_s=5)
    assert all(isinstance(e, ValueError) and "moved apart" in str(e) for e in errors)


def test_sums_begun_in_parts() -> None:
    def body(sync: GradSync) -> list[list[torch.Tensor]]:
        reduced = []
        for call in range(3):
            grads = flat_gradients(sync.rank, call)[1]
            sync.start(grads[4:])
            sync.start(grads[1:4])
            time.sleep(0.05 * sync.rank)
            sync.start(grads[:1])
            sync.finish()
            reduced.append(grads)
        return reduced

    results, errors = run_ranks(2, body)
    assert errors == [None, None]
    for call in range(3):
        for grads in (results[0][call], results[1][call]):
            for got, a, b in zip(grads, gradients(0, call), gradients(1, call), strict=True):
                assert torch.equal(got, a + b)


def test_each_part_is_handed_over_when_its_sum_has_ended() -> None:
    def body(sync: GradSync) -> list[list[float]]:
        seen: list[list[float]] = []
        for part in ([1.0, 2.0], [3.0], [4.0]):
            sync.start([torch.full((5,), value + sync.rank) for value in part])
        sync.finish(lambda grads: seen.append([grad[4].item() for grad in grads]))
        return seen

    results, errors = run_ranks(2, body)
    assert errors == [None, None]
    assert results == [[[3.0, 5.0], [7.0], [9.0]]] * 2


def test_parts_in_another_order_are_refused() -> None:
    def body(sync: GradSync) -> None:
        parts = [torch.ones(3)], [torch.ones(2)]
        for part in parts if sync.rank == 0 else parts[::-1]:
            sync.start(part)
        sync.finish()

    _, errors = run_ranks(2, body, timeout_s=5)
    assert str(errors[0]) == "rank 0: gradients of shapes [(3,)], rank 1 has [(2,)]"
    assert isinstance(errors[1], ValueError)


def test_threads_that_meet_wait_for_each_other() -> None:
    """What stands before and behind every launch on GPUs."""
    arrived = []

    def body(sync: GradSync) -> list[int]:
        seen = []
        for meeting in range(20):
            if (meeting + sync.rank) % 3 == 0:
                time.sleep(0.01)
            arrived.append(meeting)
            sync._meet("all-reduce")
            seen.append(arrived.count(meeting))
        return seen

    store = make_store()
    results, errors = run_ranks(3, body, store=store)
    assert errors == [None] * 3
    assert results == [[3] * 20] * 3
    assert store.num_keys() < 20, "meetings leave their keys behind"


def test_meeting_names_the_rank_that_is_missing() -> None:
    def body(sync: GradSync) -> None:
        sync._meet("all-reduce")
        if sync.rank != 1:
            sync._meet("all-reduce")

    _, errors = run_ranks(3, body, timeout_s=0.5)
    assert str(errors[0]) == "rank 0: all-reduce timed out after 0.5 s waiting for rank 1"
    assert errors[1] is None


def test_one_rank_does_nothing() -> None:
    sync = GradSync(0, 1)
    sync.connect()
    grads = gradients(0, 0)
    sync.all_reduce(grads)
    sync.close()
    assert all(torch.equal(a, b) for a, b in zip(grads, gradients(0, 0), strict=True))


def test_group_over_tcp_store() -> None:
    """What torchrun provides for several machines."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def body(sync: GradSync) -> list[torch.Tensor]:
        grads = [torch.full((3,), sync.rank + 1.0)]
        sync.all_reduce(grads)
        return grads

    results, errors = run_ranks(2, body, store=store)
    assert errors == [None, None]
    assert results[0][0].tolist() == results[1][0].tolist() == [3.0, 3.0, 3.0]
