"""lm_head_topk against mm and torch.topk, which leave out log-sum-exp and the rank of the label.

On a GPU also against the matrix product alone, which is the floor: every way has to do it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import Case, median_seconds
from dflash_ext import ops
from dflash_ext.ops.lm_head_topk.naive import lm_head_topk_naive

CHECKED_ROWS = 16
MM_ROWS = 8192  # rows of the peers' products at once: their logits have to fit into memory


@dataclass(frozen=True)
class Shape:
    rows: int
    vocab: int
    width: int
    k: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[self.dtype]
        return f"N{self.rows} V{self.vocab} H{self.width} k{self.k} {dtype}"

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.vocab * self.width


def large(rows: int, vocab: int = 248_320, width: int = 5120, k: int = 8) -> Shape:
    return Shape(rows, vocab, width, k, torch.bfloat16)


SHAPES = {
    # SmolLM2-135M's head, and a small one with a large k
    "cpu": [Shape(256, 49152, 576, 8), Shape(64, 49152, 576, 1), Shape(256, 8192, 576, 256)],
    "cuda": [
        large(1024),
        large(4096),
        large(16_384),
        large(4096, k=16),
        large(4096, 151_936, 4096),
        large(4096, 128_256, 4096),
    ],
}


class Inputs:
    """Two sets of hidden states take turns, so that neither lies in the cache."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.hidden = [
            torch.randn(shape.rows, shape.width, device=device, dtype=shape.dtype) for _ in range(2)
        ]
        self.weight = torch.randn(shape.vocab, shape.width, device=device, dtype=shape.dtype)
        self.weight /= shape.width**0.5
        self.labels = torch.randint(0, shape.vocab, (shape.rows,), device=device)
        self.turns = itertools.cycle(self.hidden)

    def run(self) -> tuple[Tensor, ...]:
        return ops.lm_head_topk(next(self.turns), self.weight, self.shape.k, self.labels)

    def each_part(self, function: Callable[[Tensor], object]) -> list[object]:
        return [function(part) for part in next(self.turns).split(MM_ROWS)]

    @functools.cached_property
    def logits(self) -> Tensor:
        """Where the products alone go, allocated once."""
        rows = min(self.shape.rows, MM_ROWS)
        return self.weight.new_empty(rows, self.shape.vocab)

    def mm(self) -> object:
        return self.each_part(
            lambda part: torch.mm(part, self.weight.T, out=self.logits[: len(part)])
        )

    def mm_topk(self) -> object:
        return self.each_part(lambda part: (part @ self.weight.T).topk(self.shape.k))

    @functools.cached_property
    def compiled(self) -> Callable[[Tensor], object]:
        return torch.compile(lambda part: (part @ self.weight.T).topk(self.shape.k))

    def compiled_mm_topk(self) -> object:
        return self.each_part(self.compiled)

    def check(self) -> None:
        """Some rows of a whole call, against fp64."""
        hidden = self.hidden[0]
        outputs = ops.lm_head_topk(hidden, self.weight, self.shape.k, self.labels)
        some = torch.linspace(0, len(hidden) - 1, CHECKED_ROWS).long().to(hidden.device)
        values, indices, lse, rank, label_logit = (x[some] for x in outputs)
        exact = lm_head_topk_naive(
            hidden[some].double(), self.weight.double(), self.shape.k, self.labels[some]
        )
        for got, want in ((values, exact[0]), (lse, exact[2]), (label_logit, exact[4])):
            assert torch.allclose(got.double(), want, rtol=1e-5, atol=3e-5)
        # Where neighbours are further apart than the rounding, the ids are the same too.
        gap = exact[0][:, :-1] - exact[0][:, 1:]
        clear = torch.nn.functional.pad(gap > 1e-4, (1, 1), value=True)
        clear = clear[:, :-1] & clear[:, 1:]
        clear[:, -1] = False  # its successor is not known
        assert torch.equal(indices[clear], exact[1][clear])
        # Ranks may differ by the few ids that are nearly equal to the label.
        assert (rank - exact[3]).abs().max() <= 5


@functools.cache
def product_rate(device: torch.device) -> float:
    """Operations a second of a large square bf16 product of random data."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    (seconds,) = median_seconds((lambda: torch.mm(a, b),), device)
    return 2 * 8192**3 / seconds


def cases_of(shape: Shape, device: torch.device) -> Iterator[Case]:
    inputs = Inputs(shape, device)
    peers = {"mm + topk": inputs.mm_topk}
    if device.type == "cuda":
        peers["mm alone"] = inputs.mm
        peers["compiled mm + topk"] = inputs.compiled_mm_topk
    for name, peer in peers.items():
        yield Case(
            op="lm_head_topk",
            shape=str(shape),
            run=inputs.run,
            peer=peer,
            peer_name=name,
            check=inputs.check,
            flops=shape.flops,
            ceiling=product_rate(device) if device.type == "cuda" else 0,
        )


def cases(device: torch.device) -> Iterator[Case]:
    for shape in SHAPES[device.type]:
        yield from cases_of(shape, device)
