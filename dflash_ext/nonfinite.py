"""Steps without a finite gradient: which, from which batches, and what to leave behind of them.

The optimizer skips such a step on the device. A drafter notes it there, too, and the note travels
to the host as the metrics do: the training thread reads nothing and waits for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from dflash_ext.data.corpus import Example
    from dflash_ext.data.packing import BatchPlan
    from dflash_ext.pipeline import Pipeline

KEPT_STEPS = 1024
MAX_ACCUM = 32  # batches of a step told apart; the last one stands for any beyond
FOLDER = "nonfinite"


class NonfiniteSteps(RuntimeError):
    """``train.max_nonfinite_steps`` in a row.

    Args:
        steps: those steps, ascending.
        suspects: batches whose own loss was not finite; without any, a gradient alone was not.
    """

    def __init__(self, steps: Iterable[int], suspects: Iterable[int], allowed: int) -> None:
        self.steps, self.suspects = sorted(steps), sorted(suspects)
        super().__init__(
            f"train.max_nonfinite_steps: found {len(self.steps)} steps in a row without a finite "
            f"gradient, {self.steps[0]} to {self.steps[-1]}, want fewer than {allowed}"
        )


class NeverTrained(NonfiniteSteps):
    """A run at its end, of whose steps none had a finite gradient.

    Args:
        count: all of them, those of the run's earlier parts included.
    """

    def __init__(self, steps: Iterable[int], suspects: Iterable[int], count: int) -> None:
        self.steps, self.suspects = sorted(steps), sorted(suspects)
        RuntimeError.__init__(
            self,
            f"train.steps: found none of {count} steps with a finite gradient, so no step changed "
            "the weights, and nothing is exported; want finite losses",
        )


class NonfiniteWeights(RuntimeError):
    """A weight that is not finite, as after a step far too long; the message names its tensor."""


class NonfiniteLog:
    """The last ``KEPT_STEPS`` optimizer steps of one drafter: finite or not, and by which batches.

    The drafter thread writes on its stream; the monitor thread reads what ``send`` has copied.
    """

    def __init__(self, device: torch.device | str) -> None:
        # Of step s, at s % KEPT_STEPS: (s + 1) * 2^32 + a bit for each batch, or 0 for a finite one
        self._noted = torch.zeros(KEPT_STEPS, dtype=torch.int64, device=device)
        self._batches = torch.zeros((), dtype=torch.int64, device=device)
        self._host = self._noted
        if self._noted.is_cuda:
            self._host = torch.zeros(KEPT_STEPS, dtype=torch.int64, pin_memory=True)

    def batch(self, index: int, loss: Tensor) -> None:
        """The loss [] of batch ``index`` of the step under way."""
        self._batches.add_((~torch.isfinite(loss)).long() << min(index, MAX_ACCUM - 1))

    def step(self, step: int, finite: Tensor) -> None:
        """Whether the gradient of optimizer step ``step``, whose batches came before, is finite."""
        noted = self._batches + ((step + 1) << MAX_ACCUM)
        self._noted[step % KEPT_STEPS] = torch.where(finite, 0, noted)
        self._batches.zero_()

    def send(self) -> None:
        """Lets the host have what was noted; to be called before the metrics are published."""
        if self._host is not self._noted:
            self._host.copy_(self._noted, non_blocking=True)

    def between(self, first: int, last: int) -> dict[int, list[int]]:
        """Non-finite steps in [first, last), and the indices of their non-finite batches."""
        found, noted = {}, self._host.tolist()
        for step in range(max(first, last - KEPT_STEPS), last):
            value = noted[step % KEPT_STEPS]
            if value >> MAX_ACCUM == step + 1:
                found[step] = [i for i in range(MAX_ACCUM) if value >> i & 1]
        return found


def check_trained(run: Pipeline, skipped: Mapping[int, set[int]]) -> None:
    """Raise NeverTrained if no step of a run that is at its end changed the weights.

    skipped: the suspects of each step that was skipped, as far as this process knows.
    """
    optimizer = run.drafter_loops[0].optimizer
    if not optimizer.taken.any():
        suspects = set[int]().union(*skipped.values())
        raise NeverTrained(skipped, suspects, int(optimizer.nonfinite[0]))


def explain(error: BaseException | None, run: Pipeline) -> str:
    """Where the batches of a ``NonfiniteSteps`` now lie, as the end of its message; else "".

    Written are the suspects of its first step, or all batches of that step. A skipped step changed
    nothing, so the later ones stand for themselves.
    """
    if not isinstance(error, NonfiniteSteps) or not error.steps:
        return ""
    step, folder = error.steps[0], run.run_dir / FOLDER
    plans = run.planner.step_plans(step)
    suspects = [plan for plan in plans if plan.batch_id in error.suspects] or plans
    try:
        write_batches(folder, suspects, run.examples, {"step": step, "steps": error.steps})
    except OSError as wrong:
        return f"; its batches could not be written to {folder} ({wrong.strerror or wrong})"
    ids = ", ".join(str(plan.batch_id) for plan in suspects[:8])
    more = " ..." if len(suspects) > 8 else ""
    return f"; step {step} failed with the batches {ids}{more}, see {folder}"


def write_batches(
    folder: Path, plans: Sequence[BatchPlan], examples: Sequence[Example], facts: dict[str, Any]
) -> None:
    """Each plan's tensors, its tokens among them, as ``batch_N.safetensors``; ``batches.json`` has
    the facts and each batch's epoch and examples. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    batches = []
    for plan in plans:
        named = {field.name: getattr(plan, field.name) for field in fields(plan)}
        tensors = {n: t.contiguous() for n, t in named.items() if isinstance(t, Tensor)}
        file = f"batch_{plan.batch_id}.safetensors"
        try:
            save_file(tensors, folder / file)
        except SafetensorError as error:  # it wraps the disk's errors
            raise OSError(str(error)) from error
        sources = [examples[doc].source for doc in plan.doc_ids]
        about = {"batch": plan.batch_id, "epoch": plan.epoch, "file": file, "examples": sources}
        batches.append(about)
    text = json.dumps({**facts, "batches": batches}, indent=2)
    (folder / "batches.json").write_text(text + "\n", encoding="utf-8")
