"""What a pipeline is about to run: for people, and for the other processes of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dflash_ext.config import to_dict
from dflash_ext.data.anchors import anchor_budget
from dflash_ext.drafter.init import start_differences
from dflash_ext.drafter.loss import dead_row_share, live_grain
from dflash_ext.plan import state_bytes
from dflash_ext.resume import weights_checksum

if TYPE_CHECKING:
    from dflash_ext.pipeline import Pipeline

SAMPLED_BATCHES = 8  # planned ahead to tell how full batches are
# Fields of drafter and train that may differ from machine to machine.
MAY_DIFFER = {
    *("drafter.init_from", "train.recompute", "train.cuda_graph", "train.stall_timeout_s"),
    *("train.metrics_every", "train.max_nonfinite_steps"),
}


def describe(run: Pipeline) -> list[str]:
    """What is about to run, for people: models, text, steps, memory."""
    info, spec, cfg = run.target.info, run.model.spec, run.cfg
    mib = 1 / 2**20
    # fp32 weights are their own masters
    per_param = state_bytes(cfg.train) + (0 if run.dtype == torch.float32 else 2)
    drafters = spec.num_parameters * per_param * len(run.ranks)
    slots = sum(t.nbytes for q in run.queues for t in q.tensors())
    mask = run.tokenizer.convert_ids_to_tokens(spec.mask_token_id)
    target_bytes = sum(p.nbytes for p in run.target.model.parameters())
    return [
        f"target   {cfg.model.target}: {info.num_layers} layers, hidden {info.hidden_size}, "
        f"vocabulary {info.vocab_size}, {cfg.model.dtype}; captures layers {run.layer_ids}",
        *(f"target   {line}" for line in run.target.kernel_lines),
        *run.warm_up_lines,
        f"drafter  {spec.num_layers} layers, {spec.num_parameters / 1e6:.1f} M parameters, "
        f"block {spec.block_size}, mask token {mask!r} ({spec.mask_token_id}), "
        f"started from {cfg.drafter.init_from}",
        *_start_lines(run),
        *run.resume.notes,
        *run.data_report.lines(),
        *run.text.lines(),
        *run.cache_lines,
        f"plan     {run.total_steps} steps of {cfg.train.grad_accum * run.world} batches, "
        f"up to {cfg.data.token_budget} tokens and {anchor_budget(cfg.train, cfg.data)} anchors "
        f"each, "
        f"{run.planner.padding_share():.1%} padding, {loss_rows(run)}; "
        f"{len(run.eval_examples)} held-out texts",
        *_machine_lines(run),
        f"threads  targets {cfg.topology.targets}, drafters {cfg.topology.drafters}, "
        f"{run.cpu_threads} CPU thread(s) each",
        f"memory   target {target_bytes * mib:.0f} MiB, slots {slots * mib:.0f} MiB, drafter "
        f"weights, gradients and optimizer {drafters * mib:.0f} MiB",
    ]


def loss_rows(run: Pipeline) -> str:
    """How much of what a GPU's loss projects is for nothing, in the first batches."""
    train, plans = run.cfg.train, map(run.planner.batch, range(SAMPLED_BATCHES))
    share = dead_row_share(plans, train.anchor_group, live_grain(train))
    return f"{share:.1%} of the loss's rows without a weight"


def _machine_lines(run: Pipeline) -> list[str]:
    if not run.machines.several:
        return []
    return [
        f"machines {run.machines.count}, this is process {run.machines.rank} with drafters "
        f"{list(run.ranks)} of {run.world}; process 0 writes"
    ]


def _start_lines(run: Pipeline) -> list[str]:
    """Where a run departs from what the weights it starts from were trained with."""
    if run.start is None or run.resume.drafter is not None:
        return []
    return [f"start    {line}" for line in start_differences(run.model.spec, run.start)]


def common_facts(run: Pipeline) -> dict[str, object]:
    """What must be the same in all processes, by the field that decides it."""
    cfg = to_dict(run.cfg)
    fields = {
        f"{section}.{name}": value
        for section in ("drafter", "train")
        for name, value in cfg[section].items()
        if f"{section}.{name}" not in MAY_DIFFER
    }
    data = run.cfg.data
    return fields | {
        "model.target": f"weights with checksum {run.target_checksum}",
        "model.target_layer_ids": run.layer_ids,
        "drafter.mask_token_id": run.mask_token_id,
        "model.dtype": run.cfg.model.dtype,
        "model.weights": run.cfg.model.weights,
        "topology.drafters": f"{len(run.ranks)} drafters",
        "data.train": f"text with hash {run.data_hash[:12]}",
        "data.seed": data.seed,
        "data.token_budget": data.token_budget,
        "data.hidden_states": "a folder" if data.hidden_states else "none",
        "data.hidden_layer_ids": data.hidden_layer_ids,
        "data.hidden_last": data.hidden_last,
        "data.eval": f"{len(run.eval_examples)} held-out texts",
        "log.every": run.cfg.log.every,
        "checkpoint.every": run.cfg.checkpoint.every,
        "checkpoints": f"step {run.resume.step}, {run.resume.batches} batches",
        "drafter.init_from": f"weights with checksum {weights_checksum(run.model.parameters())}",
    }
