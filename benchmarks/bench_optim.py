"""The optimizer's step with clipping: against a copy of as many bytes and torch's fused AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks import Case, copy_rate
from dflash_ext.config import TrainConfig
from dflash_ext.optim import DrafterOptimizer

# Gradients are read twice; masters and moments are read and written; the bf16 copy is written.
BYTES_PER_PARAM = 2 * 4 + 3 * 8 + 2
CFG = TrainConfig(lr=1e-4, weight_decay=0.1, schedule="constant", warmup_ratio=0.0)


def drafter_shapes(hidden: int, inner: int, q_size: int, kv_size: int, layers: int) -> list[tuple]:
    layer: list[tuple[int, ...]] = [(q_size, hidden), (kv_size, hidden), (kv_size, hidden)]
    layer += [(hidden, q_size), (inner, hidden), (inner, hidden), (hidden, inner)]
    return [(hidden, 5 * hidden), *(layer + [(hidden,), (hidden,), (128,), (128,)]) * layers]


SHAPES = drafter_shapes(5120, 17408, 4096, 1024, 5)  # of a 27B target's drafter, 1.7e9


def make_optimizer(device: torch.device, flat: bool) -> DrafterOptimizer:
    params = [
        nn.Parameter(torch.randn(shape, device=device).mul_(0.02).bfloat16()) for shape in SHAPES
    ]
    optimizer = DrafterOptimizer(((str(i), p) for i, p in enumerate(params)), CFG, 1000, flat=flat)
    optimizer.zero_grads = False
    for p in optimizer.params:
        p.grad = torch.randn_like(p, dtype=torch.float32) if p.grad is None else p.grad.normal_()
    return optimizer


def stepping(optimizer: DrafterOptimizer) -> Callable[[], Tensor]:
    """Steps that find the same gradients each time, without a copy of them."""
    grads = [p.grad for p in optimizer.params]

    def run() -> Tensor:
        for p, grad in zip(optimizer.params, grads, strict=True):
            p.grad = grad
        return optimizer.step(100)

    return run


def cases(device: torch.device) -> Iterator[Case]:
    if device.type == "cpu":
        return  # there the optimizer is torch's own
    flat, single = (make_optimizer(device, flat) for flat in (True, False))
    numel = sum(p.numel() for p in flat.params)
    for a, b in zip(flat.masters, single.masters, strict=True):
        b.copy_(a)
    for p, q in zip(flat.params, single.params, strict=True):
        q.grad.copy_(p.grad)  # type: ignore[union-attr]
    run, peer = stepping(flat), stepping(single)

    def check() -> None:
        norms = run(), peer()
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
        for a, b in zip(flat.masters, single.masters, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)

    yield Case(
        op="optimizer",
        shape=f"P{numel / 1e9:.3f}e9 bf16, clipping",
        run=run,
        peer=peer,
        peer_name="foreach norm + torch fused AdamW + copies",
        check=check,
        bytes_moved=BYTES_PER_PARAM * numel,
        ceiling=copy_rate(device, device),
    )
