"""Draws loss and acceptance of runs over their steps.

python -m dflash_ext.plot --run runs/X [runs/Y ...] --out FILE.png
"""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any

from dflash_ext.command import CommandParser, check_output_file, run_command
from dflash_ext.config import UserError
from dflash_ext.config_values import shown
from dflash_ext.files import naming
from dflash_ext.logger import read_metrics
from dflash_ext.run_folder import METRICS

Rows = list[dict[str, Any]]

# Okabe and Ito's palette: told apart by colour-blind readers, too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "font.size": 10,
}


def series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have ``key``."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def plot_runs(runs: dict[str, Rows], out: Path) -> None:
    """Writes a picture of two panels, loss and acceptance; every run has its colour.

    Raises:
        UserError: matplotlib is missing, or does not know the type of ``out``.
    """
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        figure.get_layout_engine().set(wspace=0.06)
        draw_loss(left, runs)
        draw_acceptance(right, runs)
        if len(runs) > 1:
            left.legend()
        out.parent.mkdir(parents=True, exist_ok=True)
        save_picture(figure, out, dpi=150)


def pyplot() -> Any:
    """matplotlib's, for files alone. Raises UserError where it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("plot: found no matplotlib, want pip install 'dflash-ext[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def check_picture(option: str, path: Path, *, make_parents: bool = False) -> None:
    """`check_output_file` for a picture."""
    check_output_file(option, path, make_parents=make_parents)
    if not path.suffix:  # matplotlib would add one, and write another file than was said
        raise UserError(f"{option}: found {path}, want a picture's name, like {path}.png")


def save_picture(figure: Any, out: Path, **options: Any) -> None:
    """Writes a figure of `pyplot` and closes it. Raises UserError for a type it does not know."""
    try:
        with naming(out):
            figure.savefig(out, **options)
    except ValueError as error:
        raise UserError(f"--out: found {out}, want a picture's name: {error}") from None
    finally:
        pyplot().close(figure)


def draw_loss(axes: Any, runs: dict[str, Rows]) -> None:
    """Training loss of the logged steps."""
    for colour, (name, rows) in zip(_colours(runs), runs.items(), strict=True):
        axes.plot(*series(rows, "loss"), color=colour, label=name)
    axes.set(title=_title("Training loss", runs), xlabel="optimizer step", ylabel="loss")


def draw_acceptance(axes: Any, runs: dict[str, Rows]) -> None:
    """Acceptance length of the evaluations (left scale), accuracy of the batches (right scale)."""
    accuracy = axes.twinx()
    accuracy.spines["right"].set_visible(True)
    accuracy.grid(visible=False)
    for colour, rows in zip(_colours(runs), runs.values(), strict=True):
        accuracy.plot(*series(rows, "acc"), ":", color=colour, linewidth=1.2)
        # Points on the frame are drawn whole; the layout must not look at a line without points.
        axes.plot(
            *series(rows, "eval_accept_len"), "o-", color=colour, clip_on=False, in_layout=False
        )
    axes.set(
        title="Acceptance",
        xlabel="optimizer step",
        ylabel="tokens per target pass",
    )
    accuracy.set_ylabel("share of proposals that are right")
    axes.set_ylim(1.0, max(2.0, axes.get_ylim()[1]))  # 1: the target's own token
    accuracy.set_ylim(bottom=0.0)
    # Without data: the legend tells the line styles apart, whatever the runs' colours.
    axes.plot([], [], "o-", color="#555555", label="acceptance length, held-out text")
    axes.plot([], [], ":", color="#555555", linewidth=1.2, label="accuracy, training text")
    axes.legend(loc="lower right")


def _colours(runs: dict[str, Rows]) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(len(runs))]


def _title(text: str, runs: dict[str, Rows]) -> str:
    return text if len(runs) > 1 else f"{text}, {next(iter(runs))}"


def main(argv: list[str] | None = None) -> int:
    parser = CommandParser(
        prog="python -m dflash_ext.plot", description="Draws loss and acceptance of runs."
    )
    parser.add_argument(
        "--run", nargs="+", required=True, type=Path, metavar="DIR", help="folders of runs"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="picture to write")
    args = parser.parse_args(argv)
    check_picture("--out", args.out, make_parents=True)
    unique = len({run.resolve().name for run in args.run}) == len(args.run)
    names = [run.resolve().name if unique else str(run) for run in args.run]
    plot_runs({name: _read(run) for name, run in zip(names, args.run, strict=True)}, args.out)
    print(f"wrote {args.out}")
    return 0


def _read(run: Path) -> Rows:
    path = run / METRICS
    if not path.exists():
        raise UserError(f"--run: found no metrics.jsonl in {run}, want the folder of a run")
    rows = read_metrics(path)
    if not rows:
        raise UserError(f"{path}: found no rows, want a run that has logged some")
    for key in ("loss", "acc", "eval_accept_len"):
        for row in rows:
            if type(row.get(key)) not in (int, float, NoneType):
                found = shown(row[key])
                raise UserError(f"{path}: step {row['step']}: {key}: found {found}, want a number")
    return rows


if __name__ == "__main__":
    raise SystemExit(run_command(main))
