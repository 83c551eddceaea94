"""A target with random weights, and text of random tokens: speed does not depend on either.

The folder that stands for the target holds its config.json and a tokenizer, no weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from dflash_ext.data.buckets import WINDOW_BATCHES
from dflash_ext.fast_gdn import find_gdn_kernels, gdn_modules
from dflash_ext.target import Target, bind_gdn, target_info

RESIDUAL_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
CHECKED_TOKENS = 64


def write_target(folder: Path, sizes: dict[str, object]) -> PretrainedConfig:
    """Writes config.json of these sizes and a tokenizer of one token; returns the config."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    config = AutoConfig.for_model(**sizes)
    config.save_pretrained(folder)
    end = "<|endoftext|>"
    core = Tokenizer(models.WordLevel({end: 0}, unk_token=end))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end).save_pretrained(folder)
    return config


@torch.no_grad()
def random_target(
    config: PretrainedConfig, device: torch.device, dtype: torch.dtype, *, fast_gdn: bool
) -> Target:
    """A causal LM of random weights on `device`, its hidden states finite.

    What each layer adds to the residual stream is scaled by 1 / sqrt(2 * layers), as in GPT-2.
    `fast_gdn`: GatedDeltaNet layers run flash-linear-attention or loading stops (UserError).
    """
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    info = target_info(config)
    for name, parameter in model.named_parameters():
        if name.endswith(RESIDUAL_OUTPUTS):
            parameter.mul_((2 * info.num_layers) ** -0.5)
    target = Target(model, info)
    if fast_gdn and gdn_modules(model):
        bind_gdn(target, find_gdn_kernels())
    check_finite(target)
    return target


def check_finite(target: Target) -> None:
    """Raises RuntimeError if a layer's output is not finite on a few tokens."""
    ids = torch.arange(CHECKED_TOKENS, device=target.device)[None] % target.info.vocab_size
    largest: list[Tensor] = []
    layers = range(target.info.num_layers)
    target.forward_capture(ids, layers, lambda i, hidden: largest.append(hidden.abs().max()), True)
    found = torch.stack(largest).float()
    if not bool(found.isfinite().all()):
        raise RuntimeError(f"hidden states that are not finite: largest by layer {found.tolist()}")


def write_text(
    path: Path,
    *,
    vocab_size: int,
    mask_token_id: int,
    max_length: int,
    token_budget: int,
) -> int:
    """JSONL of tokenised documents of random length, a prompt and an answer each; their tokens.

    As many as batches are made up of by length. Lengths are log-normal, cut to
    [max_length / 16, max_length]; a fifth is the prompt.
    """
    rng = np.random.default_rng(0)
    total = 0
    with path.open("w") as file:
        while total < WINDOW_BATCHES * token_budget:
            drawn = rng.lognormal(np.log(max_length / 3), 0.7)
            length = int(np.clip(drawn, max_length / 16, max_length))
            ids = rng.integers(1, vocab_size - 1, length)
            ids[ids >= mask_token_id] += 1
            mask = np.ones(length, dtype=int)
            mask[: length // 5] = 0
            row = {"input_ids": ids.tolist(), "loss_mask": mask.tolist()}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            total += length
    return total
