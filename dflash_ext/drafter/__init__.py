"""The drafter: model, block attention, objective and training loop."""

from dflash_ext.drafter.model import DFlashDraftModel, FrozenHead
from dflash_ext.drafter.spec import DrafterSpec, drafter_spec

__all__ = ["DFlashDraftModel", "DrafterSpec", "FrozenHead", "drafter_spec"]
