"""Behind the last attention only rows with a weight go on: the same step up to rounding."""

import pytest
import torch
from test_fused import Case, assert_near

from dflash_ext.drafter import DFlashDraftModel
from dflash_ext.drafter.live_rows import live_rows
from dflash_ext.drafter.loss import forward_backward, live_chunks, live_grain

pytestmark = pytest.mark.usefixtures("nan_poison")


def batch(case: Case, group: int | None = None, chunks: int | None = None) -> torch.Tensor:
    stats = forward_backward(
        case.model, case.head, case.plan, case.hidden,
        objective=case.objective, last_hidden=case.last, group=group, chunks=chunks,
    )  # fmt: skip
    return torch.stack([s.loss for s in stats]).sum()


def make(**options) -> Case:
    from dflash_ext.drafter.loss import Objective

    torch.manual_seed(0)
    case = Case(kl_weight=0.3, loss_chunk_rows=4, **options)
    case.objective = Objective(case.train, case.spec.layout)
    return case


@pytest.fixture
def mlp_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that each MLP is given."""
    from dflash_ext.drafter.model import DraftMLP

    rows: list[int] = []
    plain = DraftMLP.forward

    def forward(self: DraftMLP, x: torch.Tensor) -> torch.Tensor:
        rows.append(x.shape[:-1].numel())
        return plain(self, x)

    monkeypatch.setattr(DraftMLP, "forward", forward)
    return rows


@pytest.mark.parametrize("on_storage", [False, True], ids=["plain layers", "on storage"])
@pytest.mark.parametrize("group", [None, 5])
@pytest.mark.parametrize("recompute", [False, True])
def test_loss_and_gradients_stay(recompute, group, on_storage, request):
    plain = make(on_storage=on_storage)
    want = batch(plain, group)
    mlp_rows = request.getfixturevalue("mlp_rows")
    case = make(on_storage=on_storage)
    case.model.recompute = recompute
    grain = live_grain(case.train)
    chunks = live_chunks(case.plan, group, grain)
    torch.testing.assert_close(batch(case, group, chunks), want, rtol=1e-6, atol=0)
    assert_near(case.grads(), plain.grads())
    slots = (group or 12) * case.spec.block_size
    assert mlp_rows[:3] == [slots, slots, chunks * grain] and chunks * grain < slots


def test_together_with_shared_slots(monkeypatch):
    plain = make(on_storage=True)
    with monkeypatch.context() as patch:
        patch.setattr(DFlashDraftModel, "_shared_slots", lambda *_: None)
        want = batch(plain)
    case = make(on_storage=True)
    chunks = live_chunks(case.plan, None, 4)
    torch.testing.assert_close(batch(case, None, chunks), want, rtol=1e-6, atol=0)
    assert_near(case.grads(), plain.grads())


def test_rows_come_from_slots_and_go_back():
    rows, n_rows = torch.tensor([4, 0, 3, 0, 0]), torch.tensor(3)  # two of padding
    live = live_rows(rows, n_rows, 2, 3)
    x = torch.randn(2, 3, 7, requires_grad=True)
    picked = live.pick(x)
    assert torch.equal(picked[:3], x.flatten(0, 1)[rows[:3]]) and (picked[3:] == 0).all()
    placed = live.place(picked)
    kept = torch.zeros(6, 1)
    kept[rows[:3]] = 1
    assert torch.equal(placed, (x.flatten(0, 1) * kept).view(2, 3, 7))
    grad = torch.randn(2, 3, 7)
    placed.backward(grad)  # the padding's slot is a live one's too, which counts once
    assert torch.equal(x.grad, (grad.flatten(0, 1) * kept).view(2, 3, 7))


def test_no_live_rows_give_zeros():
    live = live_rows(torch.zeros(4, dtype=torch.int64), torch.tensor(0), 2, 3)
    x = torch.randn(2, 3, 7)
    assert (live.pick(x) == 0).all() and (live.place(torch.randn(4, 7)) == 0).all()
