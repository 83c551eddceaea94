"""Launches Triton kernels from any thread, on the device of their tensors."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import torch
from torch import Tensor

# Triton's caches are built without locks: two threads in a cold kernel can meet half of an entry.
_first_launch = threading.Lock()
_launched: set[tuple] = set()


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **opts: Any
) -> None:
    """kernel[grid](*args, **opts) on the current stream of `device`; nothing for an empty grid.

    The first launch of what may be a new specialisation holds a lock that later ones do not take:
    a launch can wait for its GPU, and that GPU for what another thread has yet to launch.
    """
    if 0 in grid:
        return
    # Triton's interpreter, for tests, runs on the CPU.
    place = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    key = (id(kernel), device, tuple(map(_specialised, args)), tuple(opts.items()))
    with place:
        if key in _launched:
            kernel[grid](*args, **opts)
            return
        with _first_launch:
            kernel[grid](*args, **opts)
            _launched.add(key)


def _specialised(arg: Any) -> Any:
    """What Triton compiles into a kernel of an argument (as of 3.6: at least)."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0, arg.bit_length() > 31
    return None if arg is None else type(arg)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU: the grid of kernels that loop over their work."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may fill with loads, apart from what reductions need."""
    if device.type != "cuda":
        return 160 * 1024
    properties: Any = torch.cuda.get_device_properties(device)  # torch declares a part of them
    return properties.shared_memory_per_block_optin - 4096


def rows_of(x: Tensor) -> Tensor:
    """x [..., C] as [N, C] whose rows are contiguous; a copy only where strides ask for it."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
