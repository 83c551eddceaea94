"""AdamW with fp32 masters, gradient clipping and a skip of non-finite steps, all on the device.

No method here reads a number from the device, so a step never makes the host wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.optim.adamw import adamw

from dflash_ext import ops
from dflash_ext.config import TrainConfig, UserError
from dflash_ext.flat_params import FlatParams, flat_view

BETAS = (0.9, 0.999)
EPS = 1e-8
MUON_MOMENTUM = 0.95
NO_SHIFT = Fraction(0)
# torch.optim.Muon's: coefficients of the polynomial, iterations, least norm.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315), 5, 1e-7


def lr_at(step: int | Fraction, total_steps: int | Fraction, cfg: TrainConfig) -> float:
    """Learning rate of optimizer step ``step`` (0-based) out of ``total_steps``.

    Linear warm-up over ``warmup_ratio`` of the steps, lr * (step + 1) / warm-up, so that no step
    has a rate of 0; then ``cosine`` (half a period) or ``linear`` down towards 0, or ``constant``.
    A step skipped for a non-finite gradient still counts: the schedule follows the data.
    """
    warmup = int(cfg.warmup_ratio * total_steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    progress = float(min(1, (step - warmup) / max(1, total_steps - warmup)))
    if cfg.schedule == "cosine":
        return cfg.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    if cfg.schedule == "linear":
        return cfg.lr * (1.0 - progress)
    return cfg.lr


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm over all elements of all tensors: [] fp32, accumulated in fp32, without a sync."""
    return total_norm(norms_of(tensors))


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The L2 norm of each tensor: [] fp32."""
    return list(torch._foreach_norm(list(tensors), 2.0, dtype=torch.float32))


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all elements, from each tensor's own."""
    return torch.linalg.vector_norm(torch.stack(list(norms)))


class DrafterOptimizer:
    """AdamW (decoupled weight decay) for one replica of the drafter.

    Parameters in fp32 are their own masters; other dtypes get an fp32 master and fp32 gradients,
    because a bf16 weight loses updates below 1/256 of its size. Norm weights (1-D) are not decayed.

    On a GPU parameters, masters, gradients and moments lie in one buffer each (``FlatParams``): a
    step is one pass for the norm and one for the update. ``set_lr`` outside and ``update`` inside
    of a CUDA graph do what ``step`` does.

    Args:
        flat: whether to use one buffer each; None: on a GPU.
        shift: from a step to its place in the schedule (``BatchPlanner.schedule_shift``).

    Attributes:
        flat: the buffers, or None. With them every parameter has a ``main_grad``.
        zero_grads: whether ``update`` clears the flat gradients; to be unset where every backward
            pass overwrites them.
        nonfinite: [2] int64 on the device: steps skipped for a non-finite gradient norm in all, and
            how many of them in a row up to the last step.
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, nn.Parameter]],
        cfg: TrainConfig,
        total_steps: int,
        *,
        flat: bool | None = None,
        shift: Fraction = NO_SHIFT,
    ) -> None:
        self.cfg, self.total_steps, self.shift = cfg, total_steps, shift
        named = [(name, p) for name, p in named_params if p.requires_grad]
        # Matrices, which are decayed, come first: each rule of a step then takes one slice.
        named.sort(key=lambda item: item[1].ndim < 2)
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        self.num_matrices = sum(p.ndim >= 2 for p in self.params)
        device = self.params[0].device
        self.flat = None
        if device.type == "cuda" if flat is None else flat:
            self.flat = FlatParams(self.params)
            self.masters = self.flat.views(self.flat.master)
        else:
            self.masters = [_master(p) for p in self.params]
            for p in self.params:
                if p.dtype != torch.float32:
                    p.grad_dtype = torch.float32
        self.zero_grads = True
        # Steps taken by each parameter: one tensor, whose elements are AdamW's own counters.
        self.taken = torch.zeros(len(self.params), dtype=torch.float32, device=device)
        self.nonfinite = torch.zeros(2, dtype=torch.int64, device=device)
        # The rate of the next update, for the host and on the device.
        self.rate = 0.0
        self.lr = torch.zeros((), dtype=torch.float64, device=device)
        # The moments of AdamW are those of the last parameters: all, or those without another rule.
        self.adamw_first = self._num_others()
        self.exp_avgs = self._zeros(self.adamw_first, len(self.params))
        self.exp_avg_sqs = self._zeros(self.adamw_first, len(self.params))

    def _num_others(self) -> int:
        """How many parameters, from the first, have another rule than AdamW."""
        return 0

    def _zeros(self, first: int, last: int) -> list[Tensor]:
        """fp32 zeros for each of a range of parameters, as neighbours in one buffer if flat."""
        masters = self.masters[first:last]
        if self.flat is None:
            return [torch.zeros_like(m) for m in masters]
        sizes = [m.numel() for m in masters]
        parts = torch.zeros(sum(sizes), device=self.lr.device).split(sizes)
        return [part.view(m.shape) for part, m in zip(parts, masters, strict=True)]

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step ``step`` (0-based)."""
        return lr_at(step + self.shift, self.total_steps + self.shift, self.cfg)

    def set_lr(self, step: int) -> None:
        """Gives the next ``update`` the rate of optimizer step ``step`` (0-based)."""
        self.rate = self.lr_at(step)
        self.lr.fill_(self.rate)

    def step(self, step: int, norm: Tensor | None = None) -> Tensor:
        """``set_lr`` and ``update``."""
        self.set_lr(step)
        return self.update(norm)

    @torch.no_grad()
    def update(self, norm: Tensor | None = None) -> Tensor:
        """One update from the parameters' gradients, which are then cleared.

        The gradients are scaled to a norm of at most ``max_grad_norm``; if the norm is not finite,
        parameters and moments stay exactly as they are and ``nonfinite`` counts the step.

        Args:
            norm: of the gradients, where it has been taken already.

        Returns:
            The gradient norm before clipping, [] fp32 on the device.
        """
        missing = [name for name, p in zip(self.names, self.params, strict=True) if p.grad is None]
        if missing:
            raise RuntimeError(f"no gradient for {missing[0]} and {len(missing) - 1} others")
        grads = [p.grad for p in self.params if p.grad is not None]
        if norm is None and self.flat is not None and self.flat.grad.is_cuda:
            norm = torch.linalg.vector_norm(self.flat.grad)  # faster than part by part
        elif norm is None:
            norm = global_norm(grads)
        bad = ~torch.isfinite(norm)
        divisor = ((norm + 1e-6) / self.cfg.max_grad_norm).clamp_min(1.0)
        self._update_others(grads, divisor, bad)
        if self.adamw_first < len(self.params):
            adamw_of = self._fused_adamw if self.flat is None else self._flat_adamw
            adamw_of(grads, divisor, bad)
        if self.flat is None:
            for p, master in zip(self.params, self.masters, strict=True):
                if master is not p:
                    p.copy_(master)
                p.grad = None
        elif self.zero_grads:
            self.flat.grad.zero_()
        total, in_a_row = self.nonfinite.unbind()
        total.add_(bad)
        in_a_row.add_(1).mul_(bad)
        return norm

    def _update_others(self, grads: list[Tensor], divisor: Tensor, bad: Tensor) -> None:
        """Updates the parameters that have another rule than AdamW."""

    def _fused_adamw(self, grads: list[Tensor], divisor: Tensor, bad: Tensor) -> None:
        counters = list(self.taken.unbind())
        # The kernel divides by `divisor`: no pass over the gradients of its own.
        first, split = self.adamw_first, max(self.adamw_first, self.num_matrices)
        for begin, end, weight_decay in (
            (first, split, self.cfg.weight_decay),
            (split, len(grads), 0.0),
        ):
            if begin == end:
                continue
            adamw(
                self.masters[begin:end],
                grads[begin:end],
                self.exp_avgs[begin - first : end - first],
                self.exp_avg_sqs[begin - first : end - first],
                [],
                counters[begin:end],
                fused=True,
                grad_scale=divisor,
                found_inf=bad.to(torch.float32),
                amsgrad=False,
                beta1=BETAS[0],
                beta2=BETAS[1],
                lr=self.rate,
                weight_decay=weight_decay,
                eps=EPS,
                maximize=False,
            )

    def _flat_adamw(self, grads: list[Tensor], divisor: Tensor, bad: Tensor) -> None:
        assert self.flat is not None
        first = self.adamw_first
        counters = self.taken[first:]
        counters.add_(~bad)
        taken = counters[0].double()
        scalars = torch.stack(
            [
                (~bad).double(),
                1.0 / divisor.double(),
                self.lr * self.cfg.weight_decay,
                self.lr / (1.0 - BETAS[0] ** taken),
                (1.0 - BETAS[1] ** taken).sqrt(),
            ]
        )
        copied = self.flat.weight is not self.flat.master
        ops.adamw(
            flat_view(self.masters[first:]),
            flat_view(self.params[first:]) if copied else None,
            flat_view(grads[first:]),
            flat_view(self.exp_avgs),
            flat_view(self.exp_avg_sqs),
            scalars.float(),
            num_decayed=sum(m.numel() for m in self.masters[first : self.num_matrices]),
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPS,
        )

    def state_tensors(self) -> dict[str, Tensor]:
        """The whole state, as references: masters (where they differ from the parameters), moments
        and counters. With the parameters themselves it continues a run bit for bit."""
        state = {"taken": self.taken, "nonfinite": self.nonfinite}
        for name, p, master in zip(self.names, self.params, self.masters, strict=True):
            if p.dtype != master.dtype:
                state[f"{name}.master"] = master
        for i, name in enumerate(self.names[self.adamw_first :]):
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
            if p.dtype != master.dtype:
                p.copy_(master)


class MuonOptimizer(DrafterOptimizer):
    """Muon for matrices, AdamW for norm weights.

    The formulas of ``torch.optim.Muon`` (Jordan et al. 2024) with the scaling of Liu et al., Muon
    is Scalable for LLM Training (2025): the root mean square of an update is that of AdamW's, so
    that one learning rate and one weight decay serve both.
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, nn.Parameter]],
        cfg: TrainConfig,
        total_steps: int,
        *,
        flat: bool | None = None,
        shift: Fraction = NO_SHIFT,
    ) -> None:
        super().__init__(named_params, cfg, total_steps, flat=flat, shift=shift)
        self.momenta = self._zeros(0, self.num_matrices)

    def _num_others(self) -> int:
        return self.num_matrices

    def _update_others(self, grads: list[Tensor], divisor: Tensor, bad: Tensor) -> None:
        """As ``torch.optim.Muon``, whose own step could be skipped by the host alone."""
        self.taken[: self.num_matrices].add_(~bad)
        for p, master, momentum, grad in zip(
            self.params, self.masters, self.momenta, grads, strict=False
        ):
            clipped = grad / divisor
            averaged = momentum.lerp(clipped, 1 - MUON_MOMENTUM)
            nesterov = clipped.lerp(averaged, MUON_MOMENTUM)
            update = _zeropower_via_newtonschulz(nesterov, *NEWTON_SCHULZ)
            scale = self.lr * 0.2 * math.sqrt(max(master.shape))
            stepped = master * (1 - self.lr * self.cfg.weight_decay) - scale * update.float()
            momentum.copy_(torch.where(bad, momentum, averaged))
            master.copy_(torch.where(bad, master, stepped))
            if self.flat is not None and p.dtype != master.dtype:
                p.copy_(master)

    def state_tensors(self) -> dict[str, Tensor]:
        momenta = zip(self.names, self.momenta, strict=False)
        return {**super().state_tensors(), **{f"{name}.momentum": m for name, m in momenta}}


def build_optimizer(
    named_params: Iterable[tuple[str, nn.Parameter]],
    cfg: TrainConfig,
    total_steps: int,
    shift: Fraction = NO_SHIFT,
) -> DrafterOptimizer:
    """The optimizer of ``cfg.optimizer`` for the trained parameters among ``named_params``."""
    kinds = {"adamw": DrafterOptimizer, "muon": MuonOptimizer}
    if cfg.optimizer not in kinds:
        raise UserError(f"train.optimizer: found {cfg.optimizer!r}, want {' or '.join(kinds)}")
    return kinds[cfg.optimizer](named_params, cfg, total_steps, shift=shift)


def _master(p: nn.Parameter) -> Tensor:
    return p if p.dtype == torch.float32 else p.detach().to(torch.float32, copy=True)
