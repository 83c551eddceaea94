"""DDTree: how far a best-first draft tree under a node budget follows the target's text.

One block forward gives a factorised draft distribution (a distribution per slot, independent of
what the other slots draw). A tree node of depth d stands for the choice of a token rank in each of
the first d slots; its value is the sum of their log-probabilities. Taking nodes best first gives
the largest expected accepted depth for the number of nodes that the target verifies
(arXiv 2604.12989).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def path_pops(logprobs: Sequence[Sequence[float]], path: Sequence[int], budget: int) -> list[int]:
    """When a best-first tree takes the nodes of one root path.

    `logprobs[d][r]`: log-probability of the token of rank r in slot d, descending in r. `path[d]`:
    the rank of the followed token in slot d. Entry d of the result is the number of nodes taken
    before node `path[: d + 1]`; it ends with the first node outside a tree of `budget` nodes (the
    root, the anchor, is not counted). A smaller budget's tree is the start of a larger one's, so
    the accepted depth at budget b is the number of entries below b.
    """
    pops: list[int] = []
    if not path or not logprobs:
        return pops
    path = tuple(path)
    heap: list[tuple[float, tuple[int, ...]]] = [(-logprobs[0][0], (0,))]
    for count in range(budget):
        if not heap:
            break
        cost, ranks = heapq.heappop(heap)
        depth = len(ranks) - 1
        if ranks == path[: depth + 1]:  # a parent is always taken before its children
            pops.append(count)
            if len(pops) == len(path):
                break
        slot = logprobs[depth]
        rank = ranks[-1]
        if rank + 1 < len(slot):
            sibling = (*ranks[:-1], rank + 1)
            heapq.heappush(heap, (cost + slot[rank] - slot[rank + 1], sibling))
        if depth + 1 < len(logprobs):
            heapq.heappush(heap, (cost - logprobs[depth + 1][0], (*ranks, 0)))
    return pops
