"""What no thread that trains may do on a GPU: wait."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_syncs() -> Iterator[None]:
    """Inside, torch raises an error for a call that waits for a GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
