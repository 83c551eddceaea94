"""The same drafter step in the public trainers: SpecForge, speculators, and Liger's fused loss.

They are compared as they come, without their servers: same weights, tensors and anchors, forward
and backward. Unpack their wheels into a folder (`--peers DIR`) or install them:
specforge 0.2.0, speculators 0.9.0 (which needs pydantic), liger-kernel 0.8.5.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.step_problem import GAMMA, KL, Problem, Terms
from dflash_ext.drafter import FrozenHead

# Only their servers need these.
SERVER_MODULES = ("openai", "openai.types", "openai.types.chat", "openai.types.completion")
DATA_MODULES = ("datasets", "hs_connectors")


@dataclass
class Peer:
    """A trainer's step. ``params`` are its trained parameters under this package's names."""

    name: str
    params: dict[str, nn.Parameter]
    forward: Callable[[], Tensor]
    loss_scale: float = 1.0  # its loss and gradients, times this, are ours

    def run(self) -> Tensor:
        for parameter in self.params.values():
            parameter.grad = None
        loss = self.forward()
        loss.backward()
        return loss.detach()


def version(package: str) -> str:
    """The installed version; raises ImportError naming the package if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{package} is not installed") from None


def specforge(problem: Problem, *, compiled: bool) -> Peer:
    """SpecForge's OnlineDFlashModel with its default chunks of the objective."""
    release = version("specforge")
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    spec, shape, device = problem.spec, problem.shape, problem.hidden.device
    backend = "flex_attention" if device.type == "cuda" else "sdpa"
    config = qwen3_config(
        problem,
        backend,
        num_target_layers=spec.num_target_layers,
        block_size=spec.block_size,
        dflash_config={
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": list(spec.target_layer_ids),
        },
    )
    with made_on(device, problem.hidden.dtype):
        drafter = DFlashDraftModel(config)
    params = load_weights(drafter, problem)
    model = OnlineDFlashModel(
        drafter,
        *target_modules(problem.head),
        spec.mask_token_id,
        spec.block_size,
        backend,
        num_anchors=shape.anchors,
        loss_decay_gamma=GAMMA,
    )
    anchors = (problem.plan.anchors - problem.plan.ctx_start).view(shape.documents, -1)
    keep = torch.ones_like(anchors, dtype=torch.bool)
    model._sample_anchor_positions = lambda *_: (anchors, keep)
    ids, mask = problem.plan.input_ids, loss_mask(problem)
    hidden = problem.hidden.view(*ids.shape, -1)
    call = torch.compile(model) if compiled else model
    return Peer(
        f"SpecForge {release}{' compiled' if compiled else ''}",
        params,
        lambda: call(ids, hidden, mask)[0],
    )


def speculators(problem: Problem, terms: Terms, *, losses: str) -> Peer:
    """speculators' DFlashDraftModel, which compiles itself on a GPU. losses: "fused" (its own
    Triton kernels, the default there) or "eager" (torch, compiled with the rest)."""
    release = version("speculators")
    for name in (*SERVER_MODULES, *DATA_MODULES):
        if name not in sys.modules and not installed(name):
            sys.modules[name] = Stub(name)
    import speculators.models.dflash.core as core
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashSpeculatorConfig

    spec, device = problem.spec, problem.hidden.device
    on_gpu = device.type == "cuda"
    given = problem.plan.anchors, torch.ones_like(problem.plan.anchors, dtype=torch.bool)
    core.select_anchors = lambda *_: given
    # Its compiled mask builder takes minutes in ptxas with torch 2.11; it is no part of the step.
    core._compiled_create_block_mask = core.create_block_mask
    if on_gpu and losses == "fused":
        keep_compiler_out(importlib.import_module("speculators.losses.fused"))
    torch._dynamo.reset()
    layer = qwen3_config(problem, "simple_flex_attention" if on_gpu else "eager")
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=spec.vocab_size,
        block_size=spec.block_size,
        aux_hidden_state_layer_ids=list(spec.target_layer_ids),
        mask_token_id=spec.mask_token_id,
    )
    with made_on(device, problem.hidden.dtype):
        drafter = core.DFlashDraftModel(config)
    for name in ("embed_tokens", "lm_head", "verifier_lm_head"):
        table = nn.Parameter(problem.head.head_weight, requires_grad=False)
        getattr(drafter, name).weight = table
    params = load_weights(drafter, problem)
    ids = problem.plan.input_ids
    documents = torch.arange(ids.shape[0], device=device).repeat_interleave(ids.shape[1])
    inputs = {
        "hidden_states": problem.hidden[None],
        "input_ids": ids.view(1, -1),
        "loss_mask": loss_mask(problem).view(1, -1),
        "verifier_last_hidden_states": problem.raw_last[None],
        "document_ids": documents[None],
        "position_ids": torch.arange(ids.shape[1], device=device).repeat(ids.shape[0])[None],
        "max_anchors": problem.plan.anchors.numel(),
        "loss_config": resolve_loss_config("kl_div" if terms == KL else "ce", losses),
        "gamma": GAMMA,
    }
    return Peer(
        f"speculators {release}{' compiled' if on_gpu else ''}, {losses} loss",
        params,
        lambda: drafter(**inputs)[1],
        # It divides by the number of slots with a loss, not by the sum of their weights.
        loss_scale=problem.rows / float(problem.plan.weight_sum),
    )


def target_modules(head: FrozenHead) -> tuple[nn.Linear, nn.Embedding]:
    """The target's head and embedding as modules around its tables; one parameter if tied."""
    table = nn.Parameter(head.head_weight, requires_grad=False)
    tied = head.embed_weight is head.head_weight
    linear = nn.Linear(*table.shape[::-1], bias=False, device="meta")
    linear.weight = table
    embedding = nn.Embedding(*head.embed_weight.shape, device="meta")
    embedding.weight = table if tied else nn.Parameter(head.embed_weight, requires_grad=False)
    return linear, embedding


def liger_loss(hidden: Tensor, table: Tensor, labels: Tensor) -> tuple[str, Callable[[], Tensor]]:
    """Name and call of Liger's fused head and cross entropy, forward and backward: the mean over
    rows hidden [N, H]; the gradient goes to hidden.grad."""
    name = f"Liger {version('liger-kernel')}"
    from liger_kernel.ops.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyFunction as Function,
    )

    def run() -> Tensor:
        hidden.grad = None
        loss: Tensor = Function.apply(hidden, table, labels)[0]
        loss.backward()
        return loss.detach()

    return name, run


def qwen3_config(problem: Problem, attention: str, **extra: object) -> Any:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    spec = problem.spec
    config = Qwen3Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_theta": spec.rope_theta, "rope_type": "default"},
        tie_word_embeddings=False,
    )
    for name, value in extra.items():
        setattr(config, name, value)
    config._attn_implementation = attention
    return config


def load_weights(drafter: nn.Module, problem: Problem) -> dict[str, nn.Parameter]:
    """Copies our weights into a peer; its parameters by our names. Both use the published names."""
    theirs = dict(drafter.named_parameters())
    params = {}
    with torch.no_grad():
        for name, parameter in problem.model.named_parameters():
            params[name] = theirs.pop(name)
            params[name].copy_(parameter)
    left = [name for name, parameter in theirs.items() if parameter.requires_grad]
    if left:
        raise RuntimeError(f"{type(drafter).__name__} also trains {left}")
    return params


def loss_mask(problem: Problem) -> Tensor:
    """[B, S] float: the supervised tokens, as `make_plan` masks them."""
    mask = torch.ones_like(problem.plan.input_ids, dtype=torch.float32)
    mask[:, -problem.shape.block :] = 0
    return mask


def keep_compiler_out(module: types.ModuleType) -> None:
    """Dynamo of torch 2.11 fails on the autotuned kernels inside the fused losses."""
    for name, value in list(vars(module).items()):
        if name.startswith("fused_") and callable(value):
            setattr(module, name, torch.compiler.disable(value))


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


class Stub(types.ModuleType):
    """Stands in for a package of which only names are imported."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


@contextmanager
def made_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
