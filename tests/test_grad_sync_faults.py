"""GradSync when ranks are late, leave, disagree or are misused: no wait without an end."""

import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from grad_sync_cases import run_ranks

from dflash_ext.grad_sync import GradSync, make_store


def test_time_out_names_the_rank_that_is_missing() -> None:
    def body(sync: GradSync) -> None:
        sync.all_reduce([torch.ones(3)])
        if sync.rank == 1:
            time.sleep(2.0)
        else:
            sync.all_reduce([torch.ones(3)])

    _, errors = run_ranks(3, body, timeout_s=0.5)
    assert str(errors[0]) == "rank 0: all-reduce timed out after 0.5 s waiting for rank 1"
    assert errors[1] is None
    assert str(errors[2]) == "rank 2: all-reduce timed out after 0.5 s waiting for rank 1"


def test_rendezvous_times_out() -> None:
    sync = GradSync(1, 3, make_store(), timeout_s=0.3)
    with pytest.raises(RuntimeError) as error:
        sync.connect()
    assert str(error.value) == "rank 1: rendezvous timed out after 0.3 s waiting for rank 0, 2"


def test_stop_frees_ranks_that_wait_for_a_sum() -> None:
    left_after, stop = [], threading.Event()

    def body(sync: GradSync) -> None:
        sync.all_reduce([torch.ones(1000)])
        if sync.rank == 1:
            time.sleep(0.3)
            stop.set()
            time.sleep(1.0)  # keeps its connections: only the event can free the others
            raise ZeroDivisionError("rank 1 is broken")
        start = time.monotonic()
        try:
            sync.all_reduce([torch.ones(1000)])
        finally:
            left_after.append(time.monotonic() - start)

    _, errors = run_ranks(3, body, stop=stop, timeout_s=60)
    assert str(errors[0]) == "rank 0: left the all-reduce, the run is stopping"
    assert isinstance(errors[1], ZeroDivisionError)
    assert str(errors[2]) == "rank 2: left the all-reduce, the run is stopping"
    assert max(left_after) < 10.0


def test_stop_frees_a_rank_at_the_rendezvous() -> None:
    stop = threading.Event()
    sync = GradSync(0, 2, make_store(), timeout_s=60, stop=stop)
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(RuntimeError, match="rank 0: left the rendezvous, the run is stopping"):
        sync.connect()


def test_rank_that_leaves_without_a_word_is_noticed() -> None:
    def body(sync: GradSync) -> None:
        sync.all_reduce([torch.ones(1000)])
        if sync.rank == 0:
            sync.all_reduce([torch.ones(1000)])

    start = time.monotonic()
    _, errors = run_ranks(2, body, timeout_s=20)
    assert errors[1] is None
    assert isinstance(errors[0], RuntimeError)
    assert str(errors[0]).startswith("rank 0: all-reduce failed: ")
    assert time.monotonic() - start < 10.0


def test_ranks_with_different_gradients_are_refused() -> None:
    def body(sync: GradSync) -> None:
        sync.all_reduce([torch.ones(4), torch.ones(2)][: sync.rank + 1])

    _, errors = run_ranks(2, body, timeout_s=5)
    assert str(errors[0]) == "rank 0: gradients of shapes [(4,)], rank 1 has [(4,), (2,)]"
    assert isinstance(errors[1], ValueError)


def test_changed_gradients_are_refused() -> None:
    def body(sync: GradSync) -> None:
        sync.all_reduce([torch.ones(4)])
        sync.all_reduce([torch.ones(2, 2)])

    _, errors = run_ranks(2, body, timeout_s=5)
    assert all(isinstance(e, ValueError) and "changed their shapes" in str(e) for e in errors)


def test_closing_right_after_the_last_sum_hurts_nobody() -> None:
    def body(sync: GradSync) -> float:
        grads = [torch.full((200_000,), float(sync.rank))]
        sync.all_reduce(grads)
        return grads[0].unique().item()

    for _ in range(10):
        results, errors = run_ranks(3, body)
        assert errors == [None] * 3
        assert results == [3.0] * 3


def test_use_before_connect_and_after_close() -> None:
    with pytest.raises(RuntimeError, match="rank 0: not connected"):
        GradSync(0, 2, make_store())._start_sum(torch.ones(1))

    def body(sync: GradSync) -> None:
        sync.all_reduce([torch.ones(1)])
        sync.close()
        sync.all_reduce([torch.ones(1)])

    _, errors = run_ranks(2, body)
    assert [str(error) for error in errors] == ["rank 0: not connected", "rank 1: not connected"]


@pytest.mark.parametrize(("rank", "world", "store"), [(2, 2, True), (-1, 1, True), (0, 2, False)])
def test_wrong_arguments(rank: int, world: int, store: bool) -> None:
    with pytest.raises(ValueError, match=r"rank must be in|needs a store"):
        GradSync(rank, world, make_store() if store else None)


def test_process_ends_although_a_rank_hangs() -> None:
    """A transfer that nobody will complete must hold up neither close() nor the exit."""
    program = """
        import threading, time, torch
        from dflash_ext.grad_sync import GradSync, make_store
        store, stop = make_store(), threading.Event()
        def body(rank):
            sync = GradSync(rank, 2, store, timeout_s=600, stop=stop)
            sync.connect()
            sync.all_reduce([torch.ones(10)])
            if rank == 1:
                time.sleep(600)
            threading.Timer(0.2, stop.set).start()
            try:
                sync.all_reduce([torch.ones(10)])
            except RuntimeError as error:
                print(error)
            sync.close()
        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(2)]
        for thread in threads:
            thread.start()
        threads[0].join()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "rank 0: left the all-reduce, the run is stopping\n"
    assert (done.returncode, done.stderr) == (0, "")
