"""A target spread over devices: what lies where, and that inputs follow."""

import copy
from pathlib import Path

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig

from dflash_ext.config import UserError, from_dict, validate
from dflash_ext.config_values import coerce_devices
from dflash_ext.placement import copy_to, device_map, follow_devices, place, split_evenly
from dflash_ext.target import Target, load_target
from dflash_ext.target_fast import fuse_target

# Small hybrid and dense targets; layer sizes differ in the first one.
HYBRID = Qwen3_5TextConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    tie_word_embeddings=True,
)
META = torch.device("meta")


@pytest.mark.parametrize(
    ("sizes", "parts", "want"),
    [
        ([1, 1, 1, 1], 2, [0, 0, 1, 1]),
        ([1, 1, 1], 2, [0, 1, 1]),
        ([8, 1, 1, 1, 1], 2, [0, 1, 1, 1, 1]),
        ([1, 1, 1, 1, 8], 2, [0, 0, 0, 0, 1]),
        ([5], 3, [1]),
        ([], 2, []),
        ([0, 0], 2, [0, 0]),
    ],
)
def test_split_evenly(sizes: list[int], parts: int, want: list[int]) -> None:
    assert split_evenly(sizes, parts) == want


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_parts_are_in_order_and_even(parts: int) -> None:
    generator = torch.Generator().manual_seed(parts)
    sizes = torch.randint(50, 100, (64,), generator=generator).tolist()
    found = split_evenly(sizes, parts)
    assert found == sorted(found) and set(found) == set(range(parts))
    totals = [sum(s for s, p in zip(sizes, found, strict=True) if p == i) for i in range(parts)]
    assert max(totals) - min(totals) <= 2 * max(sizes)


def model_of(config) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_every_tensor_has_a_place(tiny_target_dir: Path) -> None:
    model = model_of(LlamaConfig.from_pretrained(tiny_target_dir))
    found = place(model, ["cuda:0", "cuda:1", "cuda:2"])
    layers = [found[f"model.layers.{i}"].index for i in range(6)]
    assert layers == sorted(layers) and set(layers) == {0, 1, 2}
    where = {name: found[name].index for name in ("model.embed_tokens", "model.norm", "lm_head")}
    assert where == {"model.embed_tokens": 0, "model.norm": 2, "lm_head": 2}
    assert found["model.rotary_emb"].index == 0
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        assert any(name.startswith(f"{module}.") for module in found), name
    assert place(model, ["cuda:3"]) == {"": torch.device("cuda:3")}
    assert device_map(model.config, ["cpu"]) is None
    assert device_map(model.config, ["cuda:0", "cuda:1", "cuda:2"]) == found  # of the config alone


def test_a_tied_head_lies_where_the_embedding_does() -> None:
    model = model_of(HYBRID)
    found = place(model, ["cuda:0", "cuda:1"])
    assert found["lm_head"] == found["model.embed_tokens"] == torch.device("cuda:0")
    assert found["model.norm"] == found["model.layers.3"] == torch.device("cuda:1")


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_inputs_follow_the_layers(tiny_target_dir: Path, kind: str) -> None:
    """With the meta device as the second one: torch refuses operators across devices."""
    config = LlamaConfig.from_pretrained(tiny_target_dir) if kind == "dense" else HYBRID
    config = copy.deepcopy(config)
    config.tie_word_embeddings = False  # nothing comes back from the meta device
    model = model_of(config)
    names = [n for n, d in place(model, ["cpu", "cuda:0"]).items() if d.type == "cuda"]
    for name in names:
        model.get_submodule(name).to(META)
    ids = torch.arange(12)[None].repeat(2, 1)
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(input_ids=ids, use_cache=False)
    follow_devices(model)
    for copied in (model, copy.deepcopy(model)):  # as a replica
        seen: list = []
        for layer in copied.model.layers:
            layer.register_forward_hook(lambda m, args, out, seen=seen: seen.append(out))
        out = copied(input_ids=ids, use_cache=False).logits
        assert out.device == copied.lm_head.weight.device
        first = sum(f"model.layers.{i}" not in names for i in range(len(seen)))
        states = [s[0] if isinstance(s, tuple) else s for s in seen]
        assert [s.device.type for s in states] == ["cpu"] * first + ["meta"] * (len(seen) - first)
        assert 0 < first < len(seen)


def test_a_spread_target_is_fused_as_one_on_one_device() -> None:
    """Hooks of accelerate, as loading adds them, leave nothing in front of the fused modules."""
    plain, hooked = model_of(HYBRID), model_of(HYBRID)
    for module in hooked.modules():
        add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))
    follow_devices(hooked)
    assert fuse_target(hooked) == fuse_target(plain)
    ids = torch.arange(40).view(2, 20)
    assert torch.equal(hooked(ids).logits, plain(ids).logits)


def test_a_spread_target_on_one_kind_of_device_computes_the_same(tiny_target_dir: Path) -> None:
    one, spread = (
        load_target(str(tiny_target_dir), dtype="float32", device=device)
        for device in ("cpu", "cpu+cpu+cpu")
    )
    ids = torch.arange(40).view(2, 20)

    def states(target: Target) -> list[torch.Tensor]:
        found = []
        last = target.forward_capture(ids, [0, 3], lambda i, h: found.append(h), need_last=True)
        return [*found, last]

    want = states(one)
    assert all(map(torch.equal, want, states(spread)))
    assert not any(hasattr(m, "_hf_hook") for m in spread.model.modules())
    made = one.copy_to("cpu+cpu")
    assert all(map(torch.equal, want, states(made)))
    assert all(map(torch.equal, want, states(made.copy_to("cpu").replica())))
    pointers = [{p.data_ptr() for p in t.model.parameters()} for t in (one, made)]
    assert not pointers[0] & pointers[1]


def test_copies_keep_ties_and_take_no_gradient() -> None:
    model = model_of(HYBRID)
    made = copy_to(model, "cpu")
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert made.lm_head.weight is not model.lm_head.weight
    assert not any(p.requires_grad for p in made.parameters())
    assert made.state_dict().keys() == model.state_dict().keys()


def test_entries_of_a_topology() -> None:
    assert coerce_devices(["0+1", "cuda:2 + cuda:3", 4, "cpu"]) == [
        *("cuda:0+cuda:1", "cuda:2+cuda:3", "cuda:4", "cpu"),
    ]
    assert coerce_devices("[0+1, 2]") == ["cuda:0+cuda:1", "cuda:2"]
    for wrong in ("0+", "+", "0+tpu", "0++1", "-1"):
        with pytest.raises(ValueError):
            coerce_devices(wrong)


@pytest.mark.parametrize(
    ("topology", "data", "message"),
    [
        (
            {"targets": "cpu", "drafters": "cpu+cpu"},
            {},
            "topology.drafters: found cpu[+]cpu, want one device for each drafter",
        ),
        ({"targets": "cpu+99", "drafters": "cpu"}, {}, "topology.targets: found cuda:99, want one"),
        (
            {"targets": "cpu+cpu", "drafters": "cpu"},
            {"hidden_states": "d", "hidden_layer_ids": [1]},
            "with data.hidden_states, want one device for each target",
        ),
    ],
)
def test_what_cannot_be_spread(topology: dict, data: dict, message: str) -> None:
    cfg = from_dict(
        {"model": {"target": "t"}, "data": {"train": ["a"], **data}, "topology": topology}
    )
    with pytest.raises(UserError, match=message):
        validate(cfg)
