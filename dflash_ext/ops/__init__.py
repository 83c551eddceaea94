"""The operators: C++, CUDA and Triton kernels; each has a plain torch twin in its naive.py.

Dimension letters: B rows and S columns of the target's input, T packed tokens, L captured layers,
H hidden size, V vocabulary, N rows of hidden states, A anchors, K slots of a block, R staging rows.
"""

from dflash_ext.ops.adamw import adamw
from dflash_ext.ops.block_attention import block_attention
from dflash_ext.ops.draft_loss import draft_loss
from dflash_ext.ops.lm_head_topk import lm_head_topk
from dflash_ext.ops.metric_add import metric_add
from dflash_ext.ops.metric_publish import metric_publish
from dflash_ext.ops.pack_hidden import pack_hidden
from dflash_ext.ops.qkv_norm_rope import qkv_norm_rope
from dflash_ext.ops.rms_norm import add_rms_norm, rms_norm
from dflash_ext.ops.swiglu import swiglu

__all__ = [
    "adamw",
    "add_rms_norm",
    "block_attention",
    "draft_loss",
    "lm_head_topk",
    "metric_add",
    "metric_publish",
    "pack_hidden",
    "qkv_norm_rope",
    "rms_norm",
    "swiglu",
]
