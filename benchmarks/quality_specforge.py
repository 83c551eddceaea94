"""Trains a drafter by SpecForge's training module on the batches, start and rates of a run of ours.

python -m benchmarks.quality_specforge --peers DIR --config FILE [--section.field value ...]

Everything around the module is this package's: text, target, batches of documents, AdamW with fp32
masters, evaluation and export. Its own are model code, anchors (as many a batch), and loss. The run
folder holds metrics.jsonl and export, as one of `dflash_ext.train` does.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.step_peers import made_on, target_modules
from dflash_ext.acceptance import accept_len, evaluate_plan
from dflash_ext.command import CommandParser, run_command
from dflash_ext.config import Config, parse_config, save_config
from dflash_ext.data.packing import BatchPlan, Ticket
from dflash_ext.export import write_export
from dflash_ext.hs_queue import Slot
from dflash_ext.logger import MetricsFile
from dflash_ext.optim import DrafterOptimizer
from dflash_ext.pipeline import Pipeline
from dflash_ext.run_folder import CONFIG, EXPORT, METRICS


class PeerRun:
    """SpecForge's OnlineDFlashModel beside a pipeline of ours that is built but never run."""

    def __init__(self, cfg: Config, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.cfg, self.run_dir = cfg, run_dir
        self.pipeline = Pipeline(cfg, run_dir)
        loop = self.pipeline.drafter_loops[0]
        self.head, self.ours, self.device = loop.head, loop.model, loop.device
        self.slot = Slot(
            cfg.data.token_budget,
            len(self.pipeline.layer_ids),
            self.pipeline.target.info.hidden_size,
            dtype=self.pipeline.dtype,
            device=self.device,
            with_last=False,
        )
        self.module = self._module()
        self.optimizer = DrafterOptimizer(
            self.drafter.named_parameters(), cfg.train, self.pipeline.total_steps, flat=False
        )

    def _module(self) -> nn.Module:
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel
        from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

        spec = self.ours.spec
        config = Qwen3Config(**spec.to_hf_config("bfloat16"))
        config.tie_word_embeddings = False
        config._attn_implementation = "sdpa"
        with made_on(self.device, self.pipeline.dtype):
            self.drafter = DFlashDraftModel(config)
        self.drafter.load_state_dict(self.ours.state_dict())
        return OnlineDFlashModel(
            self.drafter,
            *target_modules(self.head),
            spec.mask_token_id,
            spec.block_size,
            "sdpa",
            loss_decay_gamma=self.cfg.train.gamma,
        )

    def run(self) -> None:
        """All steps, with evaluations where our run has them; metrics.jsonl and export."""
        pipeline, rows = self.pipeline, MetricsFile(self.run_dir / METRICS, 0)
        every, losses = self.cfg.log.every, list[Tensor]()
        begin = time.perf_counter()
        torch.manual_seed(self.cfg.train.seed)
        for step in range(pipeline.total_steps + 1):
            if step in pipeline.eval_steps:
                score = self.evaluate()
                rows.append(step, {"eval_accept_len": score})
                seconds = time.perf_counter() - begin
                print(f"step {step}: acceptance length {score:.3f}, {seconds:.0f} s", flush=True)
                write_export(self.ours, self.run_dir / EXPORT)  # also of a run that is cut short
            if step == pipeline.total_steps:
                break
            losses.append(self.train_step(step))
            if (step + 1) % every == 0:
                mean = float(torch.stack(losses).mean())
                rows.append(step + 1, {"loss": mean, "lr": self.optimizer.rate})
                losses.clear()
        rows.close()

    def train_step(self, step: int) -> Tensor:
        """One optimizer step; the mean loss of its batches, on the device."""
        plans = self.pipeline.planner.step_plans(step)
        losses = []
        for plan in plans:
            ids = plan.input_ids.to(self.device)
            self._fill(plan)
            # As many anchors a batch as ours has; SpecForge counts them for each document.
            self.module.num_anchors = max(1, round(self.cfg.train.max_anchors / len(ids)))
            loss = self.module(ids, self._rows(plan, ids), self._loss_mask(plan, ids))[0]
            (loss / len(plans)).backward()
            losses.append(loss.detach().float())
        self.optimizer.step(step)
        return torch.stack(losses).mean()

    def _fill(self, plan: BatchPlan) -> None:
        """The target's hidden states of a batch, packed into the slot."""
        with torch.no_grad():
            self.pipeline.target_loops[0]._forward(self.slot, Ticket(plan, 0, 0, 0))

    def _rows(self, plan: BatchPlan, ids: Tensor) -> Tensor:
        """Hidden states [B, S, L * H] of the packed ones; zeros where a row is padding."""
        hidden = self.slot.hidden
        rows = hidden.new_zeros(ids.numel(), hidden.shape[1])
        rows[plan.src_index[: plan.n_tokens].to(self.device)] = hidden[: plan.n_tokens]
        return rows.view(*ids.shape, -1)

    def _loss_mask(self, plan: BatchPlan, ids: Tensor) -> Tensor:
        """[B, S] float, 1 where a token is supervised."""
        mask = np.zeros(tuple(ids.shape), dtype=np.float32)
        for row, document in enumerate(plan.doc_ids):
            supervised = self.pipeline.examples[document].loss_mask
            mask[row, : len(supervised)] = supervised
        return torch.from_numpy(mask).to(self.device)

    def evaluate(self) -> float:
        """Acceptance length on the held-out text, by our walk with their weights in our model."""
        self.ours.load_state_dict(self.drafter.state_dict())
        lengths = []
        for plan in self.pipeline.planner.iter_eval_plans():
            self._fill(plan)
            lengths += evaluate_plan(
                self.ours,
                self.head,
                self.slot.hidden,
                plan,
                stop_token_ids=self.pipeline.stop_token_ids,
            )
        return accept_len(lengths)


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", metavar="DIR", help="folder of SpecForge's unpacked wheel")
    arguments, flags = parser.parse_known_args()
    if arguments.peers:
        sys.path.insert(0, arguments.peers)
    cfg, _ = parse_config(flags)
    run_dir = Path(cfg.log.dir) / cfg.log.name
    run = PeerRun(cfg, run_dir)
    save_config(cfg, run_dir / CONFIG)
    run.run()
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
