"""Acceptance lengths by our walk and by z-lab's own decoder, prompt by prompt, on one export.

python -m benchmarks.quality_zlab --drafter DIR --target T --data FILE --out FILE.jsonl
    [--shard I N] [--limit N] [--max_new_tokens N] [--dtype D] [--device D]

Our walk needs the target's greedy text, which this also leaves in the cache for `evaluate`.
Decoding one prompt at a time leaves a GPU idle: run several shards at once. `--out` is resumable.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_ext.acceptance import accept_len
from dflash_ext.command import CommandParser, check_device, check_output_file, run_command
from dflash_ext.data.conversations import load_examples
from dflash_ext.drafter import DFlashDraftModel
from dflash_ext.evaluate import greedy_text, serving_head, whole_prompts
from dflash_ext.greedy_text import GreedyTextCache
from dflash_ext.measure import NearTie, measure_text
from dflash_ext.target import load_target, load_tokenizer, stop_token_ids
from dflash_ext.target_source import cache_dir, quiet_transformers
from dflash_ext.zlab import zlab_model_module


@dataclass(frozen=True)
class Compared:
    """Lengths of one prompt by both, and where rounding may decide (see `measure.NearTie`)."""

    index: int
    prompt: int
    ours: list[int]
    zlab: list[int]
    near_ties: list[dict[str, Any]]


class Decoders:
    """A target with a drafter, ours and z-lab's, from the same export."""

    def __init__(self, drafter: Path, target: str, data: Path, dtype: str, device: str) -> None:
        self.module = zlab_model_module()
        with quiet_transformers():
            theirs = self.module.DFlashDraftModel.from_pretrained(drafter, dtype=dtype)
        self.theirs = theirs.to(device).eval()
        self.ours = DFlashDraftModel.from_pretrained(drafter).to(device, getattr(torch, dtype))
        self.ours.eval()
        self.target = load_target(target, dtype=dtype, device=device)
        tokenizer = load_tokenizer(target)
        spec, info = self.ours.spec, self.target.info
        self.stops = stop_token_ids(info, tokenizer)
        self.examples, _ = load_examples(
            [str(data)],
            tokenizer,
            whole_prompts(self.target),
            mask_token_id=spec.mask_token_id,
            vocab_size=info.vocab_size,
        )
        self.head = serving_head(self.ours, self.target)
        self.texts = GreedyTextCache(cache_dir(), self.target.model, self.stops)

    def compare(self, index: int, max_new_tokens: int) -> Compared:
        """One prompt; its answer ends at a stop token or at the length limit."""
        text = greedy_text(self.texts, self.examples[index], max_new_tokens)
        start = text.answers[0].first
        found = measure_text(self.target, self.ours, self.head, text, budgets=())
        theirs = self.module.dflash_generate(
            self.theirs,
            target=self.target.model,
            input_ids=torch.tensor([text.ids[:start]], device=self.target.device),
            max_new_tokens=max_new_tokens,
            stop_token_ids=self.stops,
            temperature=0.0,
            return_stats=True,
        ).acceptance_lengths
        ties = [asdict(tie) for tie in found.near_ties]
        return Compared(index, start, found.lengths, [int(n) for n in theirs], ties)


def same(row: Compared, block_size: int) -> str:
    """ "equal"; "near-tie" if they part at a step that rounding may have decided; else "differ"."""
    anchor = row.prompt
    for mine, other in zip(row.ours, row.zlab, strict=False):
        if mine != other:
            ties = [NearTie(**tie) for tie in row.near_ties]
            near = any(anchor < tie.position < anchor + block_size for tie in ties)
            return "near-tie" if near else "differ"
        anchor += mine
    return "equal" if len(row.ours) == len(row.zlab) else "differ"


def summarise(rows: Sequence[Compared], block_size: int) -> dict[str, Any]:
    """Both means over prompts, and how many prompts agree."""
    verdicts = [same(row, block_size) for row in rows]
    return {
        "prompts": len(rows),
        "ours": accept_len([row.ours for row in rows]),
        "zlab": accept_len([row.zlab for row in rows]),
        **{kind: verdicts.count(kind) for kind in ("equal", "near-tie", "differ")},
    }


def read(paths: Sequence[Path]) -> list[Compared]:
    """Rows of several shards, in order of the prompts."""
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return sorted((Compared(**json.loads(line)) for line in lines), key=lambda row: row.index)


def left_over(out: Path, indices: Sequence[int]) -> Iterator[int]:
    """The prompts that `out` does not hold yet."""
    done = {row.index for row in read([out])} if out.exists() else set()
    return (index for index in indices if index not in done)


def _run(args: argparse.Namespace) -> None:
    check_device("--device", args.device)
    check_output_file("--out", args.out)
    decoders = Decoders(args.drafter, args.target, args.data, args.dtype, args.device)
    shard, shards = args.shard
    indices = range(len(decoders.examples))[: args.limit][shard::shards]
    for index in left_over(args.out, indices):
        row = decoders.compare(index, args.max_new_tokens)
        with args.out.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
    rows = read([args.out]) if args.out.exists() else []
    if rows:
        print(json.dumps(summarise(rows, decoders.ours.spec.block_size)))


def main() -> int:
    parser = CommandParser(
        prog="python -m benchmarks.quality_zlab", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--drafter", type=Path, required=True, metavar="DIR", help="export folder")
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", type=Path, required=True, help="JSONL with the prompts")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--shard", type=int, nargs=2, default=(0, 1), metavar=("I", "N"))
    parser.add_argument("--limit", type=int, help="only the first prompts")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    return run_command(lambda: _run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
