// What the Hopper kernel of lm_head_topk does with the logits of a tile, which lie in registers:
// thread t of a warpgroup has those of its rows 16 (t / 32) + t % 32 / 4 and 8 further, in columns
// 8 j + 2 (t % 4) + e. Four neighbouring lanes share a row, and no other thread has part of it.
#pragma once

#include "lm_head_topk_schedule.cuh"

namespace dflash::sm90 {

// What a thread knows of one of its two rows; four neighbouring lanes share a row.
struct Row {
  float max, sum;   // of this lane's logits; sum of exp(z - max)
  int count;        // ids before the label, of this lane's
  float threshold;  // of candidates: no better than the row's k-th best
  int buffered;     // candidates, the same in the four lanes
  int label;        // -1: none
  float label_logit;
};

// A label in this tile, where ids before and after it mix, or a NaN as its logit.
__device__ __forceinline__ bool needs_close_count(const Row& row, int first_id) {
  return (row.label >= first_id && row.label < first_id + kTileIds) || isnan(row.label_logit);
}

// An id before the label comes before it in the order too if not z <= limit, with NaN for a limit
// below everything; that is z >= the label's. After the label, z > the label's is not z <= it.
__device__ __forceinline__ float limit_before(const Row& row) {
  if (row.label_logit == -INFINITY) return NAN;
  return isnan(row.label_logit) ? INFINITY : next_below(row.label_logit);
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr int kGroupsOfRow = 8;  // a lane's 64 logits of a row are looked at in groups of 8

// Logit i of this lane in group g of its row `kHalf`, and its offset in the tile.
template <int kHalf>
__device__ __forceinline__ constexpr int slot_of(int g, int i) {
  return 4 * (4 * g + i / 2) + 2 * kHalf + i % 2;
}

__device__ __forceinline__ int offset_of(int g, int i, int lane) {
  return 8 * (4 * g + i / 2) + 2 * (lane & 3) + (i & 1);
}

// The k-th largest of 32 numbers, eight in each of the four lanes of a row.
__device__ __forceinline__ uint32_t kth_of_32(const uint32_t (&mine)[8], int k) {
  int not_below[8];  // how many of the 32 are >= mine
#pragma unroll
  for (int i = 0; i < 8; ++i) not_below[i] = 0;
#pragma unroll 1
  for (int other = 0; other < 4; ++other) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t theirs = __shfl_xor_sync(~0u, mine[j], other);
#pragma unroll
      for (int i = 0; i < 8; ++i) not_below[i] += theirs >= mine[i];
    }
  }
  uint32_t best = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (not_below[i] >= k) best = max(best, mine[i]);
  }
  best = max(best, __shfl_xor_sync(~0u, best, 1));
  return max(best, __shfl_xor_sync(~0u, best, 2));
}

// Where a lane's row keeps candidates and the k best, and publishes.
struct RowStore {
  uint64_t* buffer;     // [kBuffer]
  uint64_t* list;       // [k], descending
  uint32_t* published;  // [num_published] of this strip
  int num_published;
};

// Puts the buffered candidates of a warp's eight rows into their lists, one of each row at a time.
__device__ __forceinline__ void flush(Row& row, const RowStore& store, int k) {
  const int lane = threadIdx.x & 31;
  __syncwarp();
  uint32_t last = 0;
#pragma unroll 1
  for (int i = 0; __any_sync(~0u, i < row.buffered); ++i) {
    const uint64_t key = i < row.buffered ? store.buffer[i] : 0;  // 0 changes nothing
    // Four places at a time, the last ones first.
#pragma unroll 1
    for (int first = (k - 1) & ~3; first >= 0; first -= 4) {
      const int place = first + (lane & 3);
      const bool exists = place < k;
      const uint64_t here = exists ? store.list[place] : 0;
      const uint64_t above = exists && place > 0 ? store.list[place - 1] : ~uint64_t{0};
      const uint64_t now = here > key ? here : above > key ? key : above;
      __syncwarp();
      if (exists && now != here) {
        store.list[place] = now;
        if (place < store.num_published) store.published[place] = static_cast<uint32_t>(now >> 32);
      }
      if (place == k - 1) last = static_cast<uint32_t>(now >> 32);
    }
    __syncwarp();
  }
  row.buffered = 0;
  last = __shfl_sync(~0u, last, (lane & ~3) | ((k - 1) & 3));
  if (last != 0) row.threshold = fmaxf(row.threshold, from_ordered_bits(last));
}

// The compiler must compute what depends on x after this.
__device__ __forceinline__ void keep_order(int& x) { asm volatile("" : "+r"(x)); }

template <int kHalf>
__device__ __forceinline__ float max_of_group(const float (&logits)[128], int g) {
  float z = logits[slot_of<kHalf>(g, 0)];
#pragma unroll
  for (int i = 1; i < 8; ++i) z = fmaxf(z, logits[slot_of<kHalf>(g, i)]);
  return z;
}

// Folds the logits of one tile and one row of each lane into the row's maximum, sum and count.
// Returns which groups may hold candidates, one bit each.
template <int kHalf>
__device__ __forceinline__ uint32_t fold(const float (&logits)[128], Row& row, int first_id) {
  float group_max[kGroupsOfRow];
  uint32_t groups = 0;
#pragma unroll
  for (int g = 0; g < kGroupsOfRow; ++g) {
    group_max[g] = max_of_group<kHalf>(logits, g);
    groups |= group_max[g] < row.threshold ? 0 : 1u << g;
  }
  float new_max = row.max;
#pragma unroll
  for (int g = 0; g < kGroupsOfRow; ++g) new_max = fmaxf(new_max, group_max[g]);
  const float shift = new_max == -INFINITY ? 0.0f : new_max * kLog2e;

  const float limit = row.label >= first_id + kTileIds ? limit_before(row) : row.label_logit;
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  int counts[2] = {0, 0};
#pragma unroll
  for (int g = 0; g < kGroupsOfRow; ++g) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float z = logits[slot_of<kHalf>(g, i)];
      sums[i % 4] += exp2_fast(fmaf(z, kLog2e, -shift));
      counts[i % 2] += !(z <= limit);
    }
  }
  const float tile_sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  row.sum = row.sum * exp2_fast(fmaf(row.max, kLog2e, -shift)) + tile_sum;
  row.max = new_max;
  // With the label in this tile, or NaN, count_closely() counts.
  if (!needs_close_count(row, first_id)) row.count += counts[0] + counts[1];
  // A NaN, which no maximum shows, or an infinity: rare, so every logit is looked at more closely.
  return isnan(tile_sum) ? (1u << kGroupsOfRow) - 1 : groups;
}

template <int kHalf>
__device__ __forceinline__ void count_closely(const float (&logits)[128], Row& row, int first_id) {
  int label = row.label - first_id - 2 * (threadIdx.x & 3);
  const float before = limit_before(row);
  const bool number = !isnan(row.label_logit);
  int count = 0;
#pragma unroll
  for (int g = 0; g < kGroupsOfRow; ++g) {
    keep_order(label);  // or the comparisons of all groups come first, in too many registers
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int offset = offset_of(g, i, 0);
      const float z = logits[slot_of<kHalf>(g, i)];
      count +=
          offset < label ? !(z <= before) : offset > label && number && !(z <= row.label_logit);
    }
  }
  if (needs_close_count(row, first_id)) row.count += count;
}

// Buffers the logits of one tile and one row of each lane that may be among the k best. `age`:
// tiles of this strip before.
template <int kHalf>
__device__ __forceinline__ void collect(const float (&logits)[128], Row& row, const RowStore& store,
                                        const uint32_t* published, int first_id, int age,
                                        uint32_t groups, const HeadParams& p) {
  const int lane = threadIdx.x & 31;
  const bool renew = (age & (age - 1)) == 0;  // the more tiles, the less a new bound gains
  if (renew) {
    uint32_t bounds[8] = {};
    if (age == 0) {  // the k-th of the groups' maxima
#pragma unroll
      for (int g = 0; g < 8; ++g) bounds[g] = ordered_bits(max_of_group<kHalf>(logits, g));
    } else if (published != nullptr) {
      const uint4* theirs = reinterpret_cast<const uint4*>(published + (lane & 3) * 8);
      const uint4 low = __ldcg(theirs), high = __ldcg(theirs + 1);
      bounds[0] = low.x, bounds[1] = low.y, bounds[2] = low.z, bounds[3] = low.w;
      bounds[4] = high.x, bounds[5] = high.y, bounds[6] = high.z, bounds[7] = high.w;
    }
    const uint32_t bound = kth_of_32(bounds, p.k);
    if (bound != 0) row.threshold = fmaxf(row.threshold, from_ordered_bits(bound));
  }
  groups = __reduce_or_sync(~0u, groups);
#pragma unroll
  for (int g = 0; g < kGroupsOfRow; ++g) {
    if ((groups >> g & 1) == 0) continue;
    uint32_t candidates = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool valid = published != nullptr && first_id + offset_of(g, i, lane) < p.valid;
      const bool found = valid && !(logits[slot_of<kHalf>(g, i)] < row.threshold);
      candidates |= found ? 1u << i : 0u;
    }
    uint32_t all;
    while ((all = __ballot_sync(~0u, candidates != 0)) != 0) {
      if (__any_sync(~0u, row.buffered + 4 > kBuffer)) flush(row, store, p.k);
      const int i = candidates == 0 ? 0 : __ffs(candidates) - 1;
      // A register cannot be chosen at run time.
      float z = logits[slot_of<kHalf>(g, 0)];
#pragma unroll
      for (int other = 1; other < 8; ++other) {
        if (i == other) z = logits[slot_of<kHalf>(g, other)];
      }
      const uint32_t quad = all >> (lane & ~3) & 0xf;
      if (candidates != 0) {
        const int place = row.buffered + __popc(quad & ((1u << (lane & 3)) - 1));
        store.buffer[place] = make_key(ordered_bits(z), first_id + offset_of(g, i, lane));
      }
      row.buffered += __popc(quad);
      candidates &= candidates - 1;
    }
  }
  if (renew) flush(row, store, p.k);
}

// Joins the four lanes of a row and writes its partial result.
__device__ __forceinline__ void write_part(Row& row, int index, const RowStore& store, int slot,
                                           const HeadParams& p) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const float other_max = __shfl_xor_sync(~0u, row.max, step);
    const float other_sum = __shfl_xor_sync(~0u, row.sum, step);
    const float larger = fmaxf(row.max, other_max);
    const float shift = larger == -INFINITY ? 0.0f : larger * kLog2e;
    // Written so that both lanes of a pair round alike.
    const float mine = __fmul_rn(row.sum, exp2_fast(fmaf(row.max, kLog2e, -shift)));
    const float theirs = __fmul_rn(other_sum, exp2_fast(fmaf(other_max, kLog2e, -shift)));
    row.sum = mine + theirs;
    row.max = larger;
    row.count += __shfl_xor_sync(~0u, row.count, step);
  }
  if (index >= p.num_rows) return;
  const int64_t part = static_cast<int64_t>(index) * p.schedule.slots + slot;
  if (p.k <= kSharedK) {
    for (int i = lane & 3; i < p.k; i += 4) p.keys[part * p.k + i] = store.list[i];
  }
  if ((lane & 3) == 0) {
    // A sum with +inf in it is of no use, but must not look like nothing.
    p.parts[part] = {row.max, row.max == INFINITY ? 1.0f : row.sum, row.count, 0};
  }
}

}  // namespace dflash::sm90
