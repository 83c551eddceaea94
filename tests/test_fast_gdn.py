"""The choice of GatedDeltaNet kernels with fake packages, its check, its proof."""

import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_ext.config import UserError
from dflash_ext.fast_gdn import (
    GdnKernels,
    bind_convolution,
    check_convolution,
    disable_fla_tensor_cache,
    find_gdn_kernels,
    forget_sizes,
    gdn_modules,
    isolate_autotuner,
    prove_gdn_kernels,
)

CPU = torch.device("cpu")


def conv_first(x: Tensor, weight: Tensor, bias: None, activation: str) -> Tensor:
    assert bias is None
    assert activation == "silu"
    out = F.conv1d(x, weight[:, None], padding=weight.shape[1] - 1, groups=len(weight))
    return F.silu(out[..., : x.shape[-1]])


def conv_last(
    x: Tensor, weight: Tensor, bias: None, activation: str, backend: str
) -> tuple[Tensor, None]:
    assert backend == "triton"
    return conv_first(x.mT, weight, bias, activation).mT, None


def delta_rule() -> None:
    raise NotImplementedError


FLA = {"fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": delta_rule}}
CONV = {"causal_conv1d": {"causal_conv1d_fn": conv_first}}
FLA_CONV = {"fla.modules.causal_conv1d": {"causal_conv1d": conv_last}}
FLA_CONV_OLD = {"fla.modules.convolution": {"causal_conv1d": conv_last}}


def loader(*packages: dict) -> Callable[[str], types.SimpleNamespace]:
    modules = {name: content for package in packages for name, content in package.items()}

    def load(name: str) -> types.SimpleNamespace:
        if name not in modules:
            raise ImportError(name)
        return types.SimpleNamespace(**modules[name])

    return load


@pytest.mark.parametrize(
    ("packages", "name"),
    [
        ([FLA, CONV], "causal-conv1d"),
        ([FLA, CONV, FLA_CONV], "causal-conv1d"),
        ([FLA, FLA_CONV], "flash-linear-attention (Triton)"),
        ([FLA, FLA_CONV_OLD], "flash-linear-attention (Triton)"),
    ],
)
def test_accepted_forms(packages: list[dict], name: str) -> None:
    kernels = find_gdn_kernels(loader(*packages))
    assert kernels.convolution_name == name
    assert kernels.line().endswith(name)
    assert kernels.delta_rule is delta_rule
    assert kernels.norm_gated is None
    check_convolution(kernels, CPU)


def test_missing_packages_are_named() -> None:
    with pytest.raises(UserError, match=r"but flash-linear-attention is missing.*\[fla\]"):
        find_gdn_kernels(loader(CONV))
    with pytest.raises(UserError, match=r"neither causal-conv1d nor .*\[fla,conv\]"):
        find_gdn_kernels(loader(FLA))


def test_package_that_does_not_fit_torch_counts_as_missing() -> None:
    def load(name: str) -> types.SimpleNamespace:
        if name == "causal_conv1d":
            raise OSError("undefined symbol")
        return loader(FLA, FLA_CONV)(name)

    assert find_gdn_kernels(load).convolution_name == "flash-linear-attention (Triton)"


def test_wrong_convolution_is_refused() -> None:
    def wrong(x: Tensor, weight: Tensor) -> Tensor:
        return conv_first(x.mT, weight.flip(1), None, "silu").mT

    with pytest.raises(UserError, match=r"that differ from torch's by .* in fp32, want at most"):
        check_convolution(GdnKernels(wrong, delta_rule, None, "fake"), CPU)


def test_fused_norm_is_used_if_there() -> None:
    def rms_norm_gated(x: Tensor, g: Tensor, weight: Tensor, bias: None, **opts: object) -> dict:
        return {"bias": bias, **opts}

    norm = {"fla.modules.fused_norm_gate": {"rms_norm_gated": rms_norm_gated}}
    found = find_gdn_kernels(loader(FLA, CONV, norm)).norm_gated
    assert found is not None
    x = torch.ones(2, 3)
    assert found(x, x, x[0], 1e-5) == {"bias": None, "activation": "swish", "eps": 1e-5}


def test_bound_convolution_keeps_what_it_cannot_do() -> None:
    modeling = types.ModuleType("modeling")
    kernels = find_gdn_kernels(loader(FLA, FLA_CONV))
    assert not bind_convolution(modeling, kernels)
    calls = []
    modeling.causal_conv1d_fn = lambda *args, **kwargs: calls.append(kwargs)  # type: ignore
    assert bind_convolution(modeling, kernels)
    x, weight = torch.randn(2, 6, 9), torch.randn(6, 4)
    got = modeling.causal_conv1d_fn(x, weight, None, activation="silu")
    torch.testing.assert_close(got, conv_first(x, weight, None, "silu"))
    assert not calls
    modeling.causal_conv1d_fn(x, weight, None, activation="gelu")
    modeling.causal_conv1d_fn(x, weight, weight[:, 0], activation="silu")
    assert [call["activation"] for call in calls] == ["gelu", "silu"]


def test_tensor_cache_of_fla_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLA_DISABLE_TENSOR_CACHE", "0")
    utils = types.ModuleType("fla.utils")
    utils.FLA_DISABLE_TENSOR_CACHE = False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla.utils", utils)
    disable_fla_tensor_cache()
    assert utils.FLA_DISABLE_TENSOR_CACHE


def test_layers_are_found_by_type() -> None:
    class TinyGatedDeltaNet(torch.nn.Module):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), TinyGatedDeltaNet())
    assert gdn_modules(model) == [model[1]]


def test_proof_by_kernel_names() -> None:
    rule, conv = "chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "causal_conv1d_fwd_kernel"
    prove_gdn_kernels(["gemm", rule, conv])
    with pytest.raises(UserError, match="ran 2 kernels, found none that is a gated delta rule"):
        prove_gdn_kernels(["gemm", conv])
    with pytest.raises(UserError, match="found none that is a fused causal convolution"):
        prove_gdn_kernels([rule, "conv_depthwise2d_forward_kernel"])


class SharedArguments:
    """What Triton's autotuner does with the arguments of a call (as of 3.8)."""

    def __init__(self) -> None:
        self.nargs: dict | None = None

    def run(self, *args: int, between=lambda: None) -> dict:
        self.nargs = dict(zip("ab", args, strict=False))
        between()
        found = {**self.nargs}
        self.nargs = None
        return found


def test_threads_do_not_share_the_arguments_of_a_tuned_kernel() -> None:
    def meet(kernel: SharedArguments) -> dict:
        def other_call() -> None:
            with ThreadPoolExecutor() as pool:
                assert pool.submit(kernel.run, 3, 4).result() == {"a": 3, "b": 4}

        return kernel.run(1, 2, between=other_call)

    kernel = SharedArguments()
    with pytest.raises(TypeError, match="not a mapping"):
        meet(kernel)
    isolate_autotuner(SharedArguments)
    assert meet(kernel) == {"a": 1, "b": 2}
    assert meet(SharedArguments()) == {"a": 1, "b": 2}
    assert kernel.nargs is None


def test_the_autotuner_of_triton_in_threads() -> None:
    tuner_module = pytest.importorskip("triton.runtime.autotuner")
    isolate_autotuner(tuner_module.Autotuner)
    busy: list[bool] = []

    class Kernel:
        """A jitted function as far as the autotuner looks."""

        arg_names = ["x", "n"]
        fn = staticmethod(lambda x, n: None)

        def run(self, x: int, n: int, **kwargs: object) -> int:
            return x

    class Configs(list):
        """Asked for its length when a call has noted its arguments: then another call comes."""

        def __len__(self) -> int:
            if not busy:
                busy.append(True)
                with ThreadPoolExecutor() as pool:
                    assert pool.submit(tuner.run, 3, 4, grid=(1,)).result() == 3
            return super().__len__()

    configs = Configs(tuner_module.Config({}, num_warps=w) for w in (1, 2))
    tuner = tuner_module.Autotuner(
        Kernel(), ["x", "n"], None, ["n"], None, None, do_bench=lambda f, quantiles: [1.0] * 3
    )
    tuner.configs = configs
    for n in (4, 4, 5):  # tuned by then, and not
        busy.clear()
        assert tuner.run(1, n, grid=(1,)) == 1


def test_kernels_are_tuned_once_whatever_the_size_of_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuner_module = pytest.importorskip("triton.runtime.autotuner")

    class Kernel(tuner_module.Autotuner.__base__):
        arg_names = ["x", "D", "NB"]

        @staticmethod
        def fn(x: int, D: int, NB: int) -> None: ...

        def run(self, *args: object, **kwargs: object) -> None: ...

    tuned: list[int] = []

    def tuner(package: str) -> object:
        """A kernel of that package, tuned for D and NB, as a decorator leaves it there."""
        configs = [tuner_module.Config({}, num_warps=w) for w in (1, 2)]
        tuned_for = tuner_module.Autotuner(
            Kernel(), Kernel.arg_names, configs, ["D", "NB"], None, None,
            do_bench=lambda call, quantiles: tuned.append(1) or [1.0] * 3,
        )  # fmt: skip
        module = types.ModuleType(package)
        module.kernel = tuner_module.Heuristics(tuned_for, Kernel.arg_names, {})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, package, module)
        return tuned_for

    def tunings(kernel: object) -> list[int]:
        counts = []
        for D, NB in ((128, 36), (128, 37), (64, 36)):
            tuned.clear()
            kernel.run(0, D, NB, grid=(1,))  # type: ignore[attr-defined]
            counts.append(len(tuned))
        return counts

    theirs, others = tuner("fla.modules.norm"), tuner("flash.norm")
    forget_sizes(tuner_module.Autotuner)
    assert tunings(theirs) == [2, 0, 2]
    assert tunings(others) == [2, 2, 2]
