"""Trains a drafter: ``python -m dflash_ext.train [--config FILE] [--section.field value ...]``."""

from __future__ import annotations

import platform
import resource
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

import dflash_ext
from dflash_ext import nonfinite
from dflash_ext.acceptance import accept_len, prompt_lookup_lengths, text_end
from dflash_ext.checkpoint import SaveError
from dflash_ext.command import leave, losable_output, run_command
from dflash_ext.config import Config, Flags, UserError, parse_config, save_config
from dflash_ext.data.conversations import prompt_and_answer
from dflash_ext.describe import describe
from dflash_ext.export import check_finite, check_replaceable, write_export
from dflash_ext.logger import RunLogger, print_summary, read_metrics, write_summary
from dflash_ext.machines import Machines, join_machines
from dflash_ext.monitor import Monitor
from dflash_ext.out_of_memory import advice, is_out_of_memory
from dflash_ext.pipeline import Pipeline
from dflash_ext.plan import Plan
from dflash_ext.run_folder import CONFIG, EXPORT, METRICS, claim
from dflash_ext.supervisor import Interrupted, RunFailed, end_at_signals


def main(argv: list[str] | None = None) -> int:
    start = time.perf_counter()
    argv = sys.argv[1:] if argv is None else argv
    cfg, flags = parse_config(argv)
    if flags.accept_changed_data and not flags.resume:
        raise UserError("--accept_changed_data: found without --resume, want both")
    run_dir = _run_dir(cfg)
    saved = run_dir / CONFIG
    if flags.resume and not any(a.startswith("--config") for a in argv):
        _check_begun(run_dir)
        cfg, flags = parse_config(["--config", str(saved), *argv])
    if flags.plan:
        plan = Plan(cfg)
        print("\n".join([*plan.lines(), "nothing was loaded, nothing was trained"]))
        plan.check_memory()
        return 0
    try:
        with (
            nullcontext() if flags.check_data else losable_output(),
            end_at_signals(),
            join_machines(cfg.train.stall_timeout_s) as machines,
            claim(run_dir, flags.resume) if _writes(machines, flags) else nullcontext(),
        ):
            return _run(cfg, flags, machines, start)
    except Interrupted as error:
        print("stopped by signal before the first step; nothing was saved")
        return 128 + error.signum
    except (RuntimeError, MemoryError, OSError) as error:
        cause: BaseException = error
        while isinstance(cause, RunFailed) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, UserError):  # found by a worker on its way
            raise cause from None
        memory = advice(cause, cfg) if is_out_of_memory(cause) else ""
        if not isinstance(error, RunFailed | SaveError):  # else a worker has printed its traceback
            if not memory:
                raise
            traceback.print_exc()
        first_line = str(error).partition("\n")[0] or type(error).__name__
        print("error:", "; ".join(filter(None, (first_line, memory))), file=sys.stderr)
        return 1


def _run(cfg: Config, flags: Flags, machines: Machines, start: float) -> int:
    run_dir = _run_dir(cfg)
    if not (flags.resume or "cpu" in cfg.topology.drafters):
        plan = Plan(cfg, starting=True)
        print("\n".join([*plan.memory_lines(), *plan.slot_lines()]), flush=True)
        plan.check_memory()
    if _writes(machines, flags):
        check_replaceable(run_dir / EXPORT)
    print(f"loading  {cfg.model.target}", flush=True)
    pipeline = Pipeline(cfg, run_dir, flags.resume, machines, flags.accept_changed_data)
    if flags.check_data:
        print("\n".join([*pipeline.describe_data(), "nothing was trained"]))
        return 0
    print("\n".join(describe(pipeline)), flush=True)

    pipeline.supervisor.install_signal_handlers()
    logger, summary = None, None
    if _writes(machines, flags):
        goes_on_from = pipeline.resume.step if pipeline.resume.meta else None
        logger = RunLogger(cfg, run_dir, pipeline.total_steps, goes_on_from, resume=flags.resume)
        save_config(cfg, run_dir / CONFIG)  # what it refuses has not begun
    try:
        monitor = pipeline.run(logger)
        if logger is not None and pipeline.complete:
            nonfinite.check_trained(pipeline, monitor.skipped_last)
            # Saved weights are finite; an older version's checkpoint may hold others.
            check_finite(
                pipeline.drafter_loops[0].model.state_dict(), f"step {pipeline.done_steps}"
            )
            summary = _summary(pipeline, monitor, time.perf_counter() - start)
    except (nonfinite.NeverTrained, nonfinite.NonfiniteWeights) as error:
        raise RunFailed(f"{error}{nonfinite.explain(error, pipeline)}") from error
    except RunFailed as error:
        raise RunFailed(
            machines.explain(error) + nonfinite.explain(error.__cause__, pipeline)
        ) from error
    finally:
        if logger is not None:
            logger.close(summary)
    try:
        return _finish(pipeline, summary)
    except OSError as error:
        raise RunFailed(
            f"{error.filename}: {error.strerror}; --resume writes it once there is room"
        ) from error


def _finish(pipeline: Pipeline, summary: dict[str, Any] | None) -> int:
    """Writes what a run leaves behind; `summary` only in the process that does, at the end.

    Raises SaveError and OSError, which names its file.
    """
    run_dir = pipeline.run_dir
    complete = pipeline.complete
    try:
        if summary is not None:
            # First: the weights are here, whatever became of their checkpoint.
            write_export(pipeline.drafter_loops[0].model, run_dir / EXPORT)
            print(f"wrote    {run_dir / EXPORT}", flush=True)
    finally:
        pipeline.checkpoints.close()
    if pipeline.supervisor.signum is not None and not complete:
        print(f"stopped by signal after step {pipeline.done_steps}; go on with --resume")
        return 128 + pipeline.supervisor.signum
    if summary is not None:
        write_summary(run_dir, summary)
        print_summary(summary | _advice(pipeline))
    return 0


def _run_dir(cfg: Config) -> Path:
    return Path(cfg.log.dir) / cfg.log.name


def _check_begun(run_dir: Path) -> None:
    """A mistyped name must not start the default run."""
    if not (run_dir / CONFIG).exists():
        raise UserError(
            f"--resume: found no run in {run_dir}, want the --log.name of one, "
            "or --config FILE to start it where there is none yet"
        )


def _writes(machines: Machines, flags: Flags) -> bool:
    return machines.rank == 0 and not flags.check_data


def _summary(pipeline: Pipeline, monitor: Monitor, seconds: float) -> dict[str, Any]:
    rows = read_metrics(pipeline.run_dir / METRICS)
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    lookup = []
    for example in pipeline.eval_examples:
        prompt, answer = (part.tolist() for part in prompt_and_answer(example))
        answer = answer[: text_end(answer, pipeline.stop_token_ids) + 1]
        lookup.append(prompt_lookup_lengths(prompt + answer, len(prompt), pipeline.layout.size))
    return {
        "steps": pipeline.done_steps,
        "tokens": monitor.tokens,
        "seconds": round(seconds, 1),
        "tokens_per_s": round((monitor.tokens - monitor.tokens_before) / monitor.train_seconds, 1),
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "accept_len_before": pipeline.accept_len_before,
        "accept_len_after": pipeline.accept_len_after,
        "accept_len_prompt_lookup": accept_len(lookup) if lookup else None,
        "balance": monitor.balance(),
        "text": pipeline.text.facts(),
        "fp8": pipeline.fp8 and pipeline.fp8.facts(),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "peak_gpu_mib": max(map(_peak_gpu_mib, pipeline.gpus()), default=0),
        "versions": {
            "dflash_ext": dflash_ext.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def _peak_gpu_mib(device: str) -> int:
    return round(torch.cuda.max_memory_allocated(device) / 2**20)


def _advice(pipeline: Pipeline) -> dict[str, str]:
    cfg, run_dir = pipeline.cfg, pipeline.run_dir
    command = (
        f"python -m dflash_ext.evaluate --drafter {run_dir / EXPORT} --target {cfg.model.target}"
    )
    command += f" --data {cfg.data.eval[0] if cfg.data.eval else 'FILE'}"
    if cfg.data.enable_thinking is not None:
        command += f" --enable_thinking {str(cfg.data.enable_thinking).lower()}"
    advice = {"export": str(run_dir / EXPORT), "evaluate": command}
    best = pipeline.checkpoints.best() if cfg.checkpoint.keep_best else None
    if best not in (None, pipeline.done_steps):
        out = run_dir / "export_best"
        advice["export_best"] = (
            f"python -m dflash_ext.export --run {run_dir} --step best --out {out}"
        )
    return advice


if __name__ == "__main__":
    leave(run_command(main))
