"""Which side of a run is the slower one, and what would balance it: planned or measured.

Targets and drafters work at the same time, so the slower side sets the pace and the other one
waits. ``Balance`` holds what each side could do alone; the plan fills it with rates, the monitor
with what it has measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from dflash_ext.config import Config
from dflash_ext.config_check import SLIDING
from dflash_ext.config_values import devices_of
from dflash_ext.data.anchors import anchor_budget
from dflash_ext.drafter.spec import DrafterSpec

OPTIMIZER_BYTES = 30  # a parameter's traffic in an AdamW step: master, moments, gradient, weight
ANCHOR_STEP = 64  # to which a proposed max_anchors is rounded
IDLE = 0.1  # share of the time from which on waiting is worth a word
HELD_UP = 0.03  # the same of what too few slots cost


@dataclass(frozen=True)
class Rate:
    """Operations a second of the target's and the drafter's whole pass, bytes a second of the
    optimizer's."""

    target: float
    drafter: float
    memory: float


# By kind of device and model.dtype. bfloat16: measured in the pipeline on two H200s at the size of
# Qwen3.5-27B (benchmarks/results/pipeline_h200_202611.md).
# float32 on a GPU: 60 % of an H200's peak, not measured. CPU: the default run on two cores.
RATES = {
    ("cuda", "bfloat16"): Rate(585e12, 640e12, 4.2e12),
    ("cuda", "float32"): Rate(40e12, 40e12, 4.2e12),
    ("cpu", "float32"): Rate(60e9, 60e9, 10e9),
    ("cpu", "bfloat16"): Rate(20e9, 20e9, 10e9),
}


def rate_of(cfg: Config) -> Rate:
    """The rates of the configured kind of device and dtype."""
    return RATES["cpu" if "cpu" in cfg.topology.drafters else "cuda", cfg.model.dtype]


def drafter_flops(cfg: Config, spec: DrafterSpec) -> tuple[float, float]:
    """Operations of one batch, forward and backward: (of the context, of one anchor).

    A product costs 2 for each weight and row, and twice that again backward; fc has no input
    gradient, the frozen head no weight gradient.
    """
    hidden, features = spec.hidden_size, len(spec.target_layer_ids) * spec.hidden_size
    keys_values = 2 * spec.num_key_value_heads * spec.head_dim * hidden
    layer = 2 * spec.num_attention_heads * spec.head_dim * hidden + keys_values
    layer += 3 * hidden * spec.intermediate_size
    context = 4 * features * hidden + 6 * spec.num_layers * keys_values
    seen = cfg.data.max_length / 2
    width = spec.num_attention_heads * spec.head_dim
    attention = sum(
        # scores and values forward, five products backward
        14 * width * (min(seen, spec.sliding_window or seen) if kind == SLIDING else seen)
        for kind in spec.layer_types
    )
    head = (6 if cfg.train.kl_weight > 0 else 4) * spec.vocab_size * hidden
    block = spec.block_size
    anchor = block * (6 * spec.num_layers * layer + attention) + (block - 1) * head
    return float(cfg.data.token_budget * context), float(anchor)


def drafter_seconds(cfg: Config, spec: DrafterSpec) -> tuple[float, float]:
    """One batch on one device at the known rates: (without anchors, of each anchor)."""
    rate = rate_of(cfg)
    context, anchor = drafter_flops(cfg, spec)
    update = spec.num_parameters * OPTIMIZER_BYTES / rate.memory / cfg.train.grad_accum
    return context / rate.drafter + update, anchor / rate.drafter


@dataclass(frozen=True)
class Balance:
    """What each side of a run does if it never waits for the other.

    Attributes:
        targets, drafters: devices of each side, or workers on a CPU.
        devices: of both sides together; fewer than their sum if some have both roles.
        target_speed: tokens a second of one target; inf if its states are stored.
        batch_tokens: of one batch.
        batch_s, anchor_s: seconds of one drafter for a batch without anchors and for each anchor.
        max_anchors: of a batch, as configured.
        slots: of one drafter; a batch has one from the start of its forward pass to the end of its
            backward pass.
    """

    targets: int
    drafters: int
    devices: int
    target_speed: float
    batch_tokens: float
    batch_s: float
    anchor_s: float
    max_anchors: int
    slots: int

    @property
    def drafter_speed(self) -> float:
        """Tokens a second of one drafter."""
        return self.batch_tokens / (self.batch_s + self.anchor_s * self.max_anchors)

    @property
    def sides(self) -> tuple[float, float]:
        """Tokens a second of (all targets, all drafters)."""
        return self.targets * self.target_speed, self.drafters * self.drafter_speed

    @property
    def whole(self) -> float:
        """Tokens a second of the run. Devices with both roles give their time to the side that
        needs it."""
        each = 1 / self.target_speed + 1 / self.drafter_speed
        return min(*self.sides, self.devices / each, self.drafters * self.slots / each)

    @property
    def shared(self) -> bool:
        return self.devices < self.targets + self.drafters

    @property
    def slower(self) -> str:
        """ "targets" or "drafters"."""
        targets, drafters = self.sides
        return "targets" if targets < drafters else "drafters"

    def waits(self) -> tuple[float, float]:
        """Shares of the time that (targets, drafters) wait if nothing else holds them up."""
        return (1 - self.whole / self.sides[0], 1 - self.whole / self.sides[1])

    @property
    def held_up(self) -> bool:
        """Whether both sides wait for slots."""
        return not self.shared and self.whole < (1 - HELD_UP) * min(self.sides)

    def slots_needed(self) -> int:
        """Slots of one drafter with which no side waits for one.

        A drafter whose batch is the first of a step to come keeps it the longest: until the last
        one of the step before is trained.
        """
        fill, train = 1 / self.target_speed, 1 / self.drafter_speed
        kept = fill + train + max(0.0, train - fill / self.targets)
        return max(1, math.ceil(kept * min(self.sides) / self.drafters - 1e-6))

    def balanced_anchors(self) -> int | None:
        """The max_anchors at which the drafters keep up exactly; None if no number of them does.

        There cannot be more than a batch has tokens.
        """
        seconds = self.drafters * self.batch_tokens / self.sides[0]
        anchors = int((seconds - self.batch_s) / self.anchor_s / ANCHOR_STEP) * ANCHOR_STEP
        return anchors if 0 < anchors <= self.batch_tokens else None

    def balanced_split(self) -> tuple[int, int]:
        """The fastest (targets, drafters) with as many devices in all, of those nearest to now."""
        total = self.targets + self.drafters
        return max(
            ((t, total - t) for t in range(1, total)),
            key=lambda s: (
                min(s[0] * self.target_speed, s[1] * self.drafter_speed),
                -abs(s[0] - self.targets),
            ),
        )

    def line(self, waits: tuple[float, float] | None = None) -> str:
        """The slower side, how long the other one waits, and what would balance them.

        Args:
            waits: shares of the time that (targets, drafters) waited, if measured.
        """
        if self.shared:
            share = self.drafter_speed / (self.target_speed + self.drafter_speed)
            return (
                f"shared devices: the target takes {share:.0%} of their time, the drafter "
                f"{1 - share:.0%}; fewer train.max_anchors make the run faster"
            )
        if math.isinf(self.target_speed):
            return "the drafters are the slower side: states are stored"
        names = ("targets", "drafters")
        idle_targets, idle_drafters = waits or self.waits()
        if self.held_up:
            return (
                f"slots hold both sides up: the targets wait {idle_targets:.0%} of the time, the "
                f"drafters {idle_drafters:.0%}; topology.slots_per_drafter {self.slots_needed()} "
                f"instead of {self.slots} would end that; then {self.advice()}"
            )
        slow = names.index(self.slower)
        fast = 1 - slow
        text = f"the {names[slow]} are the slower side"
        if waits is not None:
            text += f" and wait {waits[slow]:.0%} of the time"
        idle = (idle_targets, idle_drafters)[fast]
        return f"{text}, the {names[fast]} wait {idle:.0%} of the time; {self.advice()}"

    def advice(self) -> str:
        """What would balance the sides."""
        ratio, total = self.drafter_speed / self.target_speed, self.targets + self.drafters
        split = f"{ratio:.2g}:1" if ratio >= 1 else f"1:{1 / ratio:.2g}"
        best, anchors = self.balanced_split(), self.balanced_anchors()
        has_best = best == (self.targets, self.drafters)
        ways = [] if anchors is None else [f"train.max_anchors {anchors}"]
        if not has_best:
            ways.append(f"targets to drafters as {split} (of {total}: {best[0]} and {best[1]})")
        elif total == 2 and split != "1:1":
            ways.append(f"targets to drafters as {split}")
        parts = [f"{' or '.join(ways)} would balance it"] if ways else []
        if anchors is None:
            parts.append("no train.max_anchors would" + " balance it" * (not ways))
        if has_best and total > 2:
            parts.append(f"no other split of {total} is faster")
        return "; ".join(parts)


@dataclass(frozen=True)
class Work:
    """What all processes have done up to a moment, or between two.

    Attributes:
        time: seconds.
        paused_s: of them in evaluation and saving, when nothing trains.
        steps: optimizer steps made.
        tokens, busy_s: trained by the drafters, and the seconds they computed for it, added up.
        target_tokens, target_busy_s: the same of the targets.
        planning_s: seconds that targets waited for the prefetcher, added up.
    """

    time: float = 0.0
    paused_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    target_tokens: int = 0
    target_busy_s: float = 0.0
    planning_s: float = 0.0

    def __sub__(self, other: Work) -> Work:
        names = [f.name for f in fields(self)]
        return Work(**{n: getattr(self, n) - getattr(other, n) for n in names})


@dataclass(frozen=True)
class LoadMeter:
    """Turns work into metrics and a balance.

    Args:
        targets, drafters: workers of all processes.
        devices: of both sides together; workers on a CPU count as one each.
    """

    cfg: Config
    spec: DrafterSpec
    targets: int
    drafters: int
    devices: int

    @staticmethod
    def of_run(cfg: Config, spec: DrafterSpec, processes: int) -> LoadMeter:
        """Of a run of so many processes with the same devices."""
        targets, drafters = cfg.topology.targets, cfg.topology.drafters
        both = sum(device in drafters for entry in set(targets) for device in devices_of(entry))
        if "cpu" in drafters:
            both = 0  # workers on a CPU have their own threads
        return LoadMeter(
            cfg,
            spec,
            targets=len(targets) * processes,
            drafters=len(drafters) * processes,
            devices=(len(targets) + len(drafters) - both) * processes,
        )

    def row(self, work: Work) -> dict[str, float]:
        """tokens_per_s of the run and of each side while it computes; shares of the time (but for
        evaluation and saving) that each computes and waits. What did not work yet is absent."""
        span = max(work.time - work.paused_s, 1e-9)
        busy = min(1.0, work.busy_s / span / self.drafters)
        target_busy = min(1.0, work.target_busy_s / span / self.targets)
        row = {
            "tokens_per_s": work.tokens / max(work.time, 1e-9),
            "target_busy": target_busy,
            "drafter_busy": busy,
            "target_wait": 1 - target_busy,
            "drafter_wait": 1 - busy,
            "planning_wait": min(1.0, work.planning_s / span / self.targets),
        }
        if work.target_busy_s > 0:
            row["target_tokens_per_s"] = self.targets * work.target_tokens / work.target_busy_s
        if work.busy_s > 0:
            row["drafter_tokens_per_s"] = self.drafters * work.tokens / work.busy_s
        return row

    def balance(self, work: Work) -> Balance | None:
        """The sides as measured; None if one of them has not worked.

        How a drafter's time divides into what each anchor takes and the rest is known by the
        operations of either.
        """
        batches = work.steps * self.cfg.train.grad_accum * self.drafters
        if min(work.busy_s, work.target_busy_s, work.target_tokens, work.tokens) <= 0:
            return None
        batch_s, anchor_s = drafter_seconds(self.cfg, self.spec)
        max_anchors = anchor_budget(self.cfg.train, self.cfg.data)
        scale = work.busy_s / batches / (batch_s + anchor_s * max_anchors)
        return Balance(
            targets=self.targets,
            drafters=self.drafters,
            devices=self.devices,
            target_speed=work.target_tokens / work.target_busy_s,
            batch_tokens=work.tokens / batches,
            batch_s=scale * batch_s,
            anchor_s=scale * anchor_s,
            max_anchors=max_anchors,
            slots=self.cfg.topology.slots_per_drafter,
        )

    def summary(self, work: Work) -> dict[str, Any] | None:
        """For summary.json: figures of each side, and ``line``, the balance in words."""
        balance = self.balance(work)
        if balance is None:
            return None
        row = self.row(work)
        waits = row["target_wait"], row["drafter_wait"]
        line = balance.line(waits)
        if min(waits) >= IDLE and row["planning_wait"] >= waits[0] / 2 and not balance.shared:
            line = (
                f"planning of batches is the slowest part: the targets wait {waits[0]:.0%} of the "
                f"time, the drafters {waits[1]:.0%}; larger batches (data.token_budget) or free "
                "CPU cores would help"
            )
        names = ("target_wait", "drafter_wait", "planning_wait")
        speeds = ("target_tokens_per_s", "drafter_tokens_per_s")
        return {
            "line": line,
            **{name: round(row[name], 4) for name in names},
            **{name: round(row[name], 1) for name in speeds},
            "max_anchors": balance.balanced_anchors(),
            "targets_per_drafter": round(balance.drafter_speed / balance.target_speed, 3),
        }
