"""Fast kernels of GatedDeltaNet (Yang et al. 2024, Gated Delta Networks): found, checked, proven.

transformers silently runs slow PyTorch code for every function whose package it cannot import.
Here each function has an accepted fast form, or loading stops and names what is missing.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_ext.config import UserError

__all__ = [
    "GdnKernels",
    "bind_convolution",
    "check_convolution",
    "disable_fla_tensor_cache",
    "find_gdn_kernels",
    "forget_sizes",
    "gdn_modules",
    "isolate_autotuner",
    "profile_kernels",
    "prove_gdn_kernels",
]

# Where releases of flash-linear-attention keep their Triton convolution: 0.6, 0.5, older.
FLA_CONVOLUTIONS = (
    "fla.modules.causal_conv1d",
    "fla.modules.conv.causal_conv1d",
    "fla.modules.convolution",
)
# Arguments of its kernels that stand for the size of a batch: rows, and blocks of a norm's rows.
SIZE_KEYS = ("B", "NB")
CONV_LIMIT = 1e-5  # relative error in fp32
Convolution = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class GdnKernels:
    """The functions of a GatedDeltaNet's forward pass without a cache.

    convolve(x [B, S, C], weight [C, W]) -> silu of the causal depthwise convolution [B, S, C]
    delta_rule(q, k, v, g=, beta=, use_qk_l2norm_in_kernel=, ...) -> (out [B, S, Hv, Dv], state)
    norm_gated(x [..., D], gate [..., D], weight [D], eps) -> rms_norm(x) * silu(gate), or None
    """

    convolve: Convolution
    delta_rule: Callable[..., tuple[Tensor, Tensor | None]]
    norm_gated: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None
    convolution_name: str

    def line(self) -> str:
        """What runs, for the log."""
        return (
            "gated delta net: chunk_gated_delta_rule of flash-linear-attention, convolution of "
            f"{self.convolution_name}"
        )


def find_gdn_kernels(load: Callable[[str], Any] = importlib.import_module) -> GdnKernels:
    """The fast kernels that are installed; `load` imports a module by name.

    Raises UserError that names the missing package.
    """
    delta_rule = _attribute(load, "fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    if delta_rule is None:
        raise UserError(
            "model.require_fast_gdn: the target has gated-delta-net layers but "
            "flash-linear-attention is missing; install the extra, pip install "
            "'dflash-ext[fla]', or set false"
        )
    disable_fla_tensor_cache()
    autotuner = _attribute(load, "triton.runtime.autotuner", "Autotuner")
    if autotuner is not None:
        isolate_autotuner(autotuner)
    norm = _attribute(load, "fla.modules.fused_norm_gate", "rms_norm_gated")
    if autotuner is not None:
        forget_sizes(autotuner)
    norm_gated = None if norm is None else _fla_norm_gated(norm)
    convolution = _attribute(load, "causal_conv1d", "causal_conv1d_fn")
    if convolution is not None:
        return GdnKernels(_channel_first(convolution), delta_rule, norm_gated, "causal-conv1d")
    for place in FLA_CONVOLUTIONS:
        convolution = _attribute(load, place, "causal_conv1d")
        if callable(convolution):
            name = "flash-linear-attention (Triton)"
            return GdnKernels(_channel_last(convolution), delta_rule, norm_gated, name)
    raise UserError(
        "model.require_fast_gdn: found neither causal-conv1d nor a flash-linear-attention with a "
        "Triton convolution; install the extras, pip install 'dflash-ext[fla,conv]', or set false"
    )


def _attribute(load: Callable[[str], Any], module: str, name: str) -> Any:
    try:
        return getattr(load(module), name, None)
    except (ImportError, OSError):  # OSError: a compiled package that does not fit this torch
        return None


def _channel_first(function: Callable[..., Tensor]) -> Convolution:
    """causal-conv1d takes [B, C, S]; it has a kernel for channels that lie next to each other."""

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        if x.stride(0) % 8 or x.stride(1) % 8 or x.stride(2) != 1:  # its kernel's condition
            x = x.contiguous()
        return function(x.transpose(1, 2), weight, None, activation="silu").transpose(1, 2)

    return convolve


def _channel_last(function: Callable[..., tuple[Tensor, Tensor | None]]) -> Convolution:
    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return function(x, weight=weight, bias=None, activation="silu", backend="triton")[0]

    return convolve


def _fla_norm_gated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return function(x, gate, weight, None, activation="swish", eps=eps)

    return norm_gated


def disable_fla_tensor_cache() -> None:
    """Turn off the cache that flash-linear-attention's functions share between threads.

    It iterates over a deque that other threads append to (RuntimeError: deque mutated during
    iteration). Only functions of cu_seqlens use it, which the target's batches never pass, so
    nothing is computed twice without it.
    """
    os.environ["FLA_DISABLE_TENSOR_CACHE"] = "1"  # for parts that are not imported yet
    if (utils := sys.modules.get("fla.utils")) is not None:
        setattr(utils, "FLA_DISABLE_TENSOR_CACHE", True)  # noqa: B010 (no stubs declare it)


def isolate_autotuner(autotuner: type) -> None:
    """Let Triton's autotuner keep the arguments of a call for each thread by itself.

    They are attributes that all threads share, set when a call begins and None when it ends:
    another thread's end makes even a tuned kernel fail ('NoneType' object is not a mapping).
    """
    for name in ("nargs", "restore_copies"):
        setattr(autotuner, name, _OfThread(name))


class _OfThread:
    """An attribute with a value for each object and thread; None before the first one."""

    def __init__(self, name: str) -> None:
        self._name = f"_{name}_of_thread"

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return getattr(self._values(owner), "value", None)

    def __set__(self, owner: Any, value: Any) -> None:
        self._values(owner).value = value

    def _values(self, owner: Any) -> threading.local:
        return owner.__dict__.setdefault(self._name, threading.local())


def forget_sizes(autotuner: Any) -> None:
    """Let flash-linear-attention's kernels be tuned once, whatever the size of a batch.

    Some are tuned anew for every number of rows and for every 65,536 rows of a norm: a batch of
    another size stops all threads for up to 20 s in the middle of a run, for a choice that hardly
    depends on it.
    """
    jitted = autotuner.__base__  # what wraps a kernel, and the kernel itself
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fla":
            for kernel in list(vars(module).values()):
                while isinstance(kernel, jitted):
                    if isinstance(kernel, autotuner):
                        kernel.keys = [key for key in kernel.keys if key not in SIZE_KEYS]
                    kernel = getattr(kernel, "fn", None)


def check_convolution(kernels: GdnKernels, device: torch.device) -> None:
    """Compare the convolution with torch's in fp32 on a small layer; raises UserError."""
    generator = torch.Generator().manual_seed(0)
    # A part of a merged projection's output, as the target's layers pass it.
    x = torch.randn(2, 70, 96, generator=generator).to(device)[..., 16:80]
    weight = torch.randn(64, 4, generator=generator).to(device)
    wide = F.conv1d(x.double().mT, weight.double()[:, None], padding=3, groups=64)[..., :70]
    want = F.silu(wide).mT
    error = (kernels.convolve(x, weight).double() - want).norm() / want.norm()
    if not error <= CONV_LIMIT:
        raise UserError(
            f"model.require_fast_gdn: the convolution of {kernels.convolution_name}: found results "
            f"that differ from torch's by {error:.1e} in fp32, want at most {CONV_LIMIT:.0e}"
        )


def gdn_modules(model: nn.Module) -> list[nn.Module]:
    """The GatedDeltaNet layers of a transformers model."""
    return [m for m in model.modules() if "GatedDeltaNet" in type(m).__name__]


def bind_convolution(modeling: ModuleType, kernels: GdnKernels) -> bool:
    """Let a modeling module of transformers run `kernels.convolve`.

    Its own choice knows causal-conv1d alone. Returns False if the module has no such function.
    """
    own = getattr(modeling, "causal_conv1d_fn", None)
    if not callable(own):
        return False

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if bias is not None or activation != "silu" or kwargs.get("seq_idx") is not None:
            return own(hidden_states, weight, bias, activation=activation, **kwargs)
        return kernels.convolve(hidden_states.transpose(1, 2), weight).transpose(1, 2)

    setattr(modeling, "causal_conv1d_fn", causal_conv1d_fn)  # noqa: B010 (a module's global)
    return True


def profile_kernels(run: Callable[[], object], device: torch.device) -> list[str]:
    """Names of the GPU kernels of `run`, empty where the profiler sees none."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize(device)
    return [event.key for event in profile.key_averages()]


def prove_gdn_kernels(names: Iterable[str]) -> None:
    """Check the kernel names of one forward pass of a hybrid target; raises UserError."""
    found: Collection[str] = list(names)
    wanted = {
        "gated_delta_rule": "a gated delta rule of flash-linear-attention",
        "causal_conv1d": "a fused causal convolution",
    }
    for part, what in wanted.items():
        if not any(part in name for name in found):
            raise UserError(
                f"model.require_fast_gdn: a profiled forward pass ran {len(found)} kernels, "
                f"found none that is {what}"
            )
