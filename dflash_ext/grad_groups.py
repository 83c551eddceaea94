"""The process groups of c10d by which drafter threads sum gradients."""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist


def make_gloo(
    store: dist.PrefixStore, rank: int, world: int, timeout_s: float
) -> dist.ProcessGroupGloo:
    """The group of a rank on a CPU, once all ranks are there; other arguments as GradSync's."""
    timeout = datetime.timedelta(seconds=timeout_s)
    if not isinstance(store.underlying_store, dist.HashStore):
        return dist.ProcessGroupGloo(store, rank, world, timeout)
    # A HashStore cannot leave the process: neither need the connections, whatever the host is
    # called and whatever its network.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, world, options)


def make_nccl(
    store: dist.PrefixStore, rank: int, world: int, timeout_s: float
) -> dist.ProcessGroupNCCL:
    """The group of a rank on a GPU, beside whose sums a backward pass runs."""
    # A transfer that exceeds its limit is taken off the GPU, and the next call raises: by default
    # NCCL's watchdog would end the whole process.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    options = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=timeout_s)
    # The sums run beside the backward pass: their few blocks must not queue behind its many.
    options.is_high_priority_stream = True
    return dist.ProcessGroupNCCL(store, rank, world, options)
