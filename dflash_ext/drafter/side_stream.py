"""Weight gradients on a stream of their own, beside the rest of the backward pass.

Nothing in the backward pass waits for a weight's gradient, so its GEMM can fill what the kernels
behind it leave idle. Off: on an H200 it gains 1 % of a step at Qwen3-8B's size and nothing at 27B
(benchmarks/results/step_h200_202611.md). DFLASH_WGRAD_STREAM=1 turns it on.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

ENABLED = os.environ.get("DFLASH_WGRAD_STREAM") == "1"

# By device and main stream, as each drafter thread has its own: autograd runs backward passes of
# several in one thread, but each on the stream of its forward pass.
_sides: dict[tuple[int, int], SideStream] = {}


class SideStream:
    """A stream at most one task behind `main`, which stays the only owner of all memory.

    A task's operands are kept until main waits for it, so that memory which main takes for other
    things has been read. Graphs can be captured: the first task forks, `join` joins.
    """

    def __init__(self, main: torch.cuda.Stream) -> None:
        self._main = main
        self._stream = torch.cuda.Stream(main.device)
        self._done: torch.cuda.Event | None = None
        self._operands: tuple[Tensor, ...] = ()

    def mark(self) -> torch.cuda.Event:
        """The end of what main has been given so far."""
        return self._main.record_event()

    def run(
        self, ready: torch.cuda.Event, operands: tuple[Tensor, ...], task: Callable[[], None]
    ) -> None:
        """The task once `ready` has come; main waits for the task before."""
        self.join()
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            task()
        self._done, self._operands = self._stream.record_event(), operands

    def join(self) -> None:
        """Main waits for all tasks."""
        if self._done is not None:
            self._main.wait_event(self._done)
        self._done, self._operands = None, ()


def side_of(device: torch.device) -> SideStream | None:
    """That of the current stream of a GPU, if it is on."""
    if not ENABLED or device.type != "cuda":
        return None
    main = torch.cuda.current_stream(device)
    key = main.device.index, main.cuda_stream
    if key not in _sides:
        _sides[key] = SideStream(main)
    return _sides[key]


def join(device: torch.device) -> None:
    """Before the current stream reads a `main_grad`."""
    side = side_of(device)
    if side is not None:
        side.join()
