// metric_add on a GPU: sums of a batch's statistics, added to an accumulator without a lock.
//
// A warp takes a block of slots, a lane a slot: a streak is then the run of ones at the start of a
// ballot. Sums are integers (fixed point), so neither the order of the warps nor the atomics can
// change a bit of the result.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "metric_layout.h"

namespace dflash {

constexpr int kAddThreads = 256;
constexpr int kAddWarps = kAddThreads / 32;
constexpr int64_t kAddMaxBlocks = 132;
static_assert(kMaxBlock == 32, "a lane a slot");

struct MetricAddParams {
  int64_t* acc;          // [kNumWords]
  const int64_t* rank;   // [blocks, block_size], not read unless the batch is measured
  const float* terms;    // [blocks, block_size, kMetricTerms]
  const float* weights;  // [blocks, block_size]
  int64_t blocks;
  int block_size;
  bool measured;
};

__device__ __forceinline__ int64_t fixed_point(double value) {
  return __double2ll_rn(value * kMetricScale);
}

__device__ __forceinline__ void add_word(int64_t* word, int64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
}

__device__ __forceinline__ void add_warp_sum(int64_t* word, int64_t value, int lane) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_down_sync(~0u, value, offset);
  }
  if (lane == 0) add_word(word, value);
}

// The number of ones before the first zero, from bit 0 on.
__device__ __forceinline__ int leading_ones(unsigned bits) {
  return bits == ~0u ? 32 : __ffs(~bits) - 1;
}

__global__ void __launch_bounds__(kAddThreads)
    metric_add_kernel(const __grid_constant__ MetricAddParams params) {
  __shared__ int64_t words[kNumWords];
  for (int i = threadIdx.x; i < kNumWords; i += kAddThreads) words[i] = 0;
  __syncthreads();

  const int lane = threadIdx.x % 32;
  int64_t sums[kMetricTerms] = {}, weight_sum = 0;
  int bad = 0, supervised_blocks = 0, good_slots = 0, hits[3] = {}, streaks[3] = {};
  int slot_n = 0, slot_hit = 0;
  for (int64_t a = int64_t{blockIdx.x} * kAddWarps + threadIdx.x / 32; a < params.blocks;
       a += int64_t{gridDim.x} * kAddWarps) {
    const int64_t slot = a * params.block_size + lane;
    const bool inside = lane < params.block_size;
    const double weight = inside ? params.weights[slot] : 0.f;
    const int64_t rank = inside && params.measured ? params.rank[slot] : 0;
    const bool supervised = weight > 0;
    double products[kMetricTerms] = {};
    bool good = supervised;
#pragma unroll
    for (int i = 0; i < kMetricTerms; ++i) {
      if (inside) products[i] = weight * params.terms[slot * kMetricTerms + i];
      // Written so that NaN is bad too.
      const bool fine = fabs(products[i]) < kMaxValue && weight < kMaxValue;
      bad += supervised && !fine;
      good = good && fine;
    }
    if (good) {
#pragma unroll
      for (int i = 0; i < kMetricTerms; ++i) sums[i] += fixed_point(products[i]);
      weight_sum += fixed_point(weight);
    }
    if (!params.measured) continue;
    const unsigned supervised_bits = __ballot_sync(~0u, supervised);
    const unsigned good_bits = __ballot_sync(~0u, good);
    const int start = supervised_bits & 1 ? 0 : 1;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      constexpr int kWidths[] = {1, 4, 8};
      const unsigned hit_bits = __ballot_sync(~0u, good && rank < kWidths[i]);
      hits[i] += __popc(hit_bits);
      streaks[i] += leading_ones(hit_bits >> start);
    }
    supervised_blocks += supervised_bits != 0;
    good_slots += __popc(good_bits);
    slot_n += good;
    slot_hit += good && rank < 1;
  }

  add_warp_sum(&words[kLossSum], sums[0], lane);
  add_warp_sum(&words[kLossWeight], weight_sum, lane);
  add_warp_sum(&words[kNonfiniteValues], bad, lane);
  if (params.measured) {
    add_warp_sum(&words[kCeSum], sums[1], lane);
    add_warp_sum(&words[kKlSum], sums[2], lane);
    add_warp_sum(&words[kCapSum], sums[3], lane);
    add_word(&words[kSlotN + lane], slot_n);
    add_word(&words[kSlotHit + lane], slot_hit);
    if (lane == 0) {
      add_word(&words[kSlots], good_slots);
      add_word(&words[kTop1], hits[0]);
      add_word(&words[kTop4], hits[1]);
      add_word(&words[kTop8], hits[2]);
      add_word(&words[kBlocks], supervised_blocks);
      add_word(&words[kStreak1], streaks[0]);
      add_word(&words[kStreak4], streaks[1]);
      add_word(&words[kStreak8], streaks[2]);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (params.measured) words[kTermWeight] = words[kLossWeight];
    if (blockIdx.x == 0) {
      words[kBatches] = 1;
      words[kMeasuredBatches] = params.measured;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kNumWords; i += kAddThreads) {
    if (words[i] != 0) add_word(&params.acc[i], words[i]);
  }
}

inline cudaError_t launch_metric_add(const MetricAddParams& params, cudaStream_t stream) {
  // One thread block at least: it counts the batch.
  const int64_t wanted = (params.blocks + kAddWarps - 1) / kAddWarps;
  const int64_t grid = wanted < 1 ? 1 : wanted < kAddMaxBlocks ? wanted : kAddMaxBlocks;
  metric_add_kernel<<<grid, kAddThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace dflash
