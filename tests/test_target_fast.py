"""The fused target against transformers' own modules: fp32, cached passes, copies, unknown ones."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm

from dflash_ext.greedy_text import greedy_tokens, weights_fingerprint
from dflash_ext.target import Target, target_info
from dflash_ext.target_fast import fuse_target, merged_weight

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
COUNTS = {
    "qwen3": {"norms": 17, "MLPs": 4, "attentions": 4, "residual additions": 4},
    "llama": {"norms": 9, "MLPs": 4, "residual additions": 4},
    "qwen3_5_text": {
        "norms": 11,
        "MLPs": 4,
        "attentions": 1,
        "gated delta nets": 3,
        "residual additions": 4,
    },
}


def make(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **GDN))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones and zeros would hide a weight that is left out
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval().requires_grad_(False).to(dtype)


def states(model: PreTrainedModel, rows: int = 3, columns: int = 70) -> Tensor:
    ids = torch.randint(0, 96, (rows, columns), generator=torch.Generator().manual_seed(1))
    out = model(ids, output_hidden_states=True, use_cache=False)
    return torch.stack(out.hidden_states)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("kind", list(COUNTS))
@pytest.mark.parametrize("columns", [1, 70])
def test_hidden_states_are_those_of_transformers(kind: str, columns: int) -> None:
    own, fused = make(kind), make(kind)
    assert fuse_target(fused) == COUNTS[kind]
    want, got = states(own, columns=columns), states(fused, columns=columns)
    assert error(got, want) < 2e-6


@pytest.mark.parametrize("kind", list(COUNTS))
def test_bf16_error_is_at_most_that_of_transformers(kind: str) -> None:
    wide = states(make(kind, torch.bfloat16).double())
    own, fused = make(kind, torch.bfloat16), make(kind, torch.bfloat16)
    fuse_target(fused)
    assert error(states(fused), wide) <= 2 * error(states(own), wide)


@pytest.mark.parametrize("kind", list(COUNTS))
def test_every_kind_of_module_alone(kind: str) -> None:
    own, fused = make(kind), make(kind)
    fuse_target(fused)
    names = {name for name, module in fused.named_modules() if "Fused" in type(module).__name__}
    assert len(names) == sum(COUNTS[kind].values())
    x = torch.randn(2, 9, 32)
    for name in names:
        mine, theirs = fused.get_submodule(name), own.get_submodule(name)
        if name.endswith(("norm", "mlp")):
            inputs = torch.randn(2, 9, theirs.weight.shape[0]) if name.endswith("norm") else x
            assert error(mine(inputs), theirs(inputs)) < 2e-6
        elif name.endswith("linear_attn"):
            assert error(mine(x), theirs(x)) < 2e-6


@pytest.mark.parametrize("kind", list(COUNTS))
def test_cached_generation_is_unchanged(kind: str) -> None:
    own, fused = make(kind), make(kind)
    fuse_target(fused)
    prompt = [5, 9, 3, 77, 20]
    assert list(greedy_tokens(fused, prompt, 12, [])) == list(greedy_tokens(own, prompt, 12, []))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5_text"])
def test_padding_mask_is_kept(kind: str) -> None:
    own, fused = make(kind), make(kind)
    fuse_target(fused)
    ids = torch.arange(24).view(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0
    want = own(ids, attention_mask=mask, use_cache=False).logits
    assert error(fused(ids, attention_mask=mask, use_cache=False).logits, want) < 2e-6


@pytest.mark.parametrize("kind", list(COUNTS))
def test_copies_and_names(kind: str) -> None:
    own, fused = make(kind), make(kind)
    fuse_target(fused)
    assert weights_fingerprint(fused) == weights_fingerprint(own)
    target = Target(fused, target_info(fused.config))
    replica = target.replica().model
    for mine, theirs in zip(replica.parameters(), fused.parameters(), strict=True):
        assert mine is theirs
    moved = copy.deepcopy(fused).to(torch.float64)
    mlp = moved.model.layers[0].mlp
    parts = [mlp.gate_proj, mlp.up_proj]
    storages = {part.weight.untyped_storage().data_ptr() for part in parts}
    assert len(storages) == 1  # merged again: no weight twice
    assert error(states(moved), states(own.double())) < 2e-6


def test_merged_weight_takes_no_memory_of_its_own() -> None:
    parts = [nn.Linear(4, rows, bias=False).requires_grad_(False) for rows in (3, 5, 1)]
    want = torch.cat([part.weight for part in parts])
    whole = merged_weight(parts)
    assert torch.equal(whole, want)
    assert merged_weight(parts).data_ptr() == whole.data_ptr() == parts[0].weight.data_ptr()
    parts[1].weight.fill_(2.0)
    assert torch.equal(whole[3:8], torch.full((5, 4), 2.0))


def test_unknown_modules_stay() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=96))
    assert fuse_target(model) == {}
    config = Gemma2Config(hidden_size=32, intermediate_size=48)
    gemma = nn.ModuleList([Gemma2RMSNorm(32), Gemma2MLP(config)])  # (1 + weight); GELU
    assert fuse_target(gemma) == {"norms": 1}


class OtherRMSNorm(nn.Module):
    """A name that promises what the class does not do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight / (x.norm(dim=-1, keepdim=True) + self.eps)


def test_norm_is_recognised_by_what_it_computes() -> None:
    assert fuse_target(nn.ModuleList([OtherRMSNorm()])) == {}


def test_biased_or_special_projections_stay() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, mlp_bias=True))
    assert "MLPs" not in fuse_target(model)
