"""z-lab's own `dflash` package, the decoder that our exports must serve in.

Its pins would replace our torch and transformers, so the wheel is fetched alone, checked, and put
on sys.path as it is.
"""

import hashlib
import importlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import torch

from dflash_ext.target_source import cache_dir

WHEEL = "dflash-0.1.0-py3-none-any.whl"
SHA256 = "b3fe38d9413efc30a952c8b38b34f1dcc696ba6d7b865acbf540a34cc53afaa2"


def zlab_model_module() -> ModuleType:
    """`dflash.model`, with a timer that also works without CUDA."""
    wheel = str(_wheel())
    if wheel not in sys.path:
        sys.path.insert(0, wheel)
    module = importlib.import_module("dflash.model")
    assert str(module.__file__).startswith(wheel), f"found another dflash: {module.__file__}"
    if not torch.cuda.is_available():
        module._cuda_time = time.perf_counter
    return module


def _wheel() -> Path:
    path = cache_dir() / "wheels" / WHEEL
    if not path.is_file() or _sha256(path) != SHA256:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            pip += ["--disable-pip-version-check", "--dest", scratch, "dflash==0.1.0"]
            subprocess.run(pip, check=True)
            found = _sha256(Path(scratch, WHEEL))
            assert found == SHA256, f"{WHEEL}: found SHA-256 {found}, want {SHA256}"
            Path(scratch, WHEEL).replace(path)
    return path


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
