"""The target's own greedy continuations, made once and kept in the cache folder.

Acceptance is measured on the text that greedy decoding of this target gives, one prompt at a time,
in the dtype of the evaluation: another batch size or dtype may round a near-tie the other way, and
from there on it is another text.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel

from dflash_ext.files import replace_file


def new_cache(model: PreTrainedModel) -> dict[str, DynamicCache]:
    """An empty key/value cache, under the name of the model's argument. It grows in place."""
    names = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in names else "past_key_values"  # renamed in 5.x
    return {name: DynamicCache(config=model.config)}


@torch.inference_mode()
def greedy_tokens(
    model: PreTrainedModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: Collection[int],
) -> Iterator[int]:
    """Greedy decoding with a key/value cache, batch 1: yields at most `max_new_tokens` tokens.

    `model` is a Hugging Face causal LM. Ends after the first stop token.
    """
    cache = new_cache(model)
    input_ids = torch.tensor([list(prompt)], device=model.device)
    for _ in range(max_new_tokens):
        logits = model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **cache).logits
        input_ids = logits[:, -1].argmax(dim=-1, keepdim=True)
        token = int(input_ids)
        yield token
        if token in stop_token_ids:
            return


@torch.inference_mode()
def weights_fingerprint(model: PreTrainedModel) -> str:
    """Hash of a model's configuration and weights, independent of where they are stored.

    Each weight enters as the wrapping integer sum of its bit patterns: exact, and the same on every
    device and for every number of threads.
    """
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for name, weight in sorted(model.state_dict().items()):
        bits = weight.contiguous().view(words[weight.element_size()])
        total = int(bits.sum(dtype=torch.int64))
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} {total}\n".encode())
    return digest.hexdigest()


class GreedyTextCache:
    """Greedy continuations of one target in one dtype on one kind of device, one file per prompt.

    A stored text serves every limit up to its length (and any limit if it ended by itself), because
    greedy decoding with a lower limit gives a prefix of the same text.
    """

    def __init__(
        self, folder: Path, model: PreTrainedModel, stop_token_ids: Collection[int]
    ) -> None:
        weight = next(model.parameters())
        key = f"{weights_fingerprint(model)} {weight.dtype} {weight.device.type}"
        self.folder = folder / "greedy" / hashlib.sha256(key.encode()).hexdigest()[:16]
        self.model = model
        self.stop_token_ids = sorted(set(stop_token_ids))

    def path(self, prompt: Sequence[int]) -> Path:
        key = json.dumps([list(prompt), self.stop_token_ids])
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def get(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """The answer's tokens: the stored ones cut to the limit, else decoded and stored."""
        path = self.path(prompt)
        stored = self._stored(path, prompt)
        if stored and (len(stored) >= max_new_tokens or stored[-1] in self.stop_token_ids):
            return stored[:max_new_tokens]
        tokens = list(greedy_tokens(self.model, prompt, max_new_tokens, self.stop_token_ids))
        with contextlib.suppress(OSError):  # a full disk costs the next evaluation time, no more
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps({"prompt": list(prompt), "tokens": tokens}))
        return tokens

    def _stored(self, path: Path, prompt: Sequence[int]) -> list[int]:
        """The stored answer; empty if there is none, or a damaged one, which is then made again."""
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            tokens = stored["tokens"] if stored["prompt"] == list(prompt) else []
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return []
        vocab_size = self.model.get_input_embeddings().weight.shape[0]
        if not isinstance(tokens, list):
            return []
        whole = all(type(token) is int and 0 <= token < vocab_size for token in tokens)
        return tokens if whole else []
