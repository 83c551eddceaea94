"""Does the training text look like the target's own?

Text of another model, another chat template or another thinking mode trains a drafter well and
serves badly. The target itself says so: its own greedy text is nearly all its first choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dflash_ext import ops
from dflash_ext.config import DataConfig
from dflash_ext.data.corpus import Corpus, Example
from dflash_ext.data.sources import text_files
from dflash_ext.data.text_settings import Settings, mismatches, read_settings, template_hash
from dflash_ext.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOW_LOG_PROB = -0.9  # nats a token; a chat model's own text, also sampled, stays above it
GREEDY_SHARE = 0.97  # of text that was made greedily: near-ties may fall otherwise elsewhere
_EXAMPLES = 16
_TOKENS = 768  # of prompts and answers together
_ANSWER_TOKENS = 96  # of one example


@dataclass(frozen=True)
class TextFit:
    """Over a sample of supervised tokens: their number, their mean log-probability under the target
    (nats), and the share that is its first choice."""

    tokens: int
    log_prob: float
    greedy_share: float


@dataclass(frozen=True)
class TextCheck:
    """What a run keeps of its text: the fit, how chats are rendered, how the answers were made."""

    fit: TextFit | None
    template: str | None
    enable_thinking: bool | None
    regenerate: Mapping[str, Settings]
    mismatches: list[str]

    def facts(self) -> dict[str, Any]:
        """For summary.json and checkpoints."""
        return {
            "log_prob": self.fit and round(self.fit.log_prob, 4),
            "greedy_share": self.fit and round(self.fit.greedy_share, 4),
            "template": self.template,
            "enable_thinking": self.enable_thinking,
            "regenerate": dict(self.regenerate),
        }

    def lines(self) -> list[str]:
        """The figures in words, and a warning for everything that does not fit."""
        lines, warnings = [], list(self.mismatches)
        if self.fit is not None:
            lines.append(
                "text     mean log-probability of supervised tokens under the target "
                f"{self.fit.log_prob:.2f}; {self.fit.greedy_share:.0%} are its first choice "
                f"({self.fit.tokens} looked at)"
            )
            if self.fit.log_prob < LOW_LOG_PROB:
                warnings.append(
                    "the text does not look like the target's own, and a drafter of it will serve "
                    "badly: let the target answer (python -m dflash_ext.regenerate), or check the "
                    "chat template and data.enable_thinking (--check_data)"
                )
            elif self.regenerate and self.fit.greedy_share < GREEDY_SHARE:
                warnings.append(
                    "the text was made greedily, yet often is not the target's first choice: check "
                    "the server's model, template and thinking mode against this run's"
                )
        return lines + [f"warning  {text}" for text in warnings]


def check_text(
    target: Target, tokenizer: PreTrainedTokenizerBase, examples: Corpus, cfg: DataConfig
) -> TextCheck:
    """Look at the training text and at what `regenerate` wrote beside it. Raises UserError."""
    template = template_hash(tokenizer) if tokenizer.chat_template else None
    made = {name: read_settings(name) for name in text_files(cfg.train)}
    regenerated = {name: settings for name, settings in made.items() if settings is not None}
    wrong = [
        text
        for name, settings in regenerated.items()
        for text in mismatches(name, settings, template, cfg.enable_thinking)
    ]
    fit = text_fit(target, examples)
    return TextCheck(fit, template, cfg.enable_thinking, regenerated, wrong)


@torch.no_grad()
def text_fit(target: Target, examples: Corpus) -> TextFit | None:
    """Ask the target about examples spread over the corpus, some 800 tokens of them.

    None if no supervised token has a token before it.
    """
    log_probs, is_first = [], []
    used = 0
    for index in np.unique(np.linspace(0, len(examples) - 1, _EXAMPLES).astype(int)).tolist():
        ids, at = _stretch(examples[index])
        if used and used + len(ids) > _TOKENS:
            continue
        used += len(ids)
        if not len(at):
            continue
        batch = torch.from_numpy(ids).to(target.device)[None]
        head = target.head_weight.device
        hidden = target.forward_capture(batch, [], lambda layer, value: None, need_last=True)
        assert hidden is not None
        hidden, batch, positions = hidden.to(head), batch.to(head), torch.from_numpy(at).to(head)
        _, _, log_sum, rank, logit = ops.lm_head_topk(
            hidden[0, positions - 1],
            target.head_weight,
            k=1,
            labels=batch[0, positions],
            softcap=target.info.softcap,
            logit_scale=target.info.logit_scale,
        )
        log_probs.append((logit - log_sum).double().cpu())
        is_first.append((rank == 0).double().cpu())
    if not log_probs:
        return None
    found = torch.cat(log_probs)
    return TextFit(len(found), float(found.mean()), float(torch.cat(is_first).mean()))


def _stretch(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """The example's ids up to some way into its first answer, and the positions to look at."""
    supervised = np.flatnonzero(example.loss_mask)
    end = min(len(example), int(supervised[0]) + _ANSWER_TOKENS)
    at = supervised[(supervised > 0) & (supervised < end)]
    return example.input_ids[:end].astype(np.int64), at
