// The order of logits: value descending, then index ascending, NaN before every number, -0 = +0.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dflash {

// Orders as floats do, NaN on top. 0 is below every float and stands for "none".
__device__ __forceinline__ uint32_t ordered_bits(float z) {
  const uint32_t bits = __float_as_uint(z + 0.0f);  // -0 + 0 = +0
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return isnan(z) ? 0xffffffffu : ordered;
}

__device__ __forceinline__ float from_ordered_bits(uint32_t ordered) {
  return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

// The next float below z > -inf.
__device__ __forceinline__ float next_below(float z) {
  return z == 0 ? -__uint_as_float(1) : from_ordered_bits(ordered_bits(z) - 1);
}

// A larger key comes first. Keys of one row differ, since indices do.
__device__ __forceinline__ uint64_t make_key(uint32_t ordered, int index) {
  return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~index);
}

__device__ __forceinline__ float key_value(uint64_t key) { return from_ordered_bits(key >> 32); }

__device__ __forceinline__ int key_index(uint64_t key) { return ~static_cast<uint32_t>(key); }

// What is done to hidden . weight: z = scale * x, or z = softcap * tanh(scale * x) if softcap > 0.
struct Transform {
  float scale;  // logit_scale, divided by softcap if there is one
  float softcap;

  __device__ __forceinline__ float operator()(float x) const {
    return softcap > 0 ? softcap * tanhf(scale * x) : scale * x;
  }
};

struct TopkOutputs {
  float* values;       // [N, k]
  int64_t* indices;    // [N, k]
  float* logsumexp;    // [N]
  int64_t* rank;       // [N], null without labels
  float* label_logit;  // [N], null without labels
};

// A label outside [0, vocab) cannot raise an error here: its rank is -1 and its logit NaN. A masked
// one has -inf and comes after every valid id, so its rank is its index. True if it was either.
__device__ __forceinline__ bool write_odd_label(const TopkOutputs& out, int64_t row, int64_t label,
                                                int vocab, int valid) {
  if (label >= 0 && label < valid) return false;
  const bool masked = label >= valid && label < vocab;
  out.rank[row] = masked ? label : -1;
  out.label_logit[row] = masked ? -INFINITY : NAN;
  return true;
}

}  // namespace dflash
