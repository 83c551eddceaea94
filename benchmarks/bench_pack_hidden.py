"""pack_hidden against index_select of every layer and one cat."""

from __future__ import annotations

import torch

from benchmarks import Case
from dflash_ext import ops
from dflash_ext.ops.pack_hidden.naive import pack_hidden_naive

# (layers, rows of the batch, padded length, hidden size, share of padding)
SHAPES = [(5, 8, 512, 576, 0.1), (5, 4, 2048, 576, 0.25)]


def make_case(
    device: torch.device, layers: int, batch: int, length: int, width: int, padding: float
) -> Case:
    states = [torch.randn(batch, length, width, device=device) for _ in range(layers)]
    kept = int(length * (1 - padding))
    positions = torch.arange(batch * length, device=device).view(batch, length)
    index = positions[:, :kept].flatten()
    rows = index.numel()
    n_rows = torch.tensor(rows, device=device)
    high_water = torch.tensor(rows, device=device)
    out = torch.zeros(rows, layers * width, device=device)

    def run() -> None:
        ops.pack_hidden(states, index, out, n_rows=n_rows, high_water=high_water)

    def peer() -> torch.Tensor:
        return torch.cat([x.view(-1, width).index_select(0, index) for x in states], 1)

    def check() -> None:
        expected = torch.zeros_like(out)
        pack_hidden_naive(states, index, expected, n_rows=n_rows, high_water=high_water)
        run()
        assert torch.equal(out, expected)

    return Case(
        op="pack_hidden",
        shape=f"L{layers} B{batch} S{length} H{width} T{rows}",
        run=run,
        peer=peer,
        peer_name="index_select + cat",
        check=check,
        bytes_moved=2 * out.numel() * out.element_size(),  # each packed row read and written
    )


def cases(device: torch.device) -> list[Case]:
    return [make_case(device, *shape) for shape in SHAPES]
