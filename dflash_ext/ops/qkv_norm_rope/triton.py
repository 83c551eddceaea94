"""qkv_norm_rope for GPUs: a program takes a few rows and a group of heads of one kind.

Each head is held as its two halves, which the rotation mixes element by element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_ext.ops.triton_launch import launch, num_sms, rows_of
from dflash_ext.ops.triton_sums import sum_rows

# Of the backward pass: its registers allow no more at a time.
PROGRAMS_PER_SM = 4


@triton.jit
def _load_angles(cos_ptr, sin_ptr, rows, num_rows, stride, half, HALF: tl.constexpr):
    """(cos, sin) [ROWS, 1, HALF] in fp32."""
    pair = tl.arange(0, HALF)
    at = rows[:, None] * stride + pair[None, :]
    mask = (rows < num_rows)[:, None] & (pair < half)[None, :]
    cos = tl.load(cos_ptr + at, mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask, other=0.0).to(tl.float32)
    return cos[:, None, :], sin[:, None, :]


@triton.jit
def _load_weight(weight_ptr, half, HALF: tl.constexpr):
    pair = tl.arange(0, HALF)
    first = tl.load(weight_ptr + pair, pair < half, other=0.0).to(tl.float32)
    second = tl.load(weight_ptr + half + pair, pair < half, other=0.0).to(tl.float32)
    return first[None, None, :], second[None, None, :]


@triton.jit
def _tile(rows, heads, num_rows, num_heads, row_stride, half, HALF: tl.constexpr):
    """(offsets of the first halves, mask) [ROWS, HEADS, HALF]."""
    pair = tl.arange(0, HALF)
    at = rows[:, None, None] * row_stride + heads[None, :, None] * (2 * half) + pair[None, None, :]
    inside = (rows < num_rows)[:, None, None] & (heads < num_heads)[None, :, None]
    return at, inside & (pair < half)[None, None, :]


@triton.jit
def _load_halves(ptr, at, mask, half):
    first = tl.load(ptr + at, mask, other=0.0).to(tl.float32)
    return first, tl.load(ptr + half + at, mask, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(ptr, at, mask, half, first, second):
    tl.store(ptr + at, first.to(ptr.dtype.element_ty), mask)
    tl.store(ptr + half + at, second.to(ptr.dtype.element_ty), mask)


@triton.jit
def _rstd(first, second, half, eps):
    """1 / rms [ROWS, HEADS, 1]."""
    squares = tl.sum(first * first + second * second, 2)
    return (1.0 / tl.sqrt(squares / (2 * half) + eps))[:, :, None]


@triton.jit
def _rotated(
    qkv_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, rows, heads, num_rows, qkv_stride, cos_stride,
    eps, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    at, mask = _tile(rows, heads, num_rows, NUM_HEADS, qkv_stride, DIM // 2, HALF)
    first, second = _load_halves(qkv_ptr, at, mask, DIM // 2)
    cos, sin = _load_angles(cos_ptr, sin_ptr, rows, num_rows, cos_stride, DIM // 2, HALF)
    w1, w2 = _load_weight(weight_ptr, DIM // 2, HALF)
    rstd = _rstd(first, second, DIM // 2, eps)
    first, second = first * rstd * w1, second * rstd * w2
    to, _ = _tile(rows, heads, num_rows, NUM_HEADS, NUM_HEADS * DIM, DIM // 2, HALF)
    turned = second * cos + first * sin
    _store_halves(out_ptr, to, mask, DIM // 2, first * cos - second * sin, turned)


@triton.jit
def _copied(
    from_ptr, to_ptr, rows, heads, num_rows, from_stride, to_stride,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    at, mask = _tile(rows, heads, num_rows, NUM_HEADS, from_stride, DIM // 2, HALF)
    first, second = _load_halves(from_ptr, at, mask, DIM // 2)
    to, _ = _tile(rows, heads, num_rows, NUM_HEADS, to_stride, DIM // 2, HALF)
    _store_halves(to_ptr, to, mask, DIM // 2, first, second)


@triton.jit
def qkv_norm_rope_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
    num_rows, qkv_stride, cos_stride, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    q_groups: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    k_groups: tl.constexpr = (K_HEADS + HEADS - 1) // HEADS
    groups: tl.constexpr = q_groups + 2 * k_groups
    group = tl.program_id(0) % groups  # neighbours share their rows' angles
    rows = (tl.program_id(0) // groups).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    heads = tl.arange(0, HEADS)
    if group < q_groups:
        _rotated(
            qkv_ptr, q_weight_ptr, cos_ptr, sin_ptr, q_ptr, rows, group * HEADS + heads,
            num_rows, qkv_stride, cos_stride, eps, Q_HEADS, DIM, HALF,
        )  # fmt: skip
    elif group < q_groups + k_groups:
        _rotated(
            qkv_ptr + Q_HEADS * DIM, k_weight_ptr, cos_ptr, sin_ptr, k_ptr, rows,
            (group - q_groups) * HEADS + heads,
            num_rows, qkv_stride, cos_stride, eps, K_HEADS, DIM, HALF,
        )  # fmt: skip
    else:
        _copied(
            qkv_ptr + (Q_HEADS + K_HEADS) * DIM, v_ptr, rows,
            (group - q_groups - k_groups) * HEADS + heads,
            num_rows, qkv_stride, K_HEADS * DIM, K_HEADS, DIM, HALF,
        )  # fmt: skip


@triton.jit
def _rotated_backward(
    grad_ptr, qkv_ptr, weight_ptr, cos_ptr, sin_ptr, dqkv_ptr, partial_ptr, first_block, blocks,
    heads, num_rows, grad_stride, qkv_stride, dqkv_stride, cos_stride, eps,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = DIM // 2
    w1, w2 = _load_weight(weight_ptr, half, HALF)
    dw1 = tl.zeros([ROWS, HEADS, HALF], tl.float32)
    dw2 = tl.zeros([ROWS, HEADS, HALF], tl.float32)
    for block in range(first_block, tl.cdiv(num_rows, ROWS), blocks):
        rows = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        at, mask = _tile(rows, heads, num_rows, NUM_HEADS, grad_stride, half, HALF)
        g1, g2 = _load_halves(grad_ptr, at, mask, half)
        at, _ = _tile(rows, heads, num_rows, NUM_HEADS, qkv_stride, half, HALF)
        x1, x2 = _load_halves(qkv_ptr, at, mask, half)
        cos, sin = _load_angles(cos_ptr, sin_ptr, rows, num_rows, cos_stride, half, HALF)
        g1, g2 = g1 * cos + g2 * sin, g2 * cos - g1 * sin
        rstd = _rstd(x1, x2, half, eps)
        x1, x2 = x1 * rstd, x2 * rstd
        dw1 += g1 * x1
        dw2 += g2 * x2
        g1, g2 = g1 * w1, g2 * w2
        mean = (tl.sum(g1 * x1 + g2 * x2, 2) / DIM)[:, :, None]
        at, _ = _tile(rows, heads, num_rows, NUM_HEADS, dqkv_stride, half, HALF)
        _store_halves(dqkv_ptr, at, mask, half, (g1 - x1 * mean) * rstd, (g2 - x2 * mean) * rstd)
    pair = tl.arange(0, HALF)
    tl.store(partial_ptr + pair, tl.sum(tl.sum(dw1, 0), 0), pair < half)
    tl.store(partial_ptr + half + pair, tl.sum(tl.sum(dw2, 0), 0), pair < half)


@triton.jit
def qkv_norm_rope_backward_kernel(
    grad_q_ptr, grad_k_ptr, grad_v_ptr, qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    dqkv_ptr, partial_ptr,
    num_rows, grad_q_stride, grad_k_stride, grad_v_stride, qkv_stride, cos_stride, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    q_groups: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    k_groups: tl.constexpr = (K_HEADS + HEADS - 1) // HEADS
    groups: tl.constexpr = q_groups + 2 * k_groups
    width: tl.constexpr = (Q_HEADS + 2 * K_HEADS) * DIM
    group = tl.program_id(0) % groups
    first_block = tl.program_id(0) // groups
    blocks = tl.num_programs(0) // groups
    partial = partial_ptr + (group.to(tl.int64) * blocks + first_block) * DIM
    heads = tl.arange(0, HEADS)
    if group < q_groups:
        _rotated_backward(
            grad_q_ptr, qkv_ptr, q_weight_ptr, cos_ptr, sin_ptr, dqkv_ptr, partial, first_block,
            blocks, group * HEADS + heads, num_rows, grad_q_stride, qkv_stride, width, cos_stride,
            eps, Q_HEADS, DIM, ROWS, HEADS, HALF,
        )  # fmt: skip
    elif group < q_groups + k_groups:
        _rotated_backward(
            grad_k_ptr, qkv_ptr + Q_HEADS * DIM, k_weight_ptr, cos_ptr, sin_ptr,
            dqkv_ptr + Q_HEADS * DIM, partial, first_block, blocks,
            (group - q_groups) * HEADS + heads, num_rows, grad_k_stride, qkv_stride, width,
            cos_stride, eps, K_HEADS, DIM, ROWS, HEADS, HALF,
        )  # fmt: skip
    else:
        heads += (group - q_groups - k_groups) * HEADS
        for block in range(first_block, tl.cdiv(num_rows, ROWS), blocks):
            rows = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
            _copied(
                grad_v_ptr, dqkv_ptr + (Q_HEADS + K_HEADS) * DIM, rows, heads,
                num_rows, grad_v_stride, width, K_HEADS, DIM, HALF,
            )  # fmt: skip


def tile(dim: int, k_heads: int) -> dict[str, int]:
    """Shape of a program's tile: heads of one kind, as many rows as make 2048 pairs of numbers."""
    half = triton.next_power_of_2(dim // 2)
    heads = min(8, triton.next_power_of_2(k_heads))
    return {"ROWS": max(1, 2048 // (half * heads)), "HEADS": heads, "HALF": half}


def _heads(x: Tensor) -> Tensor:
    """[N, heads, D] with contiguous rows of heads * D, at any row stride."""
    return rows_of(x.reshape(x.shape[0], x.shape[1] * x.shape[2]))


def qkv_norm_rope_triton(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    q_heads: int,
    k_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) [N, heads, D] of qkv [N, (Hq + 2 Hk) * D], whose rows may have any stride."""
    dim, qkv, cos, sin = k_weight.shape[0], rows_of(qkv), cos.contiguous(), sin.contiguous()
    num_rows, config = qkv.shape[0], tile(k_weight.shape[0], k_heads)
    q, k, v = (qkv.new_empty(num_rows, n, dim) for n in (q_heads, k_heads, k_heads))
    groups = triton.cdiv(q_heads, config["HEADS"]) + 2 * triton.cdiv(k_heads, config["HEADS"])
    launch(
        qkv_norm_rope_kernel,
        (groups * triton.cdiv(num_rows, config["ROWS"]),),
        qkv.device,
        qkv,
        k_weight if q_weight is None else q_weight,
        k_weight,
        cos,
        sin,
        q,
        k,
        v,
        num_rows,
        qkv.stride(0),
        cos.stride(0),
        eps,
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        DIM=dim,
        num_warps=4,
        **config,
    )
    return q, k, v


def qkv_norm_rope_backward_triton(
    grad_q: Tensor | None,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    q_heads: int,
    k_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dqkv contiguous, dq_weight, dk_weight in fp32)."""
    dim, qkv, cos, sin = k_weight.shape[0], rows_of(qkv), cos.contiguous(), sin.contiguous()
    num_rows, config = qkv.shape[0], tile(k_weight.shape[0], k_heads)
    grad_k, grad_v = _heads(grad_k), _heads(grad_v)
    grad_q = grad_k if grad_q is None else _heads(grad_q)
    q_groups, k_groups = (triton.cdiv(n, config["HEADS"]) for n in (q_heads, k_heads))
    dqkv = qkv.new_empty(num_rows, qkv.shape[1])
    groups = q_groups + 2 * k_groups
    blocks = min(
        triton.cdiv(num_rows, config["ROWS"]),
        triton.cdiv(PROGRAMS_PER_SM * num_sms(qkv.device), groups),
    )
    partial = qkv.new_empty((q_groups + k_groups) * blocks, dim, dtype=torch.float32)
    launch(
        qkv_norm_rope_backward_kernel,
        (groups * blocks,),
        qkv.device,
        grad_q,
        grad_k,
        grad_v,
        qkv,
        k_weight if q_weight is None else q_weight,
        k_weight,
        cos,
        sin,
        dqkv,
        partial,
        num_rows,
        grad_q.stride(0),
        grad_k.stride(0),
        grad_v.stride(0),
        qkv.stride(0),
        cos.stride(0),
        eps,
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        DIM=dim,
        num_warps=4,
        **config,
    )
    if q_weight is None:
        dk_weight, dq_weight = sum_rows(partial)
    else:
        dq_weight, dk_weight = sum_rows(partial, q_groups * blocks)
    return dqkv, dq_weight, dk_weight
