"""What a run takes of its target if nobody says: the captured layers and the mask token."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from dflash_ext.config import Config, UserError
from dflash_ext.config_check import check_layer_ids
from dflash_ext.drafter.init import check_start
from dflash_ext.drafter.spec import DrafterSpec
from dflash_ext.engine_readers import zlab_layer_ids
from dflash_ext.target import TargetInfo

# Embedding rows that published drafters of a family use as their mask token, by the first prefix
# of the model type that fits.
FAMILY_MASK_TOKEN_ID = {"qwen3_5": 248070, "qwen3": 151669, "minimax": 200054}


def layers_and_mask(
    cfg: Config, info: TargetInfo, start: DrafterSpec | None, pick_mask: Callable[[], int]
) -> tuple[list[int], int]:
    """Captured layers and mask token: as configured, else those of the drafter that the run starts
    from, else z-lab's choice of layers and what ``pick_mask`` gives.

    Raises:
        UserError: ids that the target does not have.
    """
    ids, mask = cfg.model.target_layer_ids, cfg.drafter.mask_token_id
    if start is not None:
        check_start(start, info, ids)
        ids = ids or list(start.target_layer_ids)
        mask = start.mask_token_id if mask is None else mask
    if ids is None:
        ids = default_target_layer_ids(info.num_layers, cfg.drafter.num_layers)
    mask = pick_mask() if mask is None else mask
    check_layer_ids(ids, info.num_layers)
    if not 0 <= mask < info.vocab_size:
        raise UserError(
            f"drafter.mask_token_id: found {mask}, "
            f"want an id of the target's embedding table, 0 to {info.vocab_size - 1}"
        )
    return ids, mask


def default_target_layer_ids(num_layers: int, n: int) -> list[int]:
    """z-lab's choice of `n` captured layers of a target of `num_layers`.

    Raises UserError if the target is too shallow for n distinct layers.
    """
    ids = zlab_layer_ids(num_layers, n)
    if any(b <= a for a, b in zip(ids, ids[1:], strict=False)):
        raise UserError(
            f"drafter.num_layers: found {n} with a target of {num_layers} layers, want fewer, or "
            "ascending model.target_layer_ids: so many cannot be spread evenly"
        )
    return ids


def family_mask(info: TargetInfo) -> int | None:
    """The mask token's id known for the model family, if the target's table has it."""
    known = (i for name, i in FAMILY_MASK_TOKEN_ID.items() if info.model_type.startswith(name))
    return next((i for i in known if i < info.vocab_size), None)


def pick_mask_token_id(info: TargetInfo, tokenizer: PreTrainedTokenizerBase) -> int:
    """The mask token of a drafter whose config names none.

    The id known for the model family, else the first special token that is neither bos, eos, pad,
    unk nor used by the chat template. Raises UserError if there is none.
    """
    if (known := family_mask(info)) is not None:
        return known
    text = str(tokenizer.chat_template or "")
    taken = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    taken |= {tokenizer.unk_token_id, info.bos_token_id, info.pad_token_id, *info.eos_token_ids}
    for token_id, token in sorted(tokenizer.added_tokens_decoder.items()):
        free = token_id not in taken and token.content not in text
        if token.special and free and token_id < info.vocab_size:
            return token_id
    raise UserError("drafter.mask_token_id: the tokenizer has no unused special token, want an id")
