"""What `--check_data` prints: counts, lengths and some examples as the model will see them."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import numpy as np

from dflash_ext.config import UserError
from dflash_ext.data.corpus import Corpus, DataReport, Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN_CHARACTERS = 600  # of each stretch of text that is supervised or not
_HIGHLIGHT = ("\x1b[1;32m", "\x1b[0m")


def describe_data(
    examples: Corpus,
    report: DataReport,
    tokenizer: PreTrainedTokenizerBase,
    padding_share: float,
) -> list[str]:
    """The report, quantiles of lengths, and three examples from the start, middle and end.

    Supervised text stands in [[ ]], in green on a terminal.

    Raises:
        UserError: every token of every row is supervised.
    """
    if report.all_supervised == report.kept:
        raise UserError(
            f"data.train: found every token supervised in all {report.kept:,} rows, prompts "
            "included, want loss_mask 0 on what the target does not write (or a chat template "
            "whose {% generation %} holds only answers)"
        )
    lengths = np.quantile(examples.lengths, [0, 0.5, 0.9, 0.99, 1]).round().astype(int)
    named = zip(("shortest", "median", "90 %", "99 %", "longest"), lengths, strict=True)
    lines = [
        *report.lines(),
        "tokens of an example: " + ", ".join(f"{name} {length:,}" for name, length in named),
        f"{padding_share:.1%} padding",
    ]
    for index in sorted({0, len(examples) // 2, len(examples) - 1}):
        example = examples[index]
        supervised = int(example.loss_mask.sum())
        title = f"--- {example.source}: {len(example):,} tokens, {supervised:,} supervised"
        lines += ["", title, shown(example, tokenizer)]
    return lines


def shown(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    """The decoded text, supervised parts marked; the middle of long parts is left out."""
    left, right = ("[[", "]]")
    if sys.stdout.isatty():
        left, right = left + _HIGHLIGHT[0], _HIGHLIGHT[1] + right
    parts = []
    cuts = [0, *np.flatnonzero(np.diff(example.loss_mask)) + 1, len(example)]
    for start, end in itertools.pairwise(cuts):
        text = str(tokenizer.decode(example.input_ids[start:end].tolist()))
        if len(text) > _SHOWN_CHARACTERS:
            half = _SHOWN_CHARACTERS // 2
            text = f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"
        parts.append(left + text + right if example.loss_mask[start] else text)
    return "".join(parts)
