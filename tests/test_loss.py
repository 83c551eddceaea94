"""The objective: its value, groups of anchors, metrics that change nothing."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from drafter_cases import (
    block_outputs,
    make_plan,
    positions,
    random_examples,
    random_head,
    random_hidden,
    random_model,
    small_spec,
)

from dflash_ext.config import DataConfig, TrainConfig
from dflash_ext.data.packing import BatchPlanner
from dflash_ext.drafter import loss as loss_module
from dflash_ext.drafter.context import TrainContext
from dflash_ext.drafter.loss import (
    Objective,
    add_metrics,
    dead_row_share,
    equal_chunk_rows,
    forward_backward,
    live_chunks,
    live_grain,
    plan_group,
    train_batch,
)
from dflash_ext.ops.draft_loss import default_chunk_rows
from dflash_ext.ops.metric_add import WORD, new_accumulator

pytestmark = pytest.mark.usefixtures("nan_poison")


class Case:
    """A drafter, a head, a plan and captured states."""

    def __init__(self, *, lengths=(21, 13, 17), dtype=torch.float32, head=None, **train) -> None:
        self.spec = small_spec()
        self.train = TrainConfig(**({"max_anchors": 12, "gamma": 3.0, "kl_weight": 0.0} | train))
        self.model = random_model(self.spec, dtype=dtype)
        self.head = random_head(dtype=dtype) if head is None else head
        self.plan = make_plan(random_examples(lengths), self.spec, max_anchors=12)
        self.hidden = random_hidden(self.plan, self.spec).to(dtype)
        self.last = torch.randn(self.plan.doc_start.shape[0], 32).to(dtype)
        self.objective = Objective(self.train, self.spec.layout)

    def loss(self, **arguments) -> torch.Tensor:
        ctx_kv = self.model.context(self.hidden, positions(self.plan))
        return self.objective(
            self.model, self.head, ctx_kv, self.plan, last_hidden=self.last, **arguments
        )

    def train_batch(self, group=None, acc=None, measured=True):
        """(loss, gradients) of one batch, which is counted in the accumulator."""
        self.model.zero_grad()
        stats = forward_backward(
            self.model,
            self.head,
            self.plan,
            self.hidden,
            objective=self.objective,
            last_hidden=self.last,
            group=group,
        )
        if acc is not None:
            add_metrics(acc, stats, measured)
        loss = torch.stack([part.loss for part in stats]).sum()
        return loss, {n: p.grad.clone() for n, p in self.model.named_parameters()}


def by_hand(case: Case) -> torch.Tensor:
    """The documented formula over all slots, in fp64 and with full logits."""
    plan, train, head = case.plan, case.train, case.head
    states = block_outputs(case.model, head, plan, case.hidden).double()
    table = head.head_weight.double()
    logits = states @ table.T * head.logit_scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    log_q = torch.log_softmax(logits, -1)
    ce = -log_q.gather(-1, plan.labels[..., None])[..., 0]
    log_p = torch.log_softmax(case.last.double() @ table.T, -1)[plan.teacher_index]
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    entropy = -(log_q.exp() * log_q).sum(-1)
    cap = torch.where(logits.argmax(-1) == plan.labels, entropy, 0.0)
    terms = train.ce_weight * ce + train.kl_weight * kl + train.cap_lambda * cap
    return (plan.weights.double() * terms).sum() / plan.weight_sum.double()


@pytest.mark.parametrize(
    "train",
    [{}, {"kl_weight": 0.7, "ce_weight": 0.5}, {"cap_lambda": 2.0}, {"loss_chunk_rows": 8}],
    ids=["ce", "kl", "cap", "chunks"],
)
def test_loss_and_gradient_follow_the_formula(train):
    case = Case(**train)
    want = by_hand(case)
    want.backward()
    want_grads = {n: p.grad.clone() for n, p in case.model.named_parameters()}
    loss, grads = case.train_batch()
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-6, atol=0)
    for name, grad in grads.items():
        assert (grad - want_grads[name]).norm() <= 1e-5 * want_grads[name].norm(), name


def test_scale_and_softcap_of_the_head_are_used():
    case = Case(head=random_head(logit_scale=0.5, softcap=4.0, embed_scale=2.0))
    torch.testing.assert_close(case.loss().double(), by_hand(case), rtol=1e-6, atol=0)


def test_gradient_of_the_weights_agrees_with_differences():
    """fp64, so that the check sees the whole path: context, fc, layers, head."""
    case = Case(dtype=torch.float64)
    _, grads = case.train_batch()
    for name in ("fc.weight", "layers.0.self_attn.k_proj.weight", "layers.1.mlp.up_proj.weight"):
        parameter = case.model.get_parameter(name)
        direction = torch.randn_like(parameter)
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter += step * direction
                values.append(case.loss())
                parameter -= step * direction
        slope = (values[0] - values[1]) / 2e-5
        torch.testing.assert_close((grads[name] * direction).sum(), slope, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("group", [1, 5, 11, 12, 100])
def test_groups_of_anchors_add_up_to_the_batch(group):
    case = Case(kl_weight=0.3, cap_lambda=0.5)
    want, want_grads = case.train_batch()
    found, grads = case.train_batch(group=group)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=0)
    for name, grad in grads.items():
        assert (grad - want_grads[name]).norm() <= 1e-5 * want_grads[name].norm(), name


def test_gradients_of_batches_accumulate():
    case = Case()
    _, once = case.train_batch(group=5)
    train_batch(case.model, case.head, case.plan, case.hidden, objective=case.objective, group=5)
    for name, parameter in case.model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name])


def test_groups_of_a_bf16_context_are_added_up_in_fp32():
    """Each group adds 3/4; a bf16 sum would stay at 128."""
    spec = small_spec(block_size=3)
    hidden = torch.randn(1, 64, dtype=torch.bfloat16)
    layer = TrainContext(random_model(spec, dtype=torch.bfloat16), hidden, torch.zeros(1)).layers[0]
    assert layer.v.dtype == torch.bfloat16
    zeros = torch.zeros(1, 3, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(400):
        out = layer.attend(zeros, zeros, zeros, torch.tensor([0]), torch.tensor([1]), scale=0.0)
        out.sum().backward()
    assert layer.dv.unique().tolist() == [300.0]
    assert layer.dk.count_nonzero() == 0


def test_bf16_gradients_are_near_those_of_fp32():
    case, exact = Case(dtype=torch.bfloat16), Case()
    exact.model.load_state_dict(case.model.state_dict())
    exact.hidden = case.hidden.float()
    tables = {n: getattr(case.head, n).float() for n in ("embed_weight", "head_weight")}
    exact.head = dataclasses.replace(case.head, **tables)
    _, want = exact.train_batch()
    for group in (None, 5):
        _, grads = case.train_batch(group=group)
        for name, grad in grads.items():
            assert grad.dtype == torch.bfloat16
            assert (grad.float() - want[name]).norm() < 0.05 * want[name].norm(), name


@pytest.mark.parametrize("group", [None, 5])
def test_metrics_change_no_bit_of_loss_and_gradient(group):
    case = Case(kl_weight=0.3)
    want, want_grads = case.train_batch(group=group)
    for measured in (True, False):
        acc = new_accumulator()
        found, grads = case.train_batch(group=group, acc=acc, measured=measured)
        assert acc[WORD["batches"]] == 1
        assert acc[WORD["measured_batches"]] == int(measured)
        assert torch.equal(found, want)
        assert all(torch.equal(grads[name], want_grads[name]) for name in grads)


def test_groups_count_as_one_batch():
    case = Case()
    whole, grouped = new_accumulator(), new_accumulator()
    case.train_batch(acc=whole)
    case.train_batch(group=5, acc=grouped)
    counts = ["batches", "measured_batches", "slots", "top1", "top4", "top8", "blocks", "streak4"]
    assert whole[WORD["slots"]] == case.plan.n_rows
    assert [int(grouped[WORD[n]]) for n in counts] == [int(whole[WORD[n]]) for n in counts]
    ratio = grouped[WORD["loss_sum"]] / whole[WORD["loss_sum"]]
    assert abs(ratio.item() - 1) < 1e-5


def test_objective_of_a_group_is_its_share_of_the_loss():
    case = Case()
    parts = [case.loss(group=slice(a, a + 4)) for a in range(0, 12, 4)]
    torch.testing.assert_close(sum(parts), case.loss(), rtol=1e-6, atol=0)
    acc = new_accumulator()
    assert torch.equal(case.loss(acc=acc, compute_metrics=False), case.loss())
    assert acc[WORD["measured_batches"]] == 0


def test_plan_group_has_the_rows_of_its_anchors():
    plan = Case(lengths=(21, 9)).plan
    slots = plan.labels.shape[1]
    found = []
    for start in range(0, 12, 5):
        stop = min(start + 5, 12)
        part = plan_group(plan, start, stop)
        assert part.rows.shape[0] == 128
        assert torch.equal(part.rows[part.n_rows :], torch.zeros_like(part.rows[part.n_rows :]))
        assert torch.equal(part.labels, plan.labels[start:stop])
        assert torch.equal(part.ctx_end, plan.ctx_end[start:stop])
        assert torch.equal(part.weight_sum, plan.weight_sum)
        found.append(part.rows[: part.n_rows] + start * slots)
    assert torch.equal(torch.cat(found), plan.rows[: plan.n_rows])


@pytest.mark.parametrize("group", [None, 5])
@pytest.mark.parametrize("chunk_rows", [1, 4, 2048])
def test_rows_of_dead_chunks_are_left_out_and_change_no_bit(monkeypatch, group, chunk_rows):
    # What the last layer leaves out changes how its products are summed: test_live_rows.
    monkeypatch.setattr(loss_module, "live_rows", lambda *_: None)
    case = Case(lengths=(21, 9), loss_chunk_rows=chunk_rows, kl_weight=0.3)
    chunks = live_chunks(case.plan, group, chunk_rows)
    live = [int(plan_group(case.plan, i, min(i + (group or 12), 12)).n_rows)
            for i in range(0, 12, group or 12)]  # fmt: skip
    assert (chunks - 1) * chunk_rows < max(live) <= chunks * chunk_rows
    passed, run = [], loss_module.draft_loss_stats

    def spy(*arguments, **options):
        passed.append(arguments[5].shape[0])
        return run(*arguments, **options)

    monkeypatch.setattr(loss_module, "draft_loss_stats", spy)
    results = []
    for bound in (None, chunks):
        case.model.zero_grad()
        stats = forward_backward(
            case.model, case.head, case.plan, case.hidden,
            objective=case.objective, last_hidden=case.last, group=group, chunks=bound,
        )  # fmt: skip
        results.append([s.loss for s in stats] + [p.grad.clone() for p in case.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    whole, bounded = passed[: len(live)], passed[len(live) :]
    assert whole == [128] * len(live)
    assert bounded == [min(128, chunks * chunk_rows)] * len(live)
    wanted = 1 - sum(live) / sum(bounded)
    assert dead_row_share([case.plan], group, chunk_rows) == pytest.approx(wanted)
    with pytest.raises(RuntimeError, match="n_rows: found"):  # a bound that is too low is no loss
        forward_backward(
            case.model, case.head, case.plan, case.hidden,
            objective=Objective(TrainConfig(loss_chunk_rows=1, kl_weight=0.3), case.spec.layout),
            last_hidden=case.last, chunks=int(case.plan.n_rows) - 1,
        )  # fmt: skip


def test_rows_are_left_out_in_units_shorter_than_long_chunks(monkeypatch):
    monkeypatch.setattr(loss_module, "LIVE_GRAIN", 4)
    assert [live_grain(TrainConfig(loss_chunk_rows=rows)) for rows in (None, 3, 4096)] == [4, 3, 4]
    case = Case(lengths=(21, 9))
    chunks = live_chunks(case.plan, None, 4)
    passed, run = [], loss_module.draft_loss_stats

    def spy(*arguments, **options):
        passed.append((arguments[5].shape[0], options["chunk_rows"]))
        return run(*arguments, **options)

    monkeypatch.setattr(loss_module, "draft_loss_stats", spy)
    forward_backward(
        case.model, case.head, case.plan, case.hidden, objective=case.objective, chunks=chunks
    )
    assert passed == [(4 * chunks, None)] and int(case.plan.n_rows) <= 4 * chunks < 128


# The heads of Qwen3.5-27B, Qwen3-8B and SmolLM2 in bf16, one in fp32, and an endless one.
@pytest.mark.parametrize(
    ("vocab", "itemsize", "plain", "with_teacher"),
    [
        (248_320, 2, 4096, 2048),
        (151_936, 2, 4096, 2048),
        (49_152, 2, 4096, 2048),
        (248_320, 4, 2048, 1024),
        (10**8, 2, 128, 128),
    ],
)
def test_logits_in_memory_are_bounded(vocab, itemsize, plain, with_teacher):
    def rows(device, teacher):
        return default_chunk_rows(device, vocab, itemsize, teacher=teacher)

    assert (rows("cuda", False), rows("cuda", True)) == (plain, with_teacher)
    assert rows("cpu", False) == rows("cpu", True) == 2048


@pytest.mark.parametrize(
    ("rows", "limit", "want"),
    [(7680, 4096, 3840), (7680, 2048, 1920), (7680, 3712, 2560), (100, 4096, 128),
     (300, 100, 100), (0, 4096, 1), (4097, 4096, 2176)],
)  # fmt: skip
def test_chunks_are_equal(rows, limit, want):
    assert equal_chunk_rows(rows, limit) == want


def test_a_plan_without_rows_keeps_one_chunk():
    plan = dataclasses.replace(Case().plan, weights=torch.zeros(12, 4))
    assert live_chunks(plan, None, 2048) == live_chunks(plan, 5, 2) == 1


def test_a_batch_without_supervision_gives_zero_and_finite_gradients():
    case = Case()
    case.plan = dataclasses.replace(
        case.plan,
        weights=torch.zeros_like(case.plan.weights),
        rows=torch.zeros_like(case.plan.rows),
        n_rows=torch.zeros_like(case.plan.n_rows),
    )
    loss, grads = case.train_batch()
    assert loss == 0
    assert all((grad == 0).all() for grad in grads.values())


def test_batches_of_a_step_add_up_whatever_the_split():
    """Two small batches of one step give the gradient of one large batch over their sum."""
    spec = small_spec()
    examples = random_examples((30, 30))
    train = TrainConfig(max_anchors=64, gamma=3.0, grad_accum=2)
    planner = BatchPlanner(examples, DataConfig(token_budget=30), train, spec.layout, 1)
    plans = planner.step_plans(0)
    model, head, objective = random_model(spec), random_head(), Objective(train, spec.layout)
    hidden = {d: torch.randn(30, 64) for d in (0, 1)}
    for plan in plans:
        train_batch(model, head, plan, hidden[plan.doc_ids[0]], objective=objective)
    split = {n: p.grad.clone() for n, p in model.named_parameters()}

    both = BatchPlanner(examples, DataConfig(token_budget=60), train, spec.layout, 1).batch(0)
    model.zero_grad()
    packed = torch.cat([hidden[d] for d in both.doc_ids])
    train_batch(model, head, both, packed, objective=objective)
    for name, parameter in model.named_parameters():
        assert (parameter.grad - split[name]).norm() <= 1e-5 * split[name].norm(), name


def test_training_overfits_a_few_documents():
    case = Case(lengths=(21, 13))
    case.model.init_weights(0)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss, _ = case.train_batch()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]
    ids = case.spec.layout.input_ids(case.plan.labels[:, 0], case.spec.mask_token_id)
    ctx_kv = case.model.context(case.hidden, positions(case.plan))
    with torch.no_grad():
        states = case.model(case.head.embed(ids), ctx_kv, case.plan.ctx_start, case.plan.ctx_end)
    hits = F.linear(states, case.head.head_weight).argmax(-1) == case.plan.labels
    assert hits[case.plan.weights > 0].float().mean() > 0.95
