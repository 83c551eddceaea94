"""Start a drafter from its target's last layers."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dflash_ext.config import UserError
from dflash_ext.drafter.attention import DraftAttention
from dflash_ext.drafter.model import DFlashDraftModel

if TYPE_CHECKING:
    from dflash_ext.target import Target

# Families whose layer is a plain pre-norm RMSNorm (x * weight) layer with SwiGLU.
COMPATIBLE_TARGETS = ("llama", "mistral", "qwen3")


@torch.no_grad()
def init_from_target(model: DFlashDraftModel, target: "Target") -> None:
    """Copy the target's last layers so that block rows pass through them unchanged.

    The context reaches a drafter layer without its input norm, so the norm's weight moves into the
    q/k/v projections: W diag(g) RMSNorm_1(x) = W RMSNorm_g(x) for block rows, and the context,
    normalised by `hidden_norm` of weight 1, gets the keys and values that the target itself would
    compute from it. `fc` starts by passing on the last captured layer. A target without q/k norms
    gets them with the mean scale of its projections, so attention logits keep their size.

    Raises UserError if the target's layers have another shape or another form.
    """
    spec = model.spec
    _check_geometry(model, target)
    tensors: dict[str, Tensor] = {"hidden_norm.weight": torch.ones(spec.hidden_size)}
    fc = torch.zeros(spec.hidden_size, len(spec.target_layer_ids) * spec.hidden_size)
    fc[:, -spec.hidden_size :] = torch.eye(spec.hidden_size)
    tensors["fc.weight"] = fc
    tensors["norm.weight"] = target.decoder.norm.weight
    for i, source in enumerate(target.layers[-spec.num_layers :]):
        for name, tensor in _folded_layer(source, spec.head_dim).items():
            tensors[f"layers.{i}.{name}"] = tensor
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[name])


def _folded_layer(source: nn.Module, head_dim: int) -> dict[str, Tensor]:
    """A drafter layer's tensors from a target layer, in fp32."""
    attention, gain = source.self_attn, source.input_layernorm.weight.float()
    layer = {
        "input_layernorm.weight": torch.ones_like(gain),
        "post_attention_layernorm.weight": source.post_attention_layernorm.weight,
        "self_attn.o_proj.weight": attention.o_proj.weight,
    }
    for name in ("q", "k", "v"):
        projection = getattr(attention, f"{name}_proj").weight.float()
        layer[f"self_attn.{name}_proj.weight"] = projection * gain
    for name in ("q", "k"):
        norm = getattr(attention, f"{name}_norm", None)
        layer[f"self_attn.{name}_norm.weight"] = (
            _output_rms(layer[f"self_attn.{name}_proj.weight"]).expand(head_dim)
            if norm is None
            else norm.weight
        )
    for name in ("gate_proj", "up_proj", "down_proj"):
        layer[f"mlp.{name}.weight"] = getattr(source.mlp, name).weight
    return layer


def _output_rms(projection: Tensor) -> Tensor:
    """RMS of the outputs of W [N, H] for inputs of unit rms without direction: |W|_F / sqrt(N)."""
    return projection.square().sum().div(projection.shape[0]).sqrt()


def _check_geometry(model: DFlashDraftModel, target: "Target") -> None:
    spec, info = model.spec, target.info
    place = "drafter.init_from=target"
    if info.model_type not in COMPATIBLE_TARGETS:
        raise UserError(
            f"{place}: found a {info.model_type} target, want one of "
            f"{', '.join(COMPATIBLE_TARGETS)}"
        )
    if spec.num_layers > info.num_layers:
        raise UserError(
            f"{place}: drafter.num_layers: found {spec.num_layers}, "
            f"want at most the target's {info.num_layers}"
        )
    fields = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    wrong = [name for name in fields if getattr(spec, name) != getattr(info, name)]
    if wrong:
        found = ", ".join(f"drafter.{name} {getattr(spec, name)}" for name in wrong)
        wanted = ", ".join(str(getattr(info, name)) for name in wrong)
        raise UserError(f"{place}: found {found}, want the target's {wanted}")
    attention: DraftAttention = target.layers[-1].self_attn
    if any(getattr(attention, f"{name}_proj").bias is not None for name in "qkvo"):
        raise UserError(f"{place}: found a target whose attention has biases, want none")
