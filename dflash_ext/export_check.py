"""Checks of an exported drafter that need no serving engine.

Every reader of `engine_readers` must arrive at the drafter that was trained, every tensor must
find its place in every engine, and the checks themselves must notice a set of changes that are
silent when serving.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_ext.config_check import FULL, SLIDING
from dflash_ext.drafter.model import DFlashDraftModel
from dflash_ext.drafter.spec import DrafterSpec
from dflash_ext.engine_readers import READERS, RefusedError, served, sglang_names, vllm_names
from dflash_ext.export import check_tensors, read_config, read_export

Shapes = Mapping[str, tuple[int, ...]]
Change = Callable[[dict[str, Any]], object]

# Values that must stand in the file, at the top level and in dflash_config, although some reader
# has a default for them, with the JSON type that the strictest reader asks for.
_REQUIRED: dict[str, type] = {
    "architectures": list,
    "model_type": str,
    "block_size": int,
    "num_target_layers": int,
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "vocab_size": int,
    "draft_vocab_size": int,
    "hidden_act": str,
    "rms_norm_eps": float,
    "max_position_embeddings": int,
    "rope_theta": float,
    "rope_parameters": dict,
    "is_neox_style": bool,
    "rope_is_neox_style": bool,
    "layer_types": list,
    "use_sliding_window": bool,
    "attention_bias": bool,
    "tie_word_embeddings": bool,
    "dtype": str,
}
_REQUIRED_NESTED: dict[str, type] = {
    "block_size": int,
    "mask_token_id": int,
    "target_layer_ids": list,
    "num_target_layers": int,
    "sample_from_anchor": bool,
    "input_embedding_scale": float,
    "output_multiplier": float,
}
_STALE = ("auto_map", "speculators_model_type", "speculators_config", "transformer_layer_config")


class ExportError(RuntimeError):
    """An export that would serve another drafter than the one that was trained."""


@torch.no_grad()
def check_export(folder: str | Path, model: DFlashDraftModel) -> list[str]:
    """Reload an export and hold it against the model it was written from.

    Returns the lines of a report. Raises UserError if it cannot be read, ExportError for the first
    thing that would serve differently.
    """
    folder = Path(folder)
    config = read_config(folder)
    spec, tensors = read_export(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_tensors(model, tensors, str(folder))
    if spec != model.spec:
        raise ExportError(f"{folder}: config.json: found {spec}, want {model.spec}")
    check_config(config, spec)
    check_names(shapes, spec)
    for name, tensor in tensors.items():
        if not tensor.any():
            raise ExportError(f"{folder}: {name}: found only zeros, want a trained tensor")
    stored = next(iter(tensors.values())).dtype
    if config["dtype"] != str(stored).removeprefix("torch."):
        raise ExportError(f"{folder}: config.json: dtype: found {config['dtype']}, want {stored}")
    _check_outputs(folder, model, stored)
    noticed = check_mutations(config, shapes, spec)
    numbers = sum(tensor.numel() for tensor in tensors.values())
    return [
        f"{len(tensors)} tensors, {numbers:,} numbers, {config['dtype']}: names and shapes as "
        "config.json implies, finite, none empty",
        f"config.json: {', '.join(READERS)} all read the drafter that was trained; "
        "nothing is left to a default",
        "tensor names: SGLang ignores none and misses none, vLLM refuses none",
        f"outputs on random input: equal to the model's in {config['dtype']}",
        f"{noticed} of {noticed} silent mistakes (renamed tensors, shifted layers, other rope, "
        "window, mask, causality, slots) are noticed",
        *_notes(spec),
    ]


def check_config(config: dict[str, Any], spec: DrafterSpec) -> None:
    """Raise ExportError unless all readers resolve `config` to `spec`, without any default."""
    for place, table in ((config, _REQUIRED), (config.get("dflash_config", {}), _REQUIRED_NESTED)):
        for name, kind in table.items():
            found = place.get(name)
            if type(found) is not kind:
                raise ExportError(f"config.json: {name}: found {found!r}, want {kind}")
    for name in _STALE:
        if name in config:
            raise ExportError(f"config.json: {name}: found {config[name]!r}, want none")
    if len({spec.layer_causal(i) for i in range(spec.num_layers)}) == 1:
        flags = config.get("is_causal"), config["dflash_config"].get("causal")
        if flags != (spec.causal, spec.causal):
            raise ExportError(f"config.json: is_causal, causal: found {flags}, want {spec.causal}")
    if config["tie_word_embeddings"]:
        raise ExportError("config.json: tie_word_embeddings: found true, want false")
    if config.get("torch_dtype", config["dtype"]) != config["dtype"]:  # what older readers take
        found = config["torch_dtype"]
        raise ExportError(f"config.json: torch_dtype: found {found}, want {config['dtype']}")
    if (window := config.get("sliding_window")) != spec.sliding_window:
        want_window = spec.sliding_window
        raise ExportError(f"config.json: sliding_window: found {window}, want {want_window}")
    want = served(spec)
    for engine, read in READERS.items():
        try:
            reading = read(config)
        except RefusedError as error:
            raise ExportError(f"config.json: {engine} refuses it: {error}") from error
        for key, value in reading.items():
            if value != want[key]:
                raise ExportError(
                    f"config.json: {key}: {engine} reads {value}, want {want[key]} as trained"
                )


def check_names(shapes: Shapes, spec: DrafterSpec) -> None:
    """Raise ExportError unless every engine finds exactly the tensors of `spec`."""
    for engine, match in (("SGLang", sglang_names), ("vLLM", vllm_names)):
        unknown, missing = match(shapes, spec.num_layers)
        if unknown or missing:
            raise ExportError(
                f"tensors: {engine} has no place for {sorted(unknown)} and finds nothing for "
                f"{sorted(missing)}, want neither"
            )
    with torch.device("meta"):
        model = DFlashDraftModel(spec)
    want = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    for name, shape in shapes.items():
        if want.get(name) != shape:
            raise ExportError(f"tensors: {name}: found {shape}, want {want.get(name)}")


def check_mutations(config: dict[str, Any], shapes: Shapes, spec: DrafterSpec) -> int:
    """How many changes of the export the checks notice; ExportError if one goes unnoticed."""
    count = 0
    for what, changed_config, changed_shapes in mutations(config, shapes, spec):
        try:
            check_config(changed_config, spec)
            check_names(changed_shapes, spec)
        except ExportError:
            count += 1
        else:
            raise ExportError(f"checks: found {what} unnoticed, want every change noticed")
    return count


def mutations(
    config: dict[str, Any], shapes: Shapes, spec: DrafterSpec
) -> Iterator[tuple[str, dict[str, Any], Shapes]]:
    """(what, config, shapes) of exports with one mistake that some engine would not report."""
    for name in (*_REQUIRED, *_REQUIRED_NESTED):
        for place in ("top", "dflash_config"):
            changed = copy.deepcopy(config)
            if (changed if place == "top" else changed["dflash_config"]).pop(name, None) is None:
                continue
            if name in (_REQUIRED if place == "top" else _REQUIRED_NESTED):
                yield f"no {name} at {place}", changed, shapes
    for what, change in _config_changes(spec):
        changed = copy.deepcopy(config)
        change(changed)
        yield what, changed, shapes
    names = sorted(shapes)
    for name in (names[0], names[-1], "layers.0.self_attn.k_proj.weight"):
        yield f"no {name}", config, {n: s for n, s in shapes.items() if n != name}
        for other in (f"model.{name}", name.removesuffix(".weight"), f"draft.{name}"):
            renamed = {other if n == name else n: s for n, s in shapes.items()}
            yield f"{name} called {other}", config, renamed
    yield "a buffer among the tensors", config, {**shapes, "rotary_emb.inv_freq": (1,)}
    layers = len(spec.target_layer_ids) + 1
    wider = {**shapes, "fc.weight": (spec.hidden_size, layers * spec.hidden_size)}
    yield "fc for one layer more", config, wider


def _config_changes(spec: DrafterSpec) -> list[tuple[str, Change]]:
    shifted = [i + 1 for i in spec.target_layer_ids]
    types = list(spec.layer_types)
    types[0] = SLIDING if types[0] == FULL else FULL
    theta = 2 * spec.rope_theta

    def nested(**values: object) -> Change:
        return lambda config: config["dflash_config"].update(values)

    def top(**values: object) -> Change:
        return lambda config: config.update(values)

    changes = [
        ("shifted layer ids", nested(target_layer_ids=shifted)),
        ("our layer ids as vLLM's", top(eagle_aux_hidden_state_layer_ids=spec.target_layer_ids)),
        ("another mask token", nested(mask_token_id=(spec.mask_token_id + 1) % spec.vocab_size)),
        ("a larger block", nested(block_size=spec.block_size + 1)),
        ("another rope base", top(rope_theta=theta, rope_parameters={"rope_theta": theta})),
        ("another rope base in one place", top(rope_parameters={"rope_theta": theta})),
        ("no rope base", top(rope_theta=None, rope_parameters={"rope_type": "default"})),
        ("interleaved rope in vLLM", top(is_neox_style=False)),
        ("interleaved rope in SGLang", top(rope_is_neox_style=False)),
        ("another head size", top(head_dim=2 * spec.head_dim)),
        ("another norm epsilon", top(rms_norm_eps=10 * spec.rms_norm_eps)),
        ("a layer of another type", top(layer_types=types)),
        ("the other causality", top(is_causal=not spec.layer_causal(0))),
        ("slot 0 predicts", nested(sample_from_anchor=True)),
        ("slot 0 predicts, by its other name", nested(query_zero_predicts_next=True)),
        ("another dtype for older readers", top(torch_dtype="float16")),
        ("scaled logits", nested(output_multiplier=2 * spec.logit_scale)),
        ("a smaller draft vocabulary", top(draft_vocab_size=spec.vocab_size - 1)),
        ("the target's code", top(auto_map={"AutoModel": "model.Model"})),
    ]
    if spec.sliding_window is None:
        changes.append(("a window everywhere", nested(use_swa=True, swa_window_size=2048)))
        changes.append(("a window of nothing", top(sliding_window=2048)))
    else:
        changes.append(("another window", top(sliding_window=spec.sliding_window + 1)))
        changes.append(("a dropped window", top(use_sliding_window=False)))
    return changes


def _check_outputs(folder: Path, model: DFlashDraftModel, stored: torch.dtype) -> None:
    """Equal bits to the model's, rounded to the stored dtype."""
    states = {name: tensor.to("cpu", stored) for name, tensor in model.state_dict().items()}
    with torch.device("meta"):
        rounded = DFlashDraftModel(model.spec)
    rounded.load_state_dict(states, assign=True)
    if not torch.equal(_probe(DFlashDraftModel.from_pretrained(folder)), _probe(rounded)):
        raise ExportError(f"{folder}: found other outputs than those of the model")


def _probe(model: DFlashDraftModel) -> Tensor:
    """Outputs of two blocks over a random context."""
    context, spec, generator = 20, model.spec, torch.Generator().manual_seed(0)
    dtype = next(model.parameters()).dtype

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden = noise(context, len(spec.target_layer_ids) * spec.hidden_size)
    ctx_kv = model.context(hidden, torch.arange(context))
    ends = torch.tensor([context // 2, context])
    return model(noise(2, spec.block_size, spec.hidden_size), ctx_kv, torch.zeros_like(ends), ends)


def _notes(spec: DrafterSpec) -> list[str]:
    """What an engine is told otherwise, or does not obey."""
    size = spec.block_size
    notes = [
        f"note: serve with num_speculative_tokens {size - 1} in vLLM (it reads no block size), "
        f"--speculative-num-draft-tokens {size} in SGLang"
    ]
    if spec.embed_scale != 1.0:
        notes.append(
            f"note: vLLM does not read input_embedding_scale ({spec.embed_scale:g}) for DFlash"
        )
    if 0 < spec.layer_types.count(SLIDING) < spec.num_layers:
        notes.append("note: layers of both types need vLLM's V2 model runner")
    if any(spec.layer_causal(i) != (kind == SLIDING) for i, kind in enumerate(spec.layer_types)):
        notes.append("note: SGLang reads is_causal in its newer releases only")
    return notes
