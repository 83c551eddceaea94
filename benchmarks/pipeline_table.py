"""Reports of bench_pipeline in words: python -m benchmarks.pipeline_table REPORT.json [...]"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dflash_ext.command import CommandParser, run_command
from dflash_ext.config_values import UserError

PHASES = ("target-bound", "drafter-bound", "configured", "recommended")
Report = dict[str, Any]


def layout(report: Report) -> str:
    conditions = report["conditions"]
    sides = (" ".join(conditions[side]) for side in ("targets", "drafters"))
    return " -> ".join(sides)


def markdown(reports: list[Report]) -> str:
    """Conditions, one table of phases over all layouts, and what each layout's run says besides."""
    conditions = reports[0]["conditions"]
    facts = (f"{key} {value}" for key, value in conditions.items() if isinstance(value, (str, int)))
    lines = [
        ", ".join(facts),
        "",
        "| layout | phase | anchors | tokens/s | target alone | drafter alone | of the slower | "
        "of the harmonic bound | target waits | drafter waits | host GiB |",
        "|" + "---|" * 11,
    ]
    for report in reports:
        lines += [phase_row(report, name) for name in PHASES if name in report]
    for report in reports:
        lines += ["", f"{layout(report)}:", "", *(f"- {line}" for line in notes(report))]
    return "\n".join(lines) + "\n"


def phase_row(report: Report, name: str) -> str:
    found = report[name]
    cells = [
        layout(report),
        name,
        f"{found['anchors']:,}",
        f"{found['tokens_per_s']:,.0f}",
        f"{found['alone_tokens_per_s']['target']:,.0f}",
        f"{found['alone_tokens_per_s']['drafter']:,.0f}",
        f"{found['of_slower_stage']:.3f} ({found['slower_stage']})",
        f"{found['of_harmonic_bound']:.3f}",
        f"{found['target']['waits']:.1%}",
        f"{found['drafter']['waits']:.1%}",
        f"{found['memory']['rss_gib']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def notes(report: Report) -> list[str]:
    """What a run without some of its phases cannot say is left out."""
    lines = list(report.get("kernels", []))
    if "padding" in report:
        lines.append(f"padding of the target's input {report['padding']:.1%}")
    if "balanced_anchors" in report:
        lines.append(
            f"a drafter's step: {report['drafter_fixed_s']:.2f} s and "
            f"{report['drafter_s_an_anchor'] * 1e6:.0f} us an anchor; both sides are balanced at "
            f"{report['balanced_anchors']:,} anchors"
        )
    if report.get("one target alone", {}).get("tokens_per_s"):
        one = report["one target alone"]["tokens_per_s"]
        together = report["target alone"]["target"]["per_worker"]
        lines.append(
            f"one target by itself {one:,.0f} tokens/s, all {len(together)} together "
            f"{sum(together) / one / len(together):.3f} x that each"
        )
    for name in PHASES:
        if name in report:
            lines += layout_notes(report[name], name)
    costs = {"drafter alone": report.get("metrics, small")}
    costs |= {name: report[name]["metrics"] for name in PHASES if name in report}
    for name, cost in costs.items():
        if cost:
            lines.append(
                f"measuring a batch, {name}: {cost['extra']:+.2%} of the drafter's time, standard "
                f"error {cost['standard_error']:.2%}, {cost['pairs']} pairs of batches"
            )
    for name in PHASES:
        for gpu, found in report.get(name, {}).get("memory", {}).get("gpus", {}).items():
            first, last = found["used_quarters_gib"]
            lines.append(
                f"{gpu}, {name}: {first:.2f} GiB in the first quarter, {last:.2f} in the last"
            )
        if len(report["conditions"]["drafters"]) > 1 and name in report:
            share = report[name]["drafter"]["exposed_sum_share"]
            lines.append(f"gradient sums that nothing hides, {name}: {share:.1%} of a step")
    if "waiting_calls" in report:
        calls = report["waiting_calls"]
        words = (f"{thread}: {counts}" for thread, counts in calls.items())
        lines.append("calls that wait, in three profiled steps: " + ("; ".join(words) or "none"))
    if "equal_weights" in report:
        equal = "equal bit for bit" if report["equal_weights"] else "DIFFERENT"
        lines.append(f"after {report['steps']} steps the weights of all drafters are {equal}")
    return lines


def layout_notes(found: Report, name: str) -> list[str]:
    """Rates of each worker and what the monitor recommends; nothing of a report without them."""
    each = (
        f"{stage} {', '.join(f'{speed:,.0f}' for speed in found[stage]['per_worker'])}"
        for stage in ("target", "drafter")
    )
    lines = [f"tokens/s of each worker, {name}: {'; '.join(each)}"]
    if found.get("of_single_targets"):
        share = found["of_single_targets"]
        lines.append(f"tokens/s, {name}: {share:.3f} x as many targets, each by itself")
    if found.get("monitor"):
        advice = found["monitor"]
        ratio = advice["targets_per_drafter"]
        lines.append(f"monitor, {name}: {advice['line']} (balanced at {ratio} targets a drafter)")
    return lines


def load(path: Path) -> Report:
    """A report. Raises UserError for any other file, and for one of an older version."""
    try:
        report: Report = json.loads(path.read_text())
        markdown([report])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: found {why}, want a report of this bench_pipeline") from error
    return report


def main() -> int:
    parser = CommandParser(
        prog="python -m benchmarks.pipeline_table", description=__doc__.splitlines()[0]
    )
    parser.add_argument("report", type=Path, nargs="+")
    reports = [load(path) for path in parser.parse_args().report]
    print(markdown(reports), end="")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
