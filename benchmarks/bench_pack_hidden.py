"""pack_hidden against index_select of every layer and one cat."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import Case, copy_rate
from dflash_ext import ops
from dflash_ext.ops.pack_hidden.naive import pack_hidden_naive


@dataclass(frozen=True)
class Shape:
    rows: int  # packed tokens
    layers: int
    width: int
    length: int  # padded length of a row of the batch
    kept: int  # tokens of a row of the batch
    dtype: torch.dtype
    capacity: int  # rows of the slot
    split: bool = False  # [L, T, H] rather than [T, L*H]
    by_layer: bool = False  # a call a layer, as the target's hook makes them

    def __str__(self) -> str:
        dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[self.dtype]
        extra = " split" * self.split + " by layer" * self.by_layer
        return f"N{self.rows} L{self.layers} H{self.width} {dtype}{extra}"


def default_run(rows: int, length: int, kept: int) -> Shape:
    """SmolLM2's sizes."""
    return Shape(rows, 5, 576, length, kept, torch.float32, rows)


def large(rows: int, layers: int = 5, **options: bool) -> Shape:
    """A 27B target's sizes; the slot holds the whole token budget, few rows of it are dirty."""
    return Shape(rows, layers, 5120, 4096, 3686, torch.bfloat16, 49152, **options)


SHAPES = {
    "cpu": [default_run(3680, 512, 460), default_run(6144, 2048, 1536)],
    "cuda": [
        default_run(6144, 2048, 1536),
        large(49152),
        large(49152, 6),
        large(49152, split=True),
        large(49152, by_layer=True),
        large(16384),
        large(4096),
        large(1024),
    ],
}


@dataclass
class Inputs:
    layers: list[Tensor]
    index: Tensor
    n_rows: Tensor
    out: Tensor
    high_water: Tensor

    def pack(self, by_layer: bool) -> None:
        groups = [[layer] for layer in self.layers] if by_layer else [self.layers]
        for first, group in enumerate(groups):
            ops.pack_hidden(
                group,
                self.index,
                self.out,
                n_rows=self.n_rows,
                high_water=self.high_water,
                first_layer=first,
            )


def make_inputs(shape: Shape, device: torch.device, slot_device: torch.device) -> Inputs:
    batch = -(-shape.rows // shape.kept)
    positions = torch.arange(batch * shape.length, device=device).view(batch, shape.length)
    index = torch.full((shape.capacity,), -1, device=device)
    index[: shape.rows] = positions[:, : shape.kept].flatten()[: shape.rows]
    out_shape = (shape.capacity, shape.layers * shape.width)
    if shape.split:
        out_shape = (shape.layers, shape.capacity, shape.width)
    return Inputs(
        layers=[
            torch.randn(batch, shape.length, shape.width, dtype=shape.dtype, device=device)
            for _ in range(shape.layers)
        ],
        index=index,
        n_rows=torch.tensor(shape.rows, device=device),
        out=torch.full(out_shape, 7.0, dtype=shape.dtype, device=slot_device),
        high_water=torch.tensor(shape.capacity, device=device),
    )


def make_case(shape: Shape, device: torch.device, slot_device: torch.device) -> Case:
    far = slot_device != device
    # Two slots take turns in training; more of a small shape, so that the caches do not hold them.
    sets = [make_inputs(shape, device, slot_device) for _ in range(2 if shape.rows > 8000 else 4)]
    turns, peer_turns = itertools.cycle(sets), itertools.cycle(sets)

    def run() -> None:
        next(turns).pack(shape.by_layer)

    def peer() -> Tensor:
        inputs = next(peer_turns)
        index = inputs.index[: shape.rows]
        rows = [x.view(-1, shape.width).index_select(0, index) for x in inputs.layers]
        packed = torch.stack(rows) if shape.split else torch.cat(rows, 1)
        return packed.to(slot_device, non_blocking=True)

    def check() -> None:
        for inputs in sets:  # each slot is all 7: rows beyond the packed ones have to be cleared
            expected = torch.full_like(inputs.out, 7.0, device=device)
            mark = inputs.high_water.clone()
            pack_hidden_naive(
                inputs.layers, inputs.index, expected, n_rows=inputs.n_rows, high_water=mark
            )
            inputs.pack(shape.by_layer)
            assert torch.equal(inputs.out.to(device), expected)
            assert inputs.high_water == mark

    payload = shape.rows * shape.layers * shape.width * shape.dtype.itemsize
    return Case(
        op="pack_hidden",
        shape=f"{shape}{' to another GPU' if far else ''}",
        run=run,
        peer=peer,
        peer_name="index_select + cat" + " + copy" * far,
        check=check,
        # Each packed row is read and written, or carried over once.
        bytes_moved=payload if far else 2 * payload,
        ceiling=copy_rate(device, slot_device),
    )


def cases(device: torch.device) -> Iterator[Case]:
    """One by one: a large case takes gigabytes."""
    for shape in SHAPES[device.type]:
        yield make_case(shape, device, device)
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        other = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
        for rows in (49152, 1024):
            yield make_case(large(rows), device, other)
