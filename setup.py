"""Builds dflash_ext._C: the CPU kernels always, CUDA kernels where torch and a toolkit have CUDA.

DFLASH_CUDA=0|1 overrides that choice, CUDA_HOME names the toolkit and TORCH_CUDA_ARCH_LIST the
architectures. Whether a GPU is visible never decides what is built. What was built from the same
sources, with the same torch and flags, is not built again.
"""

import hashlib
import importlib.util
import json
import os
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

TORCH_REQUIREMENT = "torch>=2.11"
STAMP = Path("build/extension.json")
COMPILER_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


def find_torch() -> bool:
    """True if torch can be imported; pip's build isolation hides the target environment's."""
    if importlib.util.find_spec("torch") is None:
        sys.path.append(sysconfig.get_path("purelib"))
        importlib.invalidate_caches()
    return importlib.util.find_spec("torch") is not None


def cuda_home(cuda_build: bool) -> str | None:
    """The toolkit torch should use. It guesses from nvcc on PATH, which may be a wrapper."""
    from torch.utils import cpp_extension

    candidates = [os.environ.get("CUDA_HOME"), cpp_extension.CUDA_HOME, "/usr/local/cuda"]
    for home in candidates if cuda_build else []:
        if home and (Path(home) / "include" / "cuda_runtime.h").exists():
            os.environ["CUDA_HOME"] = cpp_extension.CUDA_HOME = home
            return home
    return None


def use_cuda(cuda_version: str | None, home: str | None) -> bool:
    wanted = os.environ.get("DFLASH_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"DFLASH_CUDA: found {wanted!r}, want 0 or 1")
    found = cuda_version is not None and home is not None
    if wanted == "1" and not found:
        raise SystemExit(
            f"DFLASH_CUDA=1 needs a CUDA build of torch and a toolkit: "
            f"found torch.version.cuda={cuda_version}, CUDA_HOME={home}"
        )
    return found and wanted != "0"


def sha256(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def extension() -> dict[str, object]:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    home = cuda_home(torch.version.cuda is not None)
    with_cuda = use_cuda(torch.version.cuda, home)
    sources = sorted(map(str, [*Path("csrc").glob("*.cpp"), *Path("csrc/cpu").glob("*.cpp")]))
    archs = ""
    if with_cuda:
        sources += sorted(map(str, Path("csrc/cuda").glob("*.cu")))
        # wgmma and TMA need the "a" variant, and without a GPU torch has no list to fall back on.
        archs = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0a")
    facts = {
        "DFLASH_TORCH_VERSION": f'"{torch.__version__}"',
        "DFLASH_CUDA_ARCHS": f'"{archs}"',
    }
    if with_cuda:
        facts["DFLASH_WITH_CUDA"] = "1"
    print(
        f"dflash_ext: torch {torch.__version__}, cuda {torch.version.cuda if with_cuda else 'off'}"
        f", CUDA_HOME {home}, archs {archs or '-'}, {len(sources)} sources",
        file=sys.stderr,
    )
    # -fopenmp only compiles at::parallel_for's threads in: libgomp itself is torch's own, so that
    # torch.set_num_threads holds here too. The -fno-* let comparisons in loops vectorise. Python's
    # own flags hold -g, which doubles the time that the largest files take.
    optimisation = ["-O3", "-g0", "-fno-trapping-math", "-fno-math-errno"]
    flags = {"cxx": [*optimisation, "-fopenmp", "-fvisibility=hidden"]}
    if with_cuda:
        flags["nvcc"] = ["-O3", "-lineinfo"]
    build = CUDAExtension if with_cuda else CppExtension
    module = build(
        "dflash_ext._C",
        sources,
        include_dirs=[str(Path("csrc").resolve())],
        define_macros=list(facts.items()),
        extra_compile_args=flags,
    )
    # pip builds each time in a new folder with a new path to torch: ninja would start from nothing.
    inputs = {
        "sources": sha256(Path("setup.py"), *sorted(Path("csrc").rglob("*.*"))),
        "facts": facts,
        "python": sysconfig.get_config_var("SOABI"),
        "cuda_home": home,
        "env": {name: os.environ.get(name) for name in COMPILER_VARIABLES},
    }

    class BuildOnce(BuildExtension):
        def run(self) -> None:
            in_place = self.inplace or self.editable_mode  # a wheel takes it from elsewhere
            built = Path("dflash_ext", f"_C{sysconfig.get_config_var('EXT_SUFFIX')}")

            def stamp() -> str:
                return json.dumps({"inputs": inputs, "built": sha256(built)}, indent=1)

            found = in_place and built.exists() and STAMP.exists()
            if found and STAMP.read_text() == stamp():
                print(f"dflash_ext: {built} is up to date", file=sys.stderr)
                return
            super().run()
            if in_place:
                STAMP.parent.mkdir(exist_ok=True)
                STAMP.write_text(stamp())

    return {"ext_modules": [module], "cmdclass": {"build_ext": BuildOnce}}


if find_torch():
    setup(**extension())
else:
    setup(setup_requires=[TORCH_REQUIREMENT])
