"""TargetForwardLoop: the thread that runs the frozen target and packs into slots."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dflash_ext import ops
from dflash_ext.data.packing import Ticket
from dflash_ext.devices import BusyClock, current, set_cpu_threads, worker_stream
from dflash_ext.hidden_cache import HiddenCache
from dflash_ext.hs_queue import BufferedHSQueue, Slot
from dflash_ext.supervisor import Supervisor, Worker
from dflash_ext.target import Target

MAX_IN_FLIGHT = 2  # batches that the host may have launched before the GPU has done them
POLL_S = 0.0005


class TargetForwardLoop:
    """Pulls tickets, runs the target up to its last needed layer, packs each layer as it comes.

    Args:
        target: this thread's own replica. Of one spread over GPUs each works on its stream, so two
            batches can be under way at a time; ``busy_s`` is the first GPU's, which a slower one
            behind it holds up.
        tickets: shared by all targets; None in it ends the loop (and is put back for the others).
        queues: of this process's drafters, by their rank.
        cache: where training batches come from instead of a forward pass, if not None.
        first_pass: what this thread does with its target before the first batch, if anything.

    Attributes:
        tokens: of the training batches so far, whose device time ``busy_s`` is.
        planning_s: seconds spent waiting for the prefetcher.
    """

    def __init__(
        self,
        target: Target,
        layer_ids: list[int],
        tickets: queue.Queue[Ticket | None],
        queues: Mapping[int, BufferedHSQueue],
        supervisor: Supervisor,
        cpu_threads: int,
        cache: HiddenCache | None = None,
        first_pass: Callable[[Target], None] | None = None,
    ) -> None:
        self.target = target
        self.cache = cache
        self.layer_ids = layer_ids
        self.tickets = tickets
        self.queues = queues
        self.supervisor = supervisor
        self.cpu_threads = cpu_threads
        self.first_pass = first_pass
        self.clock = BusyClock(target.device)
        self.tokens = 0
        self.planning_s = 0.0
        self._end = target.device  # where the last layer was packed
        self._in_flight: deque[torch.cuda.Event] = deque()

    @property
    def busy_s(self) -> float:
        return self.clock.seconds

    @torch.no_grad()
    def run(self, worker: Worker) -> None:
        set_cpu_threads(self.cpu_threads)
        with worker_stream(*self.target.devices):
            self._run(worker)

    def _run(self, worker: Worker) -> None:
        if self.first_pass is not None:
            worker.at("a first pass, of the largest input")
            self.first_pass(self.target)
        while True:
            worker.at("waiting for a batch")
            begin = time.perf_counter()
            ticket = self.supervisor.get(self.tickets)
            self.planning_s += time.perf_counter() - begin
            if ticket is None:
                self.supervisor.put(self.tickets, None)
                return
            hs_queue = self.queues[ticket.drafter]
            worker.at(f"step {ticket.step}, batch {ticket.plan.batch_id}, waiting for a slot")
            slot = hs_queue.acquire(ticket)
            worker.at(f"step {ticket.step}, batch {ticket.plan.batch_id}")
            self._limit_in_flight()
            slot.wait_free()
            if ticket.plan.kind == "train":
                with self.clock.measure():
                    self._fill(slot, ticket)
                self.tokens += ticket.plan.n_tokens
            else:
                self._fill(slot, ticket)
            hs_queue.publish(slot)

    def _limit_in_flight(self) -> None:
        """Keeps the host near its GPU; without a limit it would run ahead of it for ever."""
        if self.target.device.type == "cpu":
            return
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            if self._in_flight[0].query():
                self._in_flight.popleft()
            else:
                self.supervisor.check()
                time.sleep(POLL_S)

    def _fill(self, slot: Slot, ticket: Ticket) -> None:
        self._end = self.target.device
        if self.cache is not None and ticket.plan.kind == "train":
            self.cache.fill(slot, ticket.plan, self._end)
        else:
            self._forward(slot, ticket)
        with current(self._end):
            slot.set_ready()
            if self._end.type == "cuda":
                self._in_flight.append(torch.cuda.current_stream().record_event())

    def _forward(self, slot: Slot, ticket: Ticket) -> None:
        plan = ticket.plan
        input_ids = plan.input_ids.to(self.target.device, non_blocking=True)
        indices: dict[torch.device, tuple[Tensor, Tensor]] = {}

        def index(device: torch.device) -> tuple[Tensor, Tensor]:
            """Packed rows and their number where a layer is."""
            self._end = device  # layers come in order: its work follows that of all before
            if device not in indices:
                src_index = plan.src_index.to(device, non_blocking=True)
                indices[device] = src_index, torch.full((), plan.n_tokens, device=device)
            return indices[device]

        def pack(column: int, hidden: Tensor) -> None:
            src_index, n_rows = index(hidden.device)
            ops.pack_hidden(
                [hidden],
                src_index,
                slot.hidden,
                n_rows=n_rows,
                high_water=slot.high_water[0],
                first_layer=column,
            )

        last = self.target.forward_capture(
            input_ids, self.layer_ids, pack, need_last=slot.last_hidden is not None
        )
        if slot.last_hidden is not None:
            assert last is not None
            src_index, n_rows = index(last.device)
            ops.pack_hidden(
                [last],
                src_index,
                slot.last_hidden,
                n_rows=n_rows,
                high_water=slot.high_water[1],
            )
