"""The first layer projects the mask token's slots once: the same step up to rounding."""

import pytest
import torch
from step_cases import SPEC, build_loop
from test_fused import Case, assert_near

from dflash_ext.drafter import DFlashDraftModel, fused
from dflash_ext.drafter.shared_slots import COPIES, SharedSlots

pytestmark = pytest.mark.usefixtures("nan_poison")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each projection of queries, keys and values."""
    rows: list[int] = []
    plain = fused.linear

    def linear(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        if len(weights) == 3:
            rows.append(fused.flat(x).shape[0])
        return plain(x, *weights)

    monkeypatch.setattr(fused, "linear", linear)
    return rows


def all_slots(patch: pytest.MonkeyPatch) -> None:
    """The first layer projects all slots."""
    patch.setattr(DFlashDraftModel, "_shared_slots", lambda *_: None)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("group", [None, 5])
def test_loss_and_gradients_stay(group, recompute, monkeypatch, request):
    torch.manual_seed(0)
    plain = Case(on_storage=True, kl_weight=0.3)
    with monkeypatch.context() as patch:
        all_slots(patch)
        want = plain.batch(group)
    products = request.getfixturevalue("products")
    torch.manual_seed(0)
    case = Case(on_storage=True, kl_weight=0.3)
    case.model.recompute = recompute
    torch.testing.assert_close(case.batch(group), want, rtol=1e-6, atol=0)
    assert_near(case.grads(), plain.grads())
    size = case.spec.block_size
    assert products[:3] == [(group or 12) + COPIES, *[(group or 12) * size] * 2]


def test_blocks_with_prefixes_of_their_own_are_left_alone(products):
    case = Case(on_storage=True, prefix_weight_base=0.5)
    case.batch()
    assert products == [12 * case.spec.block_size] * 3


def test_layers_without_storage_are_left_alone(products):
    case = Case(on_storage=False)
    assert case.batch().isfinite() and not products


def test_rows_are_spread_and_their_gradients_gathered():
    shared = SharedSlots(3, 4, 2)
    x = torch.randn(3, 4, 5)
    x[:, 2:] = x[0, 2]
    rows = shared.distinct(x).requires_grad_()
    out = shared.spread(rows)
    assert torch.equal(out, x)
    grad = torch.randn(3, 4, 5)
    out.backward(grad)
    assert torch.equal(rows.grad[:6], grad[:, :2].flatten(0, 1))
    torch.testing.assert_close(rows.grad[6:].sum(0), grad[:, 2:].sum((0, 1)))


def test_a_sum_of_thousands_keeps_more_than_16_bits():
    shared = SharedSlots(500, 16, 1)
    rows = torch.randn(500 + COPIES, 8).bfloat16().requires_grad_()
    grad = torch.randn(500, 16, 8).bfloat16()
    shared.spread(rows).backward(grad)
    want = grad[:, 1:].double().sum((0, 1))
    assert ((rows.grad[500:].double().sum(0) - want).abs() <= 2**-15 * want.abs()).all()


def test_bf16_gradients_are_as_near_to_fp32(monkeypatch, request):
    def gemm(out, a, b, add):  # which CPUs have not got: fp32 out of bf16
        product = a.float() @ b.float()
        out.copy_(out + product if add else product)

    def gradients(dtype):
        loop = build_loop("cpu", dtype, flat=True, max_anchors=12)
        loop.world = 2  # so that no update follows
        loop._train_batch(loop.hs_queue.get(), 0)
        return {n: p.grad.double() for n, p in loop.model.named_parameters()}

    def errors(found):
        first = {n: g for n, g in found.items() if n.startswith("layers.0.")}
        return {n: float((g - want[n]).norm() / want[n].norm()) for n, g in first.items()}

    monkeypatch.setattr(fused, "_gemm", gemm)
    with monkeypatch.context() as patch:
        all_slots(patch)
        want = gradients(torch.float32)
        plain = errors(gradients(torch.bfloat16))
    products = request.getfixturevalue("products")
    found = errors(gradients(torch.bfloat16))
    assert products[0] == 12 * SPEC.layout.prefix + COPIES
    assert all(found[name] <= 1.2 * plain[name] for name in plain), (found, plain)
