"""Weight gradients on a side stream: the same bits, however late that stream is."""

import threading
from collections.abc import Callable

import pytest
import torch
from step_cases import build_loop, run
from test_overlap import WORLD, gradients
from torch import Tensor

from dflash_ext.drafter import side_stream


class LateStream:
    """A side stream that begins nothing before it is waited for."""

    def __init__(self) -> None:
        self.task: Callable[[], None] | None = None
        self.done = 0

    def mark(self) -> None: ...

    def run(self, ready: None, operands: tuple[Tensor, ...], task: Callable[[], None]) -> None:
        self.join()
        self.task = task

    def join(self) -> None:
        if self.task is not None:
            with torch.no_grad():  # as in the backward pass that has left it here
                self.task()
            self.done += 1
        self.task = None


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LateStream]:
    """One stream for each thread, made by its first use."""
    own = threading.local()
    all_of_them: list[LateStream] = []

    def side_of(device: torch.device) -> LateStream:
        if not hasattr(own, "stream"):
            own.stream = LateStream()
            all_of_them.append(own.stream)
        return own.stream

    monkeypatch.setattr(side_stream, "side_of", side_of)
    return all_of_them


@pytest.mark.parametrize(
    "train",
    [{}, {"grad_accum": 2, "anchor_group": 16}, {"recompute": True, "kl_weight": 0.3}],
    ids=["plain", "accumulated groups", "recompute, kl"],
)
def test_late_weight_gradients_change_no_bit(train: dict, request: pytest.FixtureRequest) -> None:
    settings = {"steps": 2, "flat": True} | train
    wanted, words = run(build_loop("cpu", torch.float32, **settings))
    late: list[LateStream] = request.getfixturevalue("late")
    found, found_words = run(build_loop("cpu", torch.float32, **settings))
    assert late[0].done > 0 and found_words == words
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("recompute", [False, True])
def test_sums_over_drafters_wait_for_them(recompute: bool, request: pytest.FixtureRequest) -> None:
    options = {"overlapped": True, "group": 5, "flat": True, "recompute": recompute}
    wanted = gradients(**options)
    late: list[LateStream] = request.getfixturevalue("late")
    found = gradients(**options)
    assert len(late) == WORLD and all(stream.done for stream in late)
    for rank in range(WORLD):
        for name, want in wanted[rank][0].items():
            assert torch.equal(found[rank][0][name], want), name


class Recorder:
    """A stream of a GPU that only notes what it is told."""

    device = torch.device("cuda", 0)

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_operands_live_until_the_main_stream_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Recorder("side", log))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    side = side_stream.SideStream(Recorder("main", log))  # type: ignore[arg-type]
    for i in range(2):
        ready = side.mark()
        operands = (torch.zeros(1),)
        side.run(ready, operands, lambda i=i: log.append(f"task {i}"))
        assert side._operands is operands
    side.join()
    side.join()
    assert side._operands == ()
    work = ["side waits for event of main", "task {}", "side records"]
    wait = "main waits for event of side"
    first, second = ([line.format(i) for line in work] for i in range(2))
    assert log == ["main records", *first, "main records", wait, *second, wait]
