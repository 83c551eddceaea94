"""draft_loss, forward and backward, against nothing but its products: logits, and back.

On a GPU, in bf16 and with all metrics, also against two other ways to a weighted cross entropy:
chunks of logits that are recomputed in the backward pass, and Liger's fused loss (mean, no
weights), where installed. Neither of them counts ranks.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks import Case
from benchmarks.step_peers import liger_loss
from dflash_ext import ops
from dflash_ext.ops.draft_loss import default_chunk_rows
from dflash_ext.ops.draft_loss.naive import draft_loss_stats_naive
from dflash_ext.ops.draft_loss.teacher import chunk_index, most_teachers
from dflash_ext.ops.metric_add import new_accumulator

CHECKED_BLOCKS = 2
PEER_CHUNK = 2048


@dataclass(frozen=True)
class Shape:
    blocks: int
    slots: int  # of a block, the first without weight
    vocab: int
    width: int
    options: dict[str, float] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    share: bool = False  # teachers that several rows of a chunk have are projected once

    @property
    def rows(self) -> int:
        return self.blocks * (self.slots - 1)

    @property
    def products(self) -> int:
        return 3 if self.options.get("kl_weight") else 2

    def __str__(self) -> str:
        terms = "".join(f" {name.split('_')[0]}" for name in self.options)
        return f"N{self.rows} V{self.vocab} H{self.width}{terms}{' shared' * self.share}"


def large(vocab: int, width: int, share: bool = False, **options: float) -> Shape:
    return Shape(512, 17, vocab, width, options, torch.bfloat16, share)


SHAPES = {
    # SmolLM2-135M's head
    "cpu": [
        Shape(128, 8, 49152, 576),
        Shape(128, 8, 49152, 576, {"cap_lambda": 0.1, "dpace_alpha": 0.5}),
        Shape(40, 4, 49152, 576),
    ],
    "cuda": [
        large(248_320, 5120),
        large(248_320, 5120, kl_weight=0.5, cap_lambda=0.1),
        large(248_320, 5120, share=True, kl_weight=0.5, cap_lambda=0.1),
        large(248_320, 5120, cap_lambda=0.1, dpace_alpha=0.5),
        large(151_936, 4096),
    ],
}


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


class Inputs:
    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.on_gpu = device.type == "cuda"
        slots = (shape.blocks, shape.slots)
        hidden = torch.randn(*slots, shape.width, device=device, dtype=shape.dtype)
        self.hidden = hidden.requires_grad_()
        self.weight = torch.randn(shape.vocab, shape.width, device=device, dtype=shape.dtype)
        self.weight /= shape.width**0.5
        self.labels = torch.randint(0, shape.vocab, slots, device=device)
        self.weights = 0.1 + torch.rand(slots, device=device)
        self.weights[:, 0] = 0
        self.rows = self.weights.flatten().nonzero()[:, 0]
        self.n_rows = torch.tensor(self.rows.numel(), device=device)
        self.options: dict = dict(shape.options)
        if shape.products == 3:
            self.options["teacher_hidden"] = torch.randn_like(hidden).flatten(0, 1)
            self.options["teacher_index"] = index = self.following_tokens()
            if shape.share:
                tokens = index.numel()
                chunk = default_chunk_rows("cuda", shape.vocab, 2, teacher=True)
                teachers = chunk_index(index, self.rows, self.n_rows, tokens, chunk)
                self.options["most_teachers"] = most_teachers(teachers, tokens)
        self.acc = new_accumulator(device)

    def following_tokens(self) -> Tensor:
        """Of blocks behind random tokens of a text that has as many tokens as there are slots."""
        blocks, slots = self.labels.shape
        anchors = torch.randperm(blocks * slots - slots, device=self.labels.device)[:blocks]
        return anchors.sort().values[:, None] + torch.arange(slots, device=anchors.device)

    def arguments(self) -> tuple[Tensor, ...]:
        return (
            self.hidden,
            self.weight,
            self.labels,
            self.weights,
            self.weights.sum(),
            self.rows,
            self.n_rows,
        )

    def run(self) -> None:
        self.hidden.grad = None
        metrics = self.acc if self.on_gpu else None
        ops.draft_loss(*self.arguments(), metrics=metrics, **self.options).backward()

    @functools.cached_property
    def states(self) -> Tensor:
        """What the products see: a leaf [N, H]."""
        return self.hidden.detach().flatten(0, 1)[self.rows].requires_grad_()

    @functools.cached_property
    def picked(self) -> tuple[Tensor, Tensor]:
        """Labels and weights of `states`."""
        return self.labels.flatten()[self.rows], self.weights.flatten()[self.rows]

    @functools.cached_property
    def logits(self) -> Tensor:
        return self.weight.new_empty(self.shape.rows, self.shape.vocab)

    @functools.cached_property
    def gradient(self) -> Tensor:
        return torch.empty_like(self.states, requires_grad=False)

    def multiply(self) -> None:
        states = self.states.detach()
        for _ in range(self.shape.products - 1):
            torch.mm(states, self.weight.T, out=self.logits)
        torch.mm(self.logits, self.weight, out=self.gradient)

    def chunks(self) -> None:
        self.states.grad = None

        def part(states: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
            logits = states @ self.weight.T
            return (F.cross_entropy(logits, labels, reduction="none") * weights).sum()

        parts = zip(*(x.split(PEER_CHUNK) for x in (self.states, *self.picked)), strict=True)
        losses = [checkpoint(part, *chunk, use_reentrant=False) for chunk in parts]
        torch.stack(losses).sum().backward()

    def check(self) -> None:
        """Some blocks of a whole call, against fp64; 16-bit ones beside plain torch in 16 bits."""
        self.run()
        assert self.hidden.grad is not None
        few, slots = CHECKED_BLOCKS, self.shape.slots
        part = self.hidden[:few].detach()
        wide = part.double().requires_grad_()
        weights, labels = self.weights[:few], self.labels[:few]
        rows = self.rows[self.rows < few * slots]
        options = {k: v for k, v in self.options.items() if k != "most_teachers"}
        if self.shape.products == 3:
            options["teacher_hidden"] = options["teacher_hidden"].double()
            options["teacher_index"] = options["teacher_index"][:few]
        wanted = draft_loss_stats_naive(
            wide, self.weight.double(), labels, weights, self.weights.sum(), rows,
            torch.tensor(rows.numel()), **options,
        )  # fmt: skip
        wanted[0].backward()
        assert wide.grad is not None
        limit = 1e-5
        if self.shape.dtype != torch.float32:
            limit = 2 * self.plain_error(part)
        assert relative(self.hidden.grad[:few], wide.grad) <= limit

    def plain_error(self, part: Tensor) -> float:
        """Of the gradient of a cross entropy, as plain torch makes it from 16-bit logits."""
        gradients = []
        for dtype in (part.dtype, torch.float64):
            states = part.to(dtype, copy=True).requires_grad_()
            logits = (states @ self.weight.to(dtype).T).flatten(0, 1)
            F.cross_entropy(logits, self.labels[: len(part)].flatten()).backward()
            assert states.grad is not None
            gradients.append(states.grad)
        return relative(gradients[0], gradients[1])


def cases_of(shape: Shape, device: torch.device) -> Iterator[Case]:
    inputs = Inputs(shape, device)
    peers: dict[str, Callable[[], object]] = {f"its {shape.products} products": inputs.multiply}
    if device.type == "cuda" and not shape.options:
        peers["checkpointed chunks"] = inputs.chunks
        if importlib.util.find_spec("liger_kernel") is not None:
            peers["Liger"] = liger_loss(inputs.states, inputs.weight, inputs.picked[0])[1]
    for name, peer in peers.items():
        yield Case(
            op="draft_loss",
            shape=str(shape),
            run=inputs.run,
            peer=peer,
            peer_name=name,
            check=inputs.check,
            sustained=True,
            flops=2 * shape.products * shape.rows * shape.vocab * shape.width,
        )


def cases(device: torch.device) -> Iterator[Case]:
    for shape in SHAPES[device.type]:
        yield from cases_of(shape, device)
