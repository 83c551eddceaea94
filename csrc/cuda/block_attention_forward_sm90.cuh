// Forward of block_attention on Hopper, by TMA and wgmma.
//
// A block of threads takes one piece of work after another: a tile of 128 rows, which are the
// queries of one KV head in as many slots as fit, and the keys that some of them see. One warp
// plans, a piece ahead, one copies, one clears values that no row sees, two warpgroups multiply,
// each for 64 of the rows, and take turns: one's softmax hides under the other's products. The
// product of a tile's probabilities is issued after the next tile's scores.
#pragma once

#include "block_attention_forward_sm90_copy.cuh"

namespace dflash::sm90 {

// Turns of two warpgroups, who have barriers 1 and 2: a turn waited for must have been given.
__device__ __forceinline__ void give_turn(int warpgroup) {
  asm volatile("bar.arrive %0, 256;" ::"r"(warpgroup + 1) : "memory");
}

__device__ __forceinline__ void wait_for_turn(int warpgroup) {
  asm volatile("bar.sync %0, 256;" ::"r"(warpgroup + 1) : "memory");
}

// -inf for what this thread's two rows, rows[0] and rows[8], do not see of the keys from `start`.
template <int kSize>
__device__ __forceinline__ void mask_scores(float (&s)[kSize], const Span* rows, int start) {
  const int column = start + 2 * (threadIdx.x & 3);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const Span span = rows[8 * h];
    const int first = column - span.first;
    const uint32_t length = span.end - span.first;
#pragma unroll
    for (int j = 0; j < kSize / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (static_cast<uint32_t>(first + 8 * j + e) >= length) s[4 * j + 2 * h + e] = -INFINITY;
      }
    }
  }
}

// One tile of the running softmax: `top` is scaled to powers of 2, `total` this thread's part.
template <int kSize>
__device__ __forceinline__ void softmax(float (&s)[kSize], float (&top)[2], float (&total)[2],
                                        float (&shrink)[2], float scale) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float largest = s[2 * h];
#pragma unroll
    for (int j = 0; j < kSize / 4; ++j) {
      largest = fmaxf(largest, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
    const float new_top = fmaxf(top[h], largest * scale);
    shrink[h] = exp2_approximate(top[h] - new_top);
    top[h] = new_top;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kSize / 4; ++j) {
      float& low = s[4 * j + 2 * h];
      float& high = s[4 * j + 2 * h + 1];
      low = exp2_approximate(fmaf(low, scale, -new_top));
      high = exp2_approximate(fmaf(high, scale, -new_top));
      sum += low + high;
    }
    total[h] = fmaf(total[h], shrink[h], sum);
  }
}

__device__ __forceinline__ void rescale(float (&o)[kForwardDim / 2], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kForwardDim / 2; ++i) o[i] *= factor[i / 2 % 2];
}

template <typename T, int kSize>
__device__ __forceinline__ void round_probabilities(const float (&s)[kSize],
                                                    uint32_t (&probs)[32]) {
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) probs[i] = pack<T>(s[2 * i], s[2 * i + 1]);
}

template <typename T>
__device__ __forceinline__ void multiply_work(const ForwardParams& p, uint8_t* memory) {
  using Shared = ForwardShared;
  const uint32_t base = shared_address(memory);
  const int warpgroup = threadIdx.x / 128 - 1, lane = threadIdx.x & 31;
  const int row = 16 * (threadIdx.x / 32 - 4) + lane / 4, size = kForwardRows / p.group;
  if (warpgroup == 1) give_turn(0);
  for (int piece = 0, step = 0;; ++piece) {
    const int buffer = piece & 1;
    wait(base + Shared::kPlanned + 8 * buffer, piece >> 1 & 1);
    const Walk walk = reinterpret_cast<const Walk*>(memory + Shared::kWalks)[buffer];
    if (walk.head < 0) break;
    wait(base + Shared::kQueries + 8 * buffer, piece >> 1 & 1);
    const RowSpans& spans = reinterpret_cast<const RowSpans*>(memory + Shared::kSpans)[buffer];
    const uint64_t q = operand(base + buffer * Shared::kTile + warpgroup * 64 * 128);
    float o[kForwardDim / 2], total[2] = {0, 0}, shrink[2];
    // Not -inf: a tile in which a row sees nothing leaves it as it is. Every row sees own slots,
    // whose first makes `shrink` 0.
    float top[2] = {-1e30f, -1e30f};
    uint32_t probs[32];
#pragma unroll
    for (int i = 0; i < kForwardDim / 2; ++i) o[i] = 0;

    const auto issue_scores = [&](auto& s) {
      const int stage = step % Shared::kStages;
      const uint64_t k = operand(base + Shared::kKeys + stage * Shared::kTile);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kForwardDim / 16; ++i) {
        const uint64_t inner = (i / 4 * Shared::kBox >> 4) + i % 4 * kOperandStep;
        multiply<T>(s, q + inner, k + inner, i > 0);
      }
      wgmma_commit();
    };
    const auto issue_values = [&](int of, auto keys) {
      const int stage = of % Shared::kStages;
      wait(base + Shared::kFilled + 16 * stage + 8, of / Shared::kStages & 1);
      wait(base + Shared::kCleared + 8 * stage, of / Shared::kStages & 1);
      const uint64_t v =
          operand_across(base + Shared::kValues + stage * Shared::kTile, Shared::kBox);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < decltype(keys)::value / 16; ++i)
        multiply<T>(o, probs + 4 * i, v + i * kAcrossStep, 1);
      wgmma_commit();
    };
    const auto wait_for_keys = [&] {
      wait(base + Shared::kFilled + 16 * (step % Shared::kStages), step / Shared::kStages & 1);
    };
    // A lane's arrival says nothing of what the others have read, unless they have met before.
    const auto free_keys = [&] {
      warp_arrive(base + Shared::kFreed + 16 * (step % Shared::kStages));
    };
    const auto wait_for_values = [&](int of) {
      wgmma_wait<0>();
      pin(o);
      warp_arrive(base + Shared::kFreed + 16 * (of % Shared::kStages) + 8);
    };
    constexpr std::integral_constant<int, kShortKeys> kShort;
    constexpr std::integral_constant<int, kForwardKeys> kLong;
    const auto context_tile = [&](int i, auto keys, auto keys_before) {
      // Not initialised: nothing but products may write accumulators while products are on their
      // way, or else the compiler has them wait for each other.
      float s[decltype(keys)::value / 2];
      wait_for_keys();
      wait_for_turn(warpgroup);
      issue_scores(s);
      issue_values(step - 1, keys_before);
      give_turn(1 - warpgroup);
      wgmma_wait<1>();
      pin(s);
      free_keys();
      if (i < walk.masked) mask_scores(s, spans.context + row, walk.key(i));
      softmax(s, top, total, shrink, p.scale);
      wait_for_values(step - 1);
      rescale(o, shrink);
      round_probabilities<T>(s, probs);
      ++step;
    };

    for (int i = 0; i < walk.own; ++i, ++step) {
      if (i > 0) {
        issue_values(step - 1, kShort);
        wait_for_values(step - 1);
      }
      float s[kShortKeys / 2];
      wait_for_keys();
      issue_scores(s);
      wgmma_wait<0>();
      pin(s);
      free_keys();
      mask_scores(s, spans.own + row, walk.own_begin + i * kShortKeys);
      softmax(s, top, total, shrink, p.scale);
      rescale(o, shrink);
      round_probabilities<T>(s, probs);
    }
    int i = 0;
    if (walk.tail) context_tile(i++, kShort, kShort);
    if (i < walk.tiles) {
      context_tile(i++, kLong, kShort);
      for (; i < walk.tiles; ++i) context_tile(i, kLong, kLong);
      issue_values(step - 1, kLong);
    } else {
      issue_values(step - 1, kShort);
    }
    wait_for_values(step - 1);
    arrive(base + Shared::kQueriesFree + 8 * buffer);

#pragma unroll
    for (int h = 0; h < 2; ++h) {
      total[h] += __shfl_xor_sync(0xffffffff, total[h], 1);
      total[h] += __shfl_xor_sync(0xffffffff, total[h], 2);
      shrink[h] = 1 / total[h];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int in_tile = (row + 8 * h) / p.group, slot = walk.rows * size + in_tile;
      const int64_t line =
          (int64_t{slot} * p.kv_heads + walk.head) * p.group + (row + 8 * h) % p.group;
      const bool there = in_tile < size && slot < p.blocks * p.slots;
      if (there && lane % 4 == 0) p.lse[line] = (top[h] + log2f(total[h])) * 0.6931471805599453f;
      write_row<T>(o, h, shrink[h], static_cast<T*>(p.out) + line * kForwardDim, there);
    }
  }
  if (warpgroup == 0) wait_for_turn(0);  // the last one given
}

template <typename T>
__global__ void __launch_bounds__(kForwardThreads, 1)
    forward_kernel(const __grid_constant__ ForwardMaps maps,
                   const __grid_constant__ ForwardParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shared = ForwardShared;
  extern __shared__ __align__(1024) uint8_t memory[];
  if (threadIdx.x == 0) {
    const uint32_t base = shared_address(memory);
    for (int i = 0; i < 2; ++i) {
      barrier_init(base + Shared::kPlanned + 8 * i, 32);
      barrier_init(base + Shared::kQueries + 8 * i, 1);
      // The multiplying threads, the clearing warp, the copying thread.
      barrier_init(base + Shared::kQueriesFree + 8 * i, 2 * 128 + 32 + 1);
    }
    for (int i = 0; i < 2 * Shared::kStages; ++i) {
      barrier_init(base + Shared::kFilled + 8 * i, 1);
      barrier_init(base + Shared::kFreed + 8 * i, 8 * kWarpArrivals);
    }
    for (int i = 0; i < Shared::kStages; ++i) barrier_init(base + Shared::kCleared + 8 * i, 32);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<56>();
    if (threadIdx.x == 0) {
      copy_work(maps, p, memory);
    } else if (threadIdx.x / 32 == 1) {
      clear_unseen(p, memory);
    } else if (threadIdx.x / 32 == 2) {
      plan_work(maps, p, memory);
    }
  } else {
    take_registers<224>();
    multiply_work<T>(p, memory);
  }
#endif
}

}  // namespace dflash::sm90
