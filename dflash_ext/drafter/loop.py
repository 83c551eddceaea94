"""DrafterTrainLoop: the thread that trains one replica of the drafter from its slots."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_ext.acceptance import accept_len, evaluate_plan
from dflash_ext.config import Config
from dflash_ext.devices import BusyClock, set_cpu_threads, worker_stream
from dflash_ext.drafter.fused import mark_gradients
from dflash_ext.drafter.graph import GraphedCalls
from dflash_ext.drafter.loss import (
    LossStats,
    Objective,
    add_metrics,
    forward_backward,
    live_chunks,
    live_grain,
    teacher_chunks,
)
from dflash_ext.drafter.model import DFlashDraftModel, FrozenHead
from dflash_ext.drafter.noise import with_noise
from dflash_ext.drafter.overlap import BackwardSync
from dflash_ext.grad_sync import GradSync
from dflash_ext.hs_queue import BufferedHSQueue, Slot
from dflash_ext.metrics import MetricStream
from dflash_ext.nonfinite import NonfiniteLog
from dflash_ext.ops.metric_add import SCALE
from dflash_ext.optim import DrafterOptimizer
from dflash_ext.supervisor import Supervisor, Worker


@dataclass(frozen=True)
class Mark:
    """Host-side counts of one drafter at a logged step; all are totals of this process.

    paused_s: seconds in which it evaluated or saved.
    """

    step: int
    tokens: int
    busy_s: float
    paused_s: float
    time: float


class DrafterTrainLoop:
    """Trains batches in ticket order: forward, backward, all-reduce, optimizer, metrics.

    Nothing here reads a number from the device; metrics leave through ``stream``.

    Args:
        rank: of this drafter among all drafters.
        steps: range of optimizer steps to make; ``steps.stop`` is the run's total.
        eval_steps: steps before which the evaluation batches of drafter 0 come.
        num_eval_plans: how many evaluation batches there are each time.
        stop_token_ids: what ends an answer in evaluation.
        save: writes a checkpoint after this many steps (drafter 0 only).
        best_score: the highest acceptance length of an earlier part of this run, else -inf.
        cpu_threads, eval_threads: of this thread's operators in training and in evaluation,
            during which the other workers wait.
    """

    def __init__(
        self,
        cfg: Config,
        *,
        rank: int,
        world: int,
        model: DFlashDraftModel,
        head: FrozenHead,
        objective: Objective,
        optimizer: DrafterOptimizer,
        hs_queue: BufferedHSQueue,
        grad_sync: GradSync,
        stream: MetricStream,
        supervisor: Supervisor,
        steps: range,
        eval_steps: set[int],
        num_eval_plans: int,
        stop_token_ids: Collection[int],
        save: Callable[[int], None] | None,
        best_score: float,
        cpu_threads: int,
        eval_threads: int,
    ) -> None:
        self.cfg = cfg
        self.rank, self.world = rank, world
        self.model, self.head, self.objective = model, head, objective
        self.optimizer, self.hs_queue, self.grad_sync = optimizer, hs_queue, grad_sync
        self.stream, self.supervisor = stream, supervisor
        self.steps, self.eval_steps, self.num_eval_plans = steps, eval_steps, num_eval_plans
        self.stop_token_ids = stop_token_ids
        self.save, self.cpu_threads, self.eval_threads = save, cpu_threads, eval_threads
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.done_steps = steps.start
        self.tokens = 0
        self.paused_s = 0.0
        self.device = next(model.parameters()).device
        self.clock = BusyClock(self.device)
        if optimizer.flat is not None:
            optimizer.zero_grads = False  # a step's first backward pass overwrites
        # A replayed graph calls nobody back: the sums then follow behind it.
        self.overlap: BackwardSync | None = None
        if self.world > 1 and not cfg.train.cuda_graph:
            self.overlap = BackwardSync(model, grad_sync, optimizer.params)
        self.graphs: GraphedCalls[tuple[list[LossStats], Tensor | None]] | None = None
        self.nonfinite = NonfiniteLog(self.device)
        self.marks: deque[Mark] = deque()
        # By step; None: left out, because a signal ended the run. And the last step with a row.
        self.evals: deque[tuple[int, list[list[int]] | None]] = deque()
        self.last_row = -1
        self.scores: dict[int, float] = {}
        self.best_score = best_score

    def run(self, worker: Worker) -> None:
        set_cpu_threads(self.cpu_threads)
        with worker_stream(self.device):
            if self.cfg.train.cuda_graph:
                self.graphs = GraphedCalls()
            self._run(worker)
            self.stream.wait()

    def _run(self, worker: Worker) -> None:
        self.grad_sync.connect()
        try:
            for step in self.steps:
                begin = time.perf_counter()
                self._maybe_evaluate(step, worker)
                self._maybe_save(step)
                self.paused_s += time.perf_counter() - begin
                worker.at(f"step {step}")
                if not self.supervisor.begin_step(step):
                    self._publish(step, stopping=True)
                    break
                self._train_step(step, worker)
                self._publish(step + 1)
            else:
                self._maybe_evaluate(self.steps.stop, worker)
            if self.save is not None:
                worker.at(f"step {self.done_steps}, saving")
                self.save(self.done_steps)
        finally:
            self.grad_sync.close()

    def _train_step(self, step: int, worker: Worker) -> None:
        self.optimizer.set_lr(step)
        batch_ids, norm = [], None
        for index in range(self.cfg.train.grad_accum):
            slot = self.hs_queue.get()
            assert slot.ticket is not None and slot.ticket.step == step
            batch_ids.append(slot.ticket.plan.batch_id)
            worker.at(f"step {step}, batches {batch_ids}")
            slot.wait_ready()
            with self.clock.measure():
                norm = self._train_batch(slot, index)
            slot.set_free()
            self.hs_queue.release(slot)
        if norm is None:
            norm = self._sum_gradients()
            with self.clock.measure():
                norm = self.optimizer.update(norm)
        self._count_norm(step, norm)
        self.done_steps = step + 1

    def _sum_gradients(self) -> Tensor | None:
        """Their norm, if it is known from then on."""
        if self.overlap is not None:
            return self.overlap.finish()
        params = self.optimizer.params  # in the order in which gradients lie in memory
        self.grad_sync.all_reduce([p.grad for p in params if p.grad is not None])
        return None

    def _count_norm(self, step: int, norm: Tensor) -> None:
        """Skipped steps, and if wanted the norm, leave through the metrics like all the rest."""
        finite = torch.isfinite(norm)
        self.nonfinite.step(step, finite)
        self.stream.count("nonfinite_steps", (~finite).long())
        if self.cfg.log.grad_norm:
            norm = torch.where(finite, norm, 0.0)
            self.stream.count("grad_norm_sum", (norm * SCALE).long())
            self.stream.count("grad_norm_steps", finite.long())

    def _train_batch(self, slot: Slot, index: int) -> Tensor | None:
        """Batch `index` of a step; with the step's update, whose gradient norm it then returns, if
        it is the last one and no other drafter has a part in it."""
        train, plan = self.cfg.train, slot.plan_on_device()
        assert slot.ticket is not None
        grain = live_grain(train)
        chunks = live_chunks(slot.ticket.plan, train.anchor_group, grain)
        teachers = teacher_chunks(
            slot.ticket.plan, train, self.head, train.anchor_group, chunks * grain
        )
        hidden = with_noise(slot.hidden, plan, train.noise_std, train.seed)
        first, last = index == 0, index == train.grad_accum - 1
        update = last and self.world == 1
        mark_gradients(self.params, started=not first)

        def work() -> tuple[list[LossStats], Tensor | None]:
            stats = forward_backward(
                self.model,
                self.head,
                plan,
                hidden,
                objective=self.objective,
                last_hidden=slot.last_hidden,
                group=train.anchor_group,
                chunks=chunks,
                teachers=teachers,
                overlap=self.overlap if last else None,
            )
            return stats, self.optimizer.update() if update else None

        if self.graphs is None:
            stats, norm = work()
        else:
            stats, norm = self.graphs((first, update, chunks, teachers), slot, work)
        self.nonfinite.batch(index, torch.stack([group.loss for group in stats]).sum())
        add_metrics(
            self.stream.acc,
            stats,
            measured=(plan.batch_id // self.world) % train.metrics_every == 0,
        )
        self.tokens += plan.n_tokens
        return norm

    def _publish(self, done: int, stopping: bool = False) -> None:
        """Sends off what was counted since the last row, also when a signal ends the run early."""
        logged = done % self.cfg.log.every == 0 or done == self.steps.stop
        # A row ends where a run may go on from, so that none is cut in two by a kill.
        logged |= self._save_is_due(done) or done in self.eval_steps
        if logged != stopping and done > self.steps.start:
            self.last_row = done
            self.nonfinite.send()
            busy, now = self.clock.seconds, time.perf_counter()
            self.marks.append(Mark(done, self.tokens, busy, self.paused_s, now))
            self.stream.publish(done)

    def _maybe_save(self, done: int) -> None:
        """Between steps, behind the evaluation, whose score belongs to the checkpoint."""
        due = self._save_is_due(done)
        best = self._is_best(done) and self.cfg.checkpoint.keep_best
        # A run that goes on has saved that step; what it may not have done is to evaluate it.
        new = done > self.steps.start or (done > 0 and done in self.scores)
        if self.save is not None and (due or best) and new:
            self.save(done)

    def _save_is_due(self, done: int) -> bool:
        every = self.cfg.checkpoint.every
        return bool(every) and done % every == 0

    def _is_best(self, step: int) -> bool:
        """Whether the evaluation of this step, if there was one, is the best so far."""
        score = self.scores.get(step, -math.inf)
        if not score > self.best_score:  # NaN is no better either
            return False
        self.best_score = score
        return True

    def _maybe_evaluate(self, step: int, worker: Worker) -> None:
        """Acceptance lengths of the held-out text; consumes this step's evaluation batches."""
        if self.rank != 0 or step not in self.eval_steps:
            return
        lengths: list[list[int]] = []
        set_cpu_threads(self.eval_threads)
        for i in range(self.num_eval_plans):
            worker.at(f"step {step}, evaluation batch {i}")
            # Where other drafters have begun the step, it is made: behind its evaluation
            if self.supervisor.signum is not None and not self.supervisor.begin_step(step):
                self.evals.append((step, None))
                return
            slot = self.hs_queue.get()
            assert slot.ticket is not None and slot.ticket.plan.kind == "eval"
            slot.wait_ready()
            lengths += evaluate_plan(
                self.model,
                self.head,
                slot.hidden,
                slot.ticket.plan,
                stop_token_ids=self.stop_token_ids,
            )
            slot.set_free()
            self.hs_queue.release(slot)
        set_cpu_threads(self.cpu_threads)
        self.scores[step] = accept_len(lengths)
        self.evals.append((step, lengths))
        self.last_row = max(self.last_row, step)
