"""The layers' Triton kernels on a GPU: threads, streams, devices, sizes past 2^31, repeats."""

import threading

import pytest
import torch
from cuda_waits import no_syncs
from torch import Tensor
from triton_cases import EPS, error

from dflash_ext import ops
from dflash_ext.ops.qkv_norm_rope import qkv_norm_rope_backward
from dflash_ext.ops.rms_norm import naive, rms_norm_backward
from dflash_ext.ops.swiglu import swiglu_backward

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


def test_first_calls_of_many_threads() -> None:
    x, weight = torch.randn(5, 1234, device="cuda"), torch.randn(1234, device="cuda")
    found: list[Tensor] = []
    start = threading.Barrier(8)

    def call() -> None:
        start.wait()
        for _ in range(3):
            found.append(ops.rms_norm(x, weight, EPS))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 24 and all(torch.equal(out, found[0]) for out in found)
    assert error(found[0], naive.rms_norm_naive(x.double(), weight.double(), EPS)[0]) < 1e-6


def test_runs_on_the_current_stream() -> None:
    x, weight = torch.zeros(64, 512, device="cuda"), torch.ones(512, device="cuda")
    ops.rms_norm(x, weight, EPS)  # compiled
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(2.0)
        out = ops.rms_norm(x, weight, EPS)
    side.synchronize()
    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_runs_on_the_device_of_its_tensors() -> None:
    x, weight = torch.randn(9, 40, device="cuda:1"), torch.randn(40, device="cuda:1")
    with torch.cuda.device(0):
        found = ops.rms_norm(x, weight, EPS), ops.swiglu(x)
    assert all(out.device == x.device for out in found)
    assert error(found[0], naive.rms_norm_naive(x.double(), weight.double(), EPS)[0]) < 1e-6


def test_more_than_2_31_elements() -> None:
    rows, size = 2**31 // 4096 + 8, 4096
    x, weight = torch.randn(rows, size, **BF16), torch.randn(size, **BF16)
    tail = x[-8:]
    rest = {"atol": 0.0, "rtol": 0.0}
    torch.testing.assert_close(
        ops.rms_norm(x, weight, EPS)[-8:], ops.rms_norm(tail, weight, EPS), **rest
    )
    torch.testing.assert_close(ops.swiglu(x)[-8:], ops.swiglu(tail), **rest)
    angles = torch.randn(rows, 64, **BF16)
    head = weight[:128].contiguous()
    whole = ops.qkv_norm_rope(x, head, head, angles, angles, EPS, 16, 8)
    part = ops.qkv_norm_rope(tail, head, head, angles[-8:], angles[-8:], EPS, 16, 8)
    for mine, wanted in zip(whole, part, strict=True):
        torch.testing.assert_close(mine[-8:], wanted, **rest)
    grad = torch.randn(rows, size // 2, **BF16)
    back = swiglu_backward(grad, x)
    torch.testing.assert_close(back[-8:], swiglu_backward(grad[-8:], tail), **rest)


def test_gradients_are_the_same_in_every_run() -> None:
    x, weight = torch.randn(3000, 5120, **BF16), torch.randn(5120, **BF16)
    grads = [torch.randn_like(x) for _ in range(2)]
    rstd = torch.ops.dflash_ext.rms_norm.default(x, weight, EPS)[1]
    qkv, head = torch.randn(3000, 48 * 128, **BF16), torch.randn(128, **BF16)
    angles = torch.randn(3000, 64, **BF16)
    heads = [torch.randn(3000, n, 128, **BF16) for n in (32, 8, 8)]

    def run() -> list[Tensor]:
        back = qkv_norm_rope_backward(*heads, qkv, head, head, angles, angles, EPS, 32, 8)
        return [*rms_norm_backward(*grads, x, weight, rstd), *back]

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


def test_no_call_waits_for_the_gpu() -> None:
    x, weight = torch.randn(64, 512, **BF16), torch.randn(512, **BF16)
    leaf = x.clone().requires_grad_()

    def step() -> None:
        normed, total = ops.add_rms_norm(leaf, x, weight, EPS)
        (ops.swiglu(normed).sum() + total.sum()).backward()

    step()
    with no_syncs():
        step()
