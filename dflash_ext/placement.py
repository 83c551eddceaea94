"""A target on one device or spread over several: which part lies where, and how inputs follow.

An entry of topology.targets names a device, or several that hold one target together, as
``cuda:0+cuda:1``. Layers are divided in order, evenly by bytes. Forward pre-hooks bring each part's
inputs to its device and make that device current, so that kernels start on its current stream; a
copy between two GPUs makes the one's stream wait for the other's, and the host for neither.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dflash_ext.config_values import devices_of

DeviceMap = dict[str, torch.device]


def split_evenly(sizes: Sequence[int], parts: int) -> list[int]:
    """The part, 0 to parts - 1, of each of consecutive pieces: where its middle lies.

    Each cut is within half a piece of one that divides the sizes evenly.
    """
    total, start, found = max(1, sum(sizes)), 0, []
    for size in sizes:
        middle = start + size / 2
        found.append(min(parts - 1, int(middle * parts / total)))
        start += size
    return found


def place(model: PreTrainedModel, devices: Sequence[str]) -> DeviceMap:
    """Module name -> device, for every module of a causal LM that holds tensors.

    Embedding, layers and head are divided; what else has weights (the final norm) lies on the last
    device, buffers (of the rotary embedding) on the first, and a head tied to the embedding there,
    too. The model may be on the meta device.
    """
    where = [torch.device(device) for device in devices]
    if len(where) == 1:
        return {"": where[0]}
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    pieces = [embedding, *model.get_decoder().layers, *([] if tied else [head])]
    parts = split_evenly([_nbytes(piece) for piece in pieces], len(where))
    found = {names[id(p)]: where[part] for p, part in zip(pieces, parts, strict=True)}
    if tied:
        found[names[id(head)]] = where[0]
    for name, module in model.named_modules():
        inside = any(name == piece or name.startswith(piece + ".") for piece in found)
        if not inside and next(module.parameters(recurse=False), None) is not None:
            found[name] = where[-1]
        elif not inside and next(module.buffers(recurse=False), None) is not None:
            found[name] = where[0]
    return found


def device_map(config: PretrainedConfig, devices: Sequence[str]) -> DeviceMap | None:
    """What ``from_pretrained`` takes to load a model onto `devices`; None for one CPU."""
    if list(devices) == ["cpu"]:
        return None
    if len(devices) == 1:
        return {"": torch.device(devices[0])}
    with torch.device("meta"):
        return place(AutoModelForCausalLM.from_config(config), devices)


def follow_devices(model: PreTrainedModel) -> None:
    """Lets inputs follow the parts of a spread model, in place of accelerate's hooks.

    Those replace the method ``forward``, which the target's fused modules do themselves.
    """
    remove_hook_from_module(model, recurse=True)
    for module in model.modules():
        # Left behind by that: the method as an attribute, which would hide a fused module's own.
        vars(module).pop("forward", None)
    moved = _Moved()
    layers = model.get_decoder().layers
    parts = [m for m in model.get_decoder().children() if m is not layers]
    for module in [*parts, *layers, model.get_output_embeddings()]:
        first = module is layers[0]
        module.register_forward_pre_hook(_Follow(moved, first), with_kwargs=True)


def copy_to(model: PreTrainedModel, entry: str) -> PreTrainedModel:
    """A copy with tensors of its own where the entry says; each is copied once, piece by piece."""
    where = place(model, devices_of(entry))
    tensors: dict[int, Any] = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        moved = tensor.detach().to(_find(where, name), copy=True)
        is_weight = isinstance(tensor, nn.Parameter)
        tensors[id(tensor)] = nn.Parameter(moved, requires_grad=False) if is_weight else moved
    made: PreTrainedModel = copy.deepcopy(model, tensors)
    made._apply(lambda tensor: tensor)  # merged projections become one tensor again
    if len(where) > 1 and not _follows(made):
        follow_devices(made)
    return made


def _find(where: DeviceMap, name: str) -> torch.device:
    while name and name not in where:
        name = name.rpartition(".")[0]
    return where[name]


def _nbytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _follows(model: PreTrainedModel) -> bool:
    hooks = model.get_decoder().layers[0]._forward_pre_hooks.values()
    return any(isinstance(hook, _Follow) for hook in hooks)


class _Moved(dict[tuple[int, torch.device], tuple[Tensor, Tensor]]):
    """What all layers share (rotary tables, masks), once on each device, for one pass."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Moved:
        return _Moved()


class _Follow:
    """Forward pre-hook: brings a module's inputs to its weights, and makes their device current.

    Modules without tensors, and those that only look at shapes, take inputs as they are.
    """

    def __init__(self, moved: _Moved, first: bool) -> None:
        self.moved, self.first = moved, first

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.first:
            self.moved.clear()
        tensor = next(chain(module.parameters(), module.buffers()), None)
        if tensor is None:
            return args, kwargs
        device = tensor.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        states = {name: v for name, v in kwargs.items() if name == "hidden_states"}
        return _to(args, device), self._shared(kwargs, device) | _to(states, device)

    def _shared(self, value: Any, device: torch.device) -> Any:
        """As `_to`, with the copies kept: every layer gets the same ones."""
        if isinstance(value, dict):
            shared = {k: v for k, v in value.items() if k != "hidden_states"}
            return {k: self._shared(v, device) for k, v in shared.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._shared(v, device) for v in value)
        if not isinstance(value, Tensor) or value.device == device:
            return value
        key = (id(value), device)
        if key not in self.moved:
            self.moved[key] = (value, value.to(device, non_blocking=True))  # the id stays taken
        return self.moved[key][1]


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {k: _to(v, device) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_to(v, device) for v in value)
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
