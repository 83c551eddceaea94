// The kernel of block_attention's context gradients on shapes that leave parts of tiles idle, in
// buffers without a byte to spare: a program for compute-sanitizer, without torch.
#define DFLASH_RACECHECK
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "cuda/block_attention_sm90_launch.cuh"
#include "device.h"

namespace {

using dflash::sm90::ContextParams;
using dflash::sm90::Sight;

struct Shape {
  int blocks, slots, group, kv_heads, tokens, window;
};

// From -1 to 1, all exact in 16 bits.
float value(int64_t i) { return static_cast<float>((i * 7919 + 13) % 129 - 64) / 64; }

template <typename T>
std::vector<T> values(int count, int seed) {
  std::vector<T> made(count);
  for (int i = 0; i < count; ++i) made[i] = value(int64_t{i} * 31 + seed);
  return made;
}

struct Ranges {
  std::vector<int64_t> start, end;

  explicit Ranges(const Shape& s) : start(s.blocks), end(s.blocks) {
    for (int a = 0; a < s.blocks; ++a) {
      end[a] = a + 1 == s.blocks ? s.tokens : int64_t{s.tokens} * (a + 1) / s.blocks;
      start[a] = a + 1 == s.blocks ? s.tokens : end[a] / 3;  // the last block is padding
    }
  }
  int64_t first(const Shape& s, int block, int slot) const {
    if (s.window == 0) return start[block];
    return std::min(std::max(start[block], end[block] + slot - s.window + 1), end[block]);
  }
};

std::vector<Sight> sights(const Shape& s, const Ranges& ranges) {
  std::vector<Sight> made;
  for (int begin = 0; begin < s.tokens; begin += dflash::sm90::kContextKeys) {
    const int stop = std::min(begin + dflash::sm90::kContextKeys, s.tokens);
    const auto sees_all = [&](int a) {
      return ranges.first(s, a, s.slots - 1) <= begin && ranges.end[a] >= stop;
    };
    Sight x{s.blocks, s.blocks, 0, 0};
    for (int a = 0; a < s.blocks; ++a) {
      const int64_t first = ranges.first(s, a, 0), end = ranges.end[a];
      if (first < end && first < stop && end > begin)
        x.first = std::min(x.first, a), x.last = a + 1;
      if (sees_all(a)) x.full = std::min(x.full, a);
    }
    x.full = std::min(x.full, x.last);
    x.partial = x.full;
    while (x.partial < x.last && sees_all(x.partial)) ++x.partial;
    made.push_back(x);
  }
  return made;
}

template <typename T, int kDim>
void context(const Shape& s, bool add) {
  const int q_heads = s.kv_heads * s.group, rows = s.blocks * s.slots * q_heads;
  const int keys = s.tokens * s.kv_heads;
  const auto q = values<T>(rows * kDim, 1), grads = values<T>(rows * kDim, 2);
  const auto k = values<T>(keys * kDim, 3), v = values<T>(keys * kDim, 4);
  const auto shift = values<float>(rows, 5), delta = values<float>(rows, 6);
  const Ranges ranges(s);
  const float scale = 0.0625f;  // keeps exponentials in the range of fp16
  std::vector<double> dk(keys * kDim), dv(keys * kDim);
  for (int row = 0; row < rows; ++row) {
    const int head = row % q_heads, slot = row / q_heads % s.slots, block = row / q_heads / s.slots;
    for (int64_t key = ranges.first(s, block, slot); key < ranges.end[block]; ++key) {
      const int at = (static_cast<int>(key) * s.kv_heads + head / s.group) * kDim;
      double score = 0, product = 0;
      for (int d = 0; d < kDim; ++d) {
        score += double(float(q[row * kDim + d])) * double(float(k[at + d]));
        product += double(float(grads[row * kDim + d])) * double(float(v[at + d]));
      }
      const double p = std::exp2(score * scale + shift[row]), gradient = p * (product + delta[row]);
      for (int d = 0; d < kDim; ++d) {
        dk[at + d] += gradient * double(float(q[row * kDim + d])) * 0.5;
        dv[at + d] += p * double(float(grads[row * kDim + d]));
      }
    }
  }
  const std::vector<float> ones(keys * kDim, 1.0f);
  const std::vector<T> nothing(keys * kDim);
  void* to[2];
  for (void*& x : to) {
    x = add ? static_cast<void*>(on_device(ones)) : static_cast<void*>(on_device(nothing));
  }
  const ContextParams p{on_device(shift),
                        on_device(delta),
                        on_device(ranges.start),
                        on_device(ranges.end),
                        on_device(sights(s, ranges)),
                        to[0],
                        to[1],
                        s.blocks,
                        s.slots,
                        s.group,
                        s.kv_heads,
                        s.tokens,
                        s.window,
                        kDim,
                        kDim,
                        scale,
                        0.5f,
                        add};
  const dflash::sm90::ContextInputs inputs{on_device(q), on_device(grads),  on_device(k),
                                           on_device(v), s.kv_heads * kDim, s.kv_heads * kDim};
  check(dflash::sm90::launch_context<T, kDim>(inputs, p, nullptr), "context");
  check(cudaDeviceSynchronize(), "context");
  for (int which = 0; which < 2; ++which) {
    const std::vector<double>& wanted = which == 0 ? dk : dv;
    std::vector<float> found(wanted.size());
    if (add) {
      found = read_back(static_cast<float*>(to[which]), keys * kDim);
      for (float& x : found) x -= 1;
    } else {
      const auto rounded = read_back(static_cast<T*>(to[which]), keys * kDim);
      std::transform(rounded.begin(), rounded.end(), found.begin(), [](T x) { return float(x); });
    }
    double wrong = 0, size = 0;
    for (size_t i = 0; i < found.size(); ++i) {
      wrong += (found[i] - wanted[i]) * (found[i] - wanted[i]);
      size += wanted[i] * wanted[i];
      if (wanted[i] == 0) expect(found[i] == 0, true, "gradient of a key that no row sees");
    }
    expect(wrong <= 1e-4 * size, true, which == 0 ? "dk" : "dv");
  }
}

}  // namespace

int main() {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "properties");
  if (properties.major == 9) {
    context<__nv_bfloat16, 128>({5, 16, 4, 2, 300, 0}, true);
    context<__nv_bfloat16, 128>({9, 16, 4, 1, 257, 40}, false);
    context<__half, 64>({7, 5, 3, 3, 130, 0}, false);
    context<__nv_bfloat16, 64>({3, 2, 64, 1, 64, 7}, true);
    context<__half, 128>({40, 3, 1, 2, 500, 0}, true);
  }
  std::printf("done\n");
  return 0;
}
