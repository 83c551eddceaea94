"""Holds an export against z-lab's own `dflash` package, on real text.

The package's pins would replace our torch and transformers, so its wheel is fetched alone, checked
by SHA-256, and imported as it is.
"""

import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_ext.acceptance import propose
from dflash_ext.data.corpus import Example
from dflash_ext.drafter.model import DFlashDraftModel, FrozenHead
from dflash_ext.export_check import ExportError
from dflash_ext.target import Target
from dflash_ext.target_source import cache_dir, quiet_transformers
from dflash_ext.wheels import fetch_wheel

REQUIREMENT = "dflash==0.1.0"
SHA256 = "b3fe38d9413efc30a952c8b38b34f1dcc696ba6d7b865acbf540a34cc53afaa2"
MAX_TOKENS, BLOCKS, TOP_K = 512, 8, 8
# Largest difference of logits over the largest logit, both in fp32: sums of a few thousand terms
# in another order; a missed norm, layer or position is thousands of times larger.
LIMIT = 1e-4


def zlab_model_module() -> ModuleType:
    """`dflash.model` of the wheel, with a timer that also works without CUDA.

    Raises UserError if the wheel is not there and cannot be fetched.
    """
    wheel = str(fetch_wheel(REQUIREMENT, SHA256, cache_dir(), "--check"))
    if wheel not in sys.path:
        sys.path.insert(0, wheel)
    module = importlib.import_module("dflash.model")
    if not str(module.__file__).startswith(wheel):
        raise ExportError(f"--check: found another package dflash: {module.__file__}")
    if not torch.cuda.is_available():
        module._cuda_time = time.perf_counter  # type: ignore[attr-defined]
    return module


@torch.no_grad()
def compare_logits(folder: str | Path, target: Target, examples: Sequence[Example]) -> str:
    """Logits of blocks on `examples`, by z-lab's package and by ours, both from the export.

    Everything behind the target's states is computed in fp32, whatever the target's dtype. Returns
    a line of a report; raises ExportError if the captured states or the logits differ.
    """
    module = zlab_model_module()
    with quiet_transformers():
        theirs = module.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    ours = DFlashDraftModel.from_pretrained(folder).float()
    compared = [_one_text(module, theirs, ours, target, example) for example in examples]
    worst = max(error for error, _ in compared)
    slots = sum(count for _, count in compared)
    if not worst <= LIMIT:
        raise ExportError(
            f"{folder}: found logits that differ from z-lab's by {worst:.1e}, want {LIMIT:g}"
        )
    return (
        f"logits on real text ({slots} slots from {examples[0].source} on): z-lab's {REQUIREMENT} "
        f"gives the same to {worst:.1e}"
    )


def _one_text(
    module: ModuleType,
    theirs: Any,
    ours: DFlashDraftModel,
    target: Target,
    example: Example,
) -> tuple[float, int]:
    """(largest relative difference, compared slots) over blocks spread over one text."""
    spec = ours.spec
    ids = torch.as_tensor(example.input_ids[:MAX_TOKENS]).long()
    hidden = _captured(module, theirs, ours, target, ids)
    embed, weight = (w.detach().cpu().float() for w in (target.embed_weight, target.head_weight))
    head = FrozenHead(embed, weight, spec.embed_scale, spec.logit_scale, spec.softcap)
    ends = torch.linspace(1, len(ids) - 1, BLOCKS).long().unique()
    ctx_kv = ours.context(hidden, torch.arange(len(ids)))
    best = propose(ours, head, ctx_kv, ids[ends], torch.zeros_like(ends), ends, k=TOP_K)
    worst = 0.0
    for i, end in enumerate(ends.tolist()):
        logits = _zlab_logits(module, theirs, head, hidden[:end], ids[end])
        for found, want in (
            (best.values[i], logits.topk(TOP_K).values),
            (best.values[i], logits.gather(-1, best.indices[i])),
            (best.logsumexp[i], logits.logsumexp(-1)),
        ):
            worst = max(worst, float((found - want).abs().max() / logits.abs().max()))
    return worst, best.logsumexp.numel()


def _zlab_logits(
    module: ModuleType, model: Any, head: FrozenHead, context: Tensor, anchor: Tensor
) -> Tensor:
    """Logits [K - 1, V] of the proposals after `anchor`, as z-lab's decoder computes them.

    Block size, mask token and scales are those that the package reads from the export.
    """
    block = torch.full((1, model.block_size), model.mask_token_id)
    block[0, 0] = anchor
    scale = float(module._draft_value(model.config, "input_embedding_scale", 1.0))
    hidden = model(
        position_ids=torch.arange(len(context) + model.block_size)[None],
        noise_embedding=F.embedding(block, head.embed_weight) * scale,
        target_hidden=context[None],
    )
    linear = nn.Linear(1, 1, bias=False)
    linear.weight = nn.Parameter(head.head_weight, requires_grad=False)
    return model.compute_logits(hidden[:, 1:], linear)[0]


def _captured(
    module: ModuleType,
    theirs: Any,
    ours: DFlashDraftModel,
    target: Target,
    ids: Tensor,
) -> Tensor:
    """Captured states [n, L*H] in fp32, after a check that z-lab picks the same ones."""
    layers: list[Tensor] = []
    batch = ids[None].to(target.device)
    target.forward_capture(
        batch, ours.spec.target_layer_ids, lambda i, hidden: layers.append(hidden[0]), False
    )
    found = torch.cat(layers, dim=-1)
    states = target.model(input_ids=batch, output_hidden_states=True, use_cache=False).hidden_states
    want = module.extract_context_feature(states, theirs.target_layer_ids)[0]
    if found.shape != want.shape or not (found - want).norm() <= LIMIT * want.norm():
        raise ExportError(
            f"captured layers: found other states than z-lab's for {theirs.target_layer_ids}"
        )
    return found.cpu().float()
