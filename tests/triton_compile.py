"""Compiles what a function would launch, for any architecture, without a GPU."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _interpreter_loops() -> bool:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return True  # the tests say so themselves
    return _release(triton) > (3, 6) or _release(np.__version__) < (2, 4)


needs_interpreter = pytest.mark.skipif(
    not _interpreter_loops(), reason="Triton 3.6's interpreter cannot loop with NumPy 2.4"
)

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


@contextlib.contextmanager
def recorded_launches(modules: Sequence[ModuleType], monkeypatch: Any) -> Iterator[list[Launch]]:
    """The launches that modules make inside: (kernel, arguments, options); none of them runs."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: tuple, device: torch.device, *args: Any, **opts: Any) -> None:
        launches.append((kernel, args, opts))

    with monkeypatch.context() as patch:
        for module in modules:
            patch.setattr(module, "launch", record)
        yield launches


def compile_launch(launch: Launch, arch: int) -> bytes:
    """The cubin of a recorded launch for compute capability arch / 10."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, args, opts = launch
    bound = dict(zip(kernel.arg_names, args, strict=False))
    constants = {name: value for name, value in opts.items() if name in kernel.arg_names}
    constants |= {name: None for name, value in bound.items() if value is None}
    signature, attrs = {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else _type_of(bound[name])
        value = bound.get(name)
        address = value.data_ptr() if isinstance(value, Tensor) else value
        if name not in constants and isinstance(address, int) and address % 16 == 0:
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attrs)
    options = {name: value for name, value in opts.items() if name not in kernel.arg_names}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return built.asm["cubin"]


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        kinds = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64"}
        return "*" + kinds[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"
