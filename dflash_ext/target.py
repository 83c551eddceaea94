"""The frozen target: loading, the facts a drafter needs, and hidden-state capture.

Layer ids are 0-based decoder layers whose *output* is taken, so id `i` is Hugging Face's
`hidden_states[i + 1]`.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    masking_utils,
)

from dflash_ext.config import UserError
from dflash_ext.config_values import devices_of
from dflash_ext.devices import current
from dflash_ext.fast_gdn import (
    GdnKernels,
    bind_convolution,
    check_convolution,
    find_gdn_kernels,
    gdn_modules,
    profile_kernels,
    prove_gdn_kernels,
)
from dflash_ext.placement import copy_to, device_map, follow_devices
from dflash_ext.target_source import one_line, quiet_hub, quiet_transformers, resolve_target

# Families whose embeddings are scaled by sqrt(hidden_size) without saying so in the config.
SQRT_SCALED = ("gemma", "recurrent_gemma", "vaultgemma")


_plain = threading.local()  # whether this thread's inputs are known to hold one sequence a row
_find_packed = masking_utils.find_packed_sequence_indices


def _find_packed_unless_plain(position_ids: Tensor) -> Tensor | None:
    return None if getattr(_plain, "rows", False) else _find_packed(position_ids)


masking_utils.find_packed_sequence_indices = _find_packed_unless_plain


@contextmanager
def _one_sequence_a_row() -> Iterator[None]:
    """transformers would look at position ids for several: on a GPU, that waits for the device."""
    _plain.rows = True
    try:
        yield
    finally:
        _plain.rows = False


@dataclass(frozen=True)
class TargetInfo:
    """What a drafter must know of its target.

    Input embedding of a token: `embed_scale * embed_weight[id]` (the scale rounded to the
    weight's dtype). Logits of a final-normed hidden state h: `z = logit_scale * head_weight @ h`,
    then `softcap * tanh(z / softcap)` unless softcap is None.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    model_type: str = ""
    tied: bool = False


def target_info(hf_config: PretrainedConfig) -> TargetInfo:
    """Read `TargetInfo` from a Hugging Face config; multimodal wrappers by their text part.

    Raises UserError for encoder-decoder models.
    """
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UserError(
            f"model.target: found an encoder-decoder model ({hf_config.model_type}), "
            "want a decoder-only causal LM"
        )
    text = hf_config.get_text_config(decoder=True)

    def read(*names: str) -> float | None:
        return next((v for n in names if (v := getattr(text, n, None)) is not None), None)

    def number(default: float, *names: str) -> float:
        found = read(*names)
        return float(default if found is None else found)

    def need(*names: str) -> int:
        found = read(*names)
        if found is None:
            raise UserError(f"model.target: {text.model_type} config: found no {names[0]}")
        return int(found)

    heads = need("num_attention_heads")
    hidden = need("hidden_size")
    sqrt_scaled = text.model_type.startswith(SQRT_SCALED)
    # Cohere and Falcon-H1 multiply the logits, Granite divides them.
    logit_scale = number(1.0, "logit_scale", "lm_head_multiplier") / number(1.0, "logits_scaling")
    return TargetInfo(
        hidden_size=hidden,
        num_layers=need("num_hidden_layers"),
        vocab_size=need("vocab_size"),
        num_attention_heads=heads,
        num_key_value_heads=int(number(heads, "num_key_value_heads")),
        head_dim=int(number(hidden // heads, "head_dim")),
        intermediate_size=need("intermediate_size", "moe_intermediate_size", "ffn_dim"),
        rms_norm_eps=number(1e-6, "rms_norm_eps", "layer_norm_eps"),
        rope_theta=_rope_theta(text),
        max_position_embeddings=int(number(0, "max_position_embeddings")),
        embed_scale=number(hidden**0.5 if sqrt_scaled else 1.0, "embedding_multiplier"),
        logit_scale=logit_scale,
        softcap=read("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"),
        eos_token_ids=_ids(text.eos_token_id),
        bos_token_id=text.bos_token_id,
        pad_token_id=text.pad_token_id,
        model_type=text.model_type,
        tied=bool(getattr(hf_config, "tie_word_embeddings", False)),
    )


def _rope_theta(config: PretrainedConfig) -> float:
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # one entry per layer type in e.g. Gemma 3
    theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
    return 10000.0 if theta is None else float(theta)


def _ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    """Without negative ones, which some files have for none."""
    if value is None:
        return ()
    return tuple(i for i in ([value] if isinstance(value, int) else value) if i >= 0)


def stop_token_ids(info: TargetInfo, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What ends an answer, ascending: the end tokens of the model's files and the tokenizer's."""
    return sorted({*info.eos_token_ids, tokenizer.eos_token_id} - {None})


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The target's tokenizer. Raises UserError if there is none or it cannot be read."""
    source = resolve_target(name, revision)
    try:
        with quiet_hub(), quiet_transformers():
            return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception as error:
        raise _load_error(name, "tokenizer", error) from error


def load_target(
    name: str,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    revision: str | None = None,
    attn_backend: str = "sdpa",
    require_fast_gdn: bool | None = None,
) -> Target:
    """Load a frozen target in `dtype` onto `device`, from safetensors and built-in code only.

    `dtype` is a torch dtype or its name; a `device` like "cuda:0+cuda:1" spreads the target over
    several (`placement`). `require_fast_gdn`: refuse a target with gated-delta-net
    layers unless fast kernels are installed and run (None: on CUDA devices only).
    Call from one thread at a time (transformers changes the default dtype while it loads).
    Raises UserError for anything that is not a plain causal LM with a linear head.
    """
    source = resolve_target(name, revision)
    devices = devices_of(str(device))
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    try:
        with quiet_hub(), quiet_transformers():
            config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception as error:
        raise _load_error(name, "config", error) from error
    info = target_info(config)
    required = require_fast_gdn or (require_fast_gdn is None and devices[0] != "cpu")
    # Before the weights: what is missing should not take minutes to tell.
    gdn_kernels = find_gdn_kernels() if required and _has_gdn(config) else None
    try:
        with quiet_hub(), quiet_transformers():
            model, loading = AutoModelForCausalLM.from_pretrained(
                source,
                revision=revision,
                dtype=dtype,
                attn_implementation=attn_backend,
                device_map=device_map(config, devices),
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # its own error names no tensor
                output_loading_info=True,
            )
    except Exception as error:
        raise _load_error(name, "model", error) from error
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"model.target: {name}: found no {missing[0]} and {len(missing) - 1} others, "
            "want all tensors of the model"
        )
    if mismatched := sorted(loading["mismatched_keys"]):
        tensor, found, wanted = mismatched[0]
        raise UserError(
            f"model.target: {name}: {tensor}: found shape {tuple(found)}, want {tuple(wanted)} "
            f"(and {len(mismatched) - 1} others)"
        )
    generation = getattr(model, "generation_config", None)
    stops = dict.fromkeys(info.eos_token_ids + _ids(getattr(generation, "eos_token_id", None)))
    if len(devices) > 1:
        follow_devices(model)
    target = Target(model, dataclasses.replace(info, eos_token_ids=tuple(stops)))
    if gdn_kernels is not None:
        bind_gdn(target, gdn_kernels)
    target.check_head()
    return target


def _load_error(name: str, what: str, error: Exception) -> UserError:
    reason = one_line(error)
    # transformers' words for an implementation that it does not know, or whose package is missing
    attention = "attn_implementation" in reason or "FlashAttention" in reason
    field = "model.attn_backend" if attention else "model.target"
    return UserError(f"{field}: cannot load the {what} of {name!r}: {reason}")


def _has_gdn(config: PretrainedConfig) -> bool:
    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    return "linear_attention" in layer_types


def bind_gdn(target: Target, kernels: GdnKernels) -> None:
    """Let the target's GatedDeltaNet layers run `kernels`, and prove it by a profile."""
    check_convolution(kernels, target.device)
    modules = gdn_modules(target.model)
    bound = [bind_convolution(sys.modules[type(m).__module__], kernels) for m in modules[:1]]
    if not all(bound) and kernels.convolution_name != "causal-conv1d":
        raise UserError(
            f"model.require_fast_gdn: {target.info.model_type}: found no convolution to replace; "
            "install the extra, pip install 'dflash-ext[conv]', or set false"
        )
    target.gdn_kernels = kernels
    target.kernel_lines.append(kernels.line())
    if target.device.type != "cuda" or not modules:
        return

    def run() -> None:
        ids = torch.arange(128, device=target.device)[None] % target.info.vocab_size
        target.forward_capture(ids, [], lambda index, value: None, need_last=True)

    run()  # compiles
    if names := profile_kernels(run, target.device):
        prove_gdn_kernels(names)
        target.kernel_lines.append("gated delta net: both proven by a profiled forward pass")
    else:
        target.kernel_lines.append("gated delta net: not proven, the profiler saw no kernels")


class _Stop(Exception):
    """Ends a forward pass after the last layer that is wanted."""


class Target:
    """A frozen causal LM. One instance per thread: use `replica()` for more on one device."""

    def __init__(self, model: PreTrainedModel, info: TargetInfo) -> None:
        self.model = model.eval().requires_grad_(False)
        self.decoder: nn.Module = model.get_decoder()
        layers: Any = getattr(self.decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList) or len(layers) != info.num_layers:
            raise UserError(f"model.target: {info.model_type}: found no list of decoder layers")
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise UserError(f"model.target: {info.model_type}: found no linear head, want one")
        if getattr(head, "bias", None) is not None:
            raise UserError(f"model.target: {info.model_type}: found a head bias, want none")
        self.layers = layers
        self.gdn_kernels: GdnKernels | None = None
        self.kernel_lines: list[str] = []  # which fast kernels run, for the log
        self.embed_weight: Tensor = model.get_input_embeddings().weight
        self.head_weight: Tensor = head.weight
        tied = self.head_weight.data_ptr() == self.embed_weight.data_ptr()
        if tied:
            self.head_weight = self.embed_weight
        self.info = dataclasses.replace(info, tied=tied, vocab_size=self.head_weight.shape[0])
        places = [p.device for layer in layers for p in [next(layer.parameters())]]
        self.devices = list(dict.fromkeys([self.device, *places, self.head_weight.device]))

    @property
    def device(self) -> torch.device:
        return self.embed_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight.dtype

    def replica(self) -> Target:
        """A second target with modules (hence hooks) of its own over the same parameters."""
        shared = {id(p): p for p in self.model.parameters()}
        return Target(copy.deepcopy(self.model, shared), self.info)

    def copy_to(self, entry: str) -> Target:
        """A target with parameters of its own on the device, or devices, of a topology's entry."""
        return Target(copy_to(self.model, entry), self.info)

    @torch.no_grad()
    def forward_capture(
        self,
        input_ids: Tensor,
        layer_ids: Sequence[int],
        on_layer: Callable[[int, Tensor], None],
        need_last: bool,
    ) -> Tensor | None:
        """Run `input_ids [B, S]` and hand over the output of each layer in `layer_ids`.

        Calls `on_layer(i, hidden [B, S, H])` with i the index into the ascending `layer_ids`, in
        order, as soon as the layer is done; the values are Hugging Face's
        `hidden_states[layer_ids[i] + 1]` (the last layer's therefore come final-normed). Returns
        the final-normed hidden state [B, S, H] if `need_last`, else stops after the last captured
        layer and returns None. Rows are padded on the right; causality makes a mask unnecessary.
        """
        final = self.info.num_layers - 1
        wanted = {layer: index for index, layer in enumerate(layer_ids)}
        stop_at = None if need_last or final in wanted else max(wanted, default=None)

        def hook(layer: int) -> Callable[[nn.Module, object, Tensor | tuple[Tensor]], None]:
            def run(module: nn.Module, args: object, output: Tensor | tuple[Tensor]) -> None:
                on_layer(wanted[layer], output[0] if isinstance(output, tuple) else output)
                if layer == stop_at:
                    raise _Stop

            return run

        handles = [self.layers[i].register_forward_hook(hook(i)) for i in wanted if i != final]
        try:
            # Of a spread target the hooks change the current device.
            with current(self.device), _one_sequence_a_row():
                last = self.decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        except _Stop:
            return None
        finally:
            for handle in handles:
                handle.remove()
        if final in wanted:
            on_layer(wanted[final], last)
        return last if need_last else None

    @torch.no_grad()
    def check_head(self) -> None:
        """Refuse a target whose logits are not finite, or not softcap(logit_scale * head @ h)."""
        ids = torch.arange(8, device=self.device)[None] % self.info.vocab_size
        hidden = self.forward_capture(ids, [], lambda index, value: None, need_last=True)
        assert hidden is not None
        with current(self.device):
            want = self.model(input_ids=ids, use_cache=False).logits.float()
        if not torch.isfinite(want).all():
            raise UserError(
                f"model.target: {self.info.model_type}: found logits that are not finite in "
                f"{self.dtype}, want finite weights, or a wider model.dtype"
            )
        hidden = hidden.to(self.head_weight.device)
        logits = nn.functional.linear(hidden, self.head_weight).float() * self.info.logit_scale
        if self.info.softcap is not None:
            logits = self.info.softcap * torch.tanh(logits / self.info.softcap)
        error = (logits - want).norm() / want.norm().clamp_min(1e-30)
        # bf16 logits carry 8 bits; a missed scale or cap is far outside either limit.
        limit = 1e-3 if self.dtype == torch.float32 else 3e-2
        if not error <= limit:
            raise UserError(
                f"model.target: {self.info.model_type}: found an unknown logit transform (logits "
                f"differ by {error:.1e}), want softcap(logit_scale * head @ hidden)"
            )
