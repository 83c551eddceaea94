"""Whole runs on the tiny target, in this process."""

import json
from collections.abc import Callable
from pathlib import Path

from dflash_ext import train
from dflash_ext.command import run_command


def change_a_weight(target: Path) -> None:
    """By one bit, in a target's folder."""
    path = target / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


class TinyRun:
    """run("name", "--section.field=value", ...) -> exit code; its files lie in folder/name."""

    def __init__(self, target: Path, tiny_jsonl: Callable[..., Path], folder: Path) -> None:
        self.folder = folder
        data, heldout = tiny_jsonl(n=9), tiny_jsonl(n=3, name="heldout.jsonl")
        self.config = folder / "config.yaml"
        self.config.write_text(
            f"""
model: {{target: {target}, dtype: float32}}
drafter: {{num_layers: 2, block_size: 4}}
data: {{train: [{data}], eval: [{heldout}], token_budget: 200}}
topology: {{targets: [cpu], drafters: [cpu], cpu_threads: 1}}
train: {{steps: 6, lr: 0.003, max_anchors: 12, metrics_every: 2}}
log: {{dir: {folder}, every: 2}}
"""
        )

    def __call__(self, name: str, *flags: str) -> int:
        arguments = ["--config", str(self.config), f"--log.name={name}", *flags]
        return run_command(lambda: train.main(arguments))

    def scores(self, name: str) -> dict[int, float]:
        """Acceptance length by step, as logged."""
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return {r["step"]: r["eval_accept_len"] for r in rows if "eval_accept_len" in r}

    def steps(self, name: str) -> list[int]:
        """Steps of the checkpoints that are there."""
        folders = (self.folder / name / "checkpoints").glob("step_*")
        return sorted(int(folder.name.removeprefix("step_")) for folder in folders)
