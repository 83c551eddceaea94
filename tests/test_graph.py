"""Which calls of a step are replayed; what graphs compute is tested on GPUs (test_step_cuda.py)."""

import pytest
import torch

from dflash_ext.drafter import graph


class FakeGraph:
    def __init__(self, log: list, name: str) -> None:
        self.log, self.name = log, name

    def replay(self) -> None:
        self.log.append(f"replay {self.name}")


def test_graphs_follow_eager_runs_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def capture(self: graph.GraphedCalls, function):
        return FakeGraph(log, name := function()), name

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graph.GraphedCalls, "_capture", capture)
    monkeypatch.setattr(graph, "MOST_GRAPHS", 2)
    calls: graph.GraphedCalls[str] = graph.GraphedCalls()

    def call(variant: str, place: int) -> str:
        def function() -> str:
            log.append(f"run {variant}{place}")
            return f"{variant}{place}"

        log.clear()
        assert calls(variant, place, function) == f"{variant}{place}"
        return ", ".join(log)

    assert [call("a", 0), call("a", 1)] == ["run a0", "run a1"]  # eagerly, twice
    assert call("a", 0) == "run a0, replay a0"  # captured
    assert call("a", 0) == "replay a0"
    assert call("a", 1) == "run a1, replay a1"  # another place's tensors: a graph of its own
    assert [call("b", 0) for _ in range(4)] == ["run b0"] * 4  # no third graph
    assert call("a", 1) == "replay a1"
