"""Layers on fp32 gradient storage against the plain ones: same outputs, gradients, hooks."""

import pytest
import torch
from drafter_cases import (
    make_plan,
    random_examples,
    random_head,
    random_hidden,
    random_model,
    small_spec,
)
from step_cases import SPEC, build_loop, run
from torch import Tensor, nn

from dflash_ext.config import TrainConfig
from dflash_ext.drafter import DFlashDraftModel
from dflash_ext.drafter.fused import (
    RowBlocks,
    has_main_grad,
    linear,
    mark_gradients,
    request_blocks,
    split_linear,
)
from dflash_ext.drafter.loss import Objective, train_batch
from dflash_ext.flat_params import FlatParams
from dflash_ext.metrics import summarise

pytestmark = pytest.mark.usefixtures("nan_poison")


def give_main_grads(model: DFlashDraftModel) -> DFlashDraftModel:
    """The optimizer's storage, with gradients of NaN: a step must not read what is not its own."""
    FlatParams(list(model.parameters())).grad.fill_(torch.nan)
    return model


class Case:
    def __init__(self, *, on_storage: bool, split: bool = False, **train) -> None:
        self.spec = small_spec()
        self.train = TrainConfig(**({"max_anchors": 12, "gamma": 3.0} | train))
        self.model = random_model(self.spec)
        if on_storage:
            give_main_grads(self.model)
        self.head = random_head()
        self.plan = make_plan(random_examples(), self.spec, max_anchors=12)
        self.hidden = random_hidden(self.plan, self.spec)
        if split:
            self.hidden = torch.stack(self.hidden.chunk(2, dim=1))
        self.last = torch.randn(self.plan.doc_start.shape[0], 32)

    def batch(self, group: int | None = None) -> Tensor:
        return train_batch(
            self.model,
            self.head,
            self.plan,
            self.hidden,
            objective=Objective(self.train, self.spec.layout),
            last_hidden=self.last,
            group=group,
        )

    def grads(self) -> dict[str, Tensor]:
        params = self.model.named_parameters()
        return {n: (p.main_grad if has_main_grad(p) else p.grad).clone() for n, p in params}


def assert_near(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, grad in found.items():
        assert (grad - want[name]).norm() <= 1e-5 * want[name].norm(), name


@pytest.mark.parametrize("split", [False, True], ids=["one fc", "split fc"])
@pytest.mark.parametrize("group", [None, 5, 12])
def test_loss_and_gradients_are_those_of_the_plain_layers(group, split):
    torch.manual_seed(0)
    plain = Case(on_storage=False, kl_weight=0.3)
    want = plain.batch()
    torch.manual_seed(0)
    case = Case(on_storage=True, split=split, kl_weight=0.3)
    torch.testing.assert_close(case.batch(group), want, rtol=1e-6, atol=0)
    assert_near(case.grads(), plain.grads())


def test_second_batch_of_a_step_adds_and_the_next_step_overwrites():
    case = Case(on_storage=True)
    case.batch(5)
    once = case.grads()
    case.batch(5)
    assert_near(case.grads(), {n: 2 * g for n, g in once.items()})
    mark_gradients(case.model.parameters(), started=False)
    case.batch(5)
    assert all(torch.equal(g, once[n]) for n, g in case.grads().items())


def test_recompute_changes_no_bit():
    grads = []
    for recompute in (False, True):
        case = Case(on_storage=True)
        case.model.recompute = recompute
        case.batch(5)
        grads.append(case.grads())
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_evaluation_agrees_with_plain_layers_and_leaves_gradients_alone():
    plain, case = Case(on_storage=False), Case(on_storage=True)
    outputs = []
    for c in (plain, case):
        with torch.no_grad():
            ctx_kv = c.model.context(c.hidden, c.plan.doc_start)
            embeds = c.head.embed(c.plan.labels)
            outputs.append(c.model(embeds, ctx_kv, c.plan.ctx_start, c.plan.ctx_end))
    torch.testing.assert_close(outputs[1], outputs[0])
    assert all(grad.isnan().all() for grad in case.grads().values())


def test_sublayer_hook_is_called_on_storage_too():
    seen = []
    case = Case(on_storage=True)
    for layer in case.model.layers:

        def hook(name, function, x, layer=layer):
            seen.append(name)
            return type(layer).sublayer(layer, name, function, x)

        layer.sublayer = hook
    case.batch()
    assert seen == ["attention", "mlp"] * 3


def test_parameter_names_do_not_depend_on_the_storage():
    plain, case = Case(on_storage=False), Case(on_storage=True)
    assert list(plain.model.state_dict()) == list(case.model.state_dict())
    assert all(isinstance(p, nn.Parameter) for p in case.model.parameters())


@pytest.mark.parametrize(
    "train",
    [{}, {"grad_accum": 3, "anchor_group": 16}, {"kl_weight": 0.3, "noise_std": 0.05}],
    ids=["plain", "accumulated groups", "kl, noise"],
)
def test_whole_steps_on_storage_learn_as_plain_ones(train):
    split = "noise_std" not in train  # noise is drawn for one layout or the other
    train = {"steps": 4} | train
    plain, plain_words = run(build_loop("cpu", torch.float32, flat=False, **train))
    flat, words = run(build_loop("cpu", torch.float32, flat=True, split_fc=split, **train))
    losses = [[summarise(w, SPEC.block_size)["loss"] for w in run] for run in (words, plain_words)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert flat.keys() == plain.keys()


def test_storage_without_its_own_zeroing_repeats_bit_for_bit():
    runs = [run(build_loop("cpu", torch.float32, flat=True, steps=3)) for _ in range(2)]
    assert runs[0][1] == runs[1][1]
    assert all(torch.equal(runs[0][0][name], runs[1][0][name]) for name in runs[0][0])


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 7, 8])
def test_gradient_in_blocks_of_rows(rows: int, split: bool) -> None:
    """Of integers, so that no order of additions rounds: overwritten, then added to."""
    generator = torch.Generator().manual_seed(rows)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=generator).float()

    weight = nn.Parameter(integers(rows, 15))
    FlatParams([nn.Parameter(integers(3)), weight])
    weight.main_grad.fill_(torch.nan)
    blocks: list[Tensor] = []
    finished: list[Tensor] = []

    def made(block: Tensor) -> None:
        blocks.append(block)
        finished.append(block.clone())
        if use == 0:  # those behind it are yet to be made
            left = weight.main_grad[sum(len(b) for b in blocks) :]
            assert left.isnan().all()

    request_blocks(weight, RowBlocks(4, made))
    wanted = torch.zeros(rows, 15)
    use = 0
    for use in range(2):
        x, grad_out = integers(3, 6, 5), integers(6, rows)
        flat = x.transpose(0, 1).reshape(6, 15)
        wanted += grad_out.T @ flat
        out = split_linear(x, weight) if split else linear(flat, weight)
        out.backward(grad_out)
        assert len(blocks) == len(wanted.chunk(4)) and all(b.is_contiguous() for b in blocks)
        assert torch.equal(torch.cat(finished), wanted), use
        assert torch.equal(weight.main_grad, wanted)
        assert blocks[0].data_ptr() == weight.main_grad.data_ptr()
        blocks.clear(), finished.clear()
