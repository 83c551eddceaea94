"""What belongs to one thread stays its own."""

import threading

import torch

from dflash_ext import ops
from dflash_ext.devices import set_cpu_threads


def test_a_thread_keeps_its_number_of_cpu_threads() -> None:
    """Also if another thread sets its own before the first operator of this one."""
    before, found = torch.get_num_threads(), []
    started, other_set = threading.Event(), threading.Event()

    def work() -> None:
        set_cpu_threads(before)
        started.set()
        other_set.wait()
        torch.ones(100_000).sum()
        found.append(torch.get_num_threads())
        ops.lm_head_topk(torch.ones(2, 3), torch.ones(4, 3), k=1)
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    try:
        torch.set_num_threads(before + 3)
        other_set.set()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert found == [before, before]
