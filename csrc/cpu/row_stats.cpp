#include "row_stats.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

// The function is compiled for several instruction sets, and the dynamic linker picks one.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SIMD_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define SIMD_CLONES
#endif

namespace dflash {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// exp(x) for x <= 0 with a relative error below 2e-7 and without branches or calls, so that loops
// around it vectorise. Below -87 it stays at exp(-87), about 1.6e-38. NaN gives a finite value.
inline float exp_nonpositive(float x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  x = x > -87.0f ? x : -87.0f;
  const float shifted = x * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = x - n * kLn2High - n * kLn2Low;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // 2^n through the exponent bits: the low bits of `shifted` are those of n.
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits << 23) + (127 << 23);
  float scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  return p * scale;
}

// Sorts like (value, -index): larger values first take larger keys, NaN the largest, -0 equals +0.
uint64_t order_key(float value, int64_t index) {
  uint32_t bits = 0xffffffffu;
  if (!std::isnan(value)) {
    const float canonical = value + 0.0f;
    std::memcpy(&bits, &canonical, sizeof(bits));
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  }
  return static_cast<uint64_t>(bits) << 32 | static_cast<uint32_t>(~index);
}

int64_t key_index(uint64_t key) { return static_cast<uint32_t>(~key); }

// The k-th largest block maximum: at least k elements of the row are no smaller.
float threshold(const float* block_max, int64_t blocks, int64_t k) {
  if (k > blocks) return -kInf;
  std::vector<float> maxima(block_max, block_max + blocks);
  std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<>());
  return maxima[k - 1];
}

}  // namespace

SIMD_CLONES
RowMax row_max(const float* z, int64_t n, float* block_max) {
  RowMax result{-kInf, false};
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t count = std::min(kBlock, n - start);
    const float* block = z + start;
    float max = -kInf;
    int nan = 0;
#pragma omp simd reduction(max : max) reduction(| : nan)
    for (int64_t j = 0; j < count; ++j) {
      max = block[j] > max ? block[j] : max;
      nan |= block[j] != block[j];
    }
    result.value = std::max(result.value, max);
    result.has_nan |= nan != 0;
    block_max[start / kBlock] = nan != 0 ? kInf : max;
  }
  return result;
}

SIMD_CLONES
float row_logsumexp(const float* z, int64_t n, RowMax max) {
  if (max.has_nan) return std::numeric_limits<float>::quiet_NaN();
  if (std::isinf(max.value)) return max.value;
  double total = 0;
  for (int64_t start = 0; start < n; start += 1024) {
    const int64_t count = std::min<int64_t>(1024, n - start);
    const float* block = z + start;
    const float shift = max.value;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < count; ++j) sum += exp_nonpositive(block[j] - shift);
    total += sum;
  }
  return static_cast<float>(max.value + std::log(total));
}

SIMD_CLONES
int64_t row_rank(const float* z, int64_t n, int64_t label) {
  const float mine = z[label];
  int64_t before = 0;
  if (std::isnan(mine)) {
#pragma omp simd reduction(+ : before)
    for (int64_t j = 0; j < label; ++j) before += z[j] != z[j];
    return before;
  }
  // Negated comparisons, so that NaN counts as larger. A row has fewer than 2^31 elements.
  int32_t lower = 0, upper = 0;
#pragma omp simd reduction(+ : lower)
  for (int64_t j = 0; j < label; ++j) lower += !(z[j] < mine);
#pragma omp simd reduction(+ : upper)
  for (int64_t j = label + 1; j < n; ++j) upper += !(z[j] <= mine);
  return static_cast<int64_t>(lower) + upper;
}

void row_top_k(const float* z, int64_t n, int64_t k, const float* block_max,
               std::vector<uint64_t>& keys, float* values, int64_t* indices) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  const size_t capacity = std::max<int64_t>(4 * k, 256);
  float floor = threshold(block_max, blocks, k);
  keys.clear();
  for (int64_t b = 0; b < blocks; ++b) {
    if (block_max[b] < floor) continue;
    const int64_t end = std::min(n, (b + 1) * kBlock);
    for (int64_t j = b * kBlock; j < end; ++j) {
      if (z[j] < floor) continue;  // a NaN stays
      keys.push_back(order_key(z[j], j));
      if (keys.size() < capacity) continue;
      std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end(), std::greater<>());
      keys.resize(k);
      const float smallest = z[key_index(keys[k - 1])];
      floor = std::isnan(smallest) ? kInf : smallest;
    }
  }
  std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end(), std::greater<>());
  std::sort(keys.begin(), keys.begin() + k, std::greater<>());
  for (int64_t i = 0; i < k; ++i) {
    indices[i] = key_index(keys[i]);
    values[i] = z[indices[i]];
  }
}

}  // namespace dflash
