"""Measure a drafter's acceptance on real prompts.

``python -m dflash_ext.evaluate --drafter DIR --target T --data FILE [--json OUT]``

The target first answers each prompt greedily (kept in the cache folder). One prefill of prompt and
answer and one pass over all anchors then give the acceptance lengths of greedy decoding, prompt by
prompt, without decoding (see `acceptance`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dflash_ext import acceptance
from dflash_ext.command import (
    CommandParser,
    add_target_options,
    at_least,
    check_device,
    check_no_input,
    check_output_file,
    run_command,
    true_or_false,
)
from dflash_ext.config import DataConfig, UserError
from dflash_ext.data.assistant_mask import runs
from dflash_ext.data.conversations import load_examples, prompt_and_answer
from dflash_ext.data.corpus import Example
from dflash_ext.drafter import DFlashDraftModel, FrozenHead
from dflash_ext.files import replace_file
from dflash_ext.greedy_text import GreedyTextCache
from dflash_ext.measure import NEAR_TIE, Answer, Measurement, Text, measure_text
from dflash_ext.target import Target, load_target, load_tokenizer, stop_token_ids
from dflash_ext.target_source import cache_dir

MAX_NEW_TOKENS = 160
CONTEXT = "the target's context"  # what prompts are cut at


def evaluate(
    drafter: str | Path,
    target_name: str,
    data: str | Path,
    *,
    max_new_tokens: int | None = None,
    trust_text: bool = False,
    dtype: str = "float32",
    device: str = "cpu",
    revision: str | None = None,
    enable_thinking: bool | None = None,
) -> dict[str, Any]:
    """The command's figures as a JSON-ready dict (keys: see `summarise`). Raises UserError."""
    check_device("--device", device)
    model = DFlashDraftModel.from_pretrained(drafter).to(device, getattr(torch, dtype)).eval()
    target = load_target(target_name, dtype=dtype, device=device, revision=revision)
    _check_match(model, target)
    context = target.info.max_position_embeddings
    if max_new_tokens and context and max_new_tokens > context:
        raise UserError(
            f"--max_new_tokens: found {max_new_tokens}, "
            f"want at most {context}, the target's context"
        )
    tokenizer = load_tokenizer(target_name, revision)
    stops = stop_token_ids(target.info, tokenizer)
    examples, report = load_examples(
        [str(data)],
        tokenizer,
        whole_prompts(target, enable_thinking),
        mask_token_id=model.spec.mask_token_id,
        vocab_size=target.info.vocab_size,
        limit=CONTEXT,
    )
    for line in report.lines(CONTEXT):
        print(line, file=sys.stderr)
    with _progress() as progress:
        if trust_text:
            texts = [given_text(example, stops, max_new_tokens) for example in examples]
        else:
            limit = max_new_tokens or MAX_NEW_TOKENS
            cache = GreedyTextCache(cache_dir(), target.model, stops)
            texts = [
                greedy_text(cache, example, limit)
                for example in progress.track(examples, description="greedy text")
            ]
        head = serving_head(model, target)
        measured = [
            measure_text(target, model, head, text)
            for text in progress.track(texts, description="acceptance")
        ]
    return summarise(measured, model.spec.block_size)


def whole_prompts(target: Target, enable_thinking: bool | None = None) -> DataConfig:
    """Every prompt counts, whole: nothing is dropped as a loop or cut at a training length."""
    longest = target.info.max_position_embeddings or DataConfig().max_length
    return DataConfig(
        max_length=longest,
        token_budget=longest,
        drop_loops=False,
        enable_thinking=enable_thinking,
    )


def _check_match(model: DFlashDraftModel, target: Target) -> None:
    spec, info = model.spec, target.info
    for name, found, wanted in (
        ("hidden_size", spec.hidden_size, info.hidden_size),
        ("vocab_size", spec.vocab_size, info.vocab_size),
        ("num_target_layers", spec.num_target_layers, info.num_layers),
    ):
        if found != wanted:
            raise UserError(f"--drafter: {name}: found {found}, want the target's {wanted}")


def serving_head(model: DFlashDraftModel, target: Target) -> FrozenHead:
    """The target's tables, scaled as the drafter's config says: that is what serves."""
    return FrozenHead(
        embed_weight=target.embed_weight,
        head_weight=target.head_weight,
        embed_scale=model.spec.embed_scale,
        logit_scale=model.spec.logit_scale,
        softcap=model.spec.softcap,
    )


def greedy_text(cache: GreedyTextCache, example: Example, max_new_tokens: int) -> Text:
    """An example's prompt with the target's answer: to a stop token, or to the limit."""
    first = max(len(prompt_and_answer(example)[0]), 1)  # something to start from
    prompt = example.input_ids[:first].tolist()
    tokens = cache.get(prompt, max_new_tokens)
    answer = Answer(first, first + len(tokens) - 1, first + max_new_tokens)
    return Text(prompt + tokens, [answer])


def given_text(example: Example, stop_token_ids: Sequence[int], max_new_tokens: int | None) -> Text:
    """The file's own answers, each cut at its first stop token and at `max_new_tokens`.

    An answer without a stop token was cut off by a length limit: its blocks end where it ends.
    """
    ids = example.input_ids.tolist()
    answers = []
    for first, end in runs(example.loss_mask).tolist():
        first = max(first, 1)  # nothing predicts the first token of all
        if max_new_tokens is not None:
            end = min(end, first + max_new_tokens)
        if end == first:
            continue
        last = first + acceptance.text_end(ids[first:end], stop_token_ids)
        if max_new_tokens is not None:
            limit = first + max_new_tokens
        else:
            limit = sys.maxsize if ids[last] in stop_token_ids else last + 1
        answers.append(Answer(first, last, limit))
    return Text(ids, answers)


def summarise(measured: Sequence[Measurement], block_size: int) -> dict[str, Any]:
    """All figures of the command; a figure without a single step is None.

    `histogram[i]` counts the steps of length i + 1; `acc_k[i]` is the accuracy of proposal i + 1
    over all anchors, not only the visited ones.
    """
    per_prompt = [m.lengths for m in measured]
    lookup = [m.prompt_lookup for m in measured]
    hits = [sum(column) for column in zip(*(m.slot_hits for m in measured), strict=True)]
    counts = [sum(column) for column in zip(*(m.slot_counts for m in measured), strict=True)]
    checked = sum(m.checked for m in measured)
    return {
        "accept_len": _number(acceptance.accept_len(per_prompt)),
        "accept_len_pooled": _number(acceptance.accept_len_pooled(per_prompt)),
        "histogram": acceptance.histogram(per_prompt, block_size),
        "acc_k": [h / c if c else None for h, c in zip(hits, counts, strict=True)],
        "per_prompt": per_prompt,
        "ddtree": {
            str(budget): _number(acceptance.accept_len([m.ddtree[budget] for m in measured]))
            for budget in measured[0].ddtree
        },
        "prompt_lookup": _number(acceptance.accept_len(lookup)),
        "not_argmax_share": sum(m.not_argmax for m in measured) / checked,
        "near_ties": [[dataclasses.asdict(tie) for tie in m.near_ties] for m in measured],
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:>11}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
    )


def report_lines(result: dict[str, Any]) -> list[str]:
    """The figures in words."""
    steps, prompts = sum(result["histogram"]), len(result["per_prompt"])
    lines = [
        f"accept_len {_figure(result['accept_len'])} (mean of {prompts} prompts), "
        f"pooled {_figure(result['accept_len_pooled'])} over {steps:,} steps; "
        f"prompt lookup {_figure(result['prompt_lookup'])}",
    ]
    if steps:
        shares = (f"{i}: {n / steps:.1%}" for i, n in enumerate(result["histogram"], start=1))
        lines.append("length    " + "  ".join(shares))
    right = (f"{i}: {_figure(acc)}" for i, acc in enumerate(result["acc_k"], start=1))
    lines.append("acc_k     " + "  ".join(right))
    trees = (f"{budget} nodes: {_figure(value)}" for budget, value in result["ddtree"].items())
    lines.append("ddtree    " + "  ".join(trees))
    share, ties = result["not_argmax_share"], sum(map(len, result["near_ties"]))
    if share:
        lines.append(f"text      {share:.2%} of the answers' tokens are not the target's argmax")
    if ties:
        lines.append(f"near ties {ties} choices with a top-2 logit gap below {NEAR_TIE:g}")
    return lines


def _figure(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m dflash_ext.evaluate",
        description="Acceptance length of a drafter on a target's greedy answers to real prompts.",
    )
    parser.add_argument("--drafter", required=True, metavar="DIR", help="export folder")
    parser.add_argument("--target", required=True, help="hub id, folder or pypi:NAME==VERSION")
    parser.add_argument("--data", required=True, metavar="FILE", help="JSONL with the prompts")
    parser.add_argument(
        "--max_new_tokens",
        type=at_least(1),
        metavar="N",
        help=f"length limit of an answer (default {MAX_NEW_TOKENS}; with --trust_text: none)",
    )
    parser.add_argument(
        "--trust_text",
        action="store_true",
        help="take the file's answers and report the share of tokens the target would not choose",
    )
    parser.add_argument("--json", metavar="OUT", help="also write all figures to this file")
    add_target_options(parser, "both models", device="cpu")
    parser.add_argument(
        "--enable_thinking",
        type=true_or_false,
        metavar="{true,false}",
        help="passed to the chat template, as data.enable_thinking in training",
    )
    return parser


def _run(args: argparse.Namespace) -> None:
    if args.json:
        out = Path(args.json)
        check_output_file("--json", out)
        check_no_input("--json", out, drafter=args.drafter, target=args.target, data=args.data)
    result = evaluate(
        args.drafter,
        args.target,
        args.data,
        max_new_tokens=args.max_new_tokens,
        trust_text=args.trust_text,
        dtype=args.dtype,
        device=args.device,
        revision=args.revision,
        enable_thinking=args.enable_thinking,
    )
    print("\n".join(report_lines(result)))
    if args.json:
        replace_file(Path(args.json), json.dumps(result, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code."""
    return run_command(lambda: _run(_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
