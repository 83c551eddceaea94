// lm_head_topk on Hopper: hidden @ weight^T by TMA and wgmma, its logits consumed in registers.
//
// A cluster of two blocks takes 256 rows of hidden and a strip of the vocabulary, which it walks in
// ascending order, 256 ids at a time; both blocks need the same ids, so each copies half of them
// into both. In a block one warpgroup copies and two multiply, 64 rows each. After each 256 ids a
// multiplying thread holds 2 x 64 logits and folds them into its rows' running maximum, sum of
// exponentials, number of ids before the label and candidates for the k best. Candidates are
// buffered and from time to time put into the row's sorted list. Strips publish the best of their
// lists, from which each infers a bound on the row's k-th best, so that there are few candidates.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "sm90.cuh"
#include "topk_key.cuh"

namespace dflash::sm90 {

constexpr int kTileRows = 128;  // of a block, 64 of a multiplying warpgroup
constexpr int kPairRows = 2 * kTileRows;
constexpr int kTileIds = 256;
constexpr int kTileK = 64;  // 128 bytes, the width of the swizzle
constexpr int kStages = 4;
constexpr int kRowsBytes = kTileRows * kTileK * 2;
constexpr int kIdsBytes = kTileIds * kTileK * 2;
constexpr int kStageBytes = kRowsBytes + kIdsBytes;
constexpr int kThreads = 384;
constexpr int kMaxK = 32;
constexpr int kSharedK = 16;    // up to here a list is in shared memory, beyond in global
constexpr int kBuffer = 16;     // candidates of a row
constexpr int kBufferPitch = kBuffer + 1;
constexpr int kPublished = 32;  // logits of a row that its strips publish, together
constexpr float kLog2e = 1.4426950408889634f;

// One group of row pairs is worked off at a time, so that its hidden states stay in L2. Each of its
// pairs has `strips` strips of `length` tiles; what is left of the vocabulary after them is cut
// evenly for the clusters left over.
struct Group {
  int pairs, strips, length, extra_clusters, extra_length;
};

struct Schedule {
  int tiles, clusters;
  int num_groups, num_larger;  // groups [0, num_larger) have one pair more
  Group larger, smaller;
  int slots;      // partial results of a row
  int published;  // logits a strip publishes for the others
};

// Partial result of a row over one strip. sum = 0: nothing but -inf. A NaN shows in the keys.
struct Part {
  float max, sum;
  int count, unused;
};

struct HeadParams {
  int num_rows, valid, width, k;
  Transform transform;
  const int64_t* labels;       // [rows] or null
  const float* label_logits;   // [rows] or null
  uint32_t* published;         // [rows, kPublished] ordered bits, 0 at first
  uint64_t* keys;              // [rows, slots, k], 0 at first
  Part* parts;                 // [rows, slots], 0 at first
  Schedule schedule;
};

inline int shared_list_bytes(int k) {
  return kTileRows * 8 * (kBufferPitch + (k <= kSharedK ? k : 0));
}

inline Group plan_group(int pairs, int clusters, int tiles) {
  Group group{pairs, std::min(clusters / pairs, tiles), 0, 0, 0};
  const int idle = clusters - group.strips * pairs;
  group.length = (tiles + group.strips - 1) / group.strips;
  if (group.strips == tiles || idle == 0) return group;
  // The length that makes the slowest cluster fastest.
  int best = group.length;
  for (int length = tiles * pairs / clusters; length < group.length; ++length) {
    const int rest = pairs * (tiles - group.strips * length);
    const int extra = (rest + idle - 1) / idle;
    if (std::max(length, extra) >= best) continue;
    best = std::max(length, extra);
    group.length = length;
    group.extra_clusters = idle;
    group.extra_length = extra;
  }
  return group;
}

inline Schedule plan_schedule(int num_rows, int valid, int width, int clusters) {
  constexpr int kPairsBytes = 22 << 20;  // of hidden states at a time; L2 has 50 MB and more
  constexpr int kMostPairs = 8;
  Schedule schedule{};
  schedule.tiles = (valid + kTileIds - 1) / kTileIds;
  schedule.clusters = clusters;
  const int pairs = (num_rows + kPairRows - 1) / kPairRows;
  const int most = std::clamp(clusters - 1, 1, kMostPairs);
  const int fit = std::clamp(kPairsBytes / (kPairRows * 2 * width), 1, most);
  schedule.num_groups = (pairs + fit - 1) / fit;
  schedule.num_larger = pairs % schedule.num_groups;
  const int smaller = pairs / schedule.num_groups;
  schedule.smaller = plan_group(smaller, clusters, schedule.tiles);
  schedule.larger = plan_group(smaller + 1, clusters, schedule.tiles);
  // There are fewer clusters left over than pairs, so a pair's rest is cut at most once.
  schedule.slots = schedule.smaller.strips + 2;
  schedule.published = std::max(kPublished / schedule.smaller.strips, 1);
  return schedule;
}

struct Strip {
  int pair, begin, end;  // tiles
  int slot;              // of its partial results
};

// The strips of one cluster, in turn.
struct StripIterator {
  int group = 0;
  int first_pair = 0;
  int done = 0;  // tiles of a cluster left over, in the group at hand

  __device__ __forceinline__ bool next(const Schedule& schedule, int cluster, Strip& strip) {
    while (group < schedule.num_groups) {
      const Group& now = group < schedule.num_larger ? schedule.larger : schedule.smaller;
      const int extra = cluster - now.strips * now.pairs;
      bool last = true;
      if (extra < 0) {
        strip.slot = cluster / now.pairs;
        strip.pair = first_pair + cluster % now.pairs;
        strip.begin = strip.slot * now.length;
        strip.end = min(strip.begin + now.length, schedule.tiles);
      } else {
        const int rest_begin = now.strips * now.length;
        const int rest = max(schedule.tiles - rest_begin, 1);
        const int at = extra * now.extra_length + done;
        const int stop = min((extra + 1) * now.extra_length,
                             (schedule.tiles - rest_begin) * now.pairs);
        const int begin = at % rest;
        const int end = min(rest, begin + stop - at);
        strip.slot = now.strips + (begin > 0 ? 1 : 0);
        strip.pair = first_pair + at / rest;
        strip.begin = rest_begin + begin;
        strip.end = rest_begin + end;
        last = at + (end - begin) >= stop;
        done += end - begin;
      }
      if (last) {
        ++group;
        first_pair += now.pairs;
        done = 0;
      }
      if (strip.begin < strip.end) return true;
    }
    return false;
  }
};

// Position in the ring of stages; parity flips at each round.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// What a thread knows of one of its two rows; four neighbouring lanes share a row.
struct Row {
  float max, sum;  // of this lane's logits; sum of exp(z - max)
  int count;  // ids before the label, of this lane's
  float threshold;  // of candidates: no better than the row's k-th best
  int buffered;     // candidates, the same in the four lanes
  int label;  // -1: none
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
      count += offset < label ? !(z <= before) : offset > label && number && !(z <= row.label_logit);
    }
  }
  if (needs_close_count(row, first_id)) row.count += count;
}

// Buffers the logits of one tile and one row of each lane that may be among the k best. `age`: tiles
// of this strip before.
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

template <typename T>
__global__ void __cluster_dims__(2) __launch_bounds__(kThreads, 1)
    head_kernel(const __grid_constant__ CUtensorMap hidden, const __grid_constant__ CUtensorMap weight,
                const __grid_constant__ HeadParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  uint64_t* buffers = reinterpret_cast<uint64_t*>(shared + kStages * kStageBytes);
  uint64_t* lists = buffers + kTileRows * kBufferPitch;
  __shared__ uint64_t barriers[2 * kStages];
  const uint32_t stages = shared_address(shared);
  const uint32_t full = shared_address(barriers), empty = full + kStages * 8;
  const int rank = cluster_rank();
  const int cluster = blockIdx.x / 2;
  const int warpgroup = threadIdx.x / 128;
  const int steps = (p.width + kTileK - 1) / kTileK;
  StripIterator strips;
  Strip strip;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 2 * 8);  // the multiplying warps of both blocks
    }
    fence_barrier_init();
  }
  cluster_sync();

  if (warpgroup == 2) {
    give_registers<40>();
    if (threadIdx.x == 256) {
      Ring ring;
      while (strips.next(p.schedule, cluster, strip)) {
        const int row = strip.pair * kPairRows + rank * kTileRows;
        for (int tile = strip.begin; tile < strip.end; ++tile) {
          const int id = tile * kTileIds + rank * (kTileIds / 2);
#pragma unroll 1
          for (int step = 0; step < steps; ++step) {
            const uint32_t stage = stages + ring.stage * kStageBytes;
            const uint32_t barrier = full + 8 * ring.stage;
            wait(empty + 8 * ring.stage, ring.parity ^ 1);
            arrive_expect(barrier, kStageBytes);
            copy_box(stage, &hidden, step * kTileK, row, barrier);
            copy_box_multicast(stage + kRowsBytes + rank * (kIdsBytes / 2), &weight, step * kTileK,
                               id, barrier, 3);
            ring.advance();
          }
        }
      }
    }
  } else {
    take_registers<232>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int first_row = warp * 16 + lane / 4;  // of the lane's two, in the tile
    const uint32_t my_rows = warpgroup * (kRowsBytes / 2);
    const auto release = [&](int stage) {
      if (lane < 2) arrive_cluster(empty + 8 * stage, lane);
    };
    Ring ring;
    float logits[128];

    while (strips.next(p.schedule, cluster, strip)) {
      int index = strip.pair * kPairRows + rank * kTileRows + first_row;
      Row rows[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[half] = {-INFINITY, 0.0f, 0, -INFINITY, 0, -1, 0.0f};
        if (p.labels == nullptr || index + 8 * half >= p.num_rows) continue;
        // A label out of range is dealt with at the end; any number will do here.
        rows[half].label = static_cast<int>(p.labels[index + 8 * half]);
        rows[half].label_logit = p.label_logits[index + 8 * half];
      }
      if (p.k <= kSharedK) {
        for (int i = lane; i < 16 * p.k; i += 32) lists[warp * 16 * p.k + i] = 0;
      }
      __syncwarp();
      const auto published_of = [&](int half) {
        const int row = index + 8 * half;
        return row < p.num_rows ? p.published + static_cast<int64_t>(row) * kPublished : nullptr;
      };
      const auto store_of = [&](int half) {
        const int row = min(index + 8 * half, p.num_rows - 1);  // one beyond has no candidates
        const int first = strip.slot * p.schedule.published;
        const int64_t part = static_cast<int64_t>(row) * p.schedule.slots + strip.slot;
        return RowStore{buffers + (first_row + 8 * half) * kBufferPitch,
                        p.k <= kSharedK ? lists + (first_row + 8 * half) * p.k : p.keys + part * p.k,
                        p.published + static_cast<int64_t>(row) * kPublished + first,
                        min(p.schedule.published, kPublished - first)};
      };

      for (int tile = strip.begin; tile < strip.end; ++tile) {
        int previous = 0;
        for (int step = 0; step < steps; ++step) {
          wait(full + 8 * ring.stage, ring.parity);
          const uint32_t stage = stages + ring.stage * kStageBytes;
          const uint64_t a = operand(stage + my_rows), b = operand(stage + kRowsBytes);
          pin(logits);
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kTileK / 16; ++i) {
            wgmma<T>(logits, a + i * kOperandStep, b + i * kOperandStep, step > 0 || i > 0);
          }
          wgmma_commit();
          pin(logits);
          // Only now are the products of the step before done, and its stage free.
          wgmma_wait<1>();
          if (step > 0) release(previous);
          previous = ring.stage;
          ring.advance();
        }
        wgmma_wait<0>();
        pin(logits);
        release(previous);

        const int first_id = tile * kTileIds;
        if (p.transform.softcap > 0 || p.transform.scale != 1.0f) {
#pragma unroll
          for (int i = 0; i < 128; ++i) logits[i] = p.transform(logits[i]);
        }
        if (first_id + kTileIds > p.valid) {
#pragma unroll
          for (int i = 0; i < 128; ++i) {
            const int id = first_id + 8 * (i / 4) + 2 * (lane & 3) + i % 2;
            if (id >= p.valid) logits[i] = -INFINITY;
          }
        }
        const int age = tile - strip.begin;
        const uint32_t groups[2] = {fold<0>(logits, rows[0], first_id),
                                    fold<1>(logits, rows[1], first_id)};
        if (__any_sync(~0u, needs_close_count(rows[0], first_id) ||
                                needs_close_count(rows[1], first_id))) {
          count_closely<0>(logits, rows[0], first_id);
          count_closely<1>(logits, rows[1], first_id);
        }
        keep_order(index);  // no pointers in registers meanwhile
        collect<0>(logits, rows[0], store_of(0), published_of(0), first_id, age, groups[0], p);
        collect<1>(logits, rows[1], store_of(1), published_of(1), first_id, age, groups[1], p);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        flush(rows[half], store_of(half), p.k);
        write_part(rows[half], index + 8 * half, store_of(half), strip.slot, p);
      }
      __syncwarp();
    }
  }
  // The other block may still copy into this one or arrive at its barriers.
  cluster_sync();
#endif
}

}  // namespace dflash::sm90
