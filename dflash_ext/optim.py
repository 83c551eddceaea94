"""AdamW with fp32 masters, gradient clipping and a skip of non-finite steps, all on the device.

No method here reads a number from the device, so a step never makes the host wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from dflash_ext.config import TrainConfig, UserError

BETAS = (0.9, 0.999)
EPS = 1e-8


def lr_at(step: int, total_steps: int, cfg: TrainConfig) -> float:
    """Learning rate of optimizer step ``step`` (0-based) out of ``total_steps``.

    Linear warm-up over ``warmup_ratio`` of the steps, lr * (step + 1) / warm-up, so that no step
    has a rate of 0; then ``cosine`` (half a period) or ``linear`` down towards 0, or ``constant``.
    A step skipped for a non-finite gradient still counts: the schedule follows the data.
    """
    warmup = int(cfg.warmup_ratio * total_steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if cfg.schedule == "cosine":
        return cfg.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    if cfg.schedule == "linear":
        return cfg.lr * (1.0 - progress)
    return cfg.lr


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm over all elements of all tensors: [] fp32, accumulated in fp32, without a sync."""
    norms = torch._foreach_norm(list(tensors), 2.0, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))


class DrafterOptimizer:
    """AdamW (decoupled weight decay) for one replica of the drafter.

    Parameters in fp32 are their own masters; other dtypes get an fp32 master and fp32 gradients,
    because a bf16 weight loses updates below 1/256 of its size. Norm weights (1-D) are not decayed.

    Attributes:
        nonfinite: [2] int64 on the device: steps skipped for a non-finite gradient norm in all, and
            how many of them in a row up to the last step.
    """

    def __init__(
        self, named_params: Iterable[tuple[str, nn.Parameter]], cfg: TrainConfig, total_steps: int
    ) -> None:
        if cfg.optimizer != "adamw":
            raise UserError(f"train.optimizer: found {cfg.optimizer!r}, want adamw")
        self.cfg, self.total_steps = cfg, total_steps
        named = [(name, p) for name, p in named_params if p.requires_grad]
        # Decayed parameters first, so that each of the two calls of a step takes one slice.
        named.sort(key=lambda item: item[1].ndim < 2)
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        self.num_decayed = sum(p.ndim >= 2 for p in self.params)
        self.masters = [_master(p) for p in self.params]
        self.exp_avgs = [torch.zeros_like(m) for m in self.masters]
        self.exp_avg_sqs = [torch.zeros_like(m) for m in self.masters]
        device = self.params[0].device
        # Steps taken by each parameter: one tensor, whose elements are AdamW's own counters.
        self.taken = torch.zeros(len(self.params), dtype=torch.float32, device=device)
        self.nonfinite = torch.zeros(2, dtype=torch.int64, device=device)
        for p in self.params:
            if p.dtype != torch.float32:
                p.grad_dtype = torch.float32

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step ``step`` (0-based)."""
        return lr_at(step, self.total_steps, self.cfg)

    @torch.no_grad()
    def step(self, step: int) -> Tensor:
        """One update from the parameters' gradients, which are then cleared.

        The gradients are scaled to a norm of at most ``max_grad_norm``; if the norm is not finite,
        parameters and moments stay exactly as they are and ``nonfinite`` counts the step.

        Returns:
            The gradient norm before clipping, [] fp32 on the device.
        """
        missing = [name for name, p in zip(self.names, self.params, strict=True) if p.grad is None]
        if missing:
            raise RuntimeError(f"no gradient for {missing[0]} and {len(missing) - 1} others")
        grads = [p.grad for p in self.params if p.grad is not None]
        norm = global_norm(grads)
        bad = ~torch.isfinite(norm)
        # The kernel divides by this: no pass over the gradients of its own.
        divisor = ((norm + 1e-6) / self.cfg.max_grad_norm).clamp_min(1.0)
        self._update(grads, self.lr_at(step), divisor, bad.to(torch.float32))
        for p, master in zip(self.params, self.masters, strict=True):
            if master is not p:
                p.copy_(master)
            p.grad = None
        total, in_a_row = self.nonfinite.unbind()
        total.add_(bad)
        in_a_row.add_(1).mul_(bad)
        return norm

    def _update(self, grads: list[Tensor], lr: float, divisor: Tensor, found_inf: Tensor) -> None:
        counters = list(self.taken.unbind())
        split = self.num_decayed
        for part, weight_decay in (
            (slice(0, split), self.cfg.weight_decay),
            (slice(split, None), 0.0),
        ):
            if not grads[part]:
                continue
            adamw(
                self.masters[part],
                grads[part],
                self.exp_avgs[part],
                self.exp_avg_sqs[part],
                [],
                counters[part],
                fused=True,
                grad_scale=divisor,
                found_inf=found_inf,
                amsgrad=False,
                beta1=BETAS[0],
                beta2=BETAS[1],
                lr=lr,
                weight_decay=weight_decay,
                eps=EPS,
                maximize=False,
            )

    def state_tensors(self) -> dict[str, Tensor]:
        """The whole state, as references: masters (where they differ from the parameters), moments
        and counters. With the parameters themselves it continues a run bit for bit."""
        state = {"taken": self.taken, "nonfinite": self.nonfinite}
        for i, name in enumerate(self.names):
            if self.masters[i] is not self.params[i]:
                state[f"{name}.master"] = self.masters[i]
            state[f"{name}.exp_avg"] = self.exp_avgs[i]
            state[f"{name}.exp_avg_sq"] = self.exp_avg_sqs[i]
        return state

    @torch.no_grad()
    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Copy a state from ``state_tensors`` into this optimizer; masters also set the parameters.

        Raises:
            UserError: names, shapes or dtypes are not this drafter's.
        """
        mine = self.state_tensors()
        differing = sorted(mine.keys() ^ state.keys())
        if differing:
            where = "checkpoint" if differing[0] in state else "drafter"
            raise UserError(
                f"optimizer state: found {differing[0]} only in the {where}, want the same drafter"
            )
        for name, tensor in mine.items():
            found = state[name]
            if found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise UserError(
                    f"optimizer state: found {name} {list(found.shape)} {found.dtype}, "
                    f"want {list(tensor.shape)} {tensor.dtype}"
                )
            tensor.copy_(found)
        for p, master in zip(self.params, self.masters, strict=True):
            if master is not p:
                p.copy_(master)


def build_optimizer(
    named_params: Iterable[tuple[str, nn.Parameter]], cfg: TrainConfig, total_steps: int
) -> DrafterOptimizer:
    """The optimizer of ``cfg.optimizer`` for the trained parameters among ``named_params``."""
    return DrafterOptimizer(named_params, cfg, total_steps)


def _master(p: nn.Parameter) -> Tensor:
    return p if p.dtype == torch.float32 else p.detach().to(torch.float32, copy=True)
