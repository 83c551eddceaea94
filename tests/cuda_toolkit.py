"""nvcc and its companions, for tests that compile csrc/cuda outside the extension."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.utils.cpp_extension import CUDA_HOME

ROOT = Path(__file__).parent.parent
# Programs that launch every kernel of csrc/cuda; none needs torch.
PROGRAMS = sorted((ROOT / "tests" / "sanitizer").glob("*.cu"))


def tool(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=f"{CUDA_HOME}/bin")
    if found is None:
        pytest.skip(f"{name} is not here")
    return found


def compile_cuda(
    source: Path, out: Path, archs: Sequence[str], flags: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Machine code for each of `archs` ("90a"), with the optimisation that setup.py asks for."""
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    command = [tool("nvcc"), "-std=c++17", "-O3", "-lineinfo", *codes, *flags]
    return subprocess.run(
        [*command, f"-I{ROOT / 'csrc'}", str(source), "-o", str(out)],
        capture_output=True,
        text=True,
    )
