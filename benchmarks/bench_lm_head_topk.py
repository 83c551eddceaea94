"""lm_head_topk against mm and torch.topk, which leave out log-sum-exp and the rank of the label."""

from __future__ import annotations

import torch

from benchmarks import Case
from dflash_ext import ops
from dflash_ext.ops.lm_head_topk.naive import lm_head_topk_naive

# (rows, vocabulary, hidden size, k): SmolLM2-135M's head, and a small one with a large k
SHAPES = [(256, 49152, 576, 8), (64, 49152, 576, 1), (256, 8192, 576, 256)]


def make_case(device: torch.device, rows: int, vocab: int, width: int, k: int) -> Case:
    hidden = torch.randn(rows, width, device=device)
    weight = torch.randn(vocab, width, device=device) / width**0.5
    labels = torch.randint(0, vocab, (rows,), device=device)

    def run() -> tuple[torch.Tensor, ...]:
        return ops.lm_head_topk(hidden, weight, k, labels)

    def peer() -> torch.return_types.topk:
        return (hidden @ weight.T).topk(k)

    def check() -> None:
        few = 16
        values, indices, lse, rank, label_logit = ops.lm_head_topk(
            hidden[:few], weight, k, labels[:few]
        )
        exact = lm_head_topk_naive(hidden[:few].double(), weight.double(), k, labels[:few])
        for got, want in ((values, exact[0]), (lse, exact[2]), (label_logit, exact[4])):
            assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5)
        # Where neighbours are further apart than the rounding, the ids are the same too.
        gap = exact[0][:, :-1] - exact[0][:, 1:]
        clear = torch.nn.functional.pad(gap > 1e-4, (1, 1), value=True)
        clear = clear[:, :-1] & clear[:, 1:]
        clear[:, -1] = False  # its successor is not known
        assert torch.equal(indices[clear], exact[1][clear])
        # Ranks may differ by the few ids that are nearly equal to the label.
        assert (rank - exact[3]).abs().max() <= 2

    return Case(
        op="lm_head_topk",
        shape=f"N{rows} V{vocab} H{width} k{k}",
        run=run,
        peer=peer,
        peer_name="mm + topk",
        check=check,
        flops=2 * rows * vocab * width,
    )


def cases(device: torch.device) -> list[Case]:
    return [make_case(device, *shape) for shape in SHAPES]
