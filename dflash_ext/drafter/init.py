"""Start a drafter from its target's last layers, or from an exported one."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dflash_ext.config import UserError
from dflash_ext.drafter.model import DFlashDraftModel
from dflash_ext.drafter.spec import DrafterSpec

if TYPE_CHECKING:
    from dflash_ext.config import DrafterConfig
    from dflash_ext.target import Target, TargetInfo

# Families whose layer is a plain pre-norm layer with RMSNorm (x * weight) and SwiGLU.
COMPATIBLE_TARGETS = ("llama", "mistral", "qwen3")
PROBE_TOKENS = 128
# What a run may change of the drafter it starts from: tokens and sizes that are the target's.
_TARGETS_OWN = {
    *("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_ids", "pad_token_id"),
}


def start_spec(drafter: "DrafterConfig") -> DrafterSpec | None:
    """The drafter that `drafter.init_from` names as a folder; None for none and target.

    Raises UserError if it cannot be read, or has another number of layers than configured.
    """
    from dflash_ext.export import read_spec

    if drafter.init_from in ("none", "target"):
        return None
    folder = Path(drafter.init_from).expanduser()
    if not drafter.init_from.strip() or not folder.is_dir():
        raise UserError(
            f"drafter.init_from: found {drafter.init_from!r}, which is no folder, "
            "want none, target, or the folder of a drafter"
        )
    spec = read_spec(folder)
    if spec.num_layers != drafter.num_layers:
        raise UserError(
            f"drafter.num_layers: found {drafter.num_layers}, want {spec.num_layers} "
            f"as in {drafter.init_from}"
        )
    return spec


def check_start(start: DrafterSpec, info: "TargetInfo", layer_ids: list[int] | None) -> None:
    """Refuse a start that was made for a target of another shape.

    `layer_ids`: the run's own captured layers, None if it takes over those of the start. Raises
    UserError.
    """
    wanted = [("hidden_size", info.hidden_size)]
    if layer_ids is None:
        wanted.append(("num_target_layers", info.num_layers))
    for name, want in wanted:
        if getattr(start, name) != want:
            hint = "" if name == "hidden_size" else ", or set model.target_layer_ids"
            raise UserError(
                f"drafter.init_from: {name}: found {getattr(start, name)}, "
                f"want the target's {want}{hint}"
            )


def init_from_folder(spec: DrafterSpec, folder: str) -> DFlashDraftModel:
    """A drafter of this spec with the weights of an exported one, in their dtype.

    Raises UserError naming a tensor that is missing, unknown or of another shape.
    """
    return DFlashDraftModel.from_pretrained(Path(folder).expanduser(), expect=spec)


def start_differences(spec: DrafterSpec, start: DrafterSpec) -> list[str]:
    """What the weights of `start` were trained with and this run does otherwise, for people."""
    fields = [f.name for f in dataclasses.fields(spec) if f.name not in _TARGETS_OWN]
    pairs = [(name, getattr(start, name), getattr(spec, name)) for name in fields]
    return [f"{name} {there} there, {here} here" for name, there, here in pairs if there != here]


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
