"""The plot command: what it draws, and what it says when it cannot."""

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt

from dflash_ext import plot
from dflash_ext.command import run_command
from dflash_ext.config import UserError

ROWS: plot.Rows = [
    {"step": 0, "eval_accept_len": 1.25},
    {"step": 10, "loss": 4.0, "acc": 0.1},
    {"step": 20, "loss": None, "acc": 0.2},
    {"step": 30, "loss": 2.0, "acc": 0.4, "eval_accept_len": 2.5},
]


def make_run(folder: Path, rows: plot.Rows = ROWS) -> Path:
    folder.mkdir(parents=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    return folder


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were drawn, kept open."""
    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    return figures


def lines(axes: Any) -> list[tuple[list[float], list[float]]]:
    return [
        (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.lines
        if len(line.get_xdata())
    ]


def texts(legend: Any) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def test_one_run(tmp_path: Path, drawn: list[Any]) -> None:
    out = tmp_path / "new" / "a.png"
    assert plot.main(["--run", str(make_run(tmp_path / "x")), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert plt.imread(out).std() > 0.05  # not blank
    loss, acceptance, accuracy = drawn[0].axes
    assert lines(loss) == [([10, 30], [4.0, 2.0])]
    assert lines(acceptance) == [([0, 30], [1.25, 2.5])]
    assert lines(accuracy) == [([10, 20, 30], [0.1, 0.2, 0.4])]
    assert loss.get_title(loc="left") == "Training loss, x"
    assert acceptance.get_title(loc="left") == "Acceptance"
    assert loss.get_xlabel() == acceptance.get_xlabel() == "optimizer step"
    assert (loss.get_ylabel(), acceptance.get_ylabel()) == ("loss", "tokens per target pass")
    assert accuracy.get_ylabel() == "share of proposals that are right"
    assert loss.get_legend() is None
    assert texts(acceptance.get_legend()) == [
        "acceptance length, held-out text",
        "accuracy, training text",
    ]


def test_runs_of_the_same_name_have_their_own_line_and_colour(
    tmp_path: Path, drawn: list[Any]
) -> None:
    runs = [make_run(tmp_path / parent / "x") for parent in ("a", "b")]
    plot.main(["--run", *map(str, runs), "--out", str(tmp_path / "b.png")])
    loss, acceptance, accuracy = drawn[0].axes
    assert texts(loss.get_legend()) == [str(run) for run in runs]
    for axes in (loss, acceptance, accuracy):
        assert [line.get_color() for line in axes.lines[:2]] == ["#0072B2", "#D55E00"]


def test_run_without_evaluation(tmp_path: Path, drawn: list[Any]) -> None:
    run = make_run(tmp_path / "x", ROWS[1:3])
    plot.main(["--run", str(run), "--out", str(tmp_path / "a.png")])
    _, acceptance, accuracy = drawn[0].axes
    assert lines(acceptance) == []
    assert acceptance.get_ylim() == (1.0, 2.0)
    assert all(axes.get_position().width > 0.35 for axes in drawn[0].axes)
    assert lines(accuracy) == [([10, 20], [0.1, 0.2])]


@pytest.mark.parametrize(
    ("run", "out", "message"),
    [
        ("nowhere", "a.png", "--run: found no metrics.jsonl in nowhere, want the folder of a run"),
        ("empty", "a.png", "metrics.jsonl: found no rows, want a run that has logged some"),
        ("x", "a", "--out: found a, want a picture's name, like a.png"),
        ("x", "a.nonsense", "--out: found a.nonsense, want a picture's name: "),
    ],
)
def test_mistakes_of_the_user(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run: str,
    out: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "x")
    make_run(tmp_path / "empty", [])
    assert run_command(lambda: plot.main(["--run", run, "--out", out])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_missing_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    real_import = builtins.__import__

    def without_matplotlib(name: str, *args: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return real_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(UserError) as error:
        plot.plot_runs({"x": ROWS}, tmp_path / "a.png")
    assert str(error.value) == "plot: found no matplotlib, want pip install 'dflash-ext[plot]'"
