"""Slots go round in ticket order, whatever order the targets arrive in."""

import random
import threading
import time
from dataclasses import dataclass

import pytest
import torch

from dflash_ext.hs_queue import BufferedHSQueue, Slot, SlotState
from dflash_ext.supervisor import Stopped, Supervisor


@dataclass
class FakeTicket:
    seq: int


def make_queue(num_slots: int) -> tuple[BufferedHSQueue, Supervisor]:
    supervisor = Supervisor(60)
    slots = [
        Slot(4, 2, 3, dtype=torch.float32, device=torch.device("cpu"), with_last=False)
        for _ in range(num_slots)
    ]
    return BufferedHSQueue(slots, supervisor), supervisor


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_order_holds_with_targets_that_race(num_slots: int) -> None:
    hs_queue, _ = make_queue(num_slots)
    tickets = iter(range(60))
    lock = threading.Lock()

    def target(seed: int) -> None:
        rng = random.Random(seed)
        while True:
            with lock:
                seq = next(tickets, None)
            if seq is None:
                return
            time.sleep(rng.random() * 2e-3)
            slot = hs_queue.acquire(FakeTicket(seq))
            time.sleep(rng.random() * 2e-3)
            slot.hidden.fill_(seq)
            hs_queue.publish(slot)

    threads = [threading.Thread(target=target, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    seen = []
    for _ in range(60):
        slot = hs_queue.get()
        seen.append((slot.ticket.seq, int(slot.hidden[0, 0])))
        hs_queue.release(slot)
    assert seen == [(i, i) for i in range(60)]
    assert hs_queue.depth() == 0


def test_a_full_queue_holds_the_target_back_until_release() -> None:
    hs_queue, supervisor = make_queue(1)
    hs_queue.publish(hs_queue.acquire(FakeTicket(0)))
    assert hs_queue.depth() == 1
    entered = threading.Event()

    def target() -> None:
        hs_queue.acquire(FakeTicket(1))
        entered.set()

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    slot = hs_queue.get()
    assert slot.state is SlotState.IN_USE
    assert not entered.wait(0.3)
    hs_queue.release(slot)
    assert entered.wait(2)


def test_the_slot_that_is_free_longest_is_taken_next() -> None:
    """On a GPU a slot is handed back long before it has been read: its next batch would wait."""
    hs_queue, _ = make_queue(3)
    taken = []
    for seq in range(6):
        taken.append(hs_queue.acquire(FakeTicket(seq)))
        hs_queue.publish(taken[-1])
        hs_queue.release(hs_queue.get())
    assert len({id(slot) for slot in taken[:3]}) == 3
    assert [id(slot) for slot in taken[3:]] == [id(slot) for slot in taken[:3]]


def test_waits_end_with_the_run() -> None:
    hs_queue, supervisor = make_queue(1)
    threading.Timer(0.2, supervisor.stop.set).start()
    with pytest.raises(Stopped):
        hs_queue.get()
    with pytest.raises(Stopped):
        hs_queue.acquire(FakeTicket(1))  # not its turn, and never will be


def test_a_slot_starts_finite() -> None:
    slot = Slot(8, 2, 3, dtype=torch.float32, device=torch.device("cpu"), with_last=True)
    assert slot.hidden.shape == (8, 6) and slot.last_hidden.shape == (8, 3)
    assert bool((slot.hidden == 0).all()) and bool((slot.last_hidden == 0).all())
