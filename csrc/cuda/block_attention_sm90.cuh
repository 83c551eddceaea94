// Gradients of block_attention's context keys and values on Hopper, by TMA and wgmma.
//
// A block of threads takes 128 keys of one KV head and walks the slots that see them, as many at a
// time as have 64 queries: one warpgroup copies, two multiply, each for 64 of the keys. Keys are
// the rows of every product, so probabilities and their gradients go from registers into the next.
#pragma once

#include "sm90_attention.cuh"

namespace dflash::sm90 {

constexpr int kContextKeys = 128;
constexpr int kContextRows = 64;
constexpr int kContextStages = 4;
constexpr int kContextThreads = 3 * 128;

// Blocks that see keys [128 t, 128 t + 128) are among [first, last); all slots of blocks
// [full, partial) see all of them.
struct Sight {
  int first, full, partial, last;
};

struct ContextParams {
  const float* shift;  // [A, K, Hq] -log2 of the softmax's denominator
  const float* delta;  // [A, K, Hq] -sum of out * grad_out
  const int64_t* ctx_start;
  const int64_t* ctx_end;
  const Sight* sight;  // of each tile of keys
  void* dk;            // [T, Hk, D]: float and added to, or T and written
  void* dv;
  int blocks, slots, group, kv_heads, tokens;
  int window;          // 0: none
  int head_k, head_v;  // elements from one head to the next in the context
  float scale;         // of scores, in powers of 2
  float natural_scale;
  bool add;
};

// Shift, delta and visible keys of a tile's rows, by the thread of a quad whose columns of a
// product they are: 4 floats at a time, in banks of their own.
struct RowFacts {
  static constexpr int kThread = kContextRows / 4 + 4;
  float shift[4 * kThread], delta[4 * kThread];
  int first[4 * kThread], end[4 * kThread];

  static __device__ int place(int row) { return row / 2 % 4 * kThread + row / 8 * 2 + row % 2; }
};

template <int kDim>
struct ContextShared {
  static constexpr int kBoxes = kDim / 64;
  static constexpr int kKeyBox = kContextKeys * 128, kRowBox = kContextRows * 128;
  static constexpr int kKeys = kBoxes * kKeyBox, kRows = kBoxes * kRowBox;
  static constexpr int kStage = 2 * kRows;
  static constexpr int kFacts = 2 * kKeys + kContextStages * kStage;
  static constexpr int kFactBytes = sizeof(RowFacts);
  static constexpr int kBarriers = kFacts + kContextStages * kFactBytes;
  static constexpr int kBytes = kBarriers + (2 * kContextStages + 1) * 8;
};

// Tiles of slots in the order of the walk: those that need no mask, then the others.
struct SlotTiles {
  int size, full_begin, whole, before_begin, before, before_end, after_begin, after, after_end;

  __device__ SlotTiles(const Sight& s, int slots, int group) {
    size = kContextRows / group;
    full_begin = before_end = s.full * slots;
    whole = (s.partial - s.full) * slots / size;
    before_begin = s.first * slots;
    before = (max(before_end - before_begin, 0) + size - 1) / size;
    after_begin = full_begin + whole * size;
    after_end = s.last * slots;
    after = (max(after_end - after_begin, 0) + size - 1) / size;
  }
  __device__ int count() const { return whole + before + after; }
  // First slot of tile i; its slots end at `end` or with the tile.
  __device__ int begin(int i, int& end) const {
    if (i < whole) return end = after_begin, full_begin + i * size;
    i -= whole;
    if (i < before) return end = before_end, before_begin + i * size;
    return end = after_end, after_begin + (i - before) * size;
  }
};

template <int kDim>
__device__ __forceinline__ void copy_rows(const CUtensorMap& q_map, const CUtensorMap& grad_map,
                                          const ContextParams& p, const SlotTiles& tiles, int head,
                                          uint8_t* shared, uint32_t full, uint32_t empty) {
  using Shared = ContextShared<kDim>;
  const int lane = threadIdx.x & 31;
  const int q_heads = p.kv_heads * p.group;
  const uint32_t bytes = 2 * Shared::kBoxes * 128 * tiles.size * p.group;
  for (int i = 0; i < tiles.count(); ++i) {
    const int stage = i % kContextStages;
    int slots_end;
    const int begin = tiles.begin(i, slots_end);
    wait(empty + 8 * stage, (i / kContextStages & 1) ^ 1);
    if (lane == 0) {
      const uint32_t target = shared_address(shared) + 2 * Shared::kKeys + stage * Shared::kStage;
      arrive_expect(full + 8 * stage, bytes);
#pragma unroll
      for (int box = 0; box < Shared::kBoxes; ++box) {
        const uint32_t to = target + box * Shared::kRowBox;
        copy_box(to, &q_map, 64 * box, head * p.group, begin, full + 8 * stage);
        copy_box(to + Shared::kRows, &grad_map, 64 * box, head * p.group, begin, full + 8 * stage);
      }
    }
    float shift[2], delta[2];
    int first[2], end[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 32 * half + lane, in_tile = row / p.group;
      const int slot = begin + in_tile;
      shift[half] = -INFINITY;  // a probability of 0
      delta[half] = 0;
      first[half] = end[half] = 0;
      if (in_tile >= tiles.size || slot >= slots_end) continue;
      const int64_t at = int64_t{slot} * q_heads + head * p.group + row % p.group;
      shift[half] = p.shift[at];
      delta[half] = p.delta[at];
      if (i < tiles.whole) continue;
      const int block = slot / p.slots;
      const int64_t stop = min(max(p.ctx_end[block], int64_t{0}), int64_t{p.tokens});
      int64_t start = min(max(p.ctx_start[block], int64_t{0}), stop);
      if (p.window > 0) start = min(max(start, stop + slot % p.slots - p.window + 1), stop);
      first[half] = static_cast<int>(start);
      end[half] = static_cast<int>(stop);
    }
    RowFacts& facts = reinterpret_cast<RowFacts*>(shared + Shared::kFacts)[stage];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = RowFacts::place(32 * half + lane);
      facts.shift[at] = shift[half];
      facts.delta[at] = delta[half];
      facts.first[at] = first[half];
      facts.end[at] = end[half];
    }
    arrive(full + 8 * stage);
  }
}

// exp2(scores * scale + shift), rounded into `probs`; 0 where masked.
template <typename T>
__device__ __forceinline__ void probabilities(const float (&s)[32], uint32_t (&probs)[16],
                                              const RowFacts& facts, float scale, bool masked,
                                              int key) {
  const int place = RowFacts::kThread * (threadIdx.x & 3);
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const float4 shift = *reinterpret_cast<const float4*>(facts.shift + place + 2 * j);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int i = 4 * j + 2 * part;
      const float low = fmaf(s[i], scale, part < 2 ? shift.x : shift.z);
      const float high = fmaf(s[i + 1], scale, part < 2 ? shift.y : shift.w);
      probs[i / 2] = pack<T>(exp2_approximate(low), exp2_approximate(high));
    }
  }
  if (!masked) return;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int2 first = *reinterpret_cast<const int2*>(facts.first + place + 2 * j);
    const int2 end = *reinterpret_cast<const int2*>(facts.end + place + 2 * j);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = key + 8 * h;
      if (at < first.x || at >= end.x) probs[2 * j + h] &= 0xffff0000;
      if (at < first.y || at >= end.y) probs[2 * j + h] &= 0x0000ffff;
    }
  }
}

template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
  }
}

// p * (products + delta), rounded; 0 where p is, whatever the product.
template <typename T>
__device__ __forceinline__ void score_gradients(const uint32_t (&probs)[16],
                                                const float (&products)[32],
                                                uint32_t (&gradients)[16], const RowFacts& facts,
                                                bool masked) {
  const int place = RowFacts::kThread * (threadIdx.x & 3);
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const float4 delta = *reinterpret_cast<const float4*>(facts.delta + place + 2 * j);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int i = 4 * j + 2 * part;
      const float2 p = unpack<T>(probs[i / 2]);
      float low = p.x * (products[i] + (part < 2 ? delta.x : delta.z));
      float high = p.y * (products[i + 1] + (part < 2 ? delta.y : delta.w));
      if (masked) {
        low = p.x == 0 ? 0 : low;
        high = p.y == 0 ? 0 : high;
      }
      gradients[i / 2] = pack<T>(low, high);
    }
  }
}

template <typename T, int kSize>
__device__ __forceinline__ void write_gradient(const float (&d)[kSize], void* to, float factor,
                                               int key, int tokens, int64_t row_stride,
                                               int64_t column, bool add) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool there = key + 8 * h < tokens;
    const int64_t at = (key + 8 * h) * row_stride + column;
    if (add) {
      float2* target = reinterpret_cast<float2*>(static_cast<float*>(to) + at) + (threadIdx.x & 3);
#pragma unroll
      for (int j = 0; j < kSize / 4; ++j) {
        if (!there) continue;
        const float2 before = target[4 * j];
        target[4 * j] = {before.x + d[4 * j + 2 * h] * factor,
                         before.y + d[4 * j + 2 * h + 1] * factor};
      }
    } else {
      write_row<T>(d, h, factor, static_cast<T*>(to) + at, there);
    }
  }
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kContextThreads, 1)
    context_kernel(const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap grad_map,
                   const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map,
                   const __grid_constant__ ContextParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shared = ContextShared<kDim>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t full = shared_address(shared + Shared::kBarriers);
  const uint32_t empty = full + 8 * kContextStages, keys_full = empty + 8 * kContextStages;
  const int head = blockIdx.x % p.kv_heads, tile = blockIdx.x / p.kv_heads;
  const int begin = tile * kContextKeys;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kContextStages; ++i) {
      barrier_init(full + 8 * i, 1 + 32);
      barrier_init(empty + 8 * i, 8 * kWarpArrivals);  // the multiplying warps
    }
    barrier_init(keys_full, 1);
    fence_barrier_init();
    arrive_expect(keys_full, 2 * Shared::kKeys);
#pragma unroll
    for (int box = 0; box < Shared::kBoxes; ++box) {
      const uint32_t target = shared_address(shared) + box * Shared::kKeyBox;
      copy_box(target, &k_map, head * p.head_k + 64 * box, begin, keys_full);
      copy_box(target + Shared::kKeys, &v_map, head * p.head_v + 64 * box, begin, keys_full);
    }
  }
  const SlotTiles tiles(p.sight[tile], p.slots, p.group);
  const int count = tiles.count();
  if (p.add && count == 0) {
    if (threadIdx.x == 0) wait(keys_full, 0);  // memory that copies write must not be given away
    return;
  }
  // Rows of a stage that no copy fills must not be NaN, which 0 * NaN is.
  const int filled = tiles.size * p.group * 128;
  if (filled < Shared::kRowBox) {
    const int left = (Shared::kRowBox - filled) / 16;
    for (int i = threadIdx.x; i < kContextStages * 2 * Shared::kBoxes * left; i += blockDim.x) {
      uint8_t* box = shared + 2 * Shared::kKeys + i / left * Shared::kRowBox;
      *reinterpret_cast<uint4*>(box + filled + i % left * 16) = {};
    }
    fence_async_proxy();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    give_registers<24>();
    if (threadIdx.x < 32) {
      copy_rows<kDim>(q_map, grad_map, p, tiles, head, shared, full, empty);
    }
  } else {
    take_registers<240>();
    const int warpgroup = threadIdx.x / 128 - 1;
    const int key = begin + 16 * (threadIdx.x / 32 - 4) + (threadIdx.x & 31) / 4;
    const uint32_t base = shared_address(shared);
    const uint64_t k = operand(base + warpgroup * 64 * 128);
    const uint64_t v = operand(base + Shared::kKeys + warpgroup * 64 * 128);
    float dk[kDim / 2], dv[kDim / 2];
    wait(keys_full, 0);

    for (int i = 0; i < count; ++i) {
      const int stage = i % kContextStages;
      const uint32_t rows = base + 2 * Shared::kKeys + stage * Shared::kStage;
      const uint64_t q = operand(rows), grads = operand(rows + Shared::kRows);
      const RowFacts& facts = reinterpret_cast<RowFacts*>(shared + Shared::kFacts)[stage];
      const bool masked = i >= tiles.whole;
      wait(full + 8 * stage, i / kContextStages & 1);
      // Not initialised: nothing but products may write accumulators while products are on their
      // way, or else the compiler has them wait for each other.
      float s[32], products[32];
      uint32_t probs[16], gradients[16];
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const uint64_t inner = step % 4 * kOperandStep;
        multiply<T>(s, k + (step / 4 * Shared::kKeyBox >> 4) + inner,
                    q + (step / 4 * Shared::kRowBox >> 4) + inner, step > 0);
      }
      wgmma_commit();
      // The products of the tile before are done: their operands' registers and stage are free, as
      // soon as all of the warp have read the tile's facts.
      wgmma_wait<1>();
      if (i > 0) warp_arrive(empty + 8 * ((i - 1) % kContextStages));
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const uint64_t inner = step % 4 * kOperandStep;
        multiply<T>(products, v + (step / 4 * Shared::kKeyBox >> 4) + inner,
                    grads + (step / 4 * Shared::kRowBox >> 4) + inner, step > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      pin(s);
      probabilities<T>(s, probs, facts, p.scale, masked, key);
      wgmma_fence();
      const uint64_t grads_across = operand_across(rows + Shared::kRows, Shared::kRowBox);
#pragma unroll
      for (int step = 0; step < kContextRows / 16; ++step) {
        multiply<T>(dv, probs + 4 * step, grads_across + step * kAcrossStep, i > 0 || step > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      pin(products);
      score_gradients<T>(probs, products, gradients, facts, masked);
      wgmma_fence();
      const uint64_t q_across = operand_across(rows, Shared::kRowBox);
#pragma unroll
      for (int step = 0; step < kContextRows / 16; ++step) {
        multiply<T>(dk, gradients + 4 * step, q_across + step * kAcrossStep, i > 0 || step > 0);
      }
      wgmma_commit();
    }
    wgmma_wait<0>();
    pin(dk);
    pin(dv);
    if (count == 0) {
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) dk[i] = dv[i] = 0;
    }
    const int64_t stride = static_cast<int64_t>(p.kv_heads) * kDim;
    write_gradient<T>(dk, p.dk, p.natural_scale, key, p.tokens, stride, head * kDim, p.add);
    write_gradient<T>(dv, p.dv, 1.0f, key, p.tokens, stride, head * kDim, p.add);
  }
#endif
}

}  // namespace dflash::sm90
