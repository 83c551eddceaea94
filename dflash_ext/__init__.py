"""Train DFlash block-diffusion drafters for speculative decoding."""

from __future__ import annotations

from dflash_ext.allocator import set_allocator

set_allocator()  # before torch is there

import torch  # noqa: E402

__version__ = "0.1.0"

REBUILD = "rebuild: pip install -e . --no-build-isolation"

try:
    from dflash_ext import _C
except ImportError as error:
    raise ImportError(
        f"dflash_ext._C does not load with torch {torch.__version__} ({error}); {REBUILD}"
    ) from error

if _C.torch_version != str(torch.__version__):
    raise ImportError(
        f"dflash_ext._C was built with torch {_C.torch_version}, "
        f"found torch {torch.__version__}; {REBUILD}"
    )
