"""metric_add, metric_publish and a whole step's metrics against the same sums in torch."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from benchmarks import Case
from dflash_ext import ops
from dflash_ext.metrics import MetricStream
from dflash_ext.ops.metric_add import NUM_WORDS, new_accumulator
from dflash_ext.ops.metric_add.naive import metric_add_naive
from dflash_ext.ops.metric_publish.naive import metric_publish_naive

SHAPES = [(64, 16), (512, 16), (1024, 16)]  # anchors and slots
SETS = 8  # inputs that take turns


def make_batch(device: torch.device, blocks: int, block_size: int) -> tuple[Tensor, ...]:
    """(rank, terms, weights)"""
    rank = torch.randint(0, 12, (blocks, block_size), device=device)
    terms = torch.rand(blocks, block_size, 4, device=device)
    weights = torch.rand(blocks, block_size, device=device)
    weights[:, 0] = 0
    return rank, terms, weights


def add_case(device: torch.device, blocks: int, block_size: int) -> Case:
    batches = [make_batch(device, blocks, block_size) for _ in range(SETS)]
    turns, peer_turns = itertools.cycle(batches), itertools.cycle(batches)
    acc, peer_acc = new_accumulator(device), new_accumulator(device)

    def run() -> None:
        ops.metric_add(acc, *next(turns))

    def peer() -> None:
        metric_add_naive(peer_acc, *next(peer_turns))

    def check() -> None:
        for _ in batches:
            run()
            peer()
            assert torch.equal(acc, peer_acc)

    # Ranks, four terms and the weight of each slot.
    return Case(
        op="metric_add",
        shape=f"A{blocks} K{block_size}",
        run=run,
        peer=peer,
        peer_name="naive torch",
        check=check,
        bytes_moved=blocks * block_size * (8 + 16 + 4),
    )


def publish_case(device: torch.device) -> Case:
    mine, naive = (
        (
            new_accumulator(device),
            torch.zeros(8, NUM_WORDS + 1, dtype=torch.int64, device=device),
            torch.tensor(0, device=device),
        )
        for _ in range(2)
    )

    def run() -> None:
        ops.metric_publish(*mine)

    def peer() -> None:
        metric_publish_naive(*naive)

    def check() -> None:
        run()
        peer()
        assert all(torch.equal(a, b) for a, b in zip(mine, naive, strict=True))

    return Case(
        op="metric_publish",
        shape=f"{NUM_WORDS} words",
        run=run,
        peer=peer,
        peer_name="naive torch",
        check=check,
    )


def step_case(device: torch.device, blocks: int, block_size: int) -> Case:
    """What metrics add to a step of the training stream, with all that delivers them."""
    turns = itertools.cycle([make_batch(device, blocks, block_size) for _ in range(SETS)])
    stream, steps, peer_acc = MetricStream(device), itertools.count(), new_accumulator(device)

    def run() -> None:
        ops.metric_add(stream.acc, *next(turns))
        stream.publish(next(steps))

    def peer() -> list[int]:
        metric_add_naive(peer_acc, *next(turns))
        words = peer_acc.tolist()
        peer_acc.zero_()
        return words

    def check() -> None:
        batch = make_batch(device, blocks, block_size)
        ops.metric_add(stream.acc, *batch)
        stream.publish(next(steps))
        metric_add_naive(peer_acc, *batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert stream.drain()[-1][1] == peer_acc.tolist()
        peer_acc.zero_()

    return Case(
        op="metrics",
        shape=f"A{blocks} K{block_size} add + publish",
        run=run,
        peer=peer,
        peer_name="naive torch + tolist",
        check=check,
    )


def cases(device: torch.device) -> list[Case]:
    return [
        *(add_case(device, *shape) for shape in SHAPES),
        publish_case(device),
        *(step_case(device, *shape) for shape in SHAPES),
    ]
