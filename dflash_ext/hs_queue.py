"""Slots that carry hidden states from a target thread to a drafter thread.

A slot is memory on the drafter's device, allocated once. It goes round FREE -> FILLING (a target
packs into it) -> READY -> IN_USE (the drafter trains from it) -> FREE. When no slot is free the
target waits: that is the back-pressure of the whole pipeline.
"""

from __future__ import annotations

import dataclasses
import threading
from enum import Enum

import torch
from torch import Tensor

from dflash_ext.data.packing import BatchPlan, Ticket
from dflash_ext.supervisor import Supervisor

# What a drafter reads of a plan; the rest is for the target.
DRAFTER_TENSORS = (
    *("doc_start", "anchors", "ctx_start", "ctx_end", "labels", "weights", "rows", "n_rows"),
    *("prefix", "teacher_index", "weight_sum"),
)


class SlotState(Enum):
    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    IN_USE = "in use"


class Slot:
    """Hidden states of one packed batch.

    The host hands a slot over before the GPUs are done with it: on a GPU the target's stream calls
    `wait_free` before its first write and `set_ready` after the last, the drafter's stream
    `wait_ready` and `set_free`. On a CPU these do nothing.

    Attributes:
        hidden: ``[token_budget, num_layers * hidden_size]``, the captured layers side by side;
            with ``split_fc`` ``[num_layers, token_budget, hidden_size]``.
        last_hidden: ``[token_budget, hidden_size]`` after the target's final norm, or None.
        high_water: ``[2]`` int64, the rows of ``hidden`` and ``last_hidden`` that may be non-zero.
    """

    def __init__(
        self,
        token_budget: int,
        num_layers: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        with_last: bool,
        split_fc: bool = False,
    ) -> None:
        # Zeros, not empty: rows beyond a batch meet a zero gradient in fc, and 0 * NaN is NaN.
        shape: tuple[int, ...] = (token_budget, num_layers * hidden_size)
        if split_fc:
            shape = (num_layers, token_budget, hidden_size)
        self.hidden = torch.zeros(shape, dtype=dtype, device=device)
        self.last_hidden: Tensor | None = None
        if with_last:
            self.last_hidden = torch.zeros(token_budget, hidden_size, dtype=dtype, device=device)
        self.high_water = torch.zeros(2, dtype=torch.int64, device=device)
        self.state = SlotState.FREE
        self.ticket: Ticket | None = None
        self._ready: torch.cuda.Event | None = None
        self._free: torch.cuda.Event | None = None
        self._plan: BatchPlan | None = None

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def plan_on_device(self) -> BatchPlan:
        """The ticket's plan where the slot is. On a GPU the tensors that the drafter reads are
        copied on the current stream, to the same addresses as long as their shapes stay."""
        assert self.ticket is not None
        plan = self.ticket.plan
        if self.device.type == "cpu":
            return plan
        source = {name: getattr(plan, name) for name in DRAFTER_TENSORS}
        kept = {} if self._plan is None else {n: getattr(self._plan, n) for n in source}
        if all(n in kept and kept[n].shape == t.shape for n, t in source.items()):
            for name, tensor in source.items():
                kept[name].copy_(tensor, non_blocking=True)
        else:
            kept = {n: t.to(self.device, non_blocking=True) for n, t in source.items()}
        self._plan = dataclasses.replace(plan, **kept)
        return self._plan

    def wait_free(self) -> None:
        if self._free is not None:
            self._free.wait()

    def set_ready(self) -> None:
        self._ready = self._event()

    def wait_ready(self) -> None:
        if self._ready is not None:
            self._ready.wait()

    def set_free(self) -> None:
        self._free = self._event()

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event()  # a new one each time: it belongs to the device that records it
        event.record()
        return event


class BufferedHSQueue:
    """The slots of one drafter, filled and used in the order of ``Ticket.seq``.

    Args:
        slots: at least one.
        supervisor: ends the waits when the run ends.
    """

    def __init__(self, slots: list[Slot], supervisor: Supervisor) -> None:
        self._slots = slots
        self._supervisor = supervisor
        self._changed = threading.Condition()
        self._next_to_fill = 0
        self._next_to_use = 0

    def acquire(self, ticket: Ticket) -> Slot:
        """Waits until it is this ticket's turn and a slot is free; the slot is then FILLING.

        Slots are handed out in ticket order: if a later batch could take the last free slot, the
        drafter would wait for the earlier one for ever.
        """
        with self._changed:
            self._supervisor.wait_for(
                self._changed,
                lambda: ticket.seq == self._next_to_fill and self._find(SlotState.FREE) is not None,
            )
            slot = self._find(SlotState.FREE)
            assert slot is not None
            slot.state, slot.ticket = SlotState.FILLING, ticket
            self._next_to_fill += 1
            self._changed.notify_all()
            return slot

    def publish(self, slot: Slot) -> None:
        """FILLING -> READY: the target has written everything."""
        self._move(slot, SlotState.FILLING, SlotState.READY)

    def get(self) -> Slot:
        """Waits for the next batch in ticket order; the slot is then IN_USE."""
        with self._changed:
            self._supervisor.wait_for(self._changed, lambda: self._next_ready() is not None)
            slot = self._next_ready()
            assert slot is not None
            slot.state = SlotState.IN_USE
            self._next_to_use += 1
            return slot

    def release(self, slot: Slot) -> None:
        """IN_USE -> FREE."""
        self._move(slot, SlotState.IN_USE, SlotState.FREE)

    def depth(self) -> int:
        """Batches that are ready and wait for the drafter."""
        return sum(slot.state is SlotState.READY for slot in self._slots)

    def tensors(self) -> list[Tensor]:
        """The memory of all slots."""
        slots = self._slots
        return [s.hidden for s in slots] + [
            s.last_hidden for s in slots if s.last_hidden is not None
        ]

    def _move(self, slot: Slot, old: SlotState, new: SlotState) -> None:
        with self._changed:
            assert slot.state is old, f"slot is {slot.state.value}, expected {old.value}"
            slot.state = new
            if new is SlotState.FREE:
                slot.ticket = None
                # The host frees a slot before its GPU has: the next one taken is the longest free.
                self._slots.remove(slot)
                self._slots.append(slot)
            self._changed.notify_all()

    def _find(self, state: SlotState) -> Slot | None:
        return next((slot for slot in self._slots if slot.state is state), None)

    def _next_ready(self) -> Slot | None:
        for slot in self._slots:
            ready = slot.state is SlotState.READY and slot.ticket is not None
            if ready and slot.ticket.seq == self._next_to_use:  # type: ignore[union-attr]
                return slot
        return None
