"""GradSync over NCCL and by copies: two drafter threads of one process, a GPU each."""

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import pytest
import torch

from benchmarks import step_two
from dflash_ext.grad_copies import Board
from dflash_ext.grad_sync import GradSync, make_store

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

WORLD = 2
JOIN_S = 30.0


def run_ranks(
    body: Callable[[GradSync], object], **options: object
) -> tuple[list[object], list[Exception | None]]:
    """Runs ``body`` in one thread per GPU; returns results and errors by rank."""
    for device in range(WORLD):
        # The first memory of expandable segments is to come from one thread, as in a run.
        torch.zeros(1, device=f"cuda:{device}")
    store = make_store()
    options["board"] = Board(WORLD) if options.pop("copies") else None
    results: list[object] = [None] * WORLD
    errors: list[Exception | None] = [None] * WORLD

    def target(rank: int) -> None:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        sync = GradSync(rank, WORLD, store, device, **options)
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                sync.connect()
                results[rank] = body(sync)
        except Exception as error:
            errors[rank] = error
        finally:
            sync.close()

    threads = [threading.Thread(target=target, args=(r,), daemon=True) for r in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), f"a rank hangs; errors: {errors}"
    return results, errors


def gradients(rank: int, call: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + call)
    shapes = [(700, 500), (), (0, 3), (1_000_003,), (2, 3, 4)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


by_both = pytest.mark.parametrize("copies", [False, True], ids=["nccl", "copies"])


@by_both
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [4096 * 50, None])
def test_sum_is_right_and_has_the_same_bits_everywhere(
    flat: bool, dtype: torch.dtype, bucket_bytes: int | None, copies: bool
) -> None:
    def body(sync: GradSync) -> list[list[torch.Tensor]]:
        reduced = []
        for call in range(3):
            grads = [grad.to(f"cuda:{sync.rank}") for grad in gradients(sync.rank, call)]
            if flat:
                whole = torch.cat([grad.flatten() for grad in grads])
                parts = whole.split([grad.numel() for grad in grads])
                grads = [part.view(g.shape) for part, g in zip(parts, grads, strict=True)]
            torch.cuda._sleep(10**7 * (1 + sync.rank))  # a rank's device comes late
            for grad in grads:
                grad.mul_(2.0)
            sync.start(grads[2:])
            sync.start(grads[:2])
            sync.finish()
            reduced.append([grad.cpu() for grad in grads])
        return reduced

    results, errors = run_ranks(body, dtype=dtype, bucket_bytes=bucket_bytes, copies=copies)
    assert errors == [None, None]
    for call in range(3):
        for got, other, a, b in zip(
            results[0][call], results[1][call], gradients(0, call), gradients(1, call), strict=True
        ):
            assert torch.equal(got, other)
            assert torch.equal(got, ((2 * a).to(dtype) + (2 * b).to(dtype)).float())


@by_both
def test_no_host_waits_for_the_device(copies: bool) -> None:
    def body(sync: GradSync) -> float:
        grads = [torch.ones(10**6, device=f"cuda:{sync.rank}")]
        sync.all_reduce(grads)
        torch.cuda.synchronize()
        torch.cuda._sleep(4 * 10**9)  # more than a second
        begin = time.monotonic()
        sync.all_reduce(grads)
        passed = time.monotonic() - begin
        torch.cuda.synchronize()
        return passed

    results, errors = run_ranks(body, copies=copies)
    assert errors == [None, None]
    assert max(results) < 0.5


def test_copies_are_in_order_with_both_streams() -> None:
    """Steps behind one another, each on gradients that change right before and behind the sum."""
    steps, numel = 30, 3_000_001

    def body(sync: GradSync) -> torch.Tensor:
        device = f"cuda:{sync.rank}"
        grads = [torch.empty(numel, device=device), torch.empty(1000, device=device)]
        work = torch.randn(2048, 2048, device=device)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for step in range(steps):
            for i, grad in enumerate(grads):
                for _ in range((step + sync.rank) % 3 * 4):
                    work = work @ work * 1e-3
                grad.fill_((step + 1.0) * (i + 1) * (sync.rank + 1))
                sync.start([grad])
            sync.finish()
            for i, grad in enumerate(grads):
                wrong += (grad != (step + 1.0) * (i + 1) * 3).sum()
                grad.fill_(float("nan"))
        return wrong.cpu()

    results, errors = run_ranks(body, copies=True)
    assert errors == [None, None]
    assert [int(wrong) for wrong in results] == [0, 0]


@by_both
def test_time_out_names_the_rank_that_is_missing(copies: bool) -> None:
    def body(sync: GradSync) -> None:
        grads = [torch.ones(3, device=f"cuda:{sync.rank}")]
        sync.all_reduce(grads)
        if sync.rank == 0:
            sync.all_reduce(grads)
        else:
            time.sleep(2.0)

    _, errors = run_ranks(body, timeout_s=0.5, copies=copies)
    assert str(errors[0]) == "rank 0: all-reduce timed out after 0.5 s waiting for rank 1"
    assert errors[1] is None


@by_both
def test_stop_frees_a_rank_that_waits(copies: bool) -> None:
    stop = threading.Event()

    def body(sync: GradSync) -> None:
        grads = [torch.ones(1000, device=f"cuda:{sync.rank}")]
        sync.all_reduce(grads)
        if sync.rank == 1:
            time.sleep(0.3)
            stop.set()
            raise ZeroDivisionError("rank 1 is broken")
        sync.all_reduce(grads)

    _, errors = run_ranks(body, stop=stop, timeout_s=60, copies=copies)
    assert str(errors[0]) == "rank 0: left the all-reduce, the run is stopping"
    assert isinstance(errors[1], ZeroDivisionError)


def test_process_ends_although_a_rank_hangs() -> None:
    program = """
        import threading, time, torch
        from dflash_ext.grad_sync import GradSync, make_store
        store, stop = make_store(), threading.Event()
        for device in range(2):
            torch.zeros(1, device=f"cuda:{device}")
        def body(rank):
            torch.cuda.set_device(rank)
            sync = GradSync(rank, 2, store, f"cuda:{rank}", timeout_s=600, stop=stop)
            sync.connect()
            sync.all_reduce([torch.ones(10, device=f"cuda:{rank}")])
            if rank == 1:
                time.sleep(600)
            threading.Timer(0.2, stop.set).start()
            try:
                sync.all_reduce([torch.ones(10, device="cuda:0")])
            except RuntimeError as error:
                print(error)
            sync.close()
        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(2)]
        for thread in threads:
            thread.start()
        threads[0].join()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=90
    )
    assert done.stdout == "rank 0: left the all-reduce, the run is stopping\n"
    assert done.returncode == 0, done.stderr


def test_two_drafters_from_cold() -> None:
    devices = [torch.device("cuda", rank) for rank in range(2)]
    found = step_two.cold("small", devices, starts=2, jobs=1)
    assert found["failures"] == [] and len(found["digests"]) == 1
