"""compute-sanitizer on small shapes of the kernels."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME

ROOT = Path(__file__).parent.parent


def tool(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=f"{CUDA_HOME}/bin")
    if found is None:
        pytest.skip(f"{name} is not here")
    return found


@pytest.fixture(scope="module", params=["small_shapes", "head_shapes"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    path = tmp_path_factory.mktemp("sanitizer") / request.param
    source = ROOT / "tests" / "sanitizer" / f"{request.param}.cu"
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    arch = capability + "a" * (capability == "90")  # the kernels of Hopper alone
    subprocess.run(
        [tool("nvcc"), "-std=c++17", "-lineinfo", f"-gencode=arch=compute_{arch},code=sm_{arch}"]
        + [f"-I{ROOT / 'csrc'}", str(source), "-o", str(path)],
        check=True,
    )
    return path


@pytest.mark.parametrize("check", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_kernels_are_clean(program: Path, check: str) -> None:
    result = subprocess.run(
        [tool("compute-sanitizer"), "--tool", check, "--error-exitcode", "3", str(program)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "done" in result.stdout
