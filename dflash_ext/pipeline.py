"""Builds all stages of a run and supervises their threads; holds no maths."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import queue
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from dflash_ext.balance import LoadMeter
from dflash_ext.checkpoint import CheckpointManager
from dflash_ext.config import Config, to_dict
from dflash_ext.config_check import check_topology
from dflash_ext.config_values import devices_of
from dflash_ext.data.check import describe_data
from dflash_ext.data.conversations import load_examples
from dflash_ext.data.corpus import Corpus, DataReport, dataset_hash
from dflash_ext.data.packing import BatchPlanner, BatchPrefetcher, Ticket
from dflash_ext.data.sources import text_files
from dflash_ext.describe import common_facts, loss_rows
from dflash_ext.devices import set_cpu_threads
from dflash_ext.drafter.init import init_from_folder, start_spec
from dflash_ext.drafter.loop import DrafterTrainLoop
from dflash_ext.drafter.loss import Objective
from dflash_ext.drafter.model import DFlashDraftModel, FrozenHead
from dflash_ext.drafter.spec import drafter_spec
from dflash_ext.dtypes import DTYPES
from dflash_ext.export import check_finite, check_tensors
from dflash_ext.fp8 import check_weights
from dflash_ext.grad_sync import GradSync, make_board, make_store
from dflash_ext.hidden_cache import HiddenCache
from dflash_ext.hs_queue import BufferedHSQueue, Slot
from dflash_ext.layout import BlockLayout
from dflash_ext.logger import RunLogger
from dflash_ext.machines import Machines
from dflash_ext.metrics import MetricStream
from dflash_ext.monitor import Monitor
from dflash_ext.optim import build_optimizer
from dflash_ext.plan import check_drafter
from dflash_ext.resume import Resume, load_resume, weights_checksum
from dflash_ext.run_folder import CHECKPOINTS
from dflash_ext.supervisor import Supervisor, Worker
from dflash_ext.target import Target, load_target, load_tokenizer, stop_token_ids
from dflash_ext.target_choices import layers_and_mask, pick_mask_token_id
from dflash_ext.target_loop import TargetForwardLoop
from dflash_ext.target_setup import copies, first_pass, fuse, warm_up, with_weights
from dflash_ext.text_check import check_text


class Pipeline:
    """One process's part of a run: data, targets, queues, drafters, monitor.

    Drafters have ranks over all processes: this one's are ``machines.rank * D`` and the D - 1 after
    it. Process 0 evaluates and writes.

    Raises (from the constructor):
        RunFailed: another process failed.
        UserError: for a setting or input that cannot work, before any thread starts.
    """

    def __init__(
        self,
        cfg: Config,
        run_dir: Path,
        resume: bool = False,
        machines: Machines | None = None,
        accept_changed_data: bool = False,
    ) -> None:
        check_topology(cfg.topology)
        self.cfg, self.run_dir = cfg, run_dir
        self.dtype = DTYPES[cfg.model.dtype]
        self.machines = machines or Machines()
        own = len(cfg.topology.drafters)
        self.world = own * self.machines.count
        self.ranks = range(self.machines.rank * own, (self.machines.rank + 1) * own)
        self.checkpoints = CheckpointManager(
            run_dir / CHECKPOINTS, cfg.checkpoint, lambda step: self.monitor.wait_logged(step)
        )
        self.resume = Resume()
        if resume:
            self.resume = load_resume(self.checkpoints, cfg, self.machines.count)
        self.start = self.resume.drafter or start_spec(cfg.drafter)
        self._load_data_and_target()
        self.resume.check_same_text(self.data_hash, accept_changed_data)
        self._build_drafter()
        self.total_steps = self.planner.total_steps()
        self.resume.check_steps(self.total_steps)
        self.supervisor = Supervisor(cfg.train.stall_timeout_s, self._ending_signal)
        workers = len(cfg.topology.targets) + own
        cores = len(os.sched_getaffinity(0))
        self.cpu_threads = cfg.topology.cpu_threads or max(1, cores // workers)
        self._build_stages()
        if self.machines.several:
            self.machines.check_same(common_facts(self))

    # -- building ------------------------------------------------------------------------------

    def _load_data_and_target(self) -> None:
        cfg = self.cfg
        text_files([*cfg.data.train, *cfg.data.eval])  # all there? Before the target is loaded
        check_weights(cfg)
        self.tokenizer = load_tokenizer(cfg.model.target, cfg.model.revision)
        self.target: Target = self.load_target()
        self.target_checksum = weights_checksum(self.target.model.parameters())
        self.resume.check_same_target(self.target_checksum)
        fuse(self.target)
        info = self.target.info
        self.stop_token_ids = stop_token_ids(info, self.tokenizer)
        self.layer_ids, self.mask_token_id = layers_and_mask(
            cfg, info, self.start, lambda: pick_mask_token_id(info, self.tokenizer)
        )
        self.examples, self.data_report = self._examples(cfg.data.train)
        self.data_hash = dataset_hash(self.examples)
        self.text = check_text(self.target, self.tokenizer, self.examples, cfg.data)
        self.cache: HiddenCache | None = None
        self.cache_lines: list[str] = []
        if cfg.data.hidden_states:
            self.cache = HiddenCache(cfg.data, self.layer_ids, self.examples, self.target)
            self.cache_lines = self.cache.verify()
        self.eval_examples = Corpus([], [])
        if cfg.data.eval:
            self.eval_examples, _ = self._examples(cfg.data.eval)
        self.layout = BlockLayout(cfg.drafter.block_size)
        done = (self.resume.step, self.resume.batches)
        self.planner = BatchPlanner(
            self.examples, cfg.data, cfg.train, self.layout, self.world, self.eval_examples, done
        )
        self.fp8 = with_weights(self.target, cfg.model, self.planner, self.layer_ids)

    def load_target(self) -> Target:
        """The frozen target on the first of its devices; a benchmark hands in one of its own."""
        model = self.cfg.model
        return load_target(
            model.target,
            dtype=self.dtype,
            device=self.cfg.topology.targets[0],
            revision=model.revision,
            attn_backend=model.attn_backend,
            require_fast_gdn=model.require_fast_gdn,
        )

    def _examples(self, paths: list[str]) -> tuple[Corpus, DataReport]:
        return load_examples(
            paths,
            self.tokenizer,
            self.cfg.data,
            mask_token_id=self.mask_token_id,
            vocab_size=self.target.info.vocab_size,
        )

    def _build_drafter(self) -> None:
        cfg, target = self.cfg, self.target
        spec = drafter_spec(cfg, target.info, self.mask_token_id, self.layer_ids, self.start)
        check_drafter(cfg, spec)
        self.model = DFlashDraftModel.empty(spec, self.dtype)
        if self.resume.tensors:
            states = self.resume.part("model.")
            check_tensors(self.model, states, str(self.checkpoints.folder))
            self.model.load_state_dict(states)
        elif cfg.drafter.init_from == "target":
            self.model.init_from_target(target)
        elif cfg.drafter.init_from == "none":
            self.model.init_weights(cfg.train.seed)
        else:
            self.model = init_from_folder(spec, cfg.drafter.init_from).to(self.dtype)
        self.model.recompute = cfg.train.recompute

    def _build_stages(self) -> None:
        cfg = self.cfg
        targets = copies(self.target, cfg.topology.targets)
        shapes = self.planner.input_shapes(train=self.cache is None)
        passes = self.layer_ids, cfg.train.kl_weight > 0
        self.warm_up_lines = warm_up(targets, shapes, *passes)
        first = first_pass(shapes, self.target, *passes)
        self.tickets: queue.Queue[Ticket | None] = queue.Queue(2 * len(cfg.topology.targets) + 1)
        self.queues = [self._hs_queue(device) for device in cfg.topology.drafters]
        self._step_tokens: defaultdict[int, int] = defaultdict(int)
        self.eval_steps: set[int] = set()
        if self.eval_examples:
            every = cfg.train.eval_every
            self.eval_steps = {0, self.total_steps}
            self.eval_steps |= set(range(every, self.total_steps, every)) if every else set()
        if self.resume.meta.get("score") is not None:
            self.eval_steps.discard(self.resume.step)  # its result is in the checkpoint
        self.num_eval_plans = sum(1 for _ in self.planner.iter_eval_plans())
        self.prefetcher = BatchPrefetcher(self.planner)
        queues = dict(zip(self.ranks, self.queues, strict=True))
        common = (self.layer_ids, self.tickets, queues, self.supervisor, self.cpu_threads)
        self.target_loops = [
            TargetForwardLoop(targets[entry].replica(), *common, self.cache, first)
            for entry in cfg.topology.targets
        ]
        heads = self._heads()
        store = self.machines.store or make_store()
        places = [torch.device(device) for device in cfg.topology.drafters]
        self.board = None if self.machines.store else make_board(places)
        models = [self.model, *(copy.deepcopy(self.model) for _ in self.ranks[1:])]
        self.drafter_loops = [
            self._drafter_loop(rank, device, model, heads[device], store)
            for rank, device, model in zip(self.ranks, cfg.topology.drafters, models, strict=True)
        ]

    def _heads(self) -> dict[str, FrozenHead]:
        """The target's embedding and head on every drafter's device, once each."""
        info = self.target.info

        def on(device: str) -> FrozenHead:
            embed = self.target.embed_weight.to(device)
            return FrozenHead(
                embed,
                embed if info.tied else self.target.head_weight.to(device),
                embed_scale=info.embed_scale,
                logit_scale=info.logit_scale,
                softcap=info.softcap,
                valid_vocab=info.vocab_size,
            )

        return {device: on(device) for device in set(self.cfg.topology.drafters)}

    def _hs_queue(self, device: str) -> BufferedHSQueue:
        cfg = self.cfg
        slots = [
            Slot(
                cfg.data.token_budget,
                len(self.layer_ids),
                self.target.info.hidden_size,
                dtype=self.dtype,
                device=torch.device(device),
                with_last=cfg.train.kl_weight > 0,
                split_fc=cfg.drafter.split_fc,
            )
            for _ in range(cfg.topology.slots_per_drafter)
        ]
        return BufferedHSQueue(slots, self.supervisor)

    def _drafter_loop(
        self, rank: int, place: str, model: DFlashDraftModel, head: FrozenHead, store: Any
    ) -> DrafterTrainLoop:
        cfg, device = self.cfg, torch.device(place)
        model.to(device)
        named, shift = list(model.named_parameters()), self.planner.schedule_shift()
        optimizer = build_optimizer(named, cfg.train, self.total_steps, shift)
        if self.resume.tensors:
            optimizer.load_state_tensors(self.resume.part("optimizer."))
        return DrafterTrainLoop(
            cfg,
            rank=rank,
            world=self.world,
            model=model,
            head=head,
            objective=Objective(cfg.train, self.layout),
            optimizer=optimizer,
            hs_queue=self.queues[rank - self.ranks.start],
            grad_sync=GradSync(
                rank,
                self.world,
                store,
                device,
                dtype=DTYPES[cfg.train.grad_sync_dtype],
                timeout_s=cfg.train.stall_timeout_s,
                stop=self.supervisor.stop,
                board=self.board,
            ),
            stream=MetricStream(device),
            supervisor=self.supervisor,
            steps=range(self.resume.step, self.total_steps),
            eval_steps=self.eval_steps,
            num_eval_plans=self.num_eval_plans,
            stop_token_ids=self.stop_token_ids,
            save=self._save if rank == 0 else None,
            best_score=max(self.checkpoints.scores().values(), default=-math.inf),
            cpu_threads=self.cpu_threads,
            eval_threads=self.cpu_threads * (len(cfg.topology.targets) + len(self.ranks)),
        )

    # -- running -------------------------------------------------------------------------------

    def run(self, logger: RunLogger | None) -> Monitor:
        """Trains to the end, to a signal, or to the first error (RunFailed). Process 0 logs."""
        supervisor = self.supervisor
        workers: list[Worker] = []
        self.monitor = Monitor(
            logger,
            drafters=self.drafter_loops,
            targets=self.target_loops,
            queues=self.queues,
            lr_at=self.drafter_loops[0].optimizer.lr_at,
            block_size=self.layout.size,
            first_batch=self.planner.first_batch,
            max_nonfinite_steps=self.cfg.train.max_nonfinite_steps,
            tokens_before=self.tokens_before,
            finished=lambda: (
                not any(w.thread and w.thread.is_alive() for w in workers)
                and (self.machines.rank != 0 or self.machines.all_ended or supervisor.stop.is_set())
            ),
            machines=self.machines,
            load=LoadMeter.of_run(self.cfg, self.model.spec, self.machines.count),
        )
        for device in self.gpus():  # the workers' streams do not wait for this one's
            torch.cuda.synchronize(device)
        supervisor.spawn("prefetcher", self._prefetch)
        for i, target_loop in enumerate(self.target_loops):
            supervisor.spawn(f"target {i}", target_loop.run)
        for loop in self.drafter_loops:
            workers.append(supervisor.spawn(f"drafter {loop.rank}", loop.run))
        if self.machines.several:
            supervisor.spawn("machines", lambda worker: self.machines.watch(worker, supervisor))
        monitor = supervisor.spawn("monitor", self.monitor.run)
        try:
            supervisor.wait([*workers, monitor])
        finally:
            self.checkpoints.wait()
        return self.monitor

    def gpus(self) -> list[str]:
        """The GPUs of this run."""
        topology = self.cfg.topology
        entries = [*topology.targets, *topology.drafters]
        return sorted({d for entry in entries for d in devices_of(entry) if d != "cpu"})

    def describe_data(self) -> list[str]:
        """What the model will see. Raises UserError for a mask that cannot be meant."""
        share = self.planner.padding_share()
        lines = describe_data(self.examples, self.data_report, self.tokenizer, share)
        lines += ["", loss_rows(self)]
        return [*lines, *self.text.lines(), *self.cache_lines]

    @property
    def done_steps(self) -> int:
        return self.drafter_loops[0].done_steps

    @property
    def complete(self) -> bool:
        """Whether all steps are made and, with held-out text, evaluated."""
        evaluated = self.accept_len_after is not None or not self.eval_examples
        return self.done_steps == self.total_steps and evaluated

    def _prefetch(self, worker: Worker) -> None:
        set_cpu_threads(1)
        gpus = self.gpus()
        for ticket in self.prefetcher.tickets(self.resume.step, self.eval_steps):
            worker.at(f"step {ticket.step}, batch {ticket.plan.batch_id}")
            if ticket.plan.kind == "train":
                self._step_tokens[ticket.step] += ticket.plan.n_tokens
            if ticket.drafter not in self.ranks:
                continue
            if gpus:  # copies from memory that is not pinned would wait
                ticket = dataclasses.replace(ticket, plan=ticket.plan.pin_memory())
            self.supervisor.put(self.tickets, ticket)
        self.supervisor.put(self.tickets, None)

    def _save(self, step: int) -> None:
        loop = self.drafter_loops[0]
        if step == self.resume.step and self.resume.meta and step not in loop.scores:
            return  # it is the checkpoint that was loaded
        check_finite(states := loop.model.state_dict(), f"step {step}")  # waits, as the copies do
        tensors = {f"model.{k}": v for k, v in states.items()}
        tensors |= {f"optimizer.{k}": v for k, v in loop.optimizer.state_tensors().items()}
        trained = sum(self._step_tokens[s] for s in range(self.resume.step, step))
        meta = {
            "tokens": self.tokens_before + trained,
            "data_hash": self.data_hash,
            "target": self.target_checksum,
            "text": self.text.facts(),
            "world": self.world,
            "batches": self.planner.first_batch(step),
            "cpu_threads": self.cpu_threads,
            "config": to_dict(self.cfg),
            "drafter": loop.model.spec.to_hf_config(),
            "accept_len_before": self.accept_len_before,
        }
        last = step == self.total_steps or self.supervisor.signum is not None
        self.checkpoints.save(step, tensors, meta, loop.scores.get(step), last=last)

    def _ending_signal(self, step: int, signum: int | None) -> int | None:
        return self.machines.ending_signal(step, signum, self.supervisor.check)

    @property
    def tokens_before(self) -> int:
        """Tokens trained by the run's earlier parts."""
        return self.resume.meta.get("tokens", 0)

    @property
    def accept_len_before(self) -> float | None:
        """Acceptance length before the first step, also in a resumed run."""
        earlier = self.resume.meta.get("accept_len_before")
        return self.drafter_loops[0].scores.get(0, earlier)

    @property
    def accept_len_after(self) -> float | None:
        """Acceptance length behind the last step."""
        loaded = self.resume.meta.get("score") if self.resume.step == self.total_steps else None
        return self.drafter_loops[0].scores.get(self.total_steps, loaded)
