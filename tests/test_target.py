"""The frozen target: loading, refusals, captured hidden states, replicas, mask token."""

import dataclasses
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from conftest import tiny_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5TextConfig,
    T5Config,
)

from dflash_ext.config import UserError
from dflash_ext.target import Target, load_target, load_tokenizer, target_info
from dflash_ext.target_choices import default_target_layer_ids, pick_mask_token_id

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(str(tiny_target_dir), dtype="float32", device="cpu")


def wrapped(model: PreTrainedModel) -> Target:
    return Target(model, target_info(model.config))


def id_of(token: str) -> int:
    return tiny_tokenizer().convert_tokens_to_ids(token)


def ids_of(shape: tuple[int, int], vocab: int = 256) -> torch.Tensor:
    return torch.randint(0, vocab, shape)


def capture(target: Target, ids: torch.Tensor, layers: list[int], need_last: bool):
    got: list[tuple[int, torch.Tensor]] = []
    last = target.forward_capture(ids, layers, lambda i, h: got.append((i, h)), need_last)
    assert [i for i, _ in got] == list(range(len(layers)))
    return [h for _, h in got], last


def count_layer_calls(target: Target) -> list[int]:
    calls: list[int] = []
    for i, layer in enumerate(target.layers):
        layer.register_forward_pre_hook(lambda module, args, i=i: calls.append(i))
    return calls


# Loading


def test_info_and_weights(target: Target) -> None:
    info = target.info
    assert (info.hidden_size, info.num_layers, info.vocab_size) == (64, 6, 264)
    assert (info.num_attention_heads, info.num_key_value_heads, info.head_dim) == (4, 2, 16)
    assert (info.intermediate_size, info.rope_theta) == (128, 5000.0)
    assert (info.embed_scale, info.logit_scale, info.softcap) == (1.0, 1.0, None)
    assert info.max_position_embeddings == 512 and not info.tied
    assert info.eos_token_ids == (id_of("<|im_end|>"),)
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.model.training
    assert target.head_weight is target.model.lm_head.weight
    assert target.embed_weight is target.model.model.embed_tokens.weight


def test_dtype_by_name_and_by_value(tiny_target_dir: Path) -> None:
    for dtype in ("bfloat16", torch.bfloat16):
        target = load_target(str(tiny_target_dir), dtype=dtype, device="cpu")
        assert target.dtype == torch.bfloat16 and target.device == torch.device("cpu")


def test_tied_head_is_one_tensor() -> None:
    target = wrapped(LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)))
    assert target.info.tied and target.head_weight is target.embed_weight


def test_generation_config_adds_stop_tokens(tiny_target_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_target_dir, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [258, 259]}')
    target = load_target(str(folder), dtype="float32", device="cpu")
    assert target.info.eos_token_ids == (id_of("<|im_end|>"), 258, 259)


def test_a_negative_stop_token_is_none(tiny_target_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_target_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": -1}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [-1, 258]}')
    target = load_target(str(folder), dtype="float32", device="cpu")
    assert target.info.eos_token_ids == (258,)


def test_no_weights_other_than_safetensors(tiny_target_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_target_dir, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"model\.target: cannot load the model of .*safetensors"):
        load_target(str(folder), dtype="float32", device="cpu")


def test_code_in_the_folder_is_not_run(tiny_target_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_target_dir, tmp_path / "model")
    config = (folder / "config.json").read_text().replace('"llama"', '"own_model"')
    auto_map = '{"auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}, '
    (folder / "config.json").write_text(auto_map + config.lstrip()[1:])
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match=r"model\.target: cannot load the config"):
        load_target(str(folder), dtype="float32", device="cpu")
    assert not (tmp_path / "ran").exists()


def test_folder_without_tokenizer(tiny_target_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_target_dir / name, tmp_path)
    with pytest.raises(UserError, match=r"model\.target: cannot load the tokenizer of"):
        load_tokenizer(str(tmp_path))


# Logit transforms


def test_known_transforms_are_read_and_hold() -> None:
    gemma = Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=5.0))
    granite = GraniteForCausalLM(
        GraniteConfig(**SIZES, logits_scaling=4.0, embedding_multiplier=3.0)
    )
    cohere = CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25))
    found = []
    for model in (gemma, granite, cohere):
        target = wrapped(model)
        target.check_head()
        found.append((target.info.embed_scale, target.info.logit_scale, target.info.softcap))
    assert found == [(32**0.5, 1.0, 5.0), (3.0, 0.25, None), (1.0, 0.25, None)]


@pytest.mark.parametrize("change", [{"logit_scale": 1.0}, {"softcap": None}])
def test_unknown_transform_is_refused(change: dict) -> None:
    model: PreTrainedModel
    if "softcap" in change:
        model = Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=5.0))
    else:
        model = CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25))
    target = wrapped(model)
    target.info = dataclasses.replace(target.info, **change)
    with pytest.raises(UserError, match="found an unknown logit transform"):
        target.check_head()


def test_weights_that_are_not_finite_are_refused() -> None:
    target = wrapped(LlamaForCausalLM(LlamaConfig(**SIZES)))
    target.head_weight[5, 3] = float("nan")
    with pytest.raises(UserError, match="llama: found logits that are not finite in torch.float32"):
        target.check_head()


def test_a_tensor_of_another_shape_is_named(tiny_target_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_target_dir, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(UserError, match="found shape") as error:
        load_target(str(folder), dtype="float32", device="cpu")
    assert str(error.value) == (
        f"model.target: {folder}: model.layers.0.mlp.down_proj.weight: found shape (64, 128), "
        "want (64, 96) (and 17 others)"
    )


def test_head_bias_is_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.lm_head = torch.nn.Linear(32, 96)
    with pytest.raises(UserError, match="llama: found a head bias, want none"):
        wrapped(model)


def test_encoder_decoder_is_refused() -> None:
    with pytest.raises(UserError, match=r"encoder-decoder model \(t5\), want a decoder-only"):
        target_info(T5Config())


def test_multimodal_wrapper_is_read_by_its_text_part() -> None:
    text = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8}
    info = target_info(Gemma3Config(text_config=text))
    assert (info.hidden_size, info.num_layers, info.head_dim) == (32, 3, 8)
    assert info.embed_scale == 32**0.5
    assert info.rope_theta == 1_000_000.0  # of its full-attention layers


def test_gdn_target_without_its_kernels(tmp_path: Path) -> None:
    Qwen3_5TextConfig(num_hidden_layers=4).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"flash-linear-attention is missing.*dflash-ext\[fla\]"):
        load_target(str(tmp_path), dtype="float32", device="cpu", require_fast_gdn=True)


# Capture


@pytest.mark.parametrize("layers", [[0], [1, 3], [0, 2, 4], [2, 5], []])
@pytest.mark.parametrize("need_last", [False, True])
def test_capture_is_bitwise_hugging_face(target: Target, layers: list[int], need_last: bool):
    ids = ids_of((3, 17))
    with torch.no_grad():
        want = target.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    got, last = capture(target, ids, layers, need_last)
    for layer, hidden in zip(layers, got, strict=True):
        assert torch.equal(hidden, want[layer + 1])
    assert (last is not None) == need_last
    if last is not None:
        assert torch.equal(last, want[-1])


def test_capture_stops_after_the_last_wanted_layer(target: Target) -> None:
    replica = target.replica()
    calls = count_layer_calls(replica)
    capture(replica, ids_of((1, 5)), [1, 3], need_last=False)
    assert calls == [0, 1, 2, 3]
    calls.clear()
    capture(replica, ids_of((1, 5)), [1, 3], need_last=True)
    assert calls == [0, 1, 2, 3, 4, 5]


class NoQuestions(TorchDispatchMode):
    """Refuses every operator that hands a value to the host: on a GPU it waits for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_forward_pass_asks_nothing_of_the_device(target: Target) -> None:
    ids = ids_of((2, 7))
    with NoQuestions():
        capture(target, ids, [0, 1], True)
        with pytest.raises(AssertionError), torch.no_grad():
            target.decoder(input_ids=ids, use_cache=False)  # transformers by itself does


def test_hooks_do_not_outlive_a_call(target: Target) -> None:
    def fail(index: int, hidden: torch.Tensor) -> None:
        raise RuntimeError("stop here")

    before = [len(layer._forward_hooks) for layer in target.layers]
    with pytest.raises(RuntimeError, match="stop here"):
        target.forward_capture(ids_of((1, 4)), [0, 2], fail, True)
    capture(target, ids_of((1, 4)), [0, 2], False)
    assert [len(layer._forward_hooks) for layer in target.layers] == before


def test_right_padding_changes_nothing_before_it(target: Target) -> None:
    ids = ids_of((2, 20))
    padded = torch.cat([ids, ids_of((2, 12))], dim=1)
    (short,), (long,) = capture(target, ids, [4], False)[0], capture(target, padded, [4], False)[0]
    error = (long[:, :20] - short).norm() / short.norm()
    assert error <= 1e-6


# Replicas


def test_replica_shares_parameters_but_no_modules(target: Target) -> None:
    replica = target.replica()
    ours, theirs = dict(target.model.named_parameters()), dict(replica.model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(theirs[name] is parameter for name, parameter in ours.items())
    modules = {id(module) for module in target.model.modules()}
    assert not any(id(module) in modules for module in replica.model.modules())
    assert replica.head_weight is target.head_weight and replica.info == target.info


def test_replicas_work_side_by_side(target: Target) -> None:
    inputs = [ids_of((2, 24)) for _ in range(4)]
    want = [capture(target, ids, [1, 4], True) for ids in inputs]
    wrong: list[int] = []

    def work(n: int) -> None:
        replica = target.replica()
        for _ in range(10):
            got, last = capture(replica, inputs[n], [1, 4], True)
            same = [torch.equal(a, b) for a, b in zip(got, want[n][0], strict=True)]
            if not all(same) or last is None or not torch.equal(last, want[n][1]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads) and not wrong


# Defaults


@pytest.mark.parametrize(
    ("layers", "n", "want"),
    [(36, 5, [1, 9, 17, 25, 33]), (64, 5, [1, 16, 31, 46, 61]), (30, 1, [15]), (30, 2, [1, 27])],
)
def test_default_layer_ids(layers: int, n: int, want: list[int]) -> None:
    assert default_target_layer_ids(layers, n) == want


def test_default_layer_ids_of_a_shallow_target() -> None:
    for n in (3, 10**6):
        with pytest.raises(
            UserError, match=rf"drafter\.num_layers: found {n} with a target of 4 l"
        ):
            default_target_layer_ids(4, n)


def test_an_unknown_attention_names_its_field(tiny_target_dir: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.attn_backend: cannot load the model"):
        load_target(str(tiny_target_dir), dtype="float32", device="cpu", attn_backend="flash")


def test_mask_token_of_a_known_family(target: Target) -> None:
    cases = [("qwen3", 151936, 151669), ("qwen3_moe", 151936, 151669)]
    cases += [("qwen3_5_text", 248320, 248070), ("minimax_m2", 200064, 200054)]
    for model_type, vocab, want in cases:
        info = dataclasses.replace(target.info, model_type=model_type, vocab_size=vocab)
        assert pick_mask_token_id(info, tiny_tokenizer()) == want


def test_mask_token_is_the_first_unused_special_token(target: Target) -> None:
    tokenizer = tiny_tokenizer()
    assert pick_mask_token_id(target.info, tokenizer) == id_of("<|mask|>")
    # Another template that leaves <|im_start|> free.
    tokenizer.chat_template = "{{ messages }}"
    assert pick_mask_token_id(target.info, tokenizer) == id_of("<|im_start|>")


def test_no_mask_token_left(target: Target) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "<|mask|>"
    with pytest.raises(UserError, match=r"drafter\.mask_token_id: .* no unused special token"):
        pick_mask_token_id(target.info, tokenizer)
