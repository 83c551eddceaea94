// Sizes of the Hopper kernel of lm_head_topk, its parameters, and who works on what.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

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
constexpr int kSharedK = 16;  // up to here a list is in shared memory, beyond in global
constexpr int kBuffer = 16;   // candidates of a row
constexpr int kBufferPitch = kBuffer + 1;
constexpr int kMostPairs = 8;   // of a group
constexpr int kPaceSteps = 6;   // of K, between comparisons of progress
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
  const int64_t* labels;      // [rows] or null
  const float* label_logits;  // [rows] or null
  uint32_t* published;        // [rows, kPublished] ordered bits, 0 at first
  uint32_t* progress;         // [groups, strips, kMostPairs] see keep_pace(), 0 at first
  uint64_t* keys;             // [rows, slots, k], 0 at first
  Part* parts;                // [rows, slots], 0 at first
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
  int group, pair, begin, end;  // tiles
  int slot;                     // of its partial results
  int walkers;                  // clusters with the same strip, each of another pair
  int walker;                   // this one's number
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
      strip.group = group;
      strip.walkers = 0;
      if (extra < 0) {
        strip.slot = cluster / now.pairs;
        strip.walkers = now.pairs;
        strip.walker = cluster % now.pairs;
        strip.pair = first_pair + strip.walker;
        strip.begin = strip.slot * now.length;
        strip.end = min(strip.begin + now.length, schedule.tiles);
      } else {
        const int rest_begin = now.strips * now.length;
        const int rest = max(schedule.tiles - rest_begin, 1);
        const int at = extra * now.extra_length + done;
        const int stop =
            min((extra + 1) * now.extra_length, (schedule.tiles - rest_begin) * now.pairs);
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

}  // namespace dflash::sm90
