# mypy: disallow-incomplete-defs=False
"""Triton kernels of block_attention, backward.

`query_kernel` walks a row tile's keys again, as the forward does; `context_kernel` walks, for a
tile of context keys, the rows that see it. Both need the rows' sums of out * grad_out, and a
block's own keys have gradients too: `query_kernel` makes them if its tiles hold whole blocks, else
`prepare_kernel` does. Nothing is shared between programs, so nothing depends on their order.
"""

import triton
import triton.language as tl

from dflash_ext.ops.block_attention.triton_forward import (
    LOG2_E,
    key_ranges,
    load_keys,
    load_rows,
    masked_at,
    masked_tiles,
    own_mask,
    product,
    row_facts,
    store_rows,
)


@triton.jit
def score_gradients(exponents, gradients, mask, MASKED: tl.constexpr):
    """(probabilities, gradients of the scores) from powers of 2 and grad_out v^T - delta."""
    probs = tl.exp2(exponents)
    gradients = probs * gradients
    if MASKED:
        probs = tl.where(mask, probs, 0.0)
        gradients = tl.where(mask, gradients, 0.0)
    return probs, gradients


@triton.jit
def prepare_rows(outs, grads, log_sums, shift, delta, lines, there):
    """(-log2 of the softmax's denominator, -sum of out * grad_out) of each row, stored too."""
    row_shift = log_sums * -LOG2_E
    row_delta = -tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    tl.store(shift + lines, row_shift, mask=there)
    tl.store(delta + lines, row_delta, mask=there)
    return row_shift[:, None], row_delta[:, None]


@triton.jit(do_not_specialize=["blocks", "window"])
def prepare_kernel(
    q, k_blk, v_blk, out, grad_out, lse, shift, delta, dk_blk, dv_blk, scale, blocks, window,
    KV_HEADS: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % KV_HEADS
    block = tl.program_id(0) // KV_HEADS
    slots = tl.arange(0, BLOCK_K)
    keys = block * K + slots
    own = slots < K
    offsets = (keys.to(tl.int64) * KV_HEADS + head) * D
    k = load_rows(k_blk, offsets, own, D, BLOCK_D, True)
    v = load_rows(v_blk, offsets, own, D, BLOCK_D, True)
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for row in tl.range(0, K * G, BLOCK_M, num_stages=1):
        rows = row + tl.arange(0, BLOCK_M)
        there = rows < K * G
        slot = rows // G
        lines = (block.to(tl.int64) * K + slot) * (KV_HEADS * G) + head * G + rows % G
        q_tile = load_rows(q, lines * D, there, D, BLOCK_D, True)
        grads = load_rows(grad_out, lines * D, there, D, BLOCK_D, True)
        outs = load_rows(out, lines * D, there, D, BLOCK_D, True)
        log_sums = tl.load(lse + lines, mask=there, other=0.0)
        row_shift, row_delta = prepare_rows(outs, grads, log_sums, shift, delta, lines, there)
        row_block = tl.where(there, block, -1)
        mask = own_mask(row_block, slot, keys, (block + 1) * K, window, K, WINDOW, CAUSAL)
        probs, ds = score_gradients(
            product(q_tile, tl.trans(k)) * scale + row_shift,
            product(grads, tl.trans(v)) + row_delta, mask, True,
        )  # fmt: skip
        dv += product(tl.trans(probs.to(v.dtype)), grads)
        dk += product(tl.trans(ds.to(k.dtype)), q_tile)
    store_rows(dk_blk, offsets, own, dk * (scale / LOG2_E), D, BLOCK_D)
    store_rows(dv_blk, offsets, own, dv, D, BLOCK_D)


@triton.jit
def load_own(
    k_blk, v_blk, keys, own_end, head,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    offsets = (keys.to(tl.int64) * KV_HEADS + head) * D
    return (
        load_rows(k_blk, offsets, keys < own_end, D, BLOCK_D, True),
        load_rows(v_blk, offsets, keys < own_end, D, BLOCK_D, True),
    )


@triton.jit
def own_gradients(
    acc, q_tile, grads, k, v, row_shift, row_delta, mask, scale, keys, own_end, head,
    dk_blk, dv_blk,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PREPARE: tl.constexpr,
):  # fmt: skip
    """Adds own keys' part to the queries' gradients; with PREPARE stores the keys' own."""
    probs, ds = score_gradients(
        product(q_tile, tl.trans(k)) * scale + row_shift,
        product(grads, tl.trans(v)) + row_delta, mask, True,
    )  # fmt: skip
    if PREPARE:
        # Own keys as rows, though mostly too few for wgmma. As columns, they would make probs an
        # operand in shared memory in swizzles of 64 or 32 bytes, whose descriptors have bit 63
        # set: ptxas 12.8, which Triton 3.6 brings, adds all but the first step to a wrong or unset
        # register.
        dv = product(tl.trans(probs.to(v.dtype)), grads)
        dk = product(tl.trans(ds.to(k.dtype)), q_tile) * (scale / LOG2_E)
        offsets = (keys.to(tl.int64) * KV_HEADS + head) * D
        store_rows(dv_blk, offsets, keys < own_end, dv, D, BLOCK_D)
        store_rows(dk_blk, offsets, keys < own_end, dk, D, BLOCK_D)
    return tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["blocks", "tokens", "window"])
def query_kernel(
    q, k_ctx, v_ctx, k_tiles, v_tiles, k_blk, v_blk, ctx_start, ctx_end, out, grad_out, lse, shift,
    delta, dq, dk_blk, dv_blk,
    scale, blocks, tokens, window,
    STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, HEAD_K: tl.constexpr, HEAD_V: tl.constexpr,
    KV_HEADS: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr, PREPARE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % KV_HEADS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    there = rows < blocks * K * G
    block, slot, first, end = row_facts(
        rows, ctx_start, ctx_end, blocks, tokens, window, K, G, WINDOW
    )
    lines = (rows // G).to(tl.int64) * (KV_HEADS * G) + head * G + rows % G
    q_tile = load_rows(q, lines * D, there, D, BLOCK_D, True)
    grads = load_rows(grad_out, lines * D, there, D, BLOCK_D, True)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    own_begin = tile * BLOCK_M // (K * G) * K
    own_end = tl.minimum(tl.cdiv((tile + 1) * BLOCK_M, K * G), blocks) * K
    if PREPARE:
        tl.static_assert(BLOCK_M % (K * G) == 0, "a tile's rows must be whole blocks")
        tl.static_assert(BLOCK_M <= BLOCK_O * G, "a tile's own keys must be loaded at once")
        outs = load_rows(out, lines * D, there, D, BLOCK_D, True)
        log_sums = tl.load(lse + lines, mask=there, other=0.0)
        own = own_begin + tl.arange(0, BLOCK_O)
        own_k, own_v = load_own(k_blk, v_blk, own, own_end, head, KV_HEADS, D, BLOCK_D)
        # While all of this is on its way.
        begin, full_begin, full_end, last = key_ranges(there, first, end, tokens, BLOCK_N)
        row_shift, row_delta = prepare_rows(outs, grads, log_sums, shift, delta, lines, there)
        own_seen = own_mask(block, slot, own, own_end, window, K, WINDOW, CAUSAL)
        acc = own_gradients(
            acc, q_tile, grads, own_k, own_v, row_shift, row_delta, own_seen, scale,
            own, own_end, head, dk_blk, dv_blk, KV_HEADS, D, BLOCK_D, True,
        )  # fmt: skip
    else:
        row_shift = tl.load(shift + lines, mask=there, other=0.0)[:, None]
        row_delta = tl.load(delta + lines, mask=there, other=0.0)[:, None]
        for at in tl.range(own_begin, own_end, BLOCK_O, num_stages=1):
            keys = at + tl.arange(0, BLOCK_O)
            k, v = load_own(k_blk, v_blk, keys, own_end, head, KV_HEADS, D, BLOCK_D)
            mask = own_mask(block, slot, keys, own_end, window, K, WINDOW, CAUSAL)
            acc = own_gradients(
                acc, q_tile, grads, k, v, row_shift, row_delta, mask, scale, keys, own_end, head,
                dk_blk, dv_blk, KV_HEADS, D, BLOCK_D, False,
            )  # fmt: skip
        begin, full_begin, full_end, last = key_ranges(there, first, end, tokens, BLOCK_N)
    k_ctx += head * HEAD_K
    v_ctx += head * HEAD_V
    for at in tl.range(full_begin, full_end, BLOCK_N, num_stages=STAGES):
        keys = at + tl.arange(0, BLOCK_N)
        k = load_keys(k_ctx, k_tiles, at, head * HEAD_K, STRIDE_K, D, BLOCK_D, BLOCK_N)
        v = load_keys(v_ctx, v_tiles, at, head * HEAD_V, STRIDE_V, D, BLOCK_D, BLOCK_N)
        _, ds = score_gradients(
            product(q_tile, tl.trans(k)) * scale + row_shift,
            product(grads, tl.trans(v)) + row_delta, keys, False,
        )  # fmt: skip
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")
    edges = masked_tiles(begin, full_begin, full_end, last, BLOCK_N)
    for i in tl.range(0, edges, num_stages=2 if PREPARE else 1):
        keys = masked_at(i, begin, full_begin, full_end, BLOCK_N) + tl.arange(0, BLOCK_N)
        mask = (keys[None, :] >= first[:, None]) & (keys[None, :] < end[:, None])
        # Not merely `keys < last`: what no row sees may be NaN, and 0 * NaN is.
        seen = tl.max(mask.to(tl.int32), 0) > 0
        k = load_rows(k_ctx, keys.to(tl.int64) * STRIDE_K, seen, D, BLOCK_D, True)
        v = load_rows(v_ctx, keys.to(tl.int64) * STRIDE_V, seen, D, BLOCK_D, True)
        _, ds = score_gradients(
            product(q_tile, tl.trans(k)) * scale + row_shift,
            product(grads, tl.trans(v)) + row_delta, mask, True,
        )  # fmt: skip
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")
    store_rows(dq, lines * D, there, acc * (scale / LOG2_E), D, BLOCK_D)


@triton.jit
def context_of(
    ctx_start, ctx_end, block, blocks, tokens, window, K: tl.constexpr, WINDOW: tl.constexpr
):
    """A block's (start, end) and where the context of its last slot begins."""
    there = block < blocks
    start = tl.load(ctx_start + block, mask=there, other=0)
    end = tl.load(ctx_end + block, mask=there, other=0)
    end = tl.minimum(tl.maximum(end, 0), tokens)
    start = tl.minimum(tl.maximum(start, 0), end)
    last_start = start
    if WINDOW:
        start = tl.minimum(tl.maximum(start, end - window + 1), end)
        last_start = tl.minimum(tl.maximum(start, end + K - window), end)
    return start.to(tl.int32), end.to(tl.int32), last_start.to(tl.int32)


@triton.jit(do_not_specialize=["blocks", "tokens", "window"])
def sight_kernel(
    ctx_start, ctx_end, sight, blocks, tokens, window,
    K: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(first, full, partial, last) of each tile of keys: those that see some of it are among the
    blocks [first, last), and all slots of blocks [full, partial) see all of it."""
    begin = tl.program_id(0) * BLOCK_N
    stop = tl.minimum(begin + BLOCK_N, tokens)
    first, last, full = blocks, 0, blocks
    for at in tl.range(0, blocks, CHUNK, num_stages=1):
        block = at + tl.arange(0, CHUNK)
        start, end, last_start = context_of(
            ctx_start, ctx_end, block, blocks, tokens, window, K, WINDOW
        )
        sees = (start < stop) & (end > begin) & (start < end)
        sees_all = (last_start <= begin) & (end >= stop)
        first = tl.minimum(first, tl.min(tl.where(sees, block, blocks), 0))
        last = tl.maximum(last, tl.max(tl.where(sees, block + 1, 0), 0))
        full = tl.minimum(full, tl.min(tl.where(sees_all, block, blocks), 0))
    partial = last
    for at in tl.range(0, blocks, CHUNK, num_stages=1):
        block = at + tl.arange(0, CHUNK)
        _, end, last_start = context_of(
            ctx_start, ctx_end, block, blocks, tokens, window, K, WINDOW
        )
        sees_all = (last_start <= begin) & (end >= stop)
        ends = (block > full) & (block < blocks) & (sees_all == 0)
        partial = tl.minimum(partial, tl.min(tl.where(ends, block, blocks), 0))
    full = tl.minimum(full, last)
    to = sight + tl.program_id(0) * 4
    tl.store(to, first)
    tl.store(to + 1, full)
    tl.store(to + 2, tl.maximum(partial, full))
    tl.store(to + 3, last)


@triton.jit(do_not_specialize=["blocks", "tokens", "window"])
def context_kernel(
    q, k_ctx, v_ctx, ctx_start, ctx_end, sight, grad_out, shift, delta, dk_ctx, dv_ctx,
    scale, blocks, tokens, window,
    STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, HEAD_K: tl.constexpr, HEAD_V: tl.constexpr,
    KV_HEADS: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ADD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    begin = tile * BLOCK_N
    stop = tl.minimum(begin + BLOCK_N, tokens)
    first = tl.load(sight + tile * 4)
    full = tl.load(sight + tile * 4 + 1)
    partial = tl.load(sight + tile * 4 + 2)
    last = tl.load(sight + tile * 4 + 3)
    if ADD:  # noqa: SIM102  (known to the compiler, unlike the rest)
        if first >= last:
            return
    keys = begin + tl.arange(0, BLOCK_N)
    wide = keys.to(tl.int64)
    k = load_rows(k_ctx + head * HEAD_K, wide * STRIDE_K, keys < stop, D, BLOCK_D, True)
    v = load_rows(v_ctx + head * HEAD_V, wide * STRIDE_V, keys < stop, D, BLOCK_D, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    # Rows whose tiles need no mask: whole tiles from the first row of block `full` on.
    full_begin = full * (K * G)
    full_end = full_begin + (partial - full) * (K * G) // BLOCK_M * BLOCK_M
    for row in tl.range(full_begin, full_end, BLOCK_M, num_stages=STAGES):
        rows = row + tl.arange(0, BLOCK_M)
        lines = (rows // G).to(tl.int64) * (KV_HEADS * G) + head * G + rows % G
        q_tile = load_rows(q, lines * D, rows >= 0, D, BLOCK_D, False)
        grads = load_rows(grad_out, lines * D, rows >= 0, D, BLOCK_D, False)
        probs, ds = score_gradients(
            product(k, tl.trans(q_tile)) * scale + tl.load(shift + lines)[None, :],
            product(v, tl.trans(grads)) + tl.load(delta + lines)[None, :], rows, False,
        )  # fmt: skip
        dv = tl.dot(probs.to(v.dtype), grads, dv, input_precision="ieee")
        dk = tl.dot(ds.to(k.dtype), q_tile, dk, input_precision="ieee")

    before = tl.cdiv((full - first) * (K * G), BLOCK_M)
    after = tl.cdiv(tl.maximum(last * (K * G) - full_end, 0), BLOCK_M)
    for i in tl.range(0, before + after, num_stages=1):
        row = tl.where(i < before, first * (K * G) + i * BLOCK_M, full_end + (i - before) * BLOCK_M)
        rows = row + tl.arange(0, BLOCK_M)
        there = rows < tl.where(i < before, full, last) * (K * G)
        _, _, row_first, row_end = row_facts(
            tl.where(there, rows, blocks * (K * G)),
            ctx_start, ctx_end, blocks, tokens, window, K, G, WINDOW,
        )  # fmt: skip
        lines = (rows // G).to(tl.int64) * (KV_HEADS * G) + head * G + rows % G
        q_tile = load_rows(q, lines * D, there, D, BLOCK_D, True)
        grads = load_rows(grad_out, lines * D, there, D, BLOCK_D, True)
        row_shift = tl.load(shift + lines, mask=there, other=0.0)
        row_delta = tl.load(delta + lines, mask=there, other=0.0)
        mask = (keys[:, None] >= row_first[None, :]) & (keys[:, None] < row_end[None, :])
        probs, ds = score_gradients(
            product(k, tl.trans(q_tile)) * scale + row_shift[None, :],
            product(v, tl.trans(grads)) + row_delta[None, :], mask, True,
        )  # fmt: skip
        dv = tl.dot(probs.to(v.dtype), grads, dv, input_precision="ieee")
        dk = tl.dot(ds.to(k.dtype), q_tile, dk, input_precision="ieee")
    offsets = (wide * KV_HEADS + head) * D
    dk *= scale / LOG2_E
    if ADD:
        dk += load_rows(dk_ctx, offsets, keys < stop, D, BLOCK_D, True)
        dv += load_rows(dv_ctx, offsets, keys < stop, D, BLOCK_D, True)
    store_rows(dk_ctx, offsets, keys < stop, dk, D, BLOCK_D)
    store_rows(dv_ctx, offsets, keys < stop, dv, D, BLOCK_D)
