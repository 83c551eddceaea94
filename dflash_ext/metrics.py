"""Training metrics: summed on the device, published by the trainer without a wait, read elsewhere.

    metric_add -> acc -> publish(): metric_publish -> staging row -> ring -> drain(): monitor thread

Everything that travels is a sum or a count, so records of several drafters and steps merge by
addition; only ``summarise`` divides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from dflash_ext import _C, ops
from dflash_ext.ops.metric_add import NUM_WORDS, SCALE, WORD, new_accumulator

Summary = dict[str, float | int]

STAGING_ROWS = 64
RING_SLOTS = 256


class MetricStream:
    """The metrics of one drafter on their way from its device to the monitor.

    The drafter thread adds to ``acc`` and calls ``publish``; the monitor thread calls ``drain``.
    Neither ever waits for the other: if the monitor falls behind by more than the ring holds, the
    oldest records are lost, and counted. On a GPU a stream of its own copies each staged row to the
    ring, in pinned memory, and ``drain`` makes no CUDA call; a row that the training stream
    overwrites before it was copied is lost, and counted, likewise.

    Attributes:
        acc: int64 ``[NUM_WORDS]`` accumulators on the drafter's device (``ops.metric_add``).
    """

    def __init__(self, device: torch.device | str) -> None:
        self.acc = new_accumulator(device)
        self._staging = torch.zeros(STAGING_ROWS, NUM_WORDS + 1, dtype=torch.int64, device=device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._next_step = 0
        if self.acc.is_cuda:
            self._copier = _C.MetricCopier(self._staging, RING_SLOTS)
            self._ring = self._copier.ring
        else:
            self._ring = _C.MetricRing(RING_SLOTS, NUM_WORDS + 1)

    def count(self, name: str, value: int | torch.Tensor) -> None:
        """Adds a number, or a 0-d integer tensor of the device, to the counter ``name``."""
        self.acc[WORD[name]].add_(value)

    def publish(self, step: int) -> None:
        """Sends off what ``acc`` holds as the record of optimizer step ``step``; zeroes ``acc``.

        Steps ascend. While the current stream is captured into a CUDA graph, only the part that a
        graph can replay is done, for consecutive steps from the next one on: call ``hand_over``
        after each replay.
        """
        if self.acc.is_cuda and torch.cuda.is_current_stream_capturing():
            ops.metric_publish(self.acc, self._staging, self._step)
            return
        if step != self._next_step:
            self._step.fill_(step)
        ops.metric_publish(self.acc, self._staging, self._step)
        self.hand_over(step)

    def hand_over(self, step: int) -> None:
        """Sends off the record of ``step``, which a replayed graph has just published."""
        self._next_step = step + 1
        if self.acc.is_cuda:
            self._copier.copy(step)
        else:
            self._ring.push(self._staging[step % STAGING_ROWS])

    def wait(self) -> None:
        """Returns when all that was sent off can be drained."""
        if self.acc.is_cuda:
            torch.cuda.ExternalStream(self._copier.stream, self.acc.device).synchronize()

    def drain(self) -> list[tuple[int, list[int]]]:
        """All new records, oldest first: (optimizer step, ``NUM_WORDS`` words)."""
        records = []
        while (record := self._ring.pop()) is not None:
            records.append((record[NUM_WORDS], record[:NUM_WORDS]))
        return records

    @property
    def dropped(self) -> int:
        """Records lost so far."""
        return self._ring.dropped


class Metrics:
    """All drafters' streams as one: what they counted since the last look.

    Args:
        block_size: slots of a block.
        lr_at: learning rate by the step of a record.
    """

    def __init__(
        self,
        streams: Sequence[MetricStream],
        block_size: int,
        lr_at: Callable[[int], float] | None = None,
    ) -> None:
        self._streams, self._block_size, self._lr_at = list(streams), block_size, lr_at
        self._lock = threading.Lock()
        self._dropped = 0

    def get_metrics(self) -> Summary:
        """What was counted since the last call, as in ``summarise``; empty if nothing was."""
        with self._lock:
            records = [record for stream in self._streams for record in stream.drain()]
            dropped = sum(stream.dropped for stream in self._streams)
            dropped, self._dropped = dropped - self._dropped, dropped
        summary = summarise(merge_words([words for _, words in records]), self._block_size)
        if summary or dropped:
            summary["dropped_metrics"] = dropped
        if summary and records and self._lr_at is not None:
            summary["lr"] = self._lr_at(max(step for step, _ in records))
        return summary


def merge_words(records: Sequence[Sequence[int]]) -> list[int]:
    """Sum of records, of drafters or steps alike."""
    return [sum(column) for column in zip(*records, strict=True)] or [0] * NUM_WORDS


def summarise(words: Sequence[int], block_size: int) -> Summary:
    """The metrics that a record's words stand for.

    ``loss`` = sum(w x) / sum(w) over all batches; ``ce``, ``kl``, ``cap`` likewise over measured
    batches. Unweighted over supervised slots of measured batches: ``acc`` (the label ranks first),
    ``top4``, ``top8``, and ``acc_1`` ... ``acc_{K-1}``, each over its slot. Over blocks with a
    supervised slot: ``streak`` = mean number of leading slots that are right, ``ddtree_streak4``
    and ``ddtree_streak8`` the same with rank < 4 and < 8. Counts: ``batches``, ``tokens``,
    ``nonfinite_steps``, ``nonfinite_values``.

    What was not measured is absent; nothing counted gives ``{}``.
    """
    if not any(words):
        return {}
    summary: Summary = {}

    def ratio(key: str, total: int, count: int) -> None:
        if count:
            summary[key] = total / count

    def word(name: str) -> int:
        return words[WORD[name]]

    ratio("loss", word("loss_sum"), word("loss_weight"))
    ratio("ce", word("ce_sum"), word("term_weight"))
    if word("kl_sum"):  # stays 0 without a teacher: a real divergence is never exactly 0
        ratio("kl", word("kl_sum"), word("term_weight"))
    ratio("cap", word("cap_sum"), word("term_weight"))
    ratio("acc", word("top1"), word("slots"))
    ratio("top4", word("top4"), word("slots"))
    ratio("top8", word("top8"), word("slots"))
    ratio("streak", word("streak1"), word("blocks"))
    ratio("ddtree_streak4", word("streak4"), word("blocks"))
    ratio("ddtree_streak8", word("streak8"), word("blocks"))
    for slot in range(block_size):
        ratio(f"acc_{slot}", words[WORD["slot_hit"] + slot], words[WORD["slot_n"] + slot])
    ratio("grad_norm", word("grad_norm_sum"), word("grad_norm_steps") * int(SCALE))
    if word("tokens"):
        summary["tokens"] = word("tokens")
    for count in ("batches", "nonfinite_steps", "nonfinite_values"):
        summary[count] = word(count)
    return summary
