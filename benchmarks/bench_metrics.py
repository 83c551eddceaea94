"""metric_add and metric_publish against the same sums in torch."""

from __future__ import annotations

import torch

from benchmarks import Case
from dflash_ext import ops
from dflash_ext.ops.metric_add import NUM_WORDS, new_accumulator
from dflash_ext.ops.metric_add.naive import metric_add_naive
from dflash_ext.ops.metric_publish.naive import metric_publish_naive

SHAPES = [(64, 16), (512, 16)]  # anchors and slots


def add_case(device: torch.device, blocks: int, block_size: int) -> Case:
    rank = torch.randint(0, 12, (blocks, block_size), device=device)
    terms = torch.rand(blocks, block_size, 4, device=device)
    weights = torch.rand(blocks, block_size, device=device)
    weights[:, 0] = 0
    acc, peer_acc = new_accumulator(device), new_accumulator(device)

    def run() -> None:
        ops.metric_add(acc, rank, terms, weights)

    def peer() -> None:
        metric_add_naive(peer_acc, rank, terms, weights)

    def check() -> None:
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


def cases(device: torch.device) -> list[Case]:
    return [*(add_case(device, *shape) for shape in SHAPES), publish_case(device)]
