"""Hidden states that another trainer stored, in place of the target's forward pass.

speculators (hs-connectors): `hs_N.safetensors`, N = row (from 0) of its Arrow data set, with
`token_ids` [S] and `hidden_states` [S, F + 1, H]: F captured layers, then the last layer, before
the final norm. SpecForge: `.ckpt` or `.ckpt.gz` files, each with `input_ids`, `loss_mask` [S],
`hidden_states` [1, S, F*H] or [S, F*H], and perhaps `target_last_hidden_states` (its EAGLE-3 files:
`aux_hidden_state`, `hidden_state`).

The files do not say which layers they hold or whether the last state is normed. Both are therefore
settings, and `verify` compares them with the target once, before anything is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dflash_ext.config import DataConfig, UserError
from dflash_ext.data.corpus import Corpus
from dflash_ext.data.packing import BatchPlan
from dflash_ext.data.readers import ckpt_files, load_ckpt
from dflash_ext.hs_queue import Slot
from dflash_ext.target import Target

_CHECKED_TOKENS = 64


class HiddenCache:
    """Reads the hidden states of a corpus's examples.

    Args:
        cfg: hidden_states (the folder), hidden_layer_ids, hidden_last.
        layer_ids: the layers that the drafter wants, 0-based decoder layers.
        examples: ids and masks; row N of the only shard belongs to the N-th file.
        target: for the sizes, the final norm and `verify`.

    Raises:
        UserError: layers are missing, there are no files or not one for each example, or a setting
            contradicts the target.
    """

    def __init__(
        self, cfg: DataConfig, layer_ids: Sequence[int], examples: Corpus, target: Target
    ) -> None:
        self._folder, self._examples, self._target = Path(cfg.hidden_states), examples, target
        self._stored = cfg.hidden_layer_ids or []
        self._last = cfg.hidden_last
        missing = [layer for layer in layer_ids if layer not in self._stored]
        if missing:
            raise UserError(
                f"data.hidden_layer_ids: found {self._stored}, want all layers of "
                f"model.target_layer_ids, {list(layer_ids)}"
            )
        if target.info.num_layers - 1 in layer_ids:
            raise UserError(
                f"model.target_layer_ids: found {list(layer_ids)}, want layers before the last "
                "with data.hidden_states"
            )
        self._columns = [self._stored.index(layer) for layer in layer_ids]
        self._layer_ids = list(layer_ids)
        if len(examples.weights) != 1:
            raise UserError("data.train: found several files, want one with data.hidden_states")
        self._ckpts = ckpt_files(self._folder)
        names = {path.name for path in self._folder.glob("hs_*.safetensors")}
        if not self._ckpts and not names:
            raise UserError(
                f"data.hidden_states: found no hs_N.safetensors or .ckpt in {self._folder}, want a "
                "folder that speculators or SpecForge wrote"
            )
        for doc in range(len(examples)):
            number = examples.number(doc)
            if self._ckpts and number > len(self._ckpts):
                there = f"{len(self._ckpts)} .ckpt files"
            elif not self._ckpts and _hs_name(number) not in names:
                there = f"no {_hs_name(number)}"
            else:
                continue
            raise UserError(
                f"data.hidden_states: found {there} in {self._folder}, want one for "
                f"{examples[doc].source}, as for every row"
            )

    def read(self, doc: int) -> tuple[Tensor, Tensor | None]:
        """Hidden states [L, n, H] of example `doc`, its last ones [n, H] or None. UserError."""
        example, number = self._examples[doc], self._examples.number(doc)
        read = self._read_ckpt if self._ckpts else self._read_safetensors
        path, ids, layers, last = read(number)
        n, size = len(example), self._target.info.hidden_size
        if ids[:n].tolist() != example.input_ids.tolist():
            raise UserError(f"{path}: found other tokens than {example.source}, want the same")
        if layers.shape[1:] != (len(self._stored), size):
            raise UserError(
                f"{path}: found hidden states {tuple(layers.shape)}, want [tokens, "
                f"{len(self._stored)} (data.hidden_layer_ids), {size} (the target's)]"
            )
        layers = layers[:n, self._columns].transpose(0, 1)
        last = None if last is None or self._last == "none" else last[:n]
        for states in (layers, last):
            if states is not None and (states.shape[-2] < n or not _are_finite(states)):
                raise UserError(f"{path}: found missing or non-finite states, want {n} finite rows")
        return layers, last

    def _read_safetensors(self, number: int) -> tuple[Path, Tensor, Tensor, Tensor | None]:
        from safetensors.torch import load_file

        path = self._folder / _hs_name(number)
        try:
            tensors = load_file(path)
            states = tensors["hidden_states"].float()
            if "hidden_states_scales" in tensors:  # fp8, one scale a token
                states = states * tensors["hidden_states_scales"]
            return path, tensors["token_ids"], states[:, :-1], states[:, -1]
        except Exception as error:  # missing, cut short, other tensors
            raise _unreadable(path, error) from error

    def _read_ckpt(self, number: int) -> tuple[Path, Tensor, Tensor, Tensor | None]:
        path = self._ckpts[number - 1]
        tensors = load_ckpt(path)
        size = self._target.info.hidden_size
        try:
            layers = tensors.get("hidden_states", tensors.get("aux_hidden_state"))
            last = tensors.get("target_last_hidden_states", tensors.get("hidden_state"))
            if layers is None:
                raise KeyError("hidden_states")
            last = None if last is None else last.reshape(-1, size)
            width = layers.shape[-1] // size
            return path, tensors["input_ids"].flatten(), layers.reshape(-1, width, size), last
        except Exception as error:
            raise _unreadable(path, error) from error

    def fill(self, slot: Slot, plan: BatchPlan, device: torch.device) -> None:
        """What a forward pass on `device` would write into the slot. Waits for the copies."""
        if device.type == "cuda":  # the copies may run on another stream than the one that waits
            torch.cuda.current_stream(device).synchronize()
        hidden = slot.hidden if slot.hidden.dim() == 3 else self._by_layer(slot.hidden)
        for doc, (start, end) in zip(plan.doc_ids, plan.doc_ranges, strict=True):
            layers, last = self.read(doc)
            hidden[:, start:end].copy_(layers)
            if slot.last_hidden is not None:
                slot.last_hidden[start:end].copy_(self._normed(last, doc))
        hidden[:, plan.n_tokens :].zero_()
        if slot.last_hidden is not None:
            slot.last_hidden[plan.n_tokens :].zero_()

    def _by_layer(self, hidden: Tensor) -> Tensor:
        """[T, L*H] as [L, T, H]."""
        return hidden.unflatten(1, (len(self._columns), -1)).transpose(0, 1)

    def _normed(self, last: Tensor | None, doc: int) -> Tensor:
        """The last states behind the final norm, in the target's dtype."""
        if last is None:
            raise self._no_last(doc)
        last = last.to(self._target.device, self._target.dtype)
        return self._final_norm(last) if self._last == "raw" else last

    def _no_last(self, doc: int) -> UserError:
        return UserError(
            f"data.hidden_last: found {self._last}, but no last states for "
            f"{self._examples[doc].source}, want them in every file (train.kl_weight needs them), "
            "or none"
        )

    def _final_norm(self, states: Tensor) -> Tensor:
        norm = getattr(self._target.decoder, "norm", None)
        if norm is None:
            raise UserError("data.hidden_last: found raw, but the target has no final norm I know")
        return norm(states)

    @torch.no_grad()
    def verify(self) -> list[str]:
        """Compare the first example with the target; says what was found.

        Each stored layer must be nearest to the target's layer of that id, and the last states must
        choose the target's next tokens better as declared than otherwise.

        Raises:
            UserError: hidden_layer_ids or hidden_last is not what the files hold.
        """
        layers, last = self.read(0)
        ids = self._examples[0].input_ids[:_CHECKED_TOKENS]
        n = len(ids)
        batch = torch.tensor(ids[None].tolist(), device=self._target.device)
        own: list[Tensor] = []
        final = self._target.forward_capture(
            batch,
            range(self._target.info.num_layers - 1),
            lambda index, hidden: own.append(hidden[0].float().cpu()),
            need_last=True,
        )
        assert final is not None
        errors = []
        for layer, stored in zip(self._layer_ids, layers[:, :n].float(), strict=True):
            distances = [float((stored - states).norm() / states.norm()) for states in own]
            nearest = min(range(len(own)), key=distances.__getitem__)
            if nearest != layer:
                raise UserError(
                    f"data.hidden_layer_ids: found layer {layer} declared, but the file holds "
                    f"layer {nearest} there, want the ids that the states were captured with"
                )
            errors.append(distances[layer])
        lines = [f"cache    layers as declared, {max(errors):.1%} from the target's own at most"]
        if last is not None:
            lines.append(self._verify_last(last[:n], final[0]))
        elif self._last != "none":
            raise self._no_last(0)
        return lines

    def _verify_last(self, last: Tensor, final: Tensor) -> str:
        """Which reading of the last states chooses the tokens that the target chooses?"""
        states = last.to(self._target.device, self._target.dtype)
        wanted = self._choices(final)
        agreement = {
            "normed": float((self._choices(states) == wanted).float().mean()),
            "raw": float((self._choices(self._final_norm(states)) == wanted).float().mean()),
        }
        other = "raw" if self._last == "normed" else "normed"
        if agreement[self._last] < max(agreement[other], 0.5):
            raise UserError(
                f"data.hidden_last: found {self._last}, with which {agreement[self._last]:.0%} of "
                f"the next tokens are the target's, want {other} ({agreement[other]:.0%}) or the "
                "states of this target"
            )
        return f"cache    last states are {self._last}: {agreement[self._last]:.0%} of its choices"

    def _choices(self, states: Tensor) -> Tensor:
        return torch.nn.functional.linear(states, self._target.head_weight).argmax(-1)


def _hs_name(number: int) -> str:
    """The file of a row, which counts from 1."""
    return f"hs_{number - 1}.safetensors"


def _are_finite(states: Tensor) -> bool:
    return bool(torch.isfinite(states.float()).all())  # float8 has no test of its own


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return UserError(f"{path}: cannot be read as hidden states ({reason}), want a whole file")
