"""Many anchors in bounded memory: rows a second and peak memory of the whole step.

python -m benchmarks.step_anchors [--shape 27b] [--documents 16] [--tokens 3072]
    [--anchors 8192 1024] [--group 512]

Forward, backward and optimizer step over one context; the numbers of anchors take turns.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import median_seconds
from benchmarks.bench_step import Step
from benchmarks.run import facts, write_report
from benchmarks.step_problem import CE, SHAPES, StepShape, make_plan, make_problem
from dflash_ext.command import CommandParser, at_least, check_output_file, device_of, run_command

GIB = 2**30


def measure_anchors(
    shape: StepShape, anchors: list[int], group: int, device: torch.device, repeats: int = 5
) -> list[dict[str, float]]:
    """A row for each number of anchors, which all documents share."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    problem = make_problem(dataclasses.replace(shape, anchors=1), device, dtype)
    step = Step(problem)
    plans = []
    for count in anchors:
        train = dataclasses.replace(problem.train, max_anchors=count)
        plans.append(make_plan(shape, train).to(device))

    done = 0

    def run(index: int) -> None:
        nonlocal done
        step.problem = dataclasses.replace(problem, plan=plans[index])
        step.run(CE, group=group)
        step.optimizer.step(done)
        done += 1

    calls = tuple(functools.partial(run, index) for index in range(len(anchors)))
    peaks = []
    for count, call in zip(anchors, calls, strict=True):
        peaks.append(peak_memory(call, device))
        print(f"{count:6} anchors: peak of {peaks[-1] / GIB:.1f} GiB", flush=True)
    seconds = median_seconds(calls, device, min_repeats=repeats)
    return [
        {
            "context_tokens": shape.documents * shape.tokens,
            "anchors": count,
            "group": group,
            "query_rows": plan.labels.numel(),
            "weighted_rows": int(plan.n_rows),
            "ms": s * 1e3,
            "rows_per_s": plan.labels.numel() / s,
            "peak_gib": peak / GIB,
        }
        for count, plan, s, peak in zip(anchors, plans, seconds, peaks, strict=True)
    ]


def peak_memory(call: Callable[[], object], device: torch.device) -> float:
    """Bytes of the device that the allocator held at most during a call, with all that stays."""
    if device.type != "cuda":
        call()
        return 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return float(torch.cuda.max_memory_reserved(device))


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shape", choices=list(SHAPES), default="27b")
    parser.add_argument("--documents", type=at_least(1), default=16)
    parser.add_argument("--tokens", type=at_least(2), default=3072, help="of a document")
    parser.add_argument("--anchors", type=at_least(1), nargs="+", default=[8192, 1024])
    parser.add_argument(
        "--group", type=at_least(1), default=512, help="anchors worked off at a time"
    )
    parser.add_argument("--repeats", type=at_least(1), default=5, help="of each number, at least")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the rows here")
    arguments = parser.parse_args()
    if arguments.json:
        check_output_file("--json", arguments.json)
    device = device_of("--device", arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shape = dataclasses.replace(
        SHAPES[arguments.shape], documents=arguments.documents, tokens=arguments.tokens
    )
    rows = measure_anchors(shape, arguments.anchors, arguments.group, device, arguments.repeats)
    for row in rows:
        print(
            f"{row['anchors']:6} anchors, {row['query_rows']} rows over {row['context_tokens']} "
            f"tokens: {row['ms']:.1f} ms, {row['rows_per_s']:.0f} rows/s "
            f"({row['rows_per_s'] / rows[-1]['rows_per_s']:.3f} of the last), "
            f"{row['peak_gib']:.1f} GiB"
        )
    if arguments.json:
        write_report(arguments.json, facts(device), rows)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
