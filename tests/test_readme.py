"""The README keeps what it says about commands and configuration true."""

import dataclasses
import re
from pathlib import Path
from types import ModuleType

import pytest
from fault_switches import MECHANISMS

from dflash_ext import evaluate, export, plot, regenerate, train
from dflash_ext.config import Config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_ci_runs_exactly_the_commands_of_the_quick_start() -> None:
    quick_start = README.split("## Quick start")[1].split("\n## ")[0]
    commands = re.findall(r"```bash\n(.*?)```", quick_start, flags=re.DOTALL)
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    lines = [line for block in commands for line in block.strip().splitlines()]
    assert len(lines) == 2
    assert all(line in ci for line in lines)


@pytest.mark.parametrize("command", [train, evaluate, regenerate, export, plot])
def test_every_flag_stands_in_the_table_of_commands_and_is_explained(
    command: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    text = capsys.readouterr().out
    flags = set(re.findall(r"^  (?:-h, )?(--\w+)(?![\w.])", text, flags=re.MULTILINE)) - {"--help"}
    name = f"python -m {command.__name__}"
    (row,) = [line for line in README.splitlines() if line.startswith(f"| `{name} ")]
    syntax = row.rpartition(" | ")[0]
    assert flags == {*re.findall(r"--\w+(?![\w.])", syntax)} - {"--section"}
    for flag in flags:
        words = re.search(rf"^  {flag}\b(.*(?:\n {{6,}}.*)*)", text, flags=re.MULTILINE)
        assert words is not None and re.search(r"[a-z]{3}", re.sub(r"\{.*?\}", "", words[1])), flag


def test_every_configuration_field_stands_in_the_readme_with_default_and_help() -> None:
    config = Config()
    for section in dataclasses.fields(Config):
        values = getattr(config, section.name)
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            shown = "–" if value is None else str(value)
            text = field.metadata["doc"].replace("||", "//")  # a bar would end the cell
            row = f"| `{section.name}.{field.name}` | {shown} | {text} |"
            assert row in README, row


def test_every_row_of_what_happens_when_names_a_test_that_is_there() -> None:
    rows = README.split("## What happens when")[1].split("\n## ")[0].strip().splitlines()[2:]
    assert len(rows) > 15
    for row in rows:
        file, name = re.findall(r"`(test_\w+\.py)::(test_\w+)` \|$", row)[0]
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", text, flags=re.MULTILINE), row


def test_every_row_of_what_happens_when_has_a_mechanism_with_a_switch() -> None:
    """A new row needs a `mechanism(...)` in tests/fault_switches*.py that names its test."""
    rows = README.split("## What happens when")[1].split("\n## ")[0]
    named = set(re.findall(r"`(test_\w+\.py::test_\w+)` \|$", rows, flags=re.MULTILINE))
    tested = {test.partition("[")[0] for each in MECHANISMS.values() for test in each.tests}
    assert len(named) > 30 and sorted(named - tested) == []
