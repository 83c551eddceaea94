// The forward of block_attention on shapes that leave parts of tiles idle, in buffers without a
// byte to spare: a program for compute-sanitizer, without torch.
#define DFLASH_RACECHECK
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "cuda/block_attention_forward_sm90_launch.cuh"
#include "device.h"

namespace {

constexpr int kDim = dflash::sm90::kForwardDim;

struct Shape {
  int blocks, slots, group, kv_heads, tokens, window;
  bool causal;
};

// From -1 to 1, all exact in 16 bits.
template <typename T>
std::vector<T> values(int count, int seed) {
  std::vector<T> made(count);
  for (int64_t i = 0; i < count; ++i) {
    made[i] = static_cast<float>(((i * 31 + seed) * 7919 + 13) % 129 - 64) / 64;
  }
  return made;
}

template <typename T>
void forward(const Shape& s) {
  const int q_heads = s.kv_heads * s.group, rows = s.blocks * s.slots * q_heads;
  const int keys = s.tokens * s.kv_heads, own_keys = s.blocks * s.slots * s.kv_heads;
  const auto q = values<T>(rows * kDim, 1), k = values<T>(keys * kDim, 2);
  const auto v = values<T>(keys * kDim, 3), k_own = values<T>(own_keys * kDim, 4);
  const auto v_own = values<T>(own_keys * kDim, 5);
  std::vector<int64_t> start(s.blocks), end(s.blocks);
  for (int a = 0; a < s.blocks; ++a) {
    end[a] = int64_t{s.tokens} * (a + 1) / s.blocks;
    start[a] = a + 1 == s.blocks ? s.tokens : end[a] / 3;  // the last block is padding
  }
  const float scale = 0.0625f;  // in powers of 2

  void* out = on_device(std::vector<T>(rows * kDim));
  float* lse = on_device(std::vector<float>(rows));
  const int size = dflash::sm90::kForwardRows / s.group;
  const dflash::sm90::ForwardParams p{out,
                                      lse,
                                      on_device(start),
                                      on_device(end),
                                      on_device(std::vector<int>{-1}),
                                      (s.blocks * s.slots + size - 1) / size * s.kv_heads,
                                      s.blocks,
                                      s.slots,
                                      s.group,
                                      s.kv_heads,
                                      s.tokens,
                                      s.window,
                                      kDim,
                                      kDim,
                                      scale,
                                      s.causal};
  const int64_t row = int64_t{s.kv_heads} * kDim;
  const dflash::sm90::ForwardInputs inputs{
      on_device(q), on_device(k), on_device(v), on_device(k_own), on_device(v_own), row, row};
  check(dflash::sm90::launch_forward<T>(inputs, p, nullptr), "forward");
  check(cudaDeviceSynchronize(), "forward");
  const auto found = read_back(static_cast<T*>(out), rows * kDim);
  const auto found_lse = read_back(lse, rows);
  double wrong = 0, length = 0;
  for (int line = 0; line < rows; ++line) {
    const int head = line % q_heads / s.group, slot = line / q_heads % s.slots;
    const int block = line / q_heads / s.slots;
    std::vector<double> wanted(kDim);
    double total = 0;
    const auto attend = [&](const std::vector<T>& key, const std::vector<T>& value, int64_t at) {
      at = (at * s.kv_heads + head) * kDim;
      double score = 0;
      for (int d = 0; d < kDim; ++d) {
        score += double(float(q[line * kDim + d])) * double(float(key[at + d]));
      }
      const double prob = std::exp2(score * scale);
      total += prob;
      for (int d = 0; d < kDim; ++d) wanted[d] += prob * double(float(value[at + d]));
    };
    int64_t first = start[block];
    if (s.window > 0) first = std::max(first, end[block] + slot - s.window + 1);
    for (int64_t at = first; at < end[block]; ++at) attend(k, v, at);
    for (int own = 0; own < s.slots; ++own) {
      const bool hidden = s.causal && own > slot;
      const bool far = s.window > 0 && std::abs(own - slot) >= s.window;
      if (!hidden && !far) attend(k_own, v_own, block * s.slots + own);
    }
    expect(std::abs(std::log(total) - found_lse[line]) <= 1e-4, true, "lse");
    for (int d = 0; d < kDim; ++d) {
      const double x = wanted[d] / total, error = double(float(found[line * kDim + d])) - x;
      wrong += error * error;
      length += x * x;
    }
  }
  expect(wrong <= 1e-4 * length, true, "out");
}

}  // namespace

int main() {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "properties");
  if (properties.major == 9) {
    forward<__nv_bfloat16>({5, 16, 4, 2, 300, 0, false});
    forward<__nv_bfloat16>({90, 16, 4, 2, 657, 40, true});
    forward<__half>({7, 5, 3, 3, 130, 0, true});
    forward<__nv_bfloat16>({3, 2, 64, 1, 64, 7, false});
    forward<__half>({70, 3, 1, 100, 500, 0, false});  // several tiles a multiprocessor
  }
  std::printf("done\n");
  return 0;
}
