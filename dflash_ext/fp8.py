"""The target's linear layers in FP8: e4m3 weights with one scale for each row, as servers do it.

Inputs are rounded to e4m3, too, with one scale for each token, and the product is accumulated in
fp32. On a CPU the same numbers are multiplied in fp32: slow, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_ext import ops
from dflash_ext.config_values import UserError, devices_of

if TYPE_CHECKING:
    from dflash_ext.config import Config
    from dflash_ext.data.packing import BatchPlan
    from dflash_ext.target import Target

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
MULTIPLE = 16  # of both sizes of a weight, for the GPU's product
CAPABILITY = (8, 9)
CELLS = 8192  # tokens of the first batch that the effect is measured on


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] as (e4m3 [..., K], scale [..., 1] fp32) with x close to e4m3 * scale.

    The largest value of a row becomes 448.
    """
    largest = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True).float()
    scale = largest.clamp_min(1e-20) / LARGEST
    scaled = x * scale.reciprocal().to(x.dtype)
    return scaled.clamp(-LARGEST, LARGEST).to(E4M3), scale


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [..., K] times the transpose of weight [N, K] (e4m3) * scale [N]: [..., N] in x's dtype."""
    rows, row_scale = quantise_rows(x.reshape(-1, x.shape[-1]))
    if x.is_cuda:
        out = scaled_product(rows, row_scale, weight, scale).to(x.dtype)
    else:
        out = F.linear(rows.float() * row_scale, weight.float() * scale[:, None]).to(x.dtype)
    return out.view(*x.shape[:-1], weight.shape[0])


def scaled_product(rows: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """torch's product of rows [M, K] * row_scale [M, 1] and weight [N, K] * scale [N], in bf16."""
    return torch._scaled_mm(
        rows,
        weight.t(),
        scale_a=row_scale,
        scale_b=scale[None],
        out_dtype=torch.bfloat16,  # the only one with a scale for each row
        use_fast_accum=True,
    )


class Fp8Linear(nn.Module):
    """A frozen linear layer without bias, in FP8."""

    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight, scale = quantise_rows(linear.weight.detach().float())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", scale.squeeze(-1))

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.weight, self.scale)


def quantise(layers: nn.Module) -> int:
    """Replaces the linear layers below `layers` by FP8 ones; returns how many.

    Those with a bias, or of sizes that are no multiples of 16, stay, and with one all that a fused
    module multiplies together with it.
    """
    count = 0
    for module in list(layers.modules()):
        fitting = {name: child for name, child in module.named_children() if _fits(child)}
        together = set(getattr(module, "PARTS", ()))
        for name, child in fitting.items():
            if name not in together or together <= fitting.keys():
                setattr(module, name, Fp8Linear(child))
                count += 1
    return count


def _fits(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or getattr(module, "bias", None) is not None:
        return False
    return module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0


def check_weights(cfg: Config) -> None:
    """Refuse model.weights: fp8 with GPUs that have no FP8 product.

    Raises:
        UserError: naming model.weights.
    """
    if cfg.model.weights != "fp8":
        return
    devices = [d for entry in cfg.topology.targets for d in devices_of(entry) if d != "cpu"]
    for device in dict.fromkeys(devices):
        found = torch.cuda.get_device_capability(device)
        if found < CAPABILITY:
            raise UserError(
                f"model.weights: found fp8 with {device} of compute capability "
                f"{found[0]}.{found[1]}, want at least {CAPABILITY[0]}.{CAPABILITY[1]}, or auto"
            )


@dataclass(frozen=True)
class Fp8Effect:
    """What FP8 changes, on tokens of the first batch.

    Attributes:
        linears, tokens: how many were replaced, looked at.
        errors: captured layer -> relative error of its hidden states, sqrt(sum d^2 / sum h^2).
        agreement: share of the tokens whose most likely next token stays the same.
    """

    linears: int
    tokens: int
    errors: dict[int, float]
    agreement: float

    def facts(self) -> dict[str, Any]:
        """For summary.json."""
        errors = {str(layer): round(error, 5) for layer, error in self.errors.items()}
        return {
            "linears": self.linears,
            "tokens": self.tokens,
            "relative_error": errors,
            "argmax_agreement": round(self.agreement, 5),
        }

    def line(self, dtype: str) -> str:
        errors = ", ".join(f"{error:.1%}" for error in self.errors.values())
        return (
            f"{self.linears} linear layers in FP8: captured states differ from {dtype}'s by "
            f"{errors}; {self.agreement:.1%} of the next tokens stay the same "
            f"({self.tokens} looked at)"
        )


def quantise_target(target: Target, plan: BatchPlan, layer_ids: Sequence[int]) -> Fp8Effect:
    """Turns the target's decoder layers to FP8 and measures the effect on a batch."""
    rows = max(1, CELLS // plan.input_ids.shape[1])
    ids, lengths = plan.input_ids[:rows].to(target.device), plan.lengths[:rows]
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    want, want_next = _states(target, ids, real, layer_ids)
    linears = quantise(target.layers)
    got, got_next = _states(target, ids, real, layer_ids)
    errors = {
        layer: float((g.float() - w.float()).norm() / w.float().norm())
        for layer, g, w in zip(layer_ids, got, want, strict=True)
    }
    agreement = float((got_next == want_next).double().mean())
    return Fp8Effect(linears, int(real.sum()), errors, agreement)


@torch.no_grad()
def _states(
    target: Target, ids: Tensor, real: Tensor, layer_ids: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """Captured states [tokens, H] of each layer, and the most likely next tokens [tokens]."""
    found: list[Tensor] = []

    def keep(index: int, hidden: Tensor) -> None:
        found.append(hidden[real.to(hidden.device)])

    last = target.forward_capture(ids, layer_ids, keep, need_last=True)
    assert last is not None
    last = last[real.to(last.device)].to(target.head_weight.device)
    softcap, logit_scale = target.info.softcap, target.info.logit_scale
    _, best, *_ = ops.lm_head_topk(
        last, target.head_weight, k=1, softcap=softcap, logit_scale=logit_scale
    )
    return found, best[:, 0]
