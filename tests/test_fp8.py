"""The target's linear layers in FP8: numbers, fused modules, and what a run says of it."""

import json
from pathlib import Path

import pytest
import torch
from tiny_run import TinyRun
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from dflash_ext.config import Config, UserError
from dflash_ext.fp8 import (
    E4M3,
    Fp8Linear,
    check_weights,
    fp8_linear,
    quantise,
    quantise_rows,
    scaled_product,
)
from dflash_ext.target import Target, load_target
from dflash_ext.target_fast import fuse_target

has_fp8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 16), (7, 3, 33), (0, 16)])
def test_rows_keep_their_own_scale(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=dtype)
    sizes = torch.logspace(-20, 20, x[..., :1].numel(), dtype=dtype)
    x = x * sizes.view(x[..., :1].shape)
    rows, scale = quantise_rows(x)
    assert (rows.dtype, rows.shape, scale.shape) == (E4M3, x.shape, (*shape[:-1], 1))
    back = rows.float() * scale
    largest = x.float().abs().amax(-1, keepdim=True) if x.numel() else scale
    # Half a step of 3 bits of fraction, and of the smallest normal number for tiny values.
    assert ((back - x.float()).abs() <= x.float().abs() / 15 + largest * 2**-16).all()
    assert rows.float().isfinite().all()


def test_rows_of_zeros_and_outliers() -> None:
    x = torch.zeros(3, 16)
    x[1, 5], x[2] = 1e4, 1.0
    rows, scale = quantise_rows(x)
    assert torch.equal(rows.float() * scale, x)
    for bad in (torch.nan, torch.inf):
        rows, scale = quantise_rows(torch.full((1, 16), bad))
        assert not (rows.float() * scale).isfinite().any()  # a broken state stays one


def test_a_linear_layer_within_the_error_of_its_format() -> None:
    linear = nn.Linear(256, 128, bias=False).requires_grad_(False)
    sizes, lengths = torch.logspace(-3, 3, 128), torch.logspace(-2, 2, 7)
    linear.weight.mul_(sizes[:, None])
    x = torch.randn(5, 7, 256) * lengths[:, None]
    layer = Fp8Linear(linear)
    got, want = (m(x) / lengths[:, None] / sizes for m in (layer, linear))
    assert got.shape == want.shape and torch.isfinite(got).all()
    # Two factors, each off by 2^-4 at most: every row counts alike, whatever its size.
    assert 0.02 < relative(got, want) < 0.05
    assert not list(p for p in layer.parameters() if p.requires_grad)
    assert layer.state_dict()["weight"].dtype == E4M3


@pytest.mark.parametrize("merged", [False, True])
def test_the_product_of_torch_is_that_of_the_same_numbers(merged: bool) -> None:
    x = torch.randn(9, 64).bfloat16()
    weight, scale = quantise_rows(torch.randn(48, 64))
    if merged:  # as the weight of fused projections lies in memory
        weight = torch.cat([weight[:16], weight[16:]]).as_strided((48, 64), (64, 1))
    rows, row_scale = quantise_rows(x)
    want = fp8_linear(x, weight, scale[:, 0])
    assert relative(scaled_product(rows, row_scale, weight, scale[:, 0]), want) < 5e-3


@pytest.mark.skipif(not has_fp8, reason="no GPU with FP8")
@pytest.mark.parametrize("rows", [1, 77, 1024])
def test_the_product_on_a_gpu_is_that_of_the_same_numbers(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 512, generator=generator).bfloat16()
    weight, scale = quantise_rows(torch.randn(304, 512, generator=generator))
    want = fp8_linear(x, weight, scale[:, 0])
    got = fp8_linear(x.cuda(), weight.cuda(), scale[:, 0].cuda())
    assert relative(got.cpu(), want) < 5e-3


def test_what_is_replaced() -> None:
    layers = nn.ModuleDict(
        {
            "plain": nn.Linear(32, 16, bias=False),
            "bias": nn.Linear(32, 16),
            "odd": nn.Linear(32, 24, bias=False),
            "deep": nn.Sequential(nn.Linear(16, 48, bias=False)),
        }
    )
    assert quantise(layers) == 2
    kinds = [type(layers[name]) for name in ("plain", "bias", "odd")] + [type(layers["deep"][0])]
    assert kinds == [Fp8Linear, nn.Linear, nn.Linear, Fp8Linear]


def states(target: Target) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    ids = torch.arange(40).view(2, 20)
    target.forward_capture(ids, [1, 4], lambda index, h: found.append(h), need_last=False)
    return found


def test_fused_modules_run_fp8_projections(tiny_target_dir: Path) -> None:
    exact, plain, fused = (
        load_target(str(tiny_target_dir), dtype="float32", device="cpu") for _ in range(3)
    )
    counts = fuse_target(fused.model)
    assert counts["MLPs"] == 6
    assert quantise(plain.layers) == quantise(fused.layers) == 6 * 7
    for got, want, true in zip(states(fused), states(plain), states(exact), strict=True):
        # Rounding that differs in a norm can move a value to the next number of e4m3.
        assert relative(got, want) < 0.3 * relative(want, true) < 0.1
    for copied in (fused.replica(), fused.copy_to("cpu")):
        assert all(map(torch.equal, states(copied), states(fused)))


def test_a_fused_product_of_which_one_part_does_not_fit_stays_whole() -> None:
    config = Qwen3_5TextConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
        **{"linear_num_key_heads": 4, "linear_num_value_heads": 8},  # 8 rows of in_proj_a and _b
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        layer_types=["linear_attention", "full_attention"],
    )
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    ids = torch.arange(20)[None]
    want = model(ids, use_cache=False).logits
    assert fuse_target(model)["gated delta nets"] == 1
    assert quantise(model.model.layers) == 1 + 4 + 2 * 3  # of the first layer's mixer the last one
    assert 0.005 < relative(model(ids, use_cache=False).logits, want) < 0.1


def test_a_run_with_fp8_weights(
    run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--train.steps=4", "--train.kl_weight=0.3")
    assert run("fp8", *flags, "--model.weights=fp8") == 0
    facts = json.loads((tmp_path / "fp8" / "summary.json").read_text())["fp8"]
    assert facts["linears"] == 42 and 0 < facts["tokens"] <= 200
    assert all(0.005 < error < 0.15 for error in facts["relative_error"].values()), facts
    assert len(facts["relative_error"]) == 2 and 0.5 < facts["argmax_agreement"] <= 1
    assert "target   42 linear layers in FP8: captured states differ from float32's by " in (
        capsys.readouterr().out
    )
    assert run("plain", *flags) == 0
    assert json.loads((tmp_path / "plain" / "summary.json").read_text())["fp8"] is None
    losses = [
        json.loads(line)["loss"]
        for name in ("fp8", "plain")
        for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        if "loss" in line.replace("eval_", "")
    ]
    assert losses[0] != losses[2] and losses[0] == pytest.approx(losses[2], rel=0.05)


def test_gpus_without_fp8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"cuda:0": (9, 0), "cuda:1": (8, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found[device])
    cfg = Config()
    cfg.topology.targets = ["cuda:0+cuda:1"]
    check_weights(cfg)
    cfg.model.weights = "fp8"
    with pytest.raises(UserError, match=r"model\.weights: found fp8 with cuda:1 of .* 8\.0, want"):
        check_weights(cfg)
    cfg.topology.targets = ["cuda:0"]
    check_weights(cfg)
