"""rms_norm, qkv_norm_rope, swiglu and adamw: against fp64, plain torch, and without a GPU too."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import triton_cases
from torch import Tensor
from torch.library import opcheck
from triton_cases import EPS, error
from triton_compile import compile_launch, needs_interpreter, recorded_launches

from dflash_ext import ops
from dflash_ext.drafter.attention import RMSNorm, apply_rope
from dflash_ext.ops.adamw.naive import adamw_naive
from dflash_ext.ops.rms_norm import rms_norm_backward
from dflash_ext.ops.swiglu import swiglu_backward

ROOT = Path(__file__).parent.parent
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 4e-3}
DTYPES = list(ROUNDING)
DEFAULT = torch.ops.dflash_ext
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def leaf(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(*shape).to(device, dtype).requires_grad_()


def grads_of(outs: Tensor | tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    outs = (outs,) if isinstance(outs, Tensor) else outs
    generator = torch.Generator().manual_seed(7)
    seeds = [torch.randn(o.shape, generator=generator).to(o) for o in outs]
    return list(torch.autograd.grad(outs, inputs, seeds))


# rms_norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 576), (2, 3, 7), (1, 1), (9,), (0, 4)], ids=str)
def test_rms_norm_is_that_of_torch(shape: tuple, dtype: torch.dtype, device: str) -> None:
    x, weight = (
        leaf(*shape, dtype=dtype, device=device),
        leaf(shape[-1], dtype=dtype, device=device),
    )
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    wanted = F.rms_norm(wide[0], wide[1].shape, wide[1], EPS)
    found = ops.rms_norm(x, weight, EPS)
    assert found.dtype == dtype and error(found, wanted) <= ROUNDING[dtype]
    plain = F.rms_norm(x, weight.shape, weight, EPS)
    triples = zip(
        *(grads_of(o, i) for o, i in ((found, [x, weight]), (wanted, wide), (plain, [x, weight]))),
        strict=True,
    )
    for mine, want, torchs in triples:
        assert mine.dtype == dtype
        # Of a row of one element the gradient is what rounding leaves.
        bound = 2 * error(torchs, want) + ROUNDING[dtype]
        assert shape[-1] == 1 or error(mine, want) <= bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_is_the_norm_of_the_sum(dtype: torch.dtype, device: str) -> None:
    x, residual = (leaf(6, 5, 40, dtype=dtype, device=device) for _ in range(2))
    weight = leaf(40, dtype=dtype, device=device)
    normed, total = ops.add_rms_norm(x[:, ::2], residual[:, 1:4], weight, EPS)
    assert torch.equal(total, x[:, ::2] + residual[:, 1:4])
    assert torch.equal(normed, ops.rms_norm(total, weight, EPS))
    found = grads_of((normed, total), [x, residual, weight])
    wide = [t.detach().double().requires_grad_() for t in (x, residual, weight)]
    rounded = total.detach().double() - wide[0][:, ::2].detach() - wide[1][:, 1:4].detach()
    wide_total = wide[0][:, ::2] + wide[1][:, 1:4] + rounded
    wide_normed = F.rms_norm(wide_total, (40,), wide[2], EPS)
    wanted = grads_of((wide_normed, wide_total), wide)
    for mine, want in zip(found, wanted, strict=True):
        assert error(mine, want) <= 2 * ROUNDING[dtype]


def test_weight_gradient_of_rms_norm_is_fp32(device: str) -> None:
    """256 + 1 + 1 + ... stays 256 in bf16."""
    x = torch.ones(300, 8, dtype=torch.bfloat16, device=device)
    grad = torch.ones_like(x)
    grad[0] = 256
    _, dweight = rms_norm_backward(grad, None, x, x[0], torch.ones(300, device=device))
    assert torch.equal(dweight, torch.full((8,), 555.0, device=device))


# qkv_norm_rope


def parts_of(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: tuple
) -> tuple[Tensor, ...]:
    """The drafter's own modules, head by head."""
    dim = k_weight.shape[0]
    sizes = heads[0], heads[1], heads[1]
    q, k, v = qkv.view(len(qkv), sum(sizes), dim).split(sizes, 1)
    rope = cos[:, None], sin[:, None]
    turned = []
    for part, weight in ((q, q_weight), (k, k_weight)):
        if weight is not None:
            norm = RMSNorm(dim, EPS).to(part)
            turned.append(apply_rope(F.rms_norm(part, (dim,), weight, norm.eps), rope))
    return (*turned, v)


HEADS = [(7, 4, 2, 64), (5, 9, 3, 16), (6, 0, 3, 8), (1, 1, 1, 2), (0, 2, 1, 4)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_qkv_norm_rope_is_the_drafters(shape: tuple, dtype: torch.dtype, device: str) -> None:
    rows, *heads, dim = shape
    width = (heads[0] + 2 * heads[1]) * dim
    base = leaf(rows, width + 4, dtype=dtype, device=device)
    qkv = base[:, :width]
    q_weight = leaf(dim, dtype=dtype, device=device) if heads[0] else None
    k_weight = leaf(dim, dtype=dtype, device=device)
    angles = torch.randn(rows, dim // 2, device=device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    inputs = [t for t in (base, q_weight, k_weight) if t is not None]
    wide = [None if t is None else t.detach().double() for t in (base, q_weight, k_weight)]
    wide_inputs = [t.requires_grad_() for t in wide if t is not None]
    wanted = parts_of(wide[0][:, :width], wide[1], wide[2], cos.double(), sin.double(), heads)
    plain = parts_of(qkv.contiguous(), q_weight, k_weight, cos, sin, heads)
    found = ops.qkv_norm_rope(qkv, q_weight, k_weight, cos, sin, EPS, *heads)
    assert all(part.is_contiguous() and part.dtype == dtype for part in found)
    if not heads[0]:
        assert found[0].shape == (rows, 0, dim)
        found = found[1:]
    results = [
        (*outs, *grads_of(tuple(outs), leaves))
        for outs, leaves in ((found, inputs), (wanted, wide_inputs), (plain, inputs))
    ]
    for mine, want, torchs in zip(*results, strict=True):
        assert error(mine, want) <= 2 * error(torchs, want) + ROUNDING[dtype] / 4


def test_qkv_norm_rope_names_what_does_not_fit(device: str) -> None:
    qkv, weight, angles = (torch.zeros(*s, device=device) for s in ((3, 32), (4,), (3, 2)))
    with pytest.raises(RuntimeError, match=r"qkv: found \[3, 32\], want \[N, 24\]"):
        ops.qkv_norm_rope(qkv, weight, weight, angles, angles, EPS, 2, 2)
    with pytest.raises(RuntimeError, match=r"sin: found \[3, 1\], want \[3, 2\]"):
        ops.qkv_norm_rope(qkv, weight, weight, angles, angles[:, :1], EPS, 4, 2)
    with pytest.raises(RuntimeError, match=r"q_weight: found None for 4 heads"):
        ops.qkv_norm_rope(qkv, None, weight, angles, angles, EPS, 4, 2)
    with pytest.raises(RuntimeError, match=r"weight: found \[4\], want the last dimension"):
        ops.rms_norm(qkv, weight, EPS)


# swiglu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 10), (2, 3, 4098), (0, 6), (2,)], ids=str)
def test_swiglu_is_that_of_torch(shape: tuple, dtype: torch.dtype, device: str) -> None:
    gate_up = leaf(*shape, dtype=dtype, device=device)
    wide = gate_up.detach().double().requires_grad_()

    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    found, wanted, torchs = ops.swiglu(gate_up), plain(wide), plain(gate_up)
    assert error(found, wanted) <= error(torchs, wanted) + ROUNDING[dtype] / 4
    (mine,), (want,), (rounded,) = (
        grads_of(o, [i]) for o, i in ((found, gate_up), (wanted, wide), (torchs, gate_up))
    )
    assert error(mine, want) <= error(rounded, want) + ROUNDING[dtype] / 4


def test_swiglu_names_a_gradient_that_does_not_fit(device: str) -> None:
    with pytest.raises(RuntimeError, match=r"grad: found \[2, 4\]"):
        swiglu_backward(torch.zeros(2, 4, device=device), torch.zeros(2, 6, device=device))


# adamw


def adamw_case(size: int, device: str, weights: bool) -> list[Tensor | None]:
    flats = [torch.randn(size, device=device) for _ in range(4)]
    flats[3].abs_()
    copy = flats[0].to(torch.bfloat16) if weights else None
    return [flats[0], copy, *flats[1:]]


@pytest.mark.parametrize("live", [1.0, 0.0])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("size, decayed", [(5000, 1234), (1024, 1024), (1, 0), (0, 0)])
def test_adamw_rounds_as_naive(
    size: int, decayed: int, weights: bool, live: float, device: str
) -> None:
    found = adamw_case(size, device, weights)
    wanted = [None if t is None else t.clone().cpu() for t in found]
    scalars = torch.tensor([live, 0.37, 1e-4, 3e-3, 0.2])
    if not live and size:
        found[2][0] = wanted[2][0] = float("nan")
    betas = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    ops.adamw(*found, scalars.to(device), num_decayed=decayed, **betas)
    adamw_naive(*wanted, scalars, decayed, *betas.values())
    for mine, naive in zip(found, wanted, strict=True):
        assert mine is None or torch.equal(mine.cpu().nan_to_num(), naive.nan_to_num())


def test_adamw_names_what_does_not_fit(device: str) -> None:
    master, weight, grad, *moments = adamw_case(8, device, True)
    scalars, options = torch.ones(5, device=device), {"num_decayed": 0, "eps": 1e-8}
    options |= {"beta1": 0.9, "beta2": 0.999}
    with pytest.raises(RuntimeError, match=r"grad: found \[8\] torch.bfloat16"):
        ops.adamw(master, weight, grad.bfloat16(), *moments, scalars, **options)
    with pytest.raises(RuntimeError, match=r"scalars: found \[4\]"):
        ops.adamw(master, weight, grad, *moments, scalars[:4], **options)


# the operators as such


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype, device: str) -> None:
    x, residual = (leaf(3, 5, 16, dtype=dtype, device=device) for _ in range(2))
    weight = leaf(16, dtype=dtype, device=device)
    opcheck(DEFAULT.rms_norm.default, (x, weight, EPS))
    opcheck(DEFAULT.add_rms_norm.default, (x, residual, weight, EPS))
    qkv, head = leaf(7, 64, dtype=dtype, device=device), leaf(8, dtype=dtype, device=device)
    cos, sin = (torch.randn(7, 4, device=device) for _ in range(2))
    opcheck(DEFAULT.qkv_norm_rope.default, (qkv, head, head, cos, sin, EPS, 4, 2))
    opcheck(DEFAULT.qkv_norm_rope.default, (qkv[:, :32], None, head, cos, sin, EPS, 0, 2))
    opcheck(DEFAULT.swiglu.default, (x,))
    flats = adamw_case(8, device, True)
    opcheck(DEFAULT.adamw.default, (*flats, torch.ones(5, device=device), 4, 0.9, 0.999, 1e-8))


def test_gradients_by_differences(device: str) -> None:
    wide = {"dtype": torch.float64, "device": device}
    x, residual, weight = leaf(3, 6, **wide), leaf(3, 6, **wide), leaf(6, **wide)
    check = torch.autograd.gradcheck
    assert check(lambda *a: ops.add_rms_norm(*a, EPS), (x, residual, weight))
    assert check(lambda *a: ops.rms_norm(*a, EPS), (x, weight))
    assert check(ops.swiglu, (x,))
    angles = torch.randn(3, 2, **wide)
    rope = angles.cos(), angles.sin()
    qkv, q_weight, k_weight = leaf(3, 24, **wide), leaf(4, **wide), leaf(4, **wide)
    assert check(
        lambda a, b, c: ops.qkv_norm_rope(a, b, c, *rope, EPS, 2, 2), (qkv, q_weight, k_weight)
    )


# Triton


@needs_triton
@needs_interpreter
def test_interpreted_kernels_match_naive() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_cases"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-6), (torch.bfloat16, 3e-3)])
def test_kernels_match_naive(dtype: torch.dtype, limit: float) -> None:
    found = triton_cases.all_errors("cuda", dtype)
    assert max(found.values()) <= limit, {n: e for n, e in found.items() if e > limit}


def launch_all(dtype: torch.dtype) -> None:
    """The layers of a 27B target's drafter (bf16), or SmolLM2's (fp32)."""
    from dflash_ext.ops.adamw.triton import adamw_triton
    from dflash_ext.ops.draft_loss.triton import scale_triton
    from dflash_ext.ops.gather_rows.triton import gather_rows_triton
    from dflash_ext.ops.qkv_norm_rope.triton import (
        qkv_norm_rope_backward_triton,
        qkv_norm_rope_triton,
    )
    from dflash_ext.ops.rms_norm.triton import rms_norm_backward_triton, rms_norm_triton
    from dflash_ext.ops.swiglu.triton import swiglu_backward_triton, swiglu_triton

    size, q_heads, k_heads, dim, inner = (
        (5120, 32, 8, 128, 17408) if dtype == torch.bfloat16 else (576, 9, 3, 64, 1536)
    )
    x, weight = torch.empty(64, size, dtype=dtype), torch.empty(size, dtype=dtype)
    rstd = torch.empty(64)
    rms_norm_triton(x, None, weight, EPS)
    rms_norm_triton(x, x, weight, EPS)
    rms_norm_backward_triton(x, None, x, weight, rstd)
    rms_norm_backward_triton(x, x, x, weight, rstd)
    for heads in (q_heads, 0):
        qkv = torch.empty(64, (heads + 2 * k_heads) * dim, dtype=dtype)
        head, angles = torch.empty(dim, dtype=dtype), torch.empty(64, dim // 2, dtype=dtype)
        inputs = (qkv, head if heads else None, head, angles, angles, EPS, heads, k_heads)
        qkv_norm_rope_triton(*inputs)
        grads = [torch.empty(64, n, dim, dtype=dtype) for n in (q_heads, k_heads, k_heads)]
        qkv_norm_rope_backward_triton(grads[0] if heads else None, *grads[1:], *inputs)
    gate_up = torch.empty(8, 2 * inner, dtype=dtype)
    swiglu_triton(gate_up)
    swiglu_backward_triton(gate_up[:, :inner], gate_up)
    scale_triton(x, torch.empty(1))
    gather_rows_triton(x, torch.empty(9, dtype=torch.int64))
    flats = [torch.empty(64) for _ in range(4)]
    copy = flats[0].to(dtype) if dtype == torch.bfloat16 else None
    adamw_triton(flats[0], copy, *flats[1:], torch.empty(5), 32, 0.9, 0.999, 1e-8)


@needs_triton
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_compile_to_cubin(
    dtype: torch.dtype, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("rms_norm", "qkv_norm_rope", "swiglu", "adamw", "draft_loss", "gather_rows")
    modules = [importlib.import_module(f"dflash_ext.ops.{name}.triton") for name in names]
    modules.append(importlib.import_module("dflash_ext.ops.triton_sums"))
    with recorded_launches(modules, monkeypatch) as launches:
        launch_all(dtype)
    assert len(launches) == 17
    for launch in launches:
        assert compile_launch(launch, arch).startswith(b"\x7fELF")
