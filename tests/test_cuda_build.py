"""csrc/cuda compiles for every architecture, without spilled registers; needs no GPU.

The kernels are those of tests/sanitizer/*.cu, which has to launch all that csrc/cuda defines: a new
kernel needs a launch there to pass.
"""

import functools
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from cuda_toolkit import PROGRAMS, ROOT, compile_cuda

ARCHS = ["80", "90a", "100", "120"]
# Kernels that no training step waits for, by a part of the mangled name, may spill.
COLD = [
    "loss_rows_kernelIdd",  # draft_loss in fp64, for tests
    "EddEEvNS0_9RowParams",  # the same with a divergence other than forward KL
]

ENTRY = re.compile(r"Compiling entry function '(?P<symbol>\w+)' for 'sm_(?P<arch>\w+)'")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture, from the report of ptxas."""

    symbol: str
    arch: str
    spilled_bytes: int

    def is_of(self, kernel: str) -> bool:
        """Whether this is `kernel`, or an instance of it: a mangled name holds "<length><name>"."""
        return f"{len(kernel)}{kernel}" in self.symbol


def read_report(report: str) -> list[Compiled]:
    found = []
    for part in re.split(r"(?=Compiling entry function)", report)[1:]:
        entry, spills = ENTRY.match(part), SPILLS.search(part)
        assert entry and spills, part
        found.append(Compiled(entry["symbol"], entry["arch"], sum(map(int, spills.groups()))))
    return found


def compile_report(source: Path, folder: Path, archs: list[str], *flags: str) -> list[Compiled]:
    options = ["-fatbin", "-Xptxas=-v", "--threads=2", *flags]
    result = compile_cuda(source, folder / f"{source.stem}.fatbin", archs, options)
    assert result.returncode == 0, result.stderr
    return read_report(result.stderr)


@functools.cache
def compiled(program: Path) -> list[Compiled]:
    """Its kernels for every architecture."""
    with tempfile.TemporaryDirectory() as folder:
        return compile_report(program, Path(folder), ARCHS)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program_compiles(program: Path) -> None:
    assert {c.arch for c in compiled(program)} == set(ARCHS)


def kernels_of(code: str) -> list[str]:
    """The names that follow `__global__` and what stands between."""
    code = re.sub(r"//.*", "", code)
    names = re.findall(r"__global__[^;{]*?\b(\w+_kernel)\(", code)
    assert len(names) == code.count("__global__"), "a kernel's name has to end in _kernel"
    return names


def all_kernels() -> list[str]:
    files = sorted((ROOT / "csrc" / "cuda").glob("*.cu*"))
    return [name for file in files for name in kernels_of(file.read_text())]


@pytest.mark.parametrize("kernel", all_kernels())
def test_compiles_for_every_architecture_without_spills(kernel: str) -> None:
    mine = [c for program in PROGRAMS for c in compiled(program) if c.is_of(kernel)]
    assert {c.arch for c in mine} == set(ARCHS), "no program in tests/sanitizer launches it"
    hot = [c for c in mine if not any(part in c.symbol for part in COLD)]
    assert [c for c in hot if c.spilled_bytes] == []


def test_spills_are_seen(tmp_path: Path) -> None:
    source = tmp_path / "spilling.cu"
    source.write_text(
        "__global__ void __launch_bounds__(1024, 2) many_kernel(float* x) {\n"
        "  float a[96];\n"
        "  for (int i = 0; i < 96; ++i) a[i] = x[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n"
        "  for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = a[i] * a[95 - i];\n"
        "}\n"
        "__global__ void few_kernel(float* x) { x[threadIdx.x] = 1; }\n"
    )
    found = compile_report(source, tmp_path, ["90a"])
    assert [c.spilled_bytes > 0 for c in found if c.is_of("many_kernel")] == [True]
    assert [c.spilled_bytes for c in found if c.is_of("few_kernel")] == [0]
