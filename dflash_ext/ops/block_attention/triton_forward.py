# mypy: disallow-incomplete-defs=False
"""Triton kernels of block_attention, forward; what the backward shares with it.

All queries of one KV head are the rows of one matrix: row m is head m % G of the group, in slot
m // G of all A * K slots. A program takes BLOCK_M rows, of as many blocks as that covers, and walks
the union of their contexts; the blocks of a batch are sorted, so neighbours see nearly the same.
Only tiles of keys that some row does not see in full are masked. The order of the blocks is a
matter of speed alone.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_facts(
    rows, ctx_start, ctx_end, blocks, tokens, window,
    K: tl.constexpr, G: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """(block, slot in the block, first and end of the visible context) of each row.

    Rows beyond the last block see nothing. Ranges are cut to the context: reading beyond it is
    never right.
    """
    block = rows // (K * G)
    slot = rows // G - block * K
    there = block < blocks
    start = tl.load(ctx_start + block, mask=there, other=0)
    end = tl.load(ctx_end + block, mask=there, other=0)
    end = tl.minimum(tl.maximum(end, 0), tokens)
    first = tl.minimum(tl.maximum(start, 0), end)
    if WINDOW:
        first = tl.minimum(tl.maximum(first, end + slot - window + 1), end)
    return block, slot, first.to(tl.int32), end.to(tl.int32)


@triton.jit
def key_ranges(there, first, end, tokens, BLOCK_N: tl.constexpr):
    """Where a program's keys begin, where whole tiles that all rows see begin and end, and the end.

    Tiles of BLOCK_N keys are counted from the beginning.
    """
    seen = there & (first < end)
    begin = tl.min(tl.where(seen, first, tokens), 0)
    last = tl.max(tl.where(seen, end, 0), 0)
    # A row that is there and sees nothing: no tile is seen by all.
    full_begin = tl.max(tl.where(there, tl.where(seen, first, tokens), 0), 0)
    full_end = tl.min(tl.where(there, tl.where(seen, end, 0), tokens), 0)
    tiles = tl.cdiv(tl.maximum(last - begin, 0), BLOCK_N)
    head = tl.minimum(tl.cdiv(tl.maximum(full_begin - begin, 0), BLOCK_N), tiles)
    whole = tl.maximum(full_end - begin, 0) // BLOCK_N
    tail = tl.maximum(tl.minimum(whole, tiles), head)
    return begin, begin + head * BLOCK_N, begin + tail * BLOCK_N, last


@triton.jit
def load_rows(base, offsets, there, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """[rows, BLOCK_D] of a matrix whose rows begin at `offsets`; absent elements are 0."""
    column = tl.arange(0, BLOCK_D)
    at = base + offsets[:, None] + column[None, :]
    if MASKED:
        if D == BLOCK_D:
            return tl.load(at, mask=there[:, None], other=0.0)
        return tl.load(at, mask=there[:, None] & (column < D)[None, :], other=0.0)
    if D == BLOCK_D:
        return tl.load(at)
    return tl.load(at, mask=(column < D)[None, :], other=0.0)


@triton.jit
def load_keys(
    base, tiles, row, column, STRIDE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows that are all there, by the copy engine if there is a descriptor of the tiles.

    `base` points to the column.
    """
    if tiles is None:
        rows = (row + tl.arange(0, BLOCK_N)).to(tl.int64)
        return load_rows(base, rows * STRIDE, rows >= 0, D, BLOCK_D, False)
    else:
        return tiles.load([row, column])


@triton.jit
def store_rows(base, offsets, there, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    column = tl.arange(0, BLOCK_D)
    at = base + offsets[:, None] + column[None, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=there[:, None] & (column < D)[None, :])


@triton.jit
def product(a, b):
    """a @ b in fp32; fp32 inputs are not rounded to tf32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def own_mask(
    block, slot, keys, slots, window,
    K: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Which of the slots `keys`, counted over all blocks, each row sees as its own block's."""
    key_block = keys // K
    distance = slot[:, None] - (keys - key_block * K)[None, :]
    mask = (block[:, None] == key_block[None, :]) & (keys < slots)[None, :]
    if CAUSAL:
        mask &= distance >= 0
    if WINDOW:
        mask &= (distance < window) & (distance > -window)
    return mask


@triton.jit
def attend(acc, total, top, scores, values, mask, scale, MASKED: tl.constexpr):
    """One tile of the running softmax: scores are raw, `top` is scaled to powers of 2."""
    if MASKED:
        scores = tl.where(mask, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    probs = tl.exp2(scores * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(probs, 1)
    acc = tl.dot(probs.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return acc, total, new_top


@triton.jit
def masked_at(i, begin, full_begin, full_end, BLOCK_N: tl.constexpr):
    """Where the i-th tile that needs a mask begins: first those before the whole ones."""
    before = (full_begin - begin) // BLOCK_N
    return tl.where(i < before, begin + i * BLOCK_N, full_end + (i - before) * BLOCK_N)


@triton.jit
def masked_tiles(begin, full_begin, full_end, last, BLOCK_N: tl.constexpr):
    return (full_begin - begin) // BLOCK_N + tl.cdiv(tl.maximum(last - full_end, 0), BLOCK_N)


@triton.jit(do_not_specialize=["blocks", "tokens", "window"])
def forward_kernel(
    q, k_ctx, v_ctx, k_tiles, v_tiles, k_blk, v_blk, ctx_start, ctx_end, out, lse,
    scale, blocks, tokens, window,
    STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, HEAD_K: tl.constexpr, HEAD_V: tl.constexpr,
    KV_HEADS: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % KV_HEADS
    # Contexts grow along a document: the longest last would leave a tail.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    there = rows < blocks * K * G
    block, slot, first, end = row_facts(
        rows, ctx_start, ctx_end, blocks, tokens, window, K, G, WINDOW
    )
    lines = (rows // G).to(tl.int64) * (KV_HEADS * G) + head * G + rows % G
    q_tile = load_rows(q, lines * D, there, D, BLOCK_D, True)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Not -inf: a tile in which a row sees nothing leaves it as it is. The first tile it sees
    # something in makes `shrink` 0 or, if its scores are as small as this, changes nothing.
    top = tl.full([BLOCK_M], -1e30, tl.float32)

    own_begin = tile * BLOCK_M // (K * G) * K
    own_end = tl.minimum(tl.cdiv((tile + 1) * BLOCK_M, K * G), blocks) * K
    for at in tl.range(own_begin, own_end, BLOCK_O, num_stages=1):
        keys = at + tl.arange(0, BLOCK_O)
        offsets = (keys.to(tl.int64) * KV_HEADS + head) * D
        k = load_rows(k_blk, offsets, keys < own_end, D, BLOCK_D, True)
        v = load_rows(v_blk, offsets, keys < own_end, D, BLOCK_D, True)
        mask = own_mask(block, slot, keys, own_end, window, K, WINDOW, CAUSAL)
        acc, total, top = attend(
            acc, total, top, product(q_tile, tl.trans(k)), v, mask, scale, True
        )

    begin, full_begin, full_end, last = key_ranges(there, first, end, tokens, BLOCK_N)
    k_ctx += head * HEAD_K
    v_ctx += head * HEAD_V
    for at in tl.range(full_begin, full_end, BLOCK_N, num_stages=STAGES):
        keys = at + tl.arange(0, BLOCK_N)
        k = load_keys(k_ctx, k_tiles, at, head * HEAD_K, STRIDE_K, D, BLOCK_D, BLOCK_N)
        scores = product(q_tile, tl.trans(k))
        v = load_keys(v_ctx, v_tiles, at, head * HEAD_V, STRIDE_V, D, BLOCK_D, BLOCK_N)
        acc, total, top = attend(acc, total, top, scores, v, keys, scale, False)
    for i in tl.range(0, masked_tiles(begin, full_begin, full_end, last, BLOCK_N), num_stages=1):
        keys = masked_at(i, begin, full_begin, full_end, BLOCK_N) + tl.arange(0, BLOCK_N)
        mask = (keys[None, :] >= first[:, None]) & (keys[None, :] < end[:, None])
        # Not merely `keys < last`: what no row sees may be NaN, and 0 * NaN is.
        seen = tl.max(mask.to(tl.int32), 0) > 0
        k = load_rows(k_ctx, keys.to(tl.int64) * STRIDE_K, seen, D, BLOCK_D, True)
        v = load_rows(v_ctx, keys.to(tl.int64) * STRIDE_V, seen, D, BLOCK_D, True)
        acc, total, top = attend(
            acc, total, top, product(q_tile, tl.trans(k)), v, mask, scale, True
        )
    store_rows(out, lines * D, there, acc / total[:, None], D, BLOCK_D)
    tl.store(lse + lines, (top + tl.log2(total)) / LOG2_E, mask=there)
