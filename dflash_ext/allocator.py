"""The commands' setting of torch's GPU allocator; imports nothing, because torch reads it once."""

from __future__ import annotations

import os
import sys

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the newer name and the older one


def set_allocator() -> None:
    """Expandable segments for ``python -m dflash_ext.COMMAND``: sizes differ from batch to batch,
    and fixed segments leave gaps between them.

    Does nothing where the user has set either variable, or where the package is imported by a
    program of another kind. While Python looks for a module to run, ``sys.argv`` starts with -m.
    """
    by_name = sys.argv[:1] == ["-m"]
    ours = any(word.removeprefix("-m").startswith("dflash_ext.") for word in sys.orig_argv)
    if by_name and ours and not any(name in os.environ for name in VARIABLES):
        os.environ[VARIABLES[0]] = "expandable_segments:True"
