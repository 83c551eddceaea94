"""CUDA graphs of a training step: captured by the thread that replays them, after eager warm-up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

EAGER_RUNS = 2  # of each variant: kernels are compiled and loaded, workspaces allocated
MOST_GRAPHS = 24  # each takes memory; what is as rare as the next ones runs as well without
_capturing = threading.Lock()


class GraphedCalls(Generic[T]):
    """Replays functions of static tensors on the current stream, which is not the default one.

    All graphs share one memory pool: their results stay valid until the next call only.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._eager_runs: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, T]] = {}

    def __call__(self, variant: Hashable, place: Hashable, function: Callable[[], T]) -> T:
        """function(), by a graph once it may be captured, of the first MOST_GRAPHS.

        Args:
            variant: of the work; each is run eagerly before it is captured.
            place: of the tensors that function reads; each has a graph of its own.
        """
        runs = self._eager_runs.get(variant, 0)
        if runs < EAGER_RUNS:
            self._eager_runs[variant] = runs + 1
            return function()
        if (variant, place) not in self._graphs:
            if len(self._graphs) == MOST_GRAPHS:
                return function()
            self._graphs[variant, place] = self._capture(function)
        graph, result = self._graphs[variant, place]
        graph.replay()
        return result

    def _capture(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        # Not by torch.cuda.graph, which waits for the whole device: another thread's stream there
        # may wait for what this thread does next. Nothing that is held here waits for a GPU.
        graph = torch.cuda.CUDAGraph()
        with _capturing:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
        return graph, result
