"""What a run will take and give, from its configuration alone: memory of each GPU, tokens a second.

No weights, no text and no GPU are needed. The memory is a sum of the buffers that stay and of the
largest ones that come and go. The speed is floating-point operations over a rate; what
is left out (launches of short kernels, padding, the sum of gradients, evaluation) makes small
models slower than the estimate.
"""

from __future__ import annotations

import math
import os

import torch

from dflash_ext.balance import Balance, drafter_seconds, rate_of
from dflash_ext.config import Config, TopologyConfig, TrainConfig, UserError
from dflash_ext.config_check import check_same_kind
from dflash_ext.config_values import devices_of
from dflash_ext.data.anchors import anchor_budget
from dflash_ext.drafter.init import start_differences, start_spec
from dflash_ext.drafter.spec import DrafterSpec, drafter_spec
from dflash_ext.dtypes import DTYPES
from dflash_ext.grad_sync import COPIED_BYTES
from dflash_ext.ops.draft_loss import CHUNK_BYTES, default_chunk_rows
from dflash_ext.placement import split_evenly
from dflash_ext.target_choices import family_mask, layers_and_mask
from dflash_ext.target_shape import TargetShape, read_target_shape

GIB = 2**30
CUDA_BYTES = 2 * GIB  # context, libraries' workspaces, and what the allocator cannot use
LARGEST = 2**60  # bytes of anything: beyond it torch cannot count
SMALL_HIDDEN = 2048  # below it kernels are shorter than their launches


class Plan:
    """The plan of one run.

    Args:
        starting: the run is about to start: what counts is the memory that its GPUs have free now.

    Raises (from the constructor):
        UserError: a target whose config cannot be read, or a setting that does not fit it.

    Attributes:
        memory: device -> part -> bytes.
    """

    def __init__(self, cfg: Config, starting: bool = False) -> None:
        check_same_kind(cfg.topology)
        self.cfg, self.starting = cfg, starting
        self.target: TargetShape = read_target_shape(cfg.model)
        info = self.target.info
        self.start = start_spec(cfg.drafter)
        # Without a tokenizer the mask token may not be known yet; no size depends on it.
        ids, mask = layers_and_mask(cfg, info, self.start, lambda: family_mask(info) or 0)
        self.spec = drafter_spec(cfg, info, mask, ids, self.start)
        check_drafter(cfg, self.spec, starting)
        self.item = DTYPES[cfg.model.dtype].itemsize
        self.rate = rate_of(cfg)
        targets = [d for entry in cfg.topology.targets for d in devices_of(entry)]
        self.target_devices = list(dict.fromkeys(targets))
        devices = dict.fromkeys([*targets, *cfg.topology.drafters])
        self.memory = {device: self._memory(device) for device in devices}

    # -- memory --------------------------------------------------------------------------------

    def _memory(self, device: str) -> dict[str, int]:
        topology = self.cfg.topology
        targets = [e for e in topology.targets if device in devices_of(e)]
        drafters = topology.drafters.count(device)
        info, parts = self.target.info, dict[str, int]()
        if targets:
            held = sum(self._held(entry, device) for entry in set(targets))
            parts["target weights"] = held * self.item
            parts["target activations"] = len(targets) * self._target_activations()
        if drafters and device not in targets:
            tables = 1 if info.tied else 2
            parts["embedding and head"] = tables * info.vocab_size * info.hidden_size * self.item
        if drafters:
            parameters = self.spec.num_parameters
            sizes = {
                "slots": topology.slots_per_drafter * self._slot(),
                "drafter weights": parameters * (self.item if self.item < 4 else 0),
                "masters": parameters * 4,
                "gradients": parameters * 4,
                "moments": parameters * (state_bytes(self.cfg.train) - 8),
                "context": self._context(),
                "activations of a group": self._group_activations(),
                "loss scratch": self._loss_scratch(),
            }
            parts |= {name: drafters * size for name, size in sizes.items()}
            if len(topology.drafters) > 1 and device != "cpu":
                # What copied sums bring in of the other drafters' gradients, or NCCL's buffers.
                parts["sums of gradients"] = min(COPIED_BYTES, parameters * 4)
        if device != "cpu":
            parts["CUDA and libraries"] = CUDA_BYTES
        return parts

    def _held(self, entry: str, device: str) -> int:
        """Parameters of a target that lie on one of its devices (``placement.place``)."""
        devices, shape = devices_of(entry), self.target
        if len(devices) == 1:
            return shape.parameters
        sizes = [shape.embedding, *shape.layer_parameters, shape.head]
        parts = split_evenly(sizes, len(devices))
        return sum(size for size, p in zip(sizes, parts, strict=True) if devices[p] == device)

    def _target_activations(self) -> int:
        """Of one layer at a time: gate, up and their product beside some states of its width."""
        info = self.target.info
        return (
            self.cfg.data.token_budget
            * (3 * info.intermediate_size + 4 * info.hidden_size)
            * (self.item)
        )

    def _slot(self) -> int:
        layers = len(self.spec.target_layer_ids) + (self.cfg.train.kl_weight > 0)
        return self.cfg.data.token_budget * layers * self.spec.hidden_size * self.item

    def _context(self) -> int:
        """Keys and values of all layers before and after norm and rotation, their gradients in
        fp32, and the fused states before and after their norm with an fp32 gradient."""
        spec = self.spec
        keys_values = 2 * spec.num_key_value_heads * spec.head_dim
        row = spec.num_layers * keys_values * (2 * self.item + 4)
        row += spec.hidden_size * (2 * self.item + 4)
        return self.cfg.data.token_budget * row

    def _group_rows(self) -> int:
        anchors = anchor_budget(self.cfg.train, self.cfg.data)
        return min(self.cfg.train.anchor_group or anchors, anchors) * self.spec.block_size

    def _group_activations(self) -> int:
        """What the backward pass of a group of anchors needs of each row and layer."""
        spec = self.spec
        queries = spec.num_attention_heads * spec.head_dim
        keys_values = 2 * spec.num_key_value_heads * spec.head_dim
        hidden, mlp = spec.hidden_size, spec.intermediate_size
        layer = 4 * hidden + 2 * (queries + keys_values) + queries + 3 * mlp
        passing = 3 * hidden + 3 * mlp  # gradients of the layer in work
        if self.cfg.train.recompute:
            values = spec.num_layers * 2 * hidden + layer + passing
        else:
            values = spec.num_layers * layer + passing
        return self._group_rows() * values * self.item

    def _loss_scratch(self) -> int:
        """Logits of a chunk (with a teacher its own too) and the gradient of all rows in fp32."""
        train, info = self.cfg.train, self.target.info
        rows = self._group_rows()
        device = self.cfg.topology.drafters[0].partition(":")[0]
        chunk = train.loss_chunk_rows or default_chunk_rows(
            device, info.vocab_size, self.item, teacher=False
        )
        logits = min(chunk, rows) * info.vocab_size * self.item
        logits *= 2 if train.kl_weight > 0 else 1
        if train.loss_chunk_rows is None and device == "cuda":
            logits = min(logits, CHUNK_BYTES)
        return logits + rows * info.hidden_size * 4

    def limit(self, device: str) -> int | None:
        """Bytes of a GPU that may be filled, None if unknown (as for a CPU): as configured, else
        what a GPU here has; for a run that starts at most what it has free."""
        return None if device == "cpu" else _gpu_limit(self.cfg.topology, device, self.starting)

    def check_memory(self) -> None:
        """Refuse a run that does not fit.

        Raises:
            UserError: naming the first GPU that is too small, with numbers.
        """
        for device, parts in self.memory.items():
            total, limit = sum(parts.values()), self.limit(device)
            if limit is not None and total > limit:
                largest = sorted(parts, key=lambda name: -parts[name])[:3]
                numbers = ", ".join(f"{name} {parts[name] / GIB:.1f}" for name in largest)
                ways = ["lower data.token_budget"]
                if "masters" in parts:
                    ways.append("train.anchor_group or slots_per_drafter")
                if "target weights" in parts:
                    ways.append("spread the target over more GPUs ('0+1' in topology.targets)")
                raise UserError(
                    f"topology: {device}: found a need of {total / GIB:.1f} GiB (most of it: "
                    f"{numbers}), want at most {limit / GIB:.1f} GiB: {', '.join(ways)}, "
                    "or raise topology.gpu_memory_gib"
                )

    # -- speed ---------------------------------------------------------------------------------

    def target_flops(self) -> float:
        """Operations of one token: two for each weight of the layers that run, and attention over
        half a text of data.max_length."""
        if self.cfg.data.hidden_states:
            return 0.0
        last = self.spec.target_layer_ids[-1] + 1
        if self.cfg.train.kl_weight > 0:
            last = self.target.info.num_layers
        seen = self.cfg.data.max_length / 2
        products = 2 * sum(self.target.layer_weights[:last])
        return products + sum(4 * width * seen for width in self.target.attention_width[:last])

    def balance(self) -> Balance:
        """Both sides at the known rates."""
        flops = self.target_flops()
        on_targets, on_drafters = set(self.target_devices), set(self.cfg.topology.drafters)
        batch_s, anchor_s = drafter_seconds(self.cfg, self.spec)
        return Balance(
            targets=len(on_targets),
            drafters=len(on_drafters),
            devices=len(on_targets | on_drafters),
            target_speed=self.rate.target / flops if flops else math.inf,
            batch_tokens=self.cfg.data.token_budget,
            batch_s=batch_s,
            anchor_s=anchor_s,
            max_anchors=anchor_budget(self.cfg.train, self.cfg.data),
            slots=self.cfg.topology.slots_per_drafter,
        )

    # -- for people ----------------------------------------------------------------------------

    def lines(self) -> list[str]:
        """Models, steps, memory, speed and balance."""
        cfg, info, spec = self.cfg, self.target.info, self.spec
        steps = f"{cfg.train.steps} steps"
        if cfg.train.steps is None:
            steps = f"{cfg.train.epochs} epochs, in steps"
        start = []
        if self.start is not None:
            start = [f"start    {line}" for line in start_differences(spec, self.start)]
        return [
            f"target   {cfg.model.target}: {info.num_layers} layers, hidden {info.hidden_size}, "
            f"vocabulary {info.vocab_size}, {self.target.parameters / 1e9:.2f} B parameters, "
            f"{cfg.model.dtype} ({self.target.source}); captures layers "
            f"{list(spec.target_layer_ids)}",
            f"drafter  {spec.num_layers} layers, {spec.num_parameters / 1e6:.1f} M parameters, "
            f"block {spec.block_size}, started from {cfg.drafter.init_from}",
            *start,
            f"plan     {steps} of {cfg.train.grad_accum * len(cfg.topology.drafters)} batches, "
            f"up to {cfg.data.token_budget} tokens and "
            f"{anchor_budget(cfg.train, cfg.data)} anchors each",
            *self.memory_lines(),
            *self._speed_lines(),
        ]

    def memory_lines(self) -> list[str]:
        """One for each kind of device: GPUs with the same roles need the same."""
        alike: dict[tuple[object, ...], list[str]] = {}
        for device, parts in self.memory.items():
            alike.setdefault((*parts.items(), self.limit(device)), []).append(device)
        return [self._memory_line(devices) for devices in alike.values()]

    def _memory_line(self, devices: list[str]) -> str:
        parts, limit = self.memory[devices[0]], self.limit(devices[0])
        total = sum(parts.values())
        numbers = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        line = f"memory   {' '.join(devices)}: {numbers}; in all {total / GIB:.1f} GiB"
        if limit is None:
            return line
        return f"{line} of {limit / GIB:.1f}, free {(limit - total) / GIB:.1f}"

    def slot_lines(self) -> list[str]:
        """A warning if too few slots make both sides wait."""
        balance = self.balance()
        if not balance.held_up:
            return []
        return [
            f"warning  topology.slots_per_drafter: found {balance.slots}, want "
            f"{balance.slots_needed()}, or both sides wait for them: {balance.whole:,.0f} tokens/s "
            f"instead of {min(balance.sides):,.0f} expected"
        ]

    def _speed_lines(self) -> list[str]:
        balance = self.balance()
        targets, drafters = balance.sides
        on_cpu = "cpu" in self.cfg.topology.drafters
        speed = (
            f"speed    {balance.whole:,.0f} tokens/s expected at the rates of "
            f"{'two cores' if on_cpu else 'an H200'} "
            f"({self.rate.target / 1e12:g} and {self.rate.drafter / 1e12:g} TFLOP/s); "
            f"targets alone {targets:,.0f}, drafters alone {drafters:,.0f}"
        )
        if not on_cpu and self.spec.hidden_size < SMALL_HIDDEN:
            speed += "; kernels this short reach less"
        return [speed, f"balance  {balance.line()}"]


def state_bytes(train: TrainConfig) -> int:
    """Master, gradient and moments of a parameter in fp32. Muon has one moment; the norm weights,
    which are few, have two there too."""
    return 12 if train.optimizer == "muon" else 16


def check_drafter(cfg: Config, spec: DrafterSpec, starting: bool = False) -> None:
    """Refuse a drafter whose masters, gradients and moments alone are more than a device of its
    drafters holds: on a CPU, than this machine's memory. And one whose config.json would not be
    read again, by --resume and by evaluate.

    Raises:
        UserError: naming the sizes, the need and the memory, or what cannot be read.
    """
    drafters = cfg.topology.drafters
    each = spec.num_parameters * state_bytes(cfg.train)
    for device in dict.fromkeys(drafters):
        need, limit = each * drafters.count(device), LARGEST
        if device == "cpu":
            limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        elif (known := _gpu_limit(cfg.topology, device, starting)) is not None:
            limit = known
        if need > limit:
            names = ("num_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
            sizes = ", ".join(f"{n} {getattr(spec, n)}" for n in (*names, "intermediate_size"))
            raise UserError(
                f"drafter: found {sizes}: {spec.num_parameters:,} parameters, whose masters, "
                f"gradients and moments need {need / GIB:,.1f} GiB on {device}, "
                f"want at most {limit / GIB:,.1f} GiB: lower these sizes"
            )
    DrafterSpec.from_hf_config(spec.to_hf_config(), "the drafter's config.json")


def _gpu_limit(topology: TopologyConfig, device: str, starting: bool) -> int | None:
    limits, index = [], int(device.removeprefix("cuda:"))
    if topology.gpu_memory_gib is not None:
        limits.append(int(topology.gpu_memory_gib * GIB))
    if index < torch.cuda.device_count():
        if starting:
            limits.append(torch.cuda.mem_get_info(index)[0])
        elif not limits:
            limits.append(torch.cuda.get_device_properties(index).total_memory)
    return min(limits, default=None)
