"""Heads with logits, and what every result of lm_head_topk has to satisfy."""

import torch

from dflash_ext import ops
from dflash_ext.ops.lm_head_topk.naive import lm_head_topk_naive

INF = float("inf")


def make_head(rows, vocab, width, dtype=torch.float32):
    hidden = torch.randn(rows, width).to(dtype)
    weight = torch.randn(vocab, width).to(dtype)
    return hidden, weight, torch.randint(0, vocab, (rows,))


def check_against_fp64(hidden, weight, k, labels, **options):
    """Against the naive op in fp64: values closely, indices and ranks up to nearly equal logits.

    An fp32 sum of H products and the exact one differ by at most H * eps * sum |h w|.
    """
    values, indices, lse, rank, label_logit = ops.lm_head_topk(hidden, weight, k, labels, **options)
    h, w = hidden.double(), weight.double()
    exact = lm_head_topk_naive(h, w, k, labels, **options)
    scale = abs(options.get("logit_scale", 1.0))
    magnitude = (h.abs() @ w.abs().T).amax().item() * scale if h.numel() else 0.0
    bound = h.shape[1] * torch.finfo(torch.float32).eps * magnitude + 1e-6

    assert values.dtype == lse.dtype == label_logit.dtype == torch.float32
    assert indices.dtype == rank.dtype == torch.int64
    for got, want in ((values, exact[0]), (lse, exact[2]), (label_logit, exact[4])):
        assert torch.allclose(got.double(), want, rtol=2e-7, atol=bound)

    # Every returned id must really have its value, once, and the order must be the promised one.
    vocab = weight.shape[0]
    valid = options.get("valid_vocab") or vocab
    found = min(k, valid)
    assert (indices[:, found:] == -1).all()
    assert (values[:, found:] == -INF).all()
    assert ((indices[:, :found] >= 0) & (indices[:, :found] < valid)).all()
    everything = lm_head_topk_naive(h, w, vocab, None, **options)
    by_id = torch.full((len(h), vocab), -INF, dtype=torch.float64)
    for row, (ids, z) in enumerate(zip(everything[1], everything[0], strict=True)):
        by_id[row, ids[:valid]] = z[:valid]
    got = by_id.gather(1, indices[:, :found])
    assert (got - values[:, :found]).abs().le(bound).all()
    assert all(len(set(row)) == found for row in indices[:, :found].tolist())
    ordered = values[:, :-1] > values[:, 1:]
    ties = (values[:, :-1] == values[:, 1:]) & (indices[:, :-1] < indices[:, 1:])
    assert (ordered | ties)[:, : max(found - 1, 0)].all()
    if labels is not None:
        mine = by_id.gather(1, labels[:, None])
        least = (by_id > mine + 2 * bound).sum(1)
        most = (by_id >= mine - 2 * bound).sum(1) - 1
        masked = labels >= valid
        assert torch.equal(rank[masked], labels[masked])
        assert ((rank >= least) & (rank <= most))[~masked].all()
