"""Draws loss and acceptance over the steps of runs.

python -m dflash_ext.plot --run runs/X [runs/Y ...] --out FILE.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dflash_ext.config import UserError, run_command
from dflash_ext.logger import read_metrics

Rows = list[dict[str, Any]]


def series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have ``key``."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def plot_runs(runs: dict[str, Rows], out: Path) -> None:
    """Writes a picture of two panels, loss and acceptance, one colour per run."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("plot: found no matplotlib, want pip install 'dflash-ext[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, rows in runs.items():
        left.plot(*series(rows, "loss"), label=name)
        right.plot(*series(rows, "eval_accept_len"), marker="o", label=name)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_ext.plot", description="Draws loss and acceptance of runs."
    )
    parser.add_argument("--run", nargs="+", required=True, type=Path, help="folders of runs")
    parser.add_argument("--out", required=True, type=Path, help="picture to write")
    args = parser.parse_args(argv)
    runs = {}
    for run in args.run:
        if not (run / "metrics.jsonl").exists():
            raise UserError(f"--run: found no metrics.jsonl in {run}, want the folder of a run")
        runs[run.name] = read_metrics(run / "metrics.jsonl")
    plot_runs(runs, args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
