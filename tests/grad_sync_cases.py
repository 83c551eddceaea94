"""Ranks of GradSync as threads, and gradients for them."""

import threading
from collections.abc import Callable

import torch

from dflash_ext.grad_sync import GradSync, make_store

SHAPES = [(7, 5), (), (0, 3), (300,), (2, 3, 4), (1,), (40, 10)]

JOIN_S = 30.0


def run_ranks(
    world: int, body: Callable[[GradSync], object], **options: object
) -> tuple[list[object], list[Exception | None]]:
    """Runs ``body`` in one thread per rank; returns results and errors by rank."""
    store = options.pop("store", None) or make_store()
    results: list[object] = [None] * world
    errors: list[Exception | None] = [None] * world
    syncs = [GradSync(rank, world, store, **options) for rank in range(world)]

    def target(rank: int) -> None:
        try:
            syncs[rank].connect()
            results[rank] = body(syncs[rank])
        except Exception as error:
            errors[rank] = error
        finally:
            syncs[rank].close()

    threads = [threading.Thread(target=target, args=(r,), daemon=True) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), "a rank hangs"
    return results, errors


def gradients(rank: int, call: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + call)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
