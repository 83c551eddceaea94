"""The whole pipeline beside its stages alone, in one process that never stops in between.

python -m benchmarks.bench_pipeline --config configs/qwen3_5_27b_2gpu.yaml [--seconds 80]
    [--phases configured recommended] [--anchors FEW MANY] [--trace OUT.json.gz] [--json OUT]
    [--section.field value ...]

Takes a recipe with its layout (`--topology.targets '[0]' --topology.drafters '[0]'` for one GPU),
gives its target random weights and random text, and runs the product's own Pipeline through phases:
the targets alone, one of them alone, the drafters alone with few and with many anchors, then
everything: with so few anchors that targets are the slower side, with so many that drafters are,
with the recipe's own number, or with what the monitor recommends after the phase before. Last come
three profiled steps. A JSON report holds all figures.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks import trace
from benchmarks.pipeline_figures import (
    Balance,
    Sample,
    alone_rate,
    memory,
    metrics_cost,
    own_speed,
    padding,
    rate,
    sample,
    stage_rows,
    work_of,
)
from benchmarks.pipeline_phases import Phase, Recorder, Schedule
from benchmarks.pipeline_table import PHASES
from benchmarks.random_target import random_target, write_target, write_text
from benchmarks.run import facts
from dflash_ext.command import CommandParser, at_least, check_output_file, run_command
from dflash_ext.config import Config, UserError, parse_config
from dflash_ext.logger import RunLogger
from dflash_ext.pipeline import Pipeline
from dflash_ext.plan import Plan
from dflash_ext.supervisor import Worker
from dflash_ext.target import Target
from dflash_ext.target_shape import KNOWN_CONFIGS

FOREVER = 10**6  # steps; the run ends after its phases
PROFILED_STEPS = 3
POLL_S, SAMPLE_S = 0.05, 1.0
# Seconds of a drafter's step over those of the targets', in the pipeline phases of both kinds.
SHARES = {"drafter-bound": 1.35, "target-bound": 0.75}
CONFIGURED, RECOMMENDED = "configured", "recommended"
TOY = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
RECIPE = str(Path(__file__).parents[1] / "configs" / "qwen3_5_27b_2gpu.yaml")
TOY_FLAGS = f"""--config {RECIPE} --model.dtype float32 --model.target_layer_ids [0,1]
--drafter.num_layers 2 --drafter.block_size 4 --drafter.mask_token_id 90
--drafter.num_attention_heads 4 --drafter.num_key_value_heads 2 --drafter.head_dim 16
--drafter.layer_types [sliding_attention,full_attention] --drafter.sliding_window 16
--data.max_length 64 --data.token_budget 192 --train.anchor_group 8
--topology.targets [cpu] --topology.drafters [cpu] --topology.cpu_threads 1""".split()


@dataclass(frozen=True)
class Options:
    """seconds: of each pipeline phase. probes: anchors of the two phases that find the balance.
    settle: batches left out at both ends of a pipeline phase. alone: batches of a stage alone."""

    seconds: float = 80.0
    probes: tuple[int, int] = (1024, 8192)
    anchors: tuple[int, int] | None = None
    phases: tuple[str, ...] = tuple(SHARES)
    settle: int = 2
    alone: int = 4
    trace: Path | None = None
    json: Path | None = None


class RandomPipeline(Pipeline):
    """The product's pipeline over a target of random weights."""

    def load_target(self) -> Target:
        device = torch.device(self.cfg.topology.targets[0])
        config = AutoConfig.from_pretrained(self.cfg.model.target)
        return random_target(config, device, self.dtype, fast_gdn=device.type == "cuda")


class Bench:
    """One pipeline and its phases. `report` fills up as they end."""

    def __init__(self, cfg: Config, options: Options) -> None:
        self.cfg, self.options = cfg, options
        self.report: dict[str, Any] = {"conditions": conditions(cfg)}
        print(json.dumps(self.report), flush=True)
        self.samples: list[Sample] = []
        self.targets = len(cfg.topology.targets)
        self.configured = cfg.train.max_anchors  # phases change it
        self.warm = Phase("warm-up", 2, max(options.probes), self.targets)
        self.schedule = Schedule(self.warm)
        with trace.profiling(None):  # the profiler has to be started by the main thread first
            pass
        self._started = begin = time.perf_counter()
        run_dir = Path(cfg.log.dir) / cfg.log.name
        run_dir.mkdir(parents=True)
        self.pipeline = RandomPipeline(cfg, run_dir)
        self.recorder = Recorder(self.pipeline, self.schedule)
        self._note("build_s", time.perf_counter() - begin)
        self._note("kernels", self.pipeline.target.kernel_lines)
        self._note("warm_up", self.pipeline.warm_up_lines)
        self._sampled = 0.0

    def run(self) -> dict[str, Any]:
        """All phases. Raises RunFailed for an error in any thread."""
        pipeline = self.pipeline
        logger = RunLogger(self.cfg, pipeline.run_dir, pipeline.total_steps)
        pipeline.supervisor.spawn("phases", self._phases)
        try:
            pipeline.run(logger)
        finally:
            logger.close()
        first, *others = (loop.model for loop in pipeline.drafter_loops)
        same = all(
            torch.equal(a, b.to(a.device))
            for other in others
            for a, b in zip(first.parameters(), other.parameters(), strict=True)
        )
        self._note("equal_weights", same)
        self._note("steps", pipeline.done_steps)
        return self.report

    def _phases(self, worker: Worker) -> None:
        worker.at("phases")
        try:
            chosen = self._stages_alone()
            pairs = {name: self._planned(name, anchors) for name, anchors in chosen.items()}
            # All at once: batches are planned so far ahead that a phase added late comes late.
            self.schedule.add(*(phase for pair in pairs.values() for phase in pair))
            for alone, phase in pairs.values():
                self._wait(phase, phase.steps)
                self._report_phase(alone, phase)
            if RECOMMENDED in self.options.phases:
                phase = self._recommended(phase)
            with trace.profiling(self.options.trace) as profile:  # the last phase goes on
                self._wait(phase, self.recorder.finished(phase) + PROFILED_STEPS)
            self._note("waiting_calls", profile.waiting_calls())
        finally:
            self.pipeline.supervisor.signum = signal.SIGTERM  # a clean end

    def _recommended(self, before: Phase) -> Phase:
        """One with the anchors that the monitor recommends after a phase, if there are any."""
        anchors = (self.report[before.name]["monitor"] or {}).get("max_anchors")
        if anchors is None:
            return before
        alone, phase = self._planned(RECOMMENDED, anchors)
        self.schedule.add(alone, phase)
        self._wait(phase, phase.steps)
        self._report_phase(alone, phase)
        return phase

    def _stages_alone(self) -> dict[str, int]:
        """Measures both stages; the number of anchors for each kind of pipeline phase."""
        options, alone = self.options, 1 + self.options.alone
        small, large = options.probes
        steps = self._steps(alone)
        target = Phase("target alone", steps, small, self.targets, drafters=False)
        # While one works, the others hand over all slots that there are.
        turns = alone * self.cfg.topology.slots_per_drafter
        single = Phase("one target alone", turns, small, 1, drafters=False)
        probe_large = Phase("drafter alone", alone, large, 0)
        # Short steps last: they go on while the next phases are chosen.
        probe_small = Phase("drafter alone", 4 * alone, small, 0, metrics_every=2)
        self.schedule.add(target, *([single] if self.targets > 1 else []), probe_large, probe_small)
        self._wait(self.warm, self.warm.steps)
        self._note("warm_s", time.perf_counter() - self._started)
        self._wait(probe_small, probe_small.steps)
        targets = self.recorder.timed("target", target)
        self.target_s = rate(targets, skip=1).step_s * self._batches_of_a_step()
        self._note("target alone", stage_rows(self.recorder, target, skip=1))
        self._note("padding", padding(targets))
        if self.targets > 1:
            one = own_speed(self.recorder.timed("target", single)[0])
            self._note("one target alone", {"tokens_per_s": one})
        rates = {p: rate(self.recorder.timed("drafter", p)) for p in (probe_small, probe_large)}
        self.balance = balance = Balance.through(*((p.anchors, r.step_s) for p, r in rates.items()))
        self._note("drafter_fixed_s", balance.fixed_s)
        self._note("drafter_s_an_anchor", balance.each_s)
        limits = {"at_least": min(self.options.probes) // 2, "at_most": self.cfg.data.token_budget}
        self._note("balanced_anchors", balance.anchors(self.target_s, **limits))
        self._note("metrics, small", metrics_cost(self.recorder.timed("drafter", probe_small)))
        chosen = {n: balance.anchors(SHARES[n] * self.target_s, **limits) for n in SHARES}
        if options.anchors is not None:
            chosen = dict(zip(SHARES, reversed(options.anchors), strict=True))
        chosen[CONFIGURED] = self.configured
        return {name: anchors for name, anchors in chosen.items() if name in options.phases}

    def _batches_of_a_step(self) -> float:
        """Batches of one optimizer step that one target makes."""
        return self.pipeline.planner.batches_per_step / self.targets

    def _steps(self, batches: int) -> int:
        """Optimizer steps in which every drafter and every target gets so many batches."""
        return math.ceil(batches * max(1.0, 1 / self._batches_of_a_step()))

    def _planned(self, name: str, anchors: int) -> tuple[Phase, Phase]:
        """The drafters alone, then everything, with so many anchors."""
        options, topology = self.options, self.cfg.topology
        # Its last batches are left out: the targets are at work on the next phase by then.
        batches = 1 + options.alone + options.settle
        alone = Phase(f"drafter alone, {name}", batches, anchors, 0)
        seconds = self.balance.seconds(anchors)
        shared = set(topology.targets) & set(topology.drafters)
        step_s = seconds + self.target_s if shared else max(seconds, self.target_s)
        edges = self._steps(2 * options.settle)
        steps = max(self._steps(2), round(options.seconds / step_s)) + edges
        return alone, Phase(name, steps, anchors, self.targets, metrics_every=2)

    def _report_phase(self, alone: Phase, phase: Phase) -> None:
        settle = self.options.settle
        alone_rates = stage_rows(self.recorder, alone, skip=1, skip_last=settle)
        found = stage_rows(self.recorder, phase, skip=settle, skip_last=settle)
        target_rate = alone_rate(self.report["target alone"]["target"], found["target"])
        drafter_rate = alone_rate(alone_rates["drafter"], found["drafter"])
        whole = found["drafter"]["tokens_per_s"]
        slower = min(target_rate, drafter_rate)
        bound = 1 / (1 / target_rate + 1 / drafter_rate)
        single = self.report.get("one target alone", {}).get("tokens_per_s")
        self._note(
            phase.name,
            {
                **found,
                "drafter_alone": alone_rates["drafter"],
                "alone_tokens_per_s": {"target": target_rate, "drafter": drafter_rate},
                "tokens_per_s": whole,
                "slower_stage": "target" if target_rate < drafter_rate else "drafter",
                "of_slower_stage": whole / slower,
                "of_harmonic_bound": whole / bound,
                "of_single_targets": None if single is None else whole / (self.targets * single),
                "monitor": self._monitor(phase),
                "metrics": metrics_cost(self.recorder.timed("drafter", phase)),
                "memory": memory([s for s in self.samples if s.phase == phase.name]),
            },
        )

    def _monitor(self, phase: Phase) -> dict[str, Any] | None:
        """What the run's last line would say if it had been this phase."""
        settle, timed = self.options.settle, self.recorder.timed
        work = work_of(
            timed("target", phase), timed("drafter", phase), skip=settle, skip_last=settle
        )
        train = replace(self.cfg.train, max_anchors=phase.anchors)
        load = self.pipeline.monitor.load
        return replace(load, cfg=replace(self.cfg, train=train)).summary(work)

    def _wait(self, phase: Phase, steps: int) -> None:
        """Until every drafter has done so many steps of a phase; samples memory meanwhile."""
        supervisor, gpus = self.pipeline.supervisor, self.pipeline.gpus()
        while self.recorder.finished(phase) < steps:
            supervisor.check()
            now = time.perf_counter()
            if self.recorder.finished(phase) and now - self._sampled >= SAMPLE_S:
                self._sampled = now
                self.samples.append(sample(phase.name, gpus))
            time.sleep(POLL_S)
        self.samples.append(sample(phase.name, gpus))

    def _note(self, name: str, value: object) -> None:
        self.report[name] = value
        print(f"{name}: {json.dumps(value)}", flush=True)
        if self.options.json is not None:  # at once: a run may be cut short
            self.options.json.write_text(json.dumps(self.report, indent=2) + "\n")


def configure(folder: Path, flags: Sequence[str], sizes: dict[str, Any] | None = None) -> Config:
    """The recipe of `flags` with a target of random weights and random text, both in `folder`.

    `sizes` are the target's, by default those known of the recipe's. Raises UserError.
    """
    cfg, _ = parse_config(flags)
    if sizes is None and cfg.model.target not in KNOWN_CONFIGS:
        raise UserError(
            f"model.target: found {cfg.model.target!r}, want one of: {', '.join(KNOWN_CONFIGS)}"
        )
    write_target(folder / "target", sizes or KNOWN_CONFIGS[cfg.model.target])
    cfg.model.target = str(folder / "target")
    plan = Plan(cfg)
    print("\n".join(plan.lines()), flush=True)
    plan.check_memory()
    cfg.drafter.mask_token_id = plan.spec.mask_token_id  # the tokenizer has none to offer
    text = folder / "random.jsonl"
    write_text(
        text,
        vocab_size=plan.target.info.vocab_size,
        mask_token_id=plan.spec.mask_token_id,
        max_length=cfg.data.max_length,
        token_budget=cfg.data.token_budget,
    )
    cfg.data.train, cfg.data.eval = [str(text)], []
    cfg.train.steps, cfg.train.eval_every = FOREVER, 0
    cfg.log.dir, cfg.log.every = str(folder / "runs"), 1
    return cfg


def conditions(cfg: Config) -> dict[str, Any]:
    return {
        **facts(torch.device(cfg.topology.targets[0])),
        "targets": cfg.topology.targets,
        "drafters": cfg.topology.drafters,
        "token_budget": cfg.data.token_budget,
    }


def run_bench(
    flags: Sequence[str], options: Options, sizes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Conditions and figures of one run. Raises UserError, RunFailed."""
    with tempfile.TemporaryDirectory() as folder:
        return Bench(configure(Path(folder), flags, sizes), options).run()


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows of `benchmarks.run`: a toy on a CPU, the recipe for as many GPUs as there are."""
    if device.type == "cpu":
        toy = Options(seconds=0.5, probes=(4, 16), settle=1, alone=2)
        report = run_bench(TOY_FLAGS, toy, TOY)
    else:
        gpus = min(2, torch.cuda.device_count())
        layout = ["--topology.targets", "[0]", "--topology.drafters", f"[{gpus - 1}]"]
        report = run_bench(["--config", RECIPE, *layout], Options())
    for name in SHARES:
        found = report[name]
        note = (
            f"{found['tokens_per_s']:.0f} tokens/s, {found['of_slower_stage']:.3f} x the "
            f"{found['slower_stage']} alone, {found['of_harmonic_bound']:.3f} x the harmonic bound"
        )
        shape = f"{name}, {found['anchors']} anchors"
        yield {"op": "pipeline", "shape": shape, "peer": "its stages", "note": note, **found}


def main() -> int:
    parser = CommandParser(
        description=__doc__.splitlines()[0], epilog="All other flags are those of dflash_ext.train."
    )
    default = Options()
    parser.add_argument("--seconds", type=float, default=default.seconds, help="of such a phase")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=default.phases)
    parser.add_argument("--anchors", type=at_least(1), nargs=2, metavar=("FEW", "MANY"))
    parser.add_argument("--probes", type=at_least(1), nargs=2, default=default.probes)
    parser.add_argument("--settle", type=at_least(0), default=default.settle)
    parser.add_argument("--alone", type=at_least(1), default=default.alone, help="of a stage")
    parser.add_argument("--trace", type=Path, metavar="OUT", help="profile of three steady steps")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report here")
    arguments, flags = parser.parse_known_args()
    for option, path in (("--json", arguments.json), ("--trace", arguments.trace)):
        if path is not None:
            check_output_file(option, path)
    if arguments.json is not None and arguments.json == arguments.trace:
        raise UserError(f"--trace: found {arguments.trace}, the file of --json, want another")
    if arguments.phases == [RECOMMENDED]:
        raise UserError(f"--phases: found {RECOMMENDED} alone, want another phase before it")
    options = Options(
        seconds=arguments.seconds,
        probes=tuple(arguments.probes),
        anchors=arguments.anchors and tuple(arguments.anchors),
        phases=tuple(arguments.phases),
        settle=arguments.settle,
        alone=arguments.alone,
        trace=arguments.trace,
        json=arguments.json,
    )
    run_bench(flags, options)
    return 0


if __name__ == "__main__":
    code = run_command(main)
    sys.stdout.flush()
    os._exit(code)  # a worker stuck in native code must not keep the process alive
