import subprocess
import sys


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_import_is_light():
    result = python(
        "import sys, dflash_ext; from dflash_ext import ops\n"
        "print([m for m in ('transformers', 'wandb', 'matplotlib', 'rich') if m in sys.modules])"
    )
    assert result.stdout == "[]\n", result.stderr


def test_another_torch_than_the_build_s_gives_a_hint():
    result = python("import torch; torch.__version__ = '9.9.9'; import dflash_ext")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: dflash_ext._C was built with torch ")
    assert last.endswith("found torch 9.9.9; rebuild: pip install -e . --no-build-isolation")


def test_an_extension_that_does_not_load_gives_the_hint():
    result = python("import sys; sys.modules['dflash_ext._C'] = None; import dflash_ext")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: dflash_ext._C does not load with torch ")
    assert last.endswith("rebuild: pip install -e . --no-build-isolation")


def test_build_facts():
    import torch

    from dflash_ext import _C

    assert _C.torch_version == torch.__version__
    assert bool(_C.archs) == _C.with_cuda
