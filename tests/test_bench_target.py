"""bench_target at toy size: checked, timed, and every kernel in one group."""

import pytest
import torch
from torch import nn

from benchmarks import bench_target
from benchmarks.run import line
from benchmarks.step_parts import Record

CPU = torch.device("cpu")


def test_toy_size_is_checked_timed_and_profiled() -> None:
    rows = list(bench_target.measure(CPU))
    assert [row["peer"] for row in rows] == ["transformers"] * 2 + ["fused", "transformers"]
    assert rows[0]["note"].startswith("error of the hidden states ")
    assert rows[1]["us"] > 0
    for row in rows[2:]:
        assert list(row["seconds"]) == ["attention and GDN", "convolution", "products", "the rest"]
        assert row["seconds"]["products"] > 0
        assert row["seconds"]["the rest"] > 0
    assert all(line(row).startswith("target ") for row in rows)


def test_wrong_hidden_states_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_weight(model: nn.Module, kernels: object) -> None:
        if kernels is None:  # the side that is timed
            model.get_submodule("layers.0.mlp.down_proj").register_forward_hook(
                lambda module, inputs, output: output * 1.5
            )

    monkeypatch.setattr(bench_target, "fuse_target", break_weight)
    with pytest.raises(AssertionError, match="fused hidden states: error"):
        list(bench_target.measure(CPU))


def test_kernels_by_group() -> None:
    names = {
        "nvjet_tst_128x256": "products",
        "ampere_bf16_gemm": "products",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": "attention and GDN",
        "pytorch_flash::flash_fwd_kernel": "attention and GDN",
        "causal_conv1d_fwd_kernel": "convolution",
        "rms_norm_kernel": "the rest",
        "swiglu_kernel": "the rest",
    }
    for name, group in names.items():
        found = bench_target.groups([Record(name, "", [], 2.0)])
        assert found.pop(group) == 2.0
        assert not any(found.values())
