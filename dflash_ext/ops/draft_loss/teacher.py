"""Teacher states that rows of one chunk share: projected once for all of them.

Blocks overlap where anchors lie close together: their slots then have the same token as teacher.

Letters: A anchors, K slots, R projected rows, C chunks of rows, U different teachers of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_index(
    teacher_index: Tensor, rows: Tensor, n_rows: Tensor, tokens: int, chunk_rows: int
) -> Tensor:
    """Teachers [C, chunk_rows] int64 of rows [R], those of each chunk; `tokens` where none is."""
    flat = teacher_index.flatten()
    order = torch.arange(rows.shape[0], device=rows.device)
    index = flat[rows.clamp(0, flat.shape[0] - 1)]
    live = (order < n_rows) & (rows >= 0) & (rows < flat.shape[0])
    live &= (index >= 0) & (index < tokens)
    chunks = -(-rows.shape[0] // chunk_rows)
    padded = index.new_full((chunks * chunk_rows,), tokens)
    padded[: rows.shape[0]] = index.where(live, tokens)
    return padded.view(chunks, chunk_rows)


def most_teachers(index: Tensor, tokens: int) -> int:
    """The largest number of different teachers in a row of `chunk_index`; waits for a GPU."""
    seen = torch.zeros(index.shape[0], tokens + 1, dtype=torch.bool, device=index.device)
    seen.scatter_(1, index, True)  # several times faster than to sort them
    return max(seen[:, :tokens].sum(1).tolist(), default=0)


def share_teachers(
    teacher_index: Tensor,
    rows: Tensor,
    n_rows: Tensor,
    tokens: int,
    chunk_rows: int,
    most: int,
) -> tuple[Tensor, Tensor]:
    """(teachers of each chunk [C, most], -1 behind the last one; where a row's is, [R] int32).

    Arguments as in `draft_loss`, whose teacher_hidden has `tokens` rows. Teachers ascend. A row
    without a valid teacher has place -1, and one whose teacher is not among the first `most` a
    place >= most. Nothing waits for the device, and no result depends on its timing.
    """
    index = chunk_index(teacher_index, rows, n_rows, tokens, chunk_rows)
    chunks = index.shape[0]
    seen = torch.zeros(chunks, tokens + 1, dtype=torch.int32, device=rows.device)
    seen = seen.scatter_(1, index, 1)[:, :tokens]
    count = seen.cumsum(1, dtype=torch.int32)
    place = count.gather(1, index.clamp_max(tokens - 1)).sub_(1).where(index < tokens, -1)
    # What is not seen, or has no room, goes to a column that is cut off.
    column = (count - 1).where((seen > 0) & (count <= most), most).long()
    found = torch.full((chunks, most + 1), -1, dtype=torch.int64, device=rows.device)
    found.scatter_(1, column, torch.arange(tokens, device=rows.device).expand(chunks, -1))
    return found[:, :most].contiguous(), place.flatten()[: rows.shape[0]].contiguous()
