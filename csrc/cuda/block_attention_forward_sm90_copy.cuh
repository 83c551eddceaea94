// What block_attention's forward on Hopper walks, and the warps that bring it.
#pragma once

#include "sm90_attention.cuh"

namespace dflash::sm90 {

constexpr int kForwardDim = 128;  // of heads
constexpr int kForwardRows = 128;
constexpr int kForwardKeys = 128;  // of the context in a tile
constexpr int kShortKeys = 64;  // of a short tile: of the blocks' own slots, at the context's end
constexpr int kForwardThreads = 3 * 128;

struct ForwardParams {
  void* out;   // [A, K, Hq, D]
  float* lse;  // [A, K, Hq]
  const int64_t* ctx_start;
  const int64_t* ctx_end;
  int* taken;  // 0: pieces of work that were taken beyond the first of each block of threads
  int work;    // tiles of rows, times KV heads
  int blocks, slots, group, kv_heads, tokens;
  int64_t window;      // 0: none
  int head_k, head_v;  // elements from one head to the next in the context
  float scale;         // of scores, in powers of 2
  bool causal;
};

struct Span {
  int first, end;
};

// What the rows of a tile see: tokens of the context, slots of their own blocks counted over all.
struct RowSpans {
  Span context[kForwardRows], own[kForwardRows];
};

// The keys of a piece of work: short tiles of own slots, then those tiles of the context that need
// a mask: the last one if a short one holds its keys, those before and after the others; then the
// others.
struct Walk {
  int head;  // -1: no more work
  int rows;  // the tile
  int own_begin, own;
  int begin, tail, before, masked, tiles;  // tail: 1 if the last tile of the context is short

  __device__ int key(int i) const {
    if (i < tail) return begin + (tiles - tail) * kForwardKeys;
    if (i >= masked) return begin + (i - masked + before) * kForwardKeys;
    i -= tail;
    return begin + (i < before ? i : i + tiles - masked) * kForwardKeys;
  }
};

struct ForwardShared {
  static constexpr int kStages = 2;
  static constexpr int kBoxes = kForwardDim / 64;
  static constexpr int kBox = 128 * 128, kTile = kBoxes * kBox;  // of queries and of keys
  static constexpr int kKeys = 2 * kTile, kValues = kKeys + kStages * kTile;
  static constexpr int kSpans = kValues + kStages * kTile;
  static constexpr int kWalks = kSpans + 2 * sizeof(RowSpans);
  static constexpr int kBarriers = kWalks + 2 * sizeof(Walk);
  // Barriers: of a piece's plan, of its queries, of their buffer; of the keys and the values of
  // each stage; of values that are cleared.
  static constexpr int kPlanned = kBarriers, kQueries = kPlanned + 2 * 8;
  static constexpr int kQueriesFree = kQueries + 2 * 8, kFilled = kQueriesFree + 2 * 8;
  static constexpr int kFreed = kFilled + 2 * kStages * 8;
  static constexpr int kCleared = kFreed + 2 * kStages * 8;
  static constexpr int kBytes = kCleared + kStages * 8;
};

// Piece `index` of the work, and what its rows see: by a warp.
__device__ __forceinline__ Walk plan(const ForwardParams& p, int index, RowSpans& spans) {
  // Contexts grow along a document: the longest last would leave a tail.
  const int at = p.work - 1 - index;
  Walk walk;
  walk.head = at % p.kv_heads;
  walk.rows = at / p.kv_heads;
  const int size = kForwardRows / p.group, first_slot = walk.rows * size;
  const int slots_end = min(first_slot + size, p.blocks * p.slots);
  walk.own_begin = first_slot / p.slots * p.slots;
  const int own_end = (slots_end - 1) / p.slots * p.slots + p.slots;
  walk.own = (own_end - walk.own_begin + kShortKeys - 1) / kShortKeys;

  int begin = p.tokens, last = 0, full_begin = 0, full_end = p.tokens;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int row = 32 * i + (threadIdx.x & 31), in_tile = row / p.group;
    const int slot = first_slot + in_tile;
    spans.context[row] = spans.own[row] = {0, 0};
    if (in_tile >= size || slot >= slots_end) continue;
    const int block = slot / p.slots, in_block = slot - block * p.slots;
    const int64_t stop = min(max(p.ctx_end[block], int64_t{0}), int64_t{p.tokens});
    int64_t start = min(max(p.ctx_start[block], int64_t{0}), stop);
    int64_t own_first = 0, own_stop = p.causal ? in_block + 1 : p.slots;
    if (p.window > 0) {
      start = min(max(start, stop + in_block - p.window + 1), stop);
      own_first = max(own_first, in_block - p.window + 1);
      own_stop = min(own_stop, in_block + p.window);
    }
    const Span context{static_cast<int>(start), static_cast<int>(stop)};
    spans.context[row] = context;
    spans.own[row] = {block * p.slots + static_cast<int>(own_first),
                      block * p.slots + static_cast<int>(own_stop)};
    const bool sees = start < stop;
    begin = min(begin, sees ? context.first : p.tokens);
    last = max(last, sees ? context.end : 0);
    // A row that sees nothing: no tile is seen by all.
    full_begin = max(full_begin, sees ? context.first : p.tokens);
    full_end = min(full_end, sees ? context.end : 0);
  }
  begin = __reduce_min_sync(0xffffffff, begin);
  last = __reduce_max_sync(0xffffffff, last);
  full_begin = __reduce_max_sync(0xffffffff, full_begin);
  full_end = __reduce_min_sync(0xffffffff, full_end);
  walk.begin = begin;
  const int keys = max(last - begin, 0), left = keys % kForwardKeys;
  walk.tail = left > 0 && left <= kShortKeys;
  const int whole = keys / kForwardKeys + (left > kShortKeys);
  walk.before = min((max(full_begin - begin, 0) + kForwardKeys - 1) / kForwardKeys, whole);
  const int after = max(min(max(full_end - begin, 0) / kForwardKeys, whole), walk.before);
  walk.tiles = walk.tail + whole;
  walk.masked = walk.tail + walk.before + whole - after;
  return walk;
}

struct ForwardMaps {
  CUtensorMap q, k, v, k_own, v_own;
};

// Takes pieces of work, plans them and copies their queries: by a warp, a piece ahead of all else.
__device__ __forceinline__ void plan_work(const ForwardMaps& maps, const ForwardParams& p,
                                          uint8_t* memory) {
  using Shared = ForwardShared;
  const uint32_t base = shared_address(memory);
  const int lane = threadIdx.x & 31, size = kForwardRows / p.group;
  for (int piece = 0;; ++piece) {
    const int buffer = piece & 1;
    const uint32_t planned = base + Shared::kPlanned + 8 * buffer;
    const uint32_t queries = base + Shared::kQueries + 8 * buffer;
    Walk& shown = reinterpret_cast<Walk*>(memory + Shared::kWalks)[buffer];
    wait(base + Shared::kQueriesFree + 8 * buffer, (piece >> 1 & 1) ^ 1);
    int index = blockIdx.x;
    if (piece > 0) {
      if (lane == 0) index = gridDim.x + atomicAdd(p.taken, 1);
      index = __shfl_sync(0xffffffff, index, 0);
    }
    if (index >= p.work) {
      if (lane == 0) shown.head = -1;
      arrive(planned);
      return;
    }
    const Walk walk = plan(p, index, reinterpret_cast<RowSpans*>(memory + Shared::kSpans)[buffer]);
    if (lane == 0) shown = walk;
    arrive(planned);
    if (lane == 0) {
      arrive_expect(queries, Shared::kBoxes * 128 * size * p.group);
#pragma unroll
      for (int box = 0; box < Shared::kBoxes; ++box) {
        copy_box(base + buffer * Shared::kTile + box * Shared::kBox, &maps.q, 64 * box,
                 walk.head * p.group, walk.rows * size, queries);
      }
    }
  }
}

// Copies the keys and values of each piece: by one thread.
__device__ __forceinline__ void copy_work(const ForwardMaps& maps, const ForwardParams& p,
                                          uint8_t* memory) {
  using Shared = ForwardShared;
  const uint32_t base = shared_address(memory);
  for (int piece = 0, step = 0;; ++piece) {
    const int buffer = piece & 1;
    wait(base + Shared::kPlanned + 8 * buffer, piece >> 1 & 1);
    const Walk walk = reinterpret_cast<const Walk*>(memory + Shared::kWalks)[buffer];
    if (walk.head < 0) return;
    for (int i = 0; i < walk.own + walk.tiles; ++i, ++step) {
      const int stage = step % Shared::kStages;
      const uint32_t parity = (step / Shared::kStages & 1) ^ 1;
      const bool is_own = i < walk.own;
      const int row = is_own ? walk.own_begin + i * kShortKeys : walk.key(i - walk.own);
      const int column_k = walk.head * (is_own ? kForwardDim : p.head_k);
      const int column_v = walk.head * (is_own ? kForwardDim : p.head_v);
      const CUtensorMap* k = is_own ? &maps.k_own : &maps.k;
      const CUtensorMap* v = is_own ? &maps.v_own : &maps.v;
      const uint32_t bytes = Shared::kBoxes * 128 * (is_own ? kShortKeys : kForwardKeys);
      const uint32_t target = base + Shared::kKeys + stage * Shared::kTile;
      const uint32_t filled = base + Shared::kFilled + 16 * stage;
      const uint32_t freed = base + Shared::kFreed + 16 * stage;
      wait(freed, parity);
      arrive_expect(filled, bytes);
#pragma unroll
      for (int box = 0; box < Shared::kBoxes; ++box) {
        copy_box(target + box * Shared::kBox, k, column_k + 64 * box, row, filled);
      }
      wait(freed + 8, parity);
      arrive_expect(filled + 8, bytes);
#pragma unroll
      for (int box = 0; box < Shared::kBoxes; ++box) {
        copy_box(target + Shared::kValues - Shared::kKeys + box * Shared::kBox, v,
                 column_v + 64 * box, row, filled + 8);
      }
    }
    arrive(base + Shared::kQueriesFree + 8 * buffer);
  }
}

// Zeroes values that no row sees: a probability of 0 does not cancel a NaN.
__device__ __forceinline__ void clear_unseen(const ForwardParams& p, uint8_t* memory) {
  using Shared = ForwardShared;
  const uint32_t base = shared_address(memory);
  const int lane = threadIdx.x & 31, size = kForwardRows / p.group;
  for (int piece = 0, step = 0;; ++piece) {
    const int buffer = piece & 1;
    wait(base + Shared::kPlanned + 8 * buffer, piece >> 1 & 1);
    const Walk walk = reinterpret_cast<const Walk*>(memory + Shared::kWalks)[buffer];
    if (walk.head < 0) return;
    const RowSpans& spans = reinterpret_cast<const RowSpans*>(memory + Shared::kSpans)[buffer];
    for (int i = 0; i < walk.own + walk.tiles; ++i, ++step) {
      const int stage = step % Shared::kStages;
      const bool is_own = i < walk.own, masked = i < walk.own + walk.masked;
      const int keys = i < walk.own + walk.tail ? kShortKeys : kForwardKeys;
      bool seen[4] = {};  // of keys `lane`, `lane` + 32, ... of the tile
      if (masked) {
        const int key = (is_own ? walk.own_begin + i * kShortKeys : walk.key(i - walk.own)) + lane;
        const Span* rows = is_own ? spans.own : spans.context;
        for (int slot = 0; slot < size; ++slot) {
          const Span span = rows[slot * p.group];
#pragma unroll
          for (int part = 0; part < 4; ++part) {
            const int at = key + 32 * part;
            seen[part] |= at >= span.first && at < span.end;
          }
        }
      }
      wait(base + Shared::kFilled + 16 * stage + 8, step / Shared::kStages & 1);
      if (masked) {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          const uint32_t unseen = ~__ballot_sync(0xffffffff, seen[part]);
          if (unseen == 0 || 32 * part >= keys) continue;
          for (int four = lane / 8; four < 32; four += 4) {
            if (!(unseen >> four & 1)) continue;
#pragma unroll
            for (int box = 0; box < Shared::kBoxes; ++box) {
              uint8_t* tile = memory + Shared::kValues + stage * Shared::kTile;
              uint8_t* row = tile + box * Shared::kBox + (32 * part + four) * 128;
              reinterpret_cast<uint4*>(row)[lane % 8] = {};
            }
          }
        }
        fence_async_proxy();
      }
      arrive(base + Shared::kCleared + 8 * stage);
    }
    arrive(base + Shared::kQueriesFree + 8 * buffer);
  }
}

}  // namespace dflash::sm90
