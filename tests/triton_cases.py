"""The Triton kernels of the layers against their naive twins: run on a GPU, or as a program under
TRITON_INTERPRET=1 in fp32 on the CPU (the interpreter is wrong in bf16)."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-6
# Rows and row size: more rows than a program takes, masked columns, one row, none.
NORM_SHAPES = [(7, 24), (9, 5120), (5, 576), (1, 3), (0, 8)]
# Rows, query heads, key heads, head size.
HEAD_SHAPES = [
    (7, 4, 2, 64),
    (37, 9, 3, 64),
    (5, 0, 8, 128),
    (3, 1, 1, 6),
    (2, 12, 10, 256),
    (0, 2, 1, 8),
]
GATE_SHAPES = [(5, 7), (3, 2049), (1, 1), (0, 4)]
GATHER_SHAPES = [(5, 24, 9), (3, 5120, 2), (2, 8200, 4), (1, 1, 1), (3, 7, 0)]
SCALE_SHAPES = [(3, 4099), (2, 2048), (1, 1), (0, 4)]


def error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|; a NaN is infinitely wrong."""
    if not wanted.numel():
        return float(found.shape != wanted.shape)
    found, wanted = found.double().cpu(), wanted.double().cpu()
    ratio = (found - wanted).norm() / wanted.norm().clamp_min(1e-30)
    return float("inf") if ratio.isnan() else ratio.item()


def norm_tensors(rows: int, size: int) -> list[Tensor]:
    """x, residual, weight, gradients of both outputs; x has rows at a stride."""
    wide = torch.randn(rows, size + 3)
    return [wide[:, :size], *(torch.randn(n, size) for n in (rows, 1, rows, rows))]


def norm_errors(rows: int, size: int, device: str, dtype: torch.dtype) -> dict[str, float]:
    from dflash_ext.ops.rms_norm import naive
    from dflash_ext.ops.rms_norm.triton import rms_norm_backward_triton, rms_norm_triton

    x, residual, weight, grad, grad_total = (t.to(device, dtype) for t in norm_tensors(rows, size))
    weight = weight[0]
    errors = {}
    for more, grad_more in ((None, None), (residual, grad_total)):
        out, total, rstd = rms_norm_triton(x, more, weight, EPS)
        added = x if more is None else x + more
        if more is not None:
            errors["total"] = 0.0 if torch.equal(total, added) else float("inf")
        want, want_rstd = naive.rms_norm_naive(added.double(), weight.double(), EPS)
        errors[f"out {more is None}"] = error(out, want)
        errors[f"rstd {more is None}"] = error(rstd, want_rstd)
        dx, dweight = rms_norm_backward_triton(grad, grad_more, added, weight, rstd)
        want_dx, want_dweight = naive.rms_norm_backward_naive(
            grad.double(),
            None if grad_more is None else grad_more.double(),
            added.double(),
            weight.double(),
            want_rstd,
        )
        errors[f"dx {more is None}"] = error(dx, want_dx)
        errors[f"dweight {more is None}"] = error(dweight, want_dweight)
    return errors


def head_errors(
    rows: int, q_heads: int, k_heads: int, dim: int, device: str, dtype: torch.dtype
) -> dict[str, float]:
    from dflash_ext.ops.qkv_norm_rope import naive
    from dflash_ext.ops.qkv_norm_rope.triton import (
        qkv_norm_rope_backward_triton,
        qkv_norm_rope_triton,
    )

    width = (q_heads + 2 * k_heads) * dim
    qkv = torch.randn(rows, width + 8).to(device, dtype)[:, :width]
    weights = [torch.randn(dim).to(device, dtype) for _ in range(2)]
    q_weight = weights[0] if q_heads else None
    angles = torch.randn(rows, dim // 2)
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    grads = [
        torch.randn(rows, heads, dim).to(device, kind)
        for heads, kind in ((q_heads, dtype), (k_heads, torch.float32), (k_heads, torch.float32))
    ]
    grad_q = grads[0] if q_heads else None
    options = (EPS, q_heads, k_heads)
    tensors = (qkv, q_weight, weights[1], cos, sin)
    wide = [None if t is None else t.double() for t in tensors]
    wide_grads = [None if t is None else t.double() for t in (grad_q, *grads[1:])]
    found = qkv_norm_rope_triton(*tensors, *options)
    found += qkv_norm_rope_backward_triton(grad_q, *grads[1:], *tensors, *options)
    wanted = naive.qkv_norm_rope_naive(*wide, *options)
    wanted += naive.qkv_norm_rope_backward_naive(*wide_grads, *wide, *options)
    names = ("q", "k", "v", "dqkv", "dq_weight", "dk_weight")
    return {n: error(f, w) for n, f, w in zip(names, found, wanted, strict=True)}


def gate_errors(rows: int, size: int, device: str, dtype: torch.dtype) -> dict[str, float]:
    from dflash_ext.ops.swiglu import naive
    from dflash_ext.ops.swiglu.triton import swiglu_backward_triton, swiglu_triton

    gate_up = (3 * torch.randn(rows, 2 * size + 2)).to(device, dtype)[:, : 2 * size]
    grad = torch.randn(rows, size).to(device, dtype)
    out = swiglu_triton(gate_up)
    gradient = swiglu_backward_triton(grad, gate_up)
    wanted = naive.swiglu_backward_naive(grad.double(), gate_up.double())
    return {
        "out": error(out, naive.swiglu_naive(gate_up.double())),
        "gradient": error(gradient, wanted),
    }


def scale_errors(rows: int, size: int, device: str, dtype: torch.dtype) -> dict[str, float]:
    from dflash_ext.ops.draft_loss.triton import scale_triton

    x = torch.randn(rows, size).to(device, dtype)
    factor = torch.tensor([0.3], device=device)
    same = torch.equal(scale_triton(x, factor), torch.mul(x, factor, out=torch.empty_like(x)))
    return {"bits": 0.0 if same else float("inf")}


def gather_errors(
    rows: int, size: int, count: int, device: str, dtype: torch.dtype
) -> dict[str, float]:
    from dflash_ext.ops.gather_rows import gather_rows
    from dflash_ext.ops.gather_rows.triton import gather_rows_triton

    x = torch.randn(rows, size + 1).to(device, dtype)[:, :size]
    index = torch.randint(-1, rows, (count,))
    same = torch.equal(gather_rows_triton(x, index.to(device)).cpu(), gather_rows(x.cpu(), index))
    return {"bits": 0.0 if same else float("inf")}


def all_errors(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of every kernel at every shape."""
    torch.manual_seed(0)
    errors = {}
    for kind, shapes, of in (
        ("norm", NORM_SHAPES, norm_errors),
        ("heads", HEAD_SHAPES, head_errors),
        ("gate", GATE_SHAPES, gate_errors),
        ("scale", SCALE_SHAPES, scale_errors),
        ("gather", GATHER_SHAPES, gather_errors),
    ):
        for shape in shapes:
            found = of(*shape, device, dtype)  # type: ignore[operator]
            errors |= {f"{kind} {shape} {name}": value for name, value in found.items()}
    return errors


if __name__ == "__main__":
    found = all_errors("cpu", torch.float32)
    worst = max(found, key=lambda name: found[name])
    print(f"{len(found)} results, worst {worst}: {found[worst]:.2e}")
    assert found[worst] < 2e-6, {name: value for name, value in found.items() if value >= 2e-6}
