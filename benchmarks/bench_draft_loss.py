"""draft_loss, forward and backward, against nothing but its two GEMMs: logits, and back."""

from __future__ import annotations

import torch

from benchmarks import Case
from dflash_ext import ops
from dflash_ext.ops.draft_loss.naive import draft_loss_stats_naive

# (blocks, slots, vocabulary, hidden size, options): SmolLM2-135M's head
SHAPES = [
    (128, 8, 49152, 576, {}),
    (128, 8, 49152, 576, {"cap_lambda": 0.1, "dpace_alpha": 0.5}),
    (40, 4, 49152, 576, {}),
]


def make_case(
    device: torch.device, blocks: int, slots: int, vocab: int, width: int, options: dict[str, float]
) -> Case:
    hidden = torch.randn(blocks, slots, width, device=device, requires_grad=True)
    weight = torch.randn(vocab, width, device=device) / width**0.5
    labels = torch.randint(0, vocab, (blocks, slots), device=device)
    weights = torch.ones(blocks, slots, device=device)
    weights[:, 0] = 0
    rows = weights.flatten().nonzero()[:, 0]
    n_rows = torch.tensor(rows.numel(), device=device)
    states = hidden.detach().flatten(0, 1)[rows]
    logits = torch.empty(rows.numel(), vocab, device=device)
    gradient = torch.empty_like(states)

    def run() -> None:
        hidden.grad = None
        args = (hidden, weight, labels, weights, weights.sum(), rows, n_rows)
        ops.draft_loss(*args, **options).backward()

    def peer() -> None:
        torch.mm(states, weight.T, out=logits)
        torch.mm(logits, weight, out=gradient)

    def check() -> None:
        few = 2
        part = hidden[:few].detach().double().requires_grad_()
        picked = rows[rows < few * slots]
        count = torch.tensor(picked.numel(), device=device)
        for states, head in ((part, weight.double()), (hidden, weight)):
            args = (states[:few], head, labels[:few], weights[:few], weights[:few].sum())
            if states is part:
                wanted = draft_loss_stats_naive(*args, picked, count, **options)[0]
                wanted.backward()
            else:
                found = ops.draft_loss(*args, picked, count, **options)
                found.backward()
        assert hidden.grad is not None and part.grad is not None
        assert torch.allclose(found.double(), wanted, rtol=1e-5)
        difference = hidden.grad[:few].double() - part.grad
        assert difference.norm() <= 1e-5 * part.grad.norm()

    terms = "".join(f" {name.split('_')[0]}" for name in options)
    return Case(
        op="draft_loss",
        shape=f"N{rows.numel()} V{vocab} H{width}{terms}",
        run=run,
        peer=peer,
        peer_name="its two GEMMs",
        check=check,
        flops=4 * rows.numel() * vocab * width,
    )


def cases(device: torch.device) -> list[Case]:
    return [make_case(device, *shape) for shape in SHAPES]
