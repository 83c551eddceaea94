"""Mistakes on the command lines of the benchmarks: one line each, and before the work."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from dflash_ext.command import run_command

MISTAKES = [
    ("pipeline_table", "empty.json", "empty.json: found KeyError: 'conditions', want a report"),
    ("pipeline_table", "bytes", "bytes: found "),
    ("trace", "empty.json --out o.png", "empty.json: found no trace (KeyError: 'traceEvents')"),
    ("trace", "bytes.gz --out o.png", "bytes.gz: found no trace (BadGzipFile"),
    ("trace", "no_work.json --out o.png", "no_work.json or --out o.png: the trace holds no work"),
    ("trace", "empty.json --out empty.json", "--out: found empty.json, the trace itself"),
    ("trace", "empty.json --out .", "--out: found the folder ."),
    ("trace", "empty.json --out picture", "--out: found picture, want a picture's name"),
    ("step_two", "rate --devices cpu", "--devices: found cpu alone, want two or more"),
    ("step_two", "rate --devices cpu cpu --steps 0", "argument --steps: found '0', want"),
    ("step_two", "cold --devices cpu banana", "--devices: found 'banana' ("),
    ("step_two", "rate --devices cpu cpu --json no/x", "--json: no/x: found no folder"),
    ("bench_step", "parts --device cpu --json no/x", "--json: no/x: found no folder"),
    ("bench_step", "parts --device cuda:99", "--device: found 'cuda:99' ("),
    ("step_anchors", "--documents 0", "argument --documents: found '0', want an integer from 1"),
    ("step_anchors", "--device cpu --json no/x", "--json: no/x: found no folder"),
    ("bench_pipeline", "--probes 0 0", "argument --probes: found '0', want an integer from 1"),
    ("bench_pipeline", "--settle -1", "argument --settle: found '-1', want an integer from 0"),
    ("bench_pipeline", "--json x --trace x", "--trace: found x, the file of --json"),
]


@pytest.mark.parametrize(("command", "words", "wanted"), MISTAKES)
def test_a_mistake_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    words: str,
    wanted: str,
) -> None:
    if "no_work" in words:
        pytest.importorskip("matplotlib")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "no_work.json").write_text(json.dumps({"traceEvents": []}))
    for name in ("bytes", "bytes.gz"):
        (tmp_path / name).write_bytes(b"\x00\xff" * 9)
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [command, *words.split()])
    assert run_command(importlib.import_module(f"benchmarks.{command}").main) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and wanted in err, err
    assert sorted(tmp_path.iterdir()) == before
