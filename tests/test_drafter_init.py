"""A drafter next to its target: starting weights, configured sizes, nothing seen of the future."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GemmaConfig, GemmaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dflash_ext.config import Config, DrafterConfig, UserError
from dflash_ext.config_check import FULL, SLIDING
from dflash_ext.drafter import DFlashDraftModel, DrafterSpec, FrozenHead, drafter_spec
from dflash_ext.drafter.init import PROBE_TOKENS
from dflash_ext.plan import check_drafter
from dflash_ext.target import Target, load_target

BLOCK = 4


@pytest.fixture(scope="module")
def llama(tiny_target_dir: Path) -> Target:
    return load_target(str(tiny_target_dir), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target with q/k norms and norm weights that are not 1."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 3000.0},
        initializer_range=0.2,
    )
    return saved_target(Qwen3ForCausalLM(config), tmp_path_factory.mktemp("qwen3"))


def saved_target(model, folder: Path) -> Target:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return load_target(str(folder), dtype="float32", device="cpu")


def spec_for(target: Target, ids: tuple[int, ...], **changes) -> DrafterSpec:
    cfg = Config()
    cfg.drafter = DrafterConfig(block_size=BLOCK, **changes)
    return drafter_spec(cfg, target.info, mask_token_id=5, target_layer_ids=ids)


def captured(target: Target, ids: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
    """Output of the layers for one text, [n, L*H]."""
    layers: list[Tensor] = []
    target.forward_capture(
        ids[None], layer_ids, lambda index, hidden: layers.append(hidden[0]), need_last=False
    )
    return torch.cat(layers, dim=-1)


@torch.no_grad()
def run_blocks(model: DFlashDraftModel, embeds: Tensor, hidden: Tensor, ends: Tensor) -> Tensor:
    ctx_kv = model.context(hidden, torch.arange(hidden.shape[0]))
    return model(embeds, ctx_kv, torch.zeros_like(ends), ends)


def test_from_target_continues_the_targets_own_computation(qwen3):
    """One causal layer over the states before the target's last layer is that last layer."""
    spec = dataclasses.replace(spec_for(qwen3, (0, 2), num_layers=1), causal=True)
    model = DFlashDraftModel(spec)
    model.init_from_target(qwen3)
    ids = torch.randint(64, (20,))
    states = captured(qwen3, ids, (0, 2))
    want = qwen3.decoder(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    ends = torch.tensor([3, 9, 16])
    blocks = torch.stack([states[a : a + BLOCK, -32:] for a in ends.tolist()])
    found = run_blocks(model, blocks, states, ends)
    for block, a in zip(found, ends.tolist(), strict=True):
        torch.testing.assert_close(block, want[a : a + BLOCK], rtol=1e-4, atol=1e-5)


def test_from_target_without_context_is_the_targets_stack(qwen3):
    """Several layers: a block at the start of a text is the target's last layers over it."""
    spec = dataclasses.replace(spec_for(qwen3, (1, 3), num_layers=3), causal=True)
    model = DFlashDraftModel(spec)
    model.init_from_target(qwen3)
    x = torch.randn(1, BLOCK, 32)
    want, position_ids = x, torch.arange(BLOCK)[None]
    rope = qwen3.decoder.rotary_emb(x, position_ids)
    mask = torch.full((BLOCK, BLOCK), float("-inf")).triu(1)[None, None]
    for layer in qwen3.layers[-3:]:
        want = layer(want, attention_mask=mask, position_embeddings=rope)
    want = qwen3.decoder.norm(want)
    found = run_blocks(model, x, torch.randn(5, 64), torch.tensor([0]))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_from_target_without_qk_norms_keeps_the_size_of_logits(llama):
    llama = Target(copy.deepcopy(llama.model), llama.info)
    for layer in llama.layers:
        layer.self_attn.q_proj.weight *= 3.0
        layer.self_attn.k_proj.weight *= 0.3
    model = DFlashDraftModel(spec_for(llama, (1, 3), num_layers=2))
    model.init_from_target(llama)
    # The tokens that the scale is measured on: on these it must be exact.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(llama.info.vocab_size, (PROBE_TOKENS,), generator=generator)
    states = captured(llama, ids, (3, 4))
    for i, drafter_layer in enumerate(model.layers):
        x = states[:, 64 * i : 64 * (i + 1)]
        normed = llama.layers[4 + i].input_layernorm(x)
        for name in ("q", "k"):
            want = llama.layers[4 + i].get_submodule(f"self_attn.{name}_proj")(normed)
            attention = drafter_layer.self_attn
            raw = attention.get_submodule(f"{name}_proj")(drafter_layer.input_layernorm(x))
            torch.testing.assert_close(raw, want, rtol=1e-4, atol=1e-5)
            found = attention.get_submodule(f"{name}_norm")(raw.view(PROBE_TOKENS, -1, 16))
            torch.testing.assert_close(
                found.square().mean().sqrt(), want.square().mean().sqrt(), rtol=1e-4, atol=0
            )
    values = model.layers[1].self_attn.v_proj.weight
    gain = llama.layers[5].input_layernorm.weight
    assert torch.equal(values, llama.layers[5].self_attn.v_proj.weight * gain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 8}, "drafter.num_attention_heads 8, want the target's 4"),
        ({"head_dim": 32, "intermediate_size": 64}, "head_dim 32, drafter.intermediate_size 64"),
        ({"num_layers": 7}, "drafter.num_layers: found 7"),
    ],
)
def test_from_target_names_the_sizes_that_differ(llama, changes, message):
    model = DFlashDraftModel(spec_for(llama, (1,), **({"num_layers": 1} | changes)))
    with pytest.raises(UserError, match=message):
        model.init_from_target(llama)


def test_from_target_refuses_another_form_of_layer(tmp_path):
    """Gemma's norm multiplies by 1 + weight: copying it would be silently wrong."""
    config = GemmaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    gemma = saved_target(GemmaForCausalLM(config), tmp_path)
    model = DFlashDraftModel(spec_for(gemma, (0,), num_layers=1))
    with pytest.raises(UserError, match="found a gemma target"):
        model.init_from_target(gemma)


def test_spec_takes_the_targets_sizes_unless_configured(llama):
    spec = spec_for(llama, (1, 4), num_layers=2, intermediate_size=80)
    assert (spec.hidden_size, spec.head_dim, spec.num_key_value_heads) == (64, 16, 2)
    assert (spec.intermediate_size, spec.num_target_layers, spec.rope_theta) == (80, 6, 5000.0)
    assert spec.layer_types == (FULL, FULL)
    assert spec.causal is False
    types = [SLIDING, FULL]
    mixed = spec_for(llama, (1, 4), num_layers=2, layer_types=types, sliding_window=8)
    assert mixed.causal is None
    assert [mixed.layer_causal(i) for i in range(2)] == [True, False]
    assert [mixed.layer_window(i) for i in range(2)] == [8, None]


def test_a_spec_that_could_not_be_read_back_is_refused(llama):
    cfg = Config()
    cfg.topology.drafters = ["cpu"]
    options = {"num_layers": 2, "layer_types": [SLIDING, FULL]}
    check_drafter(cfg, spec_for(llama, (1, 4), **options, sliding_window=2**40))
    with pytest.raises(UserError, match=r"config.json: sliding_window: found 1099511627777, want"):
        check_drafter(cfg, spec_for(llama, (1, 4), **options, sliding_window=2**40 + 1))


@pytest.mark.parametrize("sliding", [False, True])
def test_no_token_after_the_anchor_reaches_its_block(llama, sliding):
    """Text -> target -> drafter: a changed token moves only the blocks that may see it."""
    changes = {"layer_types": [SLIDING, FULL], "sliding_window": 6} if sliding else {}
    spec = spec_for(llama, (1, 4), num_layers=2, **changes)
    model = DFlashDraftModel(spec)
    model.init_weights(0)
    head = FrozenHead(llama.embed_weight, llama.head_weight)
    ends = torch.arange(4, 26)

    def outputs(ids: Tensor) -> Tensor:
        blocks = spec.layout.input_ids(ids[ends], spec.mask_token_id)
        return run_blocks(model, head.embed(blocks), captured(llama, ids, (1, 4)), ends)

    ids = torch.randint(256, (30,))
    before = outputs(ids)
    for changed_at in (8, 17, 25):
        changed = ids.clone()
        changed[changed_at] = (changed[changed_at] + 1) % 256
        after = outputs(changed)
        for a, was, now in zip(ends.tolist(), before, after, strict=True):
            assert torch.equal(was, now) is (a < changed_at), (a, changed_at)
