"""The commands ask torch for expandable segments, before it is imported."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_ext.config_cli import PROJECT_ROOT

WANTED = "expandable_segments:True"


def seen_by_torch(folder: Path, *line: str, **variables: str) -> list[str | None]:
    """Both variables as they are when torch is imported."""
    (folder / "torch.py").write_text(
        "import os\n"
        "names = 'PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF'\n"
        "print([os.environ.get(name) for name in names])\n"
        "raise SystemExit\n"
    )
    environment = {k: v for k, v in os.environ.items() if "ALLOC_CONF" not in k}
    environment |= {"PYTHONPATH": str(folder)} | variables
    out = subprocess.run(
        [sys.executable, *line], cwd=PROJECT_ROOT, env=environment, capture_output=True, text=True
    ).stdout
    return ast.literal_eval(out)


@pytest.mark.parametrize("command", ["train", "evaluate", "regenerate"])
def test_commands_set_it(tmp_path: Path, command: str) -> None:
    assert seen_by_torch(tmp_path, "-m", f"dflash_ext.{command}") == [WANTED, None]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_set_stays(tmp_path: Path, name: str) -> None:
    seen = seen_by_torch(tmp_path, "-m", "dflash_ext.train", **{name: "max_split_size_mb:64"})
    assert sorted(map(str, seen)) == ["None", "max_split_size_mb:64"]


def test_other_programs_are_left_alone(tmp_path: Path) -> None:
    assert seen_by_torch(tmp_path, "-c", "import dflash_ext") == [None, None]
    (tmp_path / "program.py").write_text("import dflash_ext")
    assert seen_by_torch(tmp_path, "-m", "program", "dflash_ext.train") == [None, None]
