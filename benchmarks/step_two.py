"""Two drafter threads on two GPUs: cold starts, equal weights, and the rate beside one alone.

python -m benchmarks.step_two rate [--devices cuda:0 cuda:1] [--shape 27b] [--variants default none
    meet late copies copies,fc_blocks=1 bucket_mib=64,dtype=bfloat16] [--profile default copies]
python -m benchmarks.step_two cold [--starts 20] [--jobs 4] [--shape small]

Each thread makes the drafter's step, the all-reduce and the optimizer step. `rate` times phases in
turns: one drafter alone, both together; for each variant of the sums, on the same drafters. What is
lost without any sums (`none`) is the machine's (clocks, interpreter), with threads that only meet
(`meet`) the host's; `late`, with all sums behind the backward pass, shows what they take alone.
`--profile` says what both GPUs did in two steps. `cold` starts fresh processes whose threads set
off at the same moment, the first ones with an empty Triton cache; each must end without an error
and with bit-identical weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks.bench_step import Step, problem_on
from benchmarks.run import facts
from benchmarks.step_problem import CE, SHAPES, Problem
from benchmarks.two_timeline import activities, timelines
from benchmarks.two_variants import MeetOnly, Variant
from dflash_ext.command import CommandParser, at_least, check_output_file, device_of, run_command
from dflash_ext.config_values import UserError
from dflash_ext.drafter.overlap import BackwardSync
from dflash_ext.grad_sync import GradSync, make_store

SETTLE_STEPS = 3  # before a timed phase: a GPU that has rested is faster for a while
PROFILED_STEPS = 2
JOIN_S = 240.0


class Drafters:
    """One thread per device, from the building of its drafter on."""

    def __init__(
        self, shape: str, devices: list[torch.device], variants: Sequence[Variant] = (Variant(),)
    ) -> None:
        """variants: how the drafters sum gradients, one after the other, each in its own group."""
        self.shape, self.devices, self.variants = shape, devices, variants
        self.world = len(devices)
        self.start = threading.Barrier(self.world)
        self.stop = threading.Event()
        self.errors: list[str] = []
        self.stores = [make_store() for _ in variants]
        self.boards = [variant.board(devices) for variant in variants]
        self.drafters = [Drafter(self, rank) for rank in range(self.world)]

    def run(self, body: Callable[[Drafter], None]) -> list[Drafter]:
        """Runs `body` in every thread at once; raises RuntimeError with the first error."""
        threads = [
            threading.Thread(target=self._guarded, args=(drafter, body), daemon=True)
            for drafter in self.drafters
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
        if any(thread.is_alive() for thread in threads):
            self.errors.append(f"a drafter hangs after {JOIN_S:g} s")
        if self.errors:
            raise RuntimeError(self.errors[0])
        return self.drafters

    def _guarded(self, drafter: Drafter, body: Callable[[Drafter], None]) -> None:
        try:
            self.start.wait()
            drafter.build()
            body(drafter)
            drafter.sync.close()
        except BaseException as error:
            self.errors.append(f"drafter {drafter.rank}: {error!r}")
            traceback.print_exc()
            self.stop.set()
            self.start.abort()
            drafter.sync.close()


class Drafter:
    """A rank: its model, data of its own, and its steps."""

    step: Step
    variant: Variant
    overlap: BackwardSync
    gradients: list[torch.Tensor]  # of the last step, summed if it was one of all drafters

    def __init__(self, owner: Drafters, rank: int) -> None:
        self.owner, self.rank = owner, rank
        self.device = owner.devices[rank]
        self.sync = self._sync(0)
        self.seconds: dict[tuple[Variant, str], list[float]] = defaultdict(list)
        self.done = 0

    def build(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.device))
        self.connect(0)
        self.step = Step(self._problem())
        self._overlap()

    def connect(self, index: int) -> None:
        """The sums from here on as in that variant; all drafters at once."""
        self.variant = self.owner.variants[index]
        if index > 0:
            self.sync.close()
            self.sync = self._sync(index)
        self.sync.connect()
        if index > 0:
            self._overlap()

    def _overlap(self) -> None:
        model, params = self.step.problem.model, self.step.optimizer.params
        self.overlap = BackwardSync(model, self.sync, params, self.variant.fc_blocks)

    def _sync(self, index: int) -> GradSync:
        owner, variant = self.owner, self.owner.variants[index]
        return (MeetOnly if variant.sums == "meet" else GradSync)(
            self.rank,
            owner.world,
            owner.stores[index],
            self.device,
            dtype=variant.dtype,
            timeout_s=60.0,
            stop=owner.stop,
            bucket_bytes=variant.bucket_mib and variant.bucket_mib * 2**20,
            board=owner.boards[index],
        )

    def _problem(self) -> Problem:
        """The same weights in every rank, hidden states of its own, the whole step's weights."""
        problem = problem_on(self.device, self.owner.shape)
        generator = torch.Generator(self.device).manual_seed(100 + self.rank)
        problem.hidden.normal_(generator=generator)
        plan = problem.plan
        return dataclasses.replace(
            problem, plan=dataclasses.replace(plan, weight_sum=plan.weight_sum * self.owner.world)
        )

    def train(self, steps: int, *, together: bool = True) -> None:
        params, sums = self.step.optimizer.params, self.variant.sums
        overlap = self.overlap if together and sums not in ("none", "late") else None
        for _ in range(steps):
            self.step.run(CE, overlap=overlap)
            self.gradients = [p.grad for p in params if p.grad is not None]
            if together and sums == "late":
                self.sync.all_reduce(self.gradients)
            self.step.optimizer.step(self.done, self.step.norm)
            self.done += 1

    def timed(self, steps: int, phase: str) -> None:
        """Adds the seconds per step of a phase: of steps among others, as in a run."""
        self.train(SETTLE_STEPS, together=phase == "both")
        begin = self._mark()
        self.train(steps, together=phase == "both")
        end = self._mark()
        self.wait()
        # A GPU is timed by itself, without the start of an empty queue, which a run has but once.
        seconds = begin.elapsed_time(end) * 1e-3 if self.device.type == "cuda" else end - begin
        self.seconds[self.variant, phase].append(seconds / steps)

    def _mark(self) -> Any:
        """A point of the training stream, or on a CPU a time."""
        if self.device.type != "cuda":
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def digest(self) -> str:
        """Of all weights and of their masters."""
        optimizer = self.step.optimizer
        found = hashlib.sha256()
        for tensor in (*optimizer.params, *optimizer.masters):
            found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]


def demand_equal(drafters: list[Drafter], what: str) -> None:
    """Raises RuntimeError unless the drafters have the same weights and masters, or summed to the
    same gradients in the last step."""
    tensors = []
    for drafter in drafters:
        optimizer = drafter.step.optimizer
        weights = [*optimizer.params, *optimizer.masters]
        tensors.append(weights if what == "weights" else drafter.gradients)
    for first, *others in zip(*tensors, strict=True):
        if not all(torch.equal(first, other.to(first.device)) for other in others):
            raise RuntimeError(f"{what} differ after {drafters[0].done} steps")


def rate(
    shape: str,
    devices: list[torch.device],
    steps: int,
    rounds: int,
    variants: Sequence[Variant] = (Variant(),),
    profiled: Sequence[Variant] = (),
    keep: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """The drafters' times with the first variant, and by "variants" with each; then timelines of
    the profiled ones. As each ends a line is printed, and the result so far given to `keep`."""
    owner = Drafters(shape, devices, [*variants, *profiled])
    result: dict[str, Any] = {"equal_weights_after_steps": None, "variants": {}, "timelines": {}}

    def compare(drafter: Drafter, index: int) -> None:
        variant = owner.variants[index]
        for i in range(rounds):
            owner.start.wait()
            drafter.timed(steps, "both")
            owner.start.wait()
            if drafter.rank == 0 and variant.is_summed:
                demand_equal(owner.drafters, "gradients")
                if index == i == 0:  # steps alone, after that, differ
                    demand_equal(owner.drafters, "weights")
                    result["equal_weights_after_steps"] = drafter.done
            for rank in range(owner.world):
                owner.start.wait()
                if rank == drafter.rank:
                    drafter.timed(steps, "alone")
        owner.start.wait()
        if drafter.rank == 0:
            result["variants"][variant.name] = found = _rates(owner.drafters, variant)
            if index == 0:
                result.update(found)
            shares = ", ".join(f"{row['share_of_alone']:.3f}" for row in found.values())
            both = ", ".join(f"{row['both_ms']:.1f}" for row in found.values())
            print(f"{variant.name}: rate / alone {shares}; both {both} ms", flush=True)

    def profile(drafter: Drafter, index: int) -> None:
        drafter.train(SETTLE_STEPS)
        drafter.wait()
        owner.start.wait()
        with _profiler(drafter) as prof:
            owner.start.wait()
            drafter.train(PROFILED_STEPS)
            drafter.wait()
            owner.start.wait()
        if prof is not None:
            name, found = owner.variants[index].name, timelines(activities(prof), PROFILED_STEPS)
            result["timelines"][name] = found
            for device, row in found.items():
                words = ", ".join(f"{key} {ms:.1f}" for key, ms in row.items())
                print(f"{name}, {device}, ms: {words}", flush=True)

    def body(drafter: Drafter) -> None:
        for index in range(len(owner.variants)):
            if index > 0:
                drafter.connect(index)
            (compare if index < len(variants) else profile)(drafter, index)
            if drafter.rank == 0:
                keep(result)

    owner.run(body)
    return result


def _profiler(drafter: Drafter) -> Any:
    """Of all GPUs, in the first drafter's thread; nothing in the others'."""
    if drafter.rank > 0:
        return contextlib.nullcontext()
    on_gpu = drafter.device.type == "cuda"
    return torch.profiler.profile(
        activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    )


def _rates(drafters: list[Drafter], variant: Variant) -> dict[str, dict[str, Any]]:
    rows = drafters[0].step.problem.plan.labels.numel()
    found = {}
    for drafter in drafters:
        alone, both = (statistics.median(drafter.seconds[variant, x]) for x in ("alone", "both"))
        found[f"drafter {drafter.rank}"] = {
            "device": str(drafter.device),
            "rows": rows,
            "alone_ms": alone * 1e3,
            "both_ms": both * 1e3,
            "share_of_alone": alone / both,
        }
    return found


def one_cold_start(shape: str, devices: list[torch.device]) -> None:
    """In a fresh process: five steps from nothing, then the digest."""
    drafters = Drafters(shape, devices).run(lambda drafter: drafter.train(5))
    for drafter in drafters:
        drafter.wait()
    demand_equal(drafters, "weights")
    print("weights", drafters[0].digest(), flush=True)


def cold(shape: str, devices: list[torch.device], starts: int, jobs: int) -> dict[str, object]:
    """Starts `starts` fresh processes, `jobs` at a time; the first ones fill a Triton cache."""
    command = [sys.executable, "-m", "benchmarks.step_two", "once", "--shape", shape, "--devices"]
    command += [str(device) for device in devices]

    def start(environment: dict[str, str]) -> tuple[float, str]:
        begin = time.perf_counter()
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=300,
            )
        except subprocess.TimeoutExpired:
            return time.perf_counter() - begin, "error: no end within 300 s"
        words = done.stdout.split()
        ok = done.returncode == 0 and words[:1] == ["weights"]
        error = f"error: exit {done.returncode}: {done.stderr.strip()[-2000:]}"
        return time.perf_counter() - begin, words[1] if ok else error

    results = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        for seconds, words in pool.map(start, [{"TRITON_CACHE_DIR": folder}] * starts):
            print(f"start {len(results)}: {words}, {seconds:.1f} s", flush=True)
            results.append((seconds, words))
    failures = [words for _, words in results if words.startswith("error")]
    return {
        "starts": starts,
        "failures": failures,
        "digests": sorted({words for _, words in results if not words.startswith("error")}),
        "median_s": statistics.median(seconds for seconds, _ in results),
    }


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["rate", "cold", "once"])
    parser.add_argument("--devices", nargs="+", default=["0", "1"])
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--steps", type=at_least(1), default=8, help="of a timed phase")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="of phases")
    parser.add_argument("--variants", nargs="+", type=Variant.of, default=[Variant()])
    parser.add_argument("--profile", nargs="+", type=Variant.of, default=[], metavar="VARIANT")
    parser.add_argument("--starts", type=at_least(1), default=20)
    parser.add_argument("--jobs", type=at_least(1), default=4, help="processes at a time")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the result here")
    arguments = parser.parse_args()
    if len(arguments.devices) < 2:
        raise UserError(f"--devices: found {arguments.devices[0]} alone, want two or more")
    if arguments.json:
        check_output_file("--json", arguments.json)
    devices = [device_of("--devices", device) for device in arguments.devices]
    for device in devices:
        # The first memory of expandable segments is to come from one thread: the allocator finds
        # out then what kind of handle the machine permits. A run's targets see to that.
        torch.zeros(1, device=device)
    if arguments.profile:
        with torch.profiler.profile():  # whose first start is to be in the main thread
            pass
    if arguments.what == "once":
        one_cold_start(arguments.shape or "small", devices)
        return 0
    conditions = facts(devices[0])

    def keep(result: dict[str, Any]) -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps({"conditions": conditions, **result}, indent=2))

    if arguments.what == "rate":
        how = arguments.steps, arguments.rounds, arguments.variants, arguments.profile
        result = rate(arguments.shape or "27b", devices, *how, keep)
    else:
        result = cold(arguments.shape or "small", devices, arguments.starts, arguments.jobs)
        keep(result)
    print(json.dumps({"conditions": conditions, **result}, indent=2))
    return 1 if result.get("failures") else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
