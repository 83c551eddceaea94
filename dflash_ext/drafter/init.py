"""Start a drafter from its target's last layers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dflash_ext.config import UserError
from dflash_ext.drafter.model import DFlashDraftModel

if TYPE_CHECKING:
    from dflash_ext.target import Target

# Families whose layer is a plain pre-norm layer with RMSNorm (x * weight) and SwiGLU.
COMPATIBLE_TARGETS = ("llama", "mistral", "qwen3")
PROBE_TOKENS = 128


@torch.no_grad()
def init_from_target(model: DFlashDraftModel, target: "Target") -> None:
    """Copy the target's last layers so that block rows pass through them as in the target.

    The context reaches a drafter layer without its input norm, so the norm's weight moves into the
    q/k/v projections: W diag(g) RMSNorm_1(x) = W RMSNorm_g(x) for block rows, and the context,
    normalised by `hidden_norm` of weight 1, gets the keys and values that the target itself would
    compute from it. `fc` starts by passing on the last captured layer. A target without q/k norms
    gets norms with the mean scale of its queries and keys, so attention logits keep their size.

    Raises UserError if the target's layers have another shape or another form.
    """
    spec = model.spec
    _check_geometry(model, target)
    layers = list(target.layers[-spec.num_layers :])
    fc = torch.zeros(spec.hidden_size, len(spec.target_layer_ids) * spec.hidden_size)
    fc[:, -spec.hidden_size :] = torch.eye(spec.hidden_size)
    tensors: dict[str, Tensor] = {
        "fc.weight": fc,
        "hidden_norm.weight": torch.ones(spec.hidden_size),
        "norm.weight": target.decoder.get_parameter("norm.weight"),
    }
    for i, (layer, norms) in enumerate(zip(layers, _qk_norms(target, layers), strict=True)):
        parts = _folded_layer(layer) | norms
        tensors |= {f"layers.{i}.{name}": tensor for name, tensor in parts.items()}
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[name].expand(parameter.shape))


def _folded_layer(layer: nn.Module) -> dict[str, Tensor]:
    """A drafter layer's tensors but its q/k norms; the folded ones in fp32."""
    tensors: dict[str, Tensor] = dict(layer.named_parameters())
    gain = tensors["input_layernorm.weight"].float()
    tensors["input_layernorm.weight"] = torch.ones_like(gain)
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"self_attn.{name}.weight"
        tensors[key] = tensors[key].float() * gain
    return tensors


def _qk_norms(target: "Target", layers: list[nn.Module]) -> list[dict[str, Tensor]]:
    """q_norm and k_norm weights [1] for each layer of a target without such norms.

    The scale is the rms of the projection's outputs over random tokens. Norms of the weights
    would not do: states have directions, for which projections are larger than on average.
    """
    if "self_attn.q_norm.weight" in dict(layers[0].named_parameters()):
        return [{} for _ in layers]  # among the layer's tensors already
    with _recorded_rms(layers) as rms:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(target.info.vocab_size, (1, PROBE_TOKENS), generator=generator)
        target.decoder(input_ids=ids.to(target.device), use_cache=False)
    return [
        {f"self_attn.{name}_norm.weight": rms[i, name].reshape(1) for name in "qk"}
        for i in range(len(layers))
    ]


@contextmanager
def _recorded_rms(layers: list[nn.Module]) -> Iterator[dict[tuple[int, str], Tensor]]:
    """While open, forwards store the rms of q_proj's and k_proj's outputs of each layer."""
    rms: dict[tuple[int, str], Tensor] = {}

    def record(key: tuple[int, str]) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(module: nn.Module, args: object, output: Tensor) -> None:
            rms[key] = output.float().square().mean().sqrt()

        return hook

    handles = [
        layer.get_submodule(f"self_attn.{name}_proj").register_forward_hook(record((i, name)))
        for i, layer in enumerate(layers)
        for name in "qk"
    ]
    try:
        yield rms
    finally:
        for handle in handles:
            handle.remove()


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
    biases = [name for name, _ in target.layers[-1].named_parameters() if name.endswith("bias")]
    if biases:
        raise UserError(f"{place}: found a target with {biases[0]}, want layers without biases")
