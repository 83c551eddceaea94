"""TargetForwardLoop: the thread that runs the frozen target and packs into slots."""

from __future__ import annotations

import queue
import time

import torch
from torch import Tensor

from dflash_ext import ops
from dflash_ext.data.packing import Ticket
from dflash_ext.hs_queue import BufferedHSQueue, Slot
from dflash_ext.supervisor import Supervisor, Worker
from dflash_ext.target import Target


class TargetForwardLoop:
    """Pulls tickets, runs the target up to its last needed layer, packs each layer as it comes.

    Args:
        target: this thread's own replica.
        tickets: shared by all targets; None in it ends the loop (and is put back for the others).
        queues: one per drafter.
    """

    def __init__(
        self,
        target: Target,
        layer_ids: list[int],
        tickets: queue.Queue[Ticket | None],
        queues: list[BufferedHSQueue],
        supervisor: Supervisor,
        cpu_threads: int,
    ) -> None:
        self.target = target
        self.layer_ids = layer_ids
        self.tickets = tickets
        self.queues = queues
        self.supervisor = supervisor
        self.cpu_threads = cpu_threads
        self.busy_s = 0.0
        self.tokens = 0

    @torch.no_grad()
    def run(self, worker: Worker) -> None:
        torch.set_num_threads(self.cpu_threads)
        while True:
            worker.at("waiting for a batch")
            ticket = self.supervisor.get(self.tickets)
            if ticket is None:
                self.supervisor.put(self.tickets, None)
                return
            hs_queue = self.queues[ticket.drafter]
            worker.at(f"step {ticket.step}, batch {ticket.plan.batch_id}, waiting for a slot")
            slot = hs_queue.acquire(ticket)
            worker.at(f"step {ticket.step}, batch {ticket.plan.batch_id}")
            start = time.perf_counter()
            self._fill(slot, ticket)
            self.busy_s += time.perf_counter() - start
            self.tokens += ticket.plan.n_tokens
            hs_queue.publish(slot)

    def _fill(self, slot: Slot, ticket: Ticket) -> None:
        plan = ticket.plan
        n_rows = torch.tensor(plan.n_tokens)

        def pack(column: int, hidden: Tensor) -> None:
            ops.pack_hidden(
                [hidden],
                plan.src_index,
                slot.hidden,
                n_rows=n_rows,
                high_water=slot.high_water[0],
                first_layer=column,
            )

        last = self.target.forward_capture(
            plan.input_ids, self.layer_ids, pack, need_last=slot.last_hidden is not None
        )
        if slot.last_hidden is not None:
            assert last is not None
            ops.pack_hidden(
                [last],
                plan.src_index,
                slot.last_hidden,
                n_rows=n_rows,
                high_water=slot.high_water[1],
            )
