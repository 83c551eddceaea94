"""Faults injected into whole runs, and the proof that each mechanism against them is needed."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from fault_switches import MECHANISMS

TESTS = Path(__file__).parent
README = (TESTS.parent / "README.md").read_text(encoding="utf-8")


def function(test: str) -> str:
    """FILE::NAME of FILE::NAME[CASE]."""
    return test.partition("[")[0]


def test_every_row_of_what_happens_when_has_a_mechanism_with_a_switch() -> None:
    rows = README.split("## What happens when")[1].split("\n## ")[0]
    named = set(re.findall(r"`(test_\w+\.py::test_\w+)` \|$", rows, flags=re.MULTILINE))
    tested = {function(test) for each in MECHANISMS.values() for test in each.tests}
    assert len(named) > 30 and named - tested == set()


@pytest.mark.parametrize("name", MECHANISMS)
def test_switches_name_tests_that_are_there_and_change_something(name: str) -> None:
    for test in map(function, MECHANISMS[name].tests):
        file, _, test_name = test.partition("::")
        assert f"\ndef {test_name}(" in (TESTS / file).read_text(encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        MECHANISMS[name].off(patch)
        changed = [(owner, attr, old) for owner, attr, old in patch._setattr]
        assert changed
        for owner, attr, old in changed:
            assert getattr(owner, attr) is not old


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_without_its_mechanism_every_fault_test_fails(name: str, tmp_path: Path) -> None:
    """They fail by themselves: no error while they are set up, no time-out."""
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--timeout=100", f"--fault-off={name}", f"--junitxml={report}"]
    command += [str(TESTS / test) for test in MECHANISMS[name].tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert report.exists(), done.stdout + done.stderr
    cases = list(ET.parse(report).iter("testcase"))
    assert len(cases) >= len(MECHANISMS[name].tests)
    for case in cases:
        failures = case.findall("failure")
        assert len(failures) == 1 and not case.findall("error"), f"{case.get('name')} passed"
        assert "Timeout" not in (failures[0].get("message") or ""), case.get("name")
