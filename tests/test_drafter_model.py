"""The drafter: names, context, and above all what a block may not see."""

import dataclasses

import pytest
import torch
from drafter_cases import (
    MIXES,
    block_outputs,
    make_plan,
    positions,
    random_examples,
    random_head,
    random_hidden,
    random_model,
    small_spec,
)

from dflash_ext.config import UserError
from dflash_ext.config_check import FULL, SLIDING
from dflash_ext.drafter import DFlashDraftModel
from dflash_ext.drafter.attention import rope_tables

pytestmark = pytest.mark.usefixtures("nan_poison")
ALL_MIXES = pytest.mark.parametrize("mix", MIXES)


def published_names(layers: int) -> set[str]:
    """The tensors of the published checkpoints."""
    per_layer = [f"self_attn.{n}_proj" for n in "qkvo"]
    per_layer += ["self_attn.q_norm", "self_attn.k_norm"]
    per_layer += [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    per_layer += ["input_layernorm", "post_attention_layernorm"]
    names = {f"layers.{i}.{name}.weight" for i in range(layers) for name in per_layer}
    return names | {"fc.weight", "hidden_norm.weight", "norm.weight"}


def relative(found: torch.Tensor, want: torch.Tensor) -> float:
    return ((found - want).norm() / want.norm()).item()


class Batch:
    """Three packed documents and the drafter's outputs for their blocks."""

    def __init__(self, mix: str) -> None:
        self.spec = small_spec(MIXES[mix])
        self.model, self.head = random_model(self.spec), random_head()
        self.plan = make_plan(random_examples(), self.spec, max_anchors=40)
        self.hidden = random_hidden(self.plan, self.spec)
        self.out = self.run()

    def run(self, hidden=None, **changes) -> torch.Tensor:
        plan = dataclasses.replace(self.plan, **changes)
        hidden = self.hidden if hidden is None else hidden
        with torch.no_grad():
            return block_outputs(self.model, self.head, plan, hidden)

    @property
    def real(self) -> list[int]:
        """Anchors that are no padding."""
        return torch.nonzero(self.plan.ctx_end < self.plan.doc_start.shape[0])[:, 0].tolist()


def test_state_dict_has_the_published_names_and_nothing_else():
    state = DFlashDraftModel(small_spec((FULL,) * 5)).state_dict()
    assert len(state) == 58
    assert set(state) == published_names(5)
    assert state["fc.weight"].shape == (32, 64)
    assert state["layers.4.self_attn.q_norm.weight"].shape == (8,)
    assert state["layers.0.self_attn.o_proj.weight"].shape == (32, 48)


@ALL_MIXES
def test_hidden_states_from_the_anchor_on_are_invisible(mix):
    batch = Batch(mix)
    for a in batch.real:
        anchor = int(batch.plan.ctx_end[a])
        changed = batch.hidden.clone()
        changed[anchor:] = torch.randn_like(changed[anchor:]) * 10
        assert torch.equal(batch.run(changed)[a], batch.out[a])


@ALL_MIXES
def test_hidden_state_just_before_the_anchor_is_visible(mix):
    batch = Batch(mix)
    for a in batch.real:
        changed = batch.hidden.clone()
        changed[int(batch.plan.ctx_end[a]) - 1] += 1.0
        difference = (batch.run(changed)[a] - batch.out[a]).abs().amax(-1)
        assert (difference > 1e-4).all()


@ALL_MIXES
def test_other_documents_are_invisible(mix):
    batch = Batch(mix)
    for a in batch.real:
        start, anchor = int(batch.plan.ctx_start[a]), int(batch.plan.ctx_end[a])
        changed = torch.randn_like(batch.hidden)
        changed[start:anchor] = batch.hidden[start:anchor]
        assert torch.equal(batch.run(changed)[a], batch.out[a])


@ALL_MIXES
def test_no_gradient_reaches_invisible_hidden_states(mix):
    batch = Batch(mix)
    for a in batch.real[::5]:
        hidden = batch.hidden.clone().requires_grad_()
        block_outputs(batch.model, batch.head, batch.plan, hidden)[a].square().sum().backward()
        start, anchor = int(batch.plan.ctx_start[a]), int(batch.plan.ctx_end[a])
        assert hidden.grad is not None
        assert hidden.grad[:start].abs().sum() == 0
        assert hidden.grad[anchor:].abs().sum() == 0
        assert hidden.grad[anchor - 1].abs().sum() > 0


@ALL_MIXES
def test_tokens_after_the_anchor_are_invisible_and_the_anchor_is_not(mix):
    batch = Batch(mix)
    changed = batch.plan.labels.clone()
    changed[:, 1:] = (changed[:, 1:] + 17) % 90
    assert torch.equal(batch.run(labels=changed), batch.out)
    changed = batch.plan.labels.clone()
    changed[:, 0] = (changed[:, 0] + 17) % 90
    assert ((batch.run(labels=changed) - batch.out).abs().amax(-1) > 1e-4).all()


@ALL_MIXES
def test_replanned_text_shows_a_block_only_its_past(mix):
    """The same through the planner: a document with another token after the anchor."""
    batch = Batch(mix)
    examples = random_examples()
    for a in batch.real[::3]:
        start, anchor = int(batch.plan.ctx_start[a]), int(batch.plan.ctx_end[a])
        document = batch.plan.doc_ids[[begin for begin, _ in batch.plan.doc_ranges].index(start)]
        for offset, seen in ((0, True), (1, False), (3, False)):
            edited = [dataclasses.replace(e, input_ids=e.input_ids.copy()) for e in examples]
            ids = edited[document].input_ids
            if anchor - start + offset >= len(ids):
                continue
            ids[anchor - start + offset] = 3 + (ids[anchor - start + offset] + 5) % 90
            plan = make_plan(edited, batch.spec, max_anchors=40)
            assert torch.equal(plan.ctx_end, batch.plan.ctx_end)
            with torch.no_grad():
                out = block_outputs(batch.model, batch.head, plan, batch.hidden)
            assert torch.equal(out[a], batch.out[a]) is not seen


@ALL_MIXES
def test_blocks_do_not_see_each_other(mix):
    """Anchors next to each other, so that the blocks' positions overlap; one of them twice."""
    spec = small_spec(MIXES[mix])
    model, head = random_model(spec), random_head()
    hidden = torch.randn(20, 64)
    ends = torch.tensor([9, 9, 10, 11, 12, 14, 20])
    starts = torch.zeros_like(ends)
    embeds = head.embed(torch.randint(90, (len(ends), spec.block_size)))
    with torch.no_grad():
        ctx_kv = model.context(hidden, torch.arange(20))
        before = model(embeds, ctx_kv, starts, ends)
        for b in range(len(ends)):
            changed = embeds.clone()
            changed[b] += torch.randn_like(changed[b])
            after = model(changed, ctx_kv, starts, ends)
            others = torch.arange(len(ends)) != b
            assert torch.equal(after[others], before[others])
            assert not torch.equal(after[b], before[b])


@ALL_MIXES
def test_packed_documents_agree_with_single_ones(mix):
    batch = Batch(mix)
    for start, end in batch.plan.doc_ranges:
        inside = (batch.plan.ctx_start == start) & (batch.plan.ctx_end < end)
        ids = batch.spec.layout.input_ids(batch.plan.labels[inside, 0], batch.spec.mask_token_id)
        ends = batch.plan.ctx_end[inside] - start
        with torch.no_grad():
            ctx_kv = batch.model.context(batch.hidden[start:end], torch.arange(end - start))
            alone = batch.model(batch.head.embed(ids), ctx_kv, torch.zeros_like(ends), ends)
        assert len(ends) > 0
        assert relative(batch.out[inside], alone) < 1e-5


def one_layer(layer_type: str, **changes):
    spec = small_spec((layer_type,), **changes)
    model, hidden = random_model(spec), torch.randn(20, 64)
    embeds = torch.randn(1, spec.block_size, 32)

    def run(hidden=hidden, embeds=embeds):
        with torch.no_grad():
            ctx_kv = model.context(hidden, torch.arange(20))
            return model(embeds, ctx_kv, torch.tensor([0]), torch.tensor([15]))[0]

    return spec, hidden, embeds, run


def test_sliding_window_moves_with_the_slot():
    spec, hidden, _, run = one_layer(SLIDING)
    before = run()
    for row in range(15):
        changed = hidden.clone()
        changed[row] += 1.0
        differs = (run(hidden=changed) - before).abs().amax(-1) > 0
        # Slot k has position 15 + k and sees positions > 15 + k - window, itself included.
        want = [row > 15 + k - spec.sliding_window for k in range(spec.block_size)]
        assert differs.tolist() == want


@pytest.mark.parametrize(
    ("layer_type", "causal", "sees_later"),
    [(FULL, None, True), (FULL, True, False), (SLIDING, None, False), (SLIDING, False, True)],
)
def test_in_block_mask(layer_type, causal, sees_later):
    spec, _, embeds, run = one_layer(layer_type, causal=causal)
    before = run()
    for slot in range(spec.block_size):
        changed = embeds.clone()
        changed[0, slot] += torch.randn(32)
        differs = (run(embeds=changed) - before).abs().amax(-1) > 0
        assert differs.tolist() == [k >= slot or sees_later for k in range(spec.block_size)]


def test_padding_blocks_are_finite_and_see_nothing():
    spec = small_spec()
    model, head = random_model(spec), random_head()
    plan = make_plan(random_examples((9,)), spec)
    padding = plan.ctx_end == plan.doc_start.shape[0]
    assert padding.any()
    hidden = random_hidden(plan, spec)
    out = block_outputs(model, head, plan, hidden)[padding]
    assert torch.isfinite(out).all()
    assert torch.equal(block_outputs(model, head, plan, hidden * 3)[padding], out)


def test_separate_layers_equal_concatenated_ones():
    spec = small_spec()
    model = random_model(spec)
    hidden = torch.randn(17, 64)
    split = torch.stack(hidden.split(32, dim=1))
    for pair, split_pair in zip(
        model.context(hidden, torch.arange(17)), model.context(split, torch.arange(17)), strict=True
    ):
        for want, found in zip(pair, split_pair, strict=True):
            assert relative(found, want) < 1e-5


def test_recompute_changes_no_bit():
    grads = []
    for recompute in (False, True):
        spec = small_spec()
        model, head = random_model(spec), random_head()
        model.recompute = recompute
        plan = make_plan(random_examples(), spec)
        out = block_outputs(model, head, plan, random_hidden(plan, spec))
        out.square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_shorter_block_is_the_block_with_fewer_slots():
    """Near the length limit a server drafts with what fits; causal layers cannot tell."""
    spec = small_spec((SLIDING,))
    model, embeds = random_model(spec), torch.randn(1, 4, 32)
    ctx_kv = model.context(torch.randn(9, 64), torch.arange(9))
    starts, ends = torch.tensor([0]), torch.tensor([9])
    whole = model(embeds, ctx_kv, starts, ends)
    short = model(embeds[:, :3], ctx_kv, starts, ends)
    assert relative(short, whole[:, :3]) < 1e-6


def test_positions_beyond_bf16_precision():
    """Angles are fp32: in bf16 the positions 1001 and 1002 would be one."""
    cos, sin = rope_tables(torch.tensor([1001, 1002]), 8, 10000.0, torch.bfloat16)
    exact = torch.arange(1001, 1003, dtype=torch.float64)
    torch.testing.assert_close(cos[:, 0, 0].double(), exact.cos(), atol=4e-3, rtol=0)
    torch.testing.assert_close(sin[:, 0, 0].double(), exact.sin(), atol=4e-3, rtol=0)


def test_embeddings_are_scaled():
    head = random_head(embed_scale=3.0)
    ids = torch.tensor([[4, 5]])
    torch.testing.assert_close(head.embed(ids), 3 * head.embed_weight[ids])


def test_an_empty_model_starts_as_one_that_torch_has_initialised():
    whole = DFlashDraftModel(small_spec())
    empty = DFlashDraftModel.empty(small_spec(), torch.bfloat16)
    for model in (whole, empty):
        model.init_weights(1)
    whole.to(torch.bfloat16)
    assert whole.state_dict().keys() == empty.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, empty.state_dict()[name])
    assert all(p.requires_grad for p in empty.parameters())


def test_init_weights_is_a_function_of_the_seed():
    a, b, c = (DFlashDraftModel(small_spec()) for _ in range(3))
    state = torch.get_rng_state()
    a.init_weights(1)
    b.init_weights(1)
    c.init_weights(2)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, b.state_dict()[name])
        if tensor.dim() == 2:
            assert not torch.equal(tensor, c.state_dict()[name])
            residual = "o_proj" in name or "down_proj" in name
            want = 0.02 / (2 * 3) ** 0.5 if residual else 0.02
            assert abs(tensor.std().item() - want) < 0.1 * want


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_key_value_heads": 4}, "drafter.num_key_value_heads"),
        ({"head_dim": 7}, "drafter.head_dim"),
        ({"block_size": 33}, "drafter.block_size"),
        ({"mask_token_id": 96}, "drafter.mask_token_id"),
        ({"layer_types": (FULL,)}, "drafter.layer_types"),
        ({"layer_types": (FULL, "linear", FULL)}, "drafter.layer_types"),
        ({"sliding_window": None}, "drafter.sliding_window"),
        ({"layer_types": (FULL,) * 3}, "drafter.sliding_window"),
        ({"target_layer_ids": (2, 1)}, "model.target_layer_ids"),
        ({"target_layer_ids": (2, 4)}, "model.target_layer_ids"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes, field):
    with pytest.raises(UserError, match=f"^{field}: found .* want"):
        dataclasses.replace(small_spec(), **changes)


def test_positions_helper_is_document_local():
    plan = make_plan(random_examples((5, 4)), small_spec(), budget=12)
    lengths = [end - start for start, end in plan.doc_ranges]
    want = [*range(lengths[0]), *range(lengths[1]), 0, 0, 0]
    assert positions(plan).tolist() == want
