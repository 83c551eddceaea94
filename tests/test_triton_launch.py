"""Launches from several threads: one compiles, none waits for another's GPU."""

import threading

import pytest
import torch

from dflash_ext.ops import triton_launch
from dflash_ext.ops.triton_launch import launch

CPU = torch.device("cpu")


class Kernel:
    """In place of a Triton kernel: calls `body` with the arguments of a launch."""

    def __init__(self, body) -> None:
        self.body = body

    def __getitem__(self, grid):
        return self.body


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_launched", set())


def test_a_launch_that_waits_holds_up_no_other_thread() -> None:
    """One GPU's queue is full and empties only when the other thread has launched."""
    other_has_launched = threading.Event()
    warm = Kernel(lambda value: None)
    launch(warm, (1,), CPU, 2.0)
    seen = []

    def body(value: float) -> None:
        if value == 1.0:
            seen.append(other_has_launched.wait(10))

    blocked = Kernel(lambda value: None)
    launch(blocked, (1,), CPU, 1.0)
    blocked.body = body
    thread = threading.Thread(target=launch, args=(blocked, (1,), CPU, 1.0))
    thread.start()
    launch(warm, (1,), CPU, 3.0)
    other_has_launched.set()
    thread.join()
    assert seen == [True]


def test_first_launches_follow_each_other() -> None:
    inside, most = [], []

    def body(*args: object) -> None:
        inside.append(1)
        most.append(len(inside))
        threading.Event().wait(0.02)
        inside.pop()

    kernel = Kernel(body)
    tensors = [torch.zeros(4, dtype=d) for d in (torch.float32, torch.float64, torch.int32)]
    threads = [threading.Thread(target=launch, args=(kernel, (1,), CPU, t)) for t in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]


@pytest.mark.parametrize(
    ("warm", "cold"),
    [
        (torch.zeros(8), torch.zeros(8)[1:]),  # alignment
        (torch.zeros(8), torch.zeros(8).double()),
        (torch.zeros(8), None),
        (16, 17),
        (2, 1),
        (16, 2**31),
        (16, 16.0),
    ],
)
def test_what_may_be_another_specialisation_takes_the_lock(warm, cold) -> None:
    locked = []
    kernel = Kernel(lambda *args: locked.append(triton_launch._first_launch.locked()))
    for argument in (warm, warm, cold, cold):
        launch(kernel, (1,), CPU, argument)
    assert locked == [True, False, True, False]


def test_an_empty_grid_is_no_launch() -> None:
    launch(Kernel(lambda: pytest.fail("launched")), (0,), CPU)
