"""compute-sanitizer on small shapes of the kernels."""

import subprocess
from pathlib import Path

import pytest
import torch
from cuda_toolkit import PROGRAMS, compile_cuda, tool

SHOWN_LINES = 40  # of a finding; the rest repeats itself


@pytest.fixture(scope="module", params=PROGRAMS, ids=lambda path: path.stem)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    path = tmp_path_factory.mktemp("sanitizer") / request.param.stem
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    arch = capability + "a" * (capability == "90")  # the kernels of Hopper alone
    result = compile_cuda(request.param, path, [arch])
    assert result.returncode == 0, result.stderr
    return path


@pytest.mark.parametrize("check", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_kernels_are_clean(program: Path, check: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = subprocess.run(
        [tool("compute-sanitizer"), "--tool", check, "--error-exitcode", "3", str(program)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    found = "\n".join((result.stdout + result.stderr).splitlines()[:SHOWN_LINES])
    if result.returncode != 0:
        with capsys.disabled():  # at once: a run that is cut off must still tell
            print(f"\n{program.stem}, {check}:\n{found}", flush=True)
    assert result.returncode == 0, found
    assert "done" in result.stdout
