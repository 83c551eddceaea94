// Statistics of rows of fp32 logits that lie in memory, each read once. Any GPU, any k <= 1024.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "topk_key.cuh"

namespace dflash {

struct RowParams {
  const float* logits;    // [rows, valid], before the transform
  const int64_t* labels;  // [rows] or null
  TopkOutputs out;
  int k, vocab, valid;
  Transform transform;
};

constexpr int kRowThreads = 256;
constexpr int kRowLoads = 4;  // logits a thread reads at once
constexpr int kRowStep = kRowThreads * kRowLoads;

// max and the sum of exp(z - max) of a part of a row. max = NaN once there was a NaN.
struct MaxSum {
  float max, sum;

  __device__ void merge(MaxSum other) {
    if (isnan(max) || isnan(other.max)) {
      max = NAN;
      return;
    }
    const float larger = fmaxf(max, other.max);
    const float mine = max == larger ? 1.0f : expf(max - larger);
    const float theirs = other.max == larger ? 1.0f : expf(other.max - larger);
    sum = sum * mine + other.sum * theirs;
    max = larger;
  }

  __device__ float logsumexp() const { return isinf(max) ? max : max + logf(sum); }
};

// Descending bitonic sort by the whole block.
template <int kSize>
__device__ void sort_keys(uint64_t* keys) {
  for (int length = 2; length <= kSize; length *= 2) {
    for (int stride = length / 2; stride > 0; stride /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < kSize / 2; i += kRowThreads) {
        const int low = 2 * i - (i & (stride - 1));
        const uint64_t a = keys[low], b = keys[low + stride];
        const bool descending = (low & length) == 0;
        if ((a < b) == descending) {
          keys[low] = b;
          keys[low + stride] = a;
        }
      }
    }
  }
  __syncthreads();
}

// One block a row. Candidates above the k-th best so far are collected and sorted when the buffer
// could overflow in the next step; which thread found one first does not change the result.
template <int kCapacity>
__global__ void __launch_bounds__(kRowThreads) topk_rows_kernel(RowParams p) {
  __shared__ uint64_t keys[kCapacity];
  __shared__ int num_keys;
  __shared__ MaxSum sums[kRowThreads];
  __shared__ int counts[kRowThreads];
  const int64_t row = blockIdx.x;
  const float* logits = p.logits + row * p.valid;
  const int tid = threadIdx.x;

  const int64_t label = p.labels == nullptr ? -1 : p.labels[row];
  const bool ranked = label >= 0 && label < p.valid;
  const float label_logit = ranked ? p.transform(logits[label]) : 0.0f;
  const uint64_t label_key = ranked ? make_key(ordered_bits(label_logit), label) : ~uint64_t{0};

  MaxSum total{-INFINITY, 0.0f};
  int count = 0;
  float threshold = -INFINITY;
  if (tid == 0) num_keys = 0;
  __syncthreads();

  const auto keep_best = [&] {
    for (int i = num_keys + tid; i < kCapacity; i += kRowThreads) keys[i] = 0;
    sort_keys<kCapacity>(keys);
    if (tid == 0) num_keys = min(num_keys, p.k);
    if (keys[p.k - 1] != 0) threshold = key_value(keys[p.k - 1]);
    __syncthreads();
  };

  for (int start = 0; start < p.valid; start += kRowStep) {
    float z[kRowLoads];
#pragma unroll
    for (int i = 0; i < kRowLoads; ++i) {
      const int index = start + i * kRowThreads + tid;
      z[i] = index < p.valid ? __ldcs(logits + index) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kRowLoads; ++i) {
      const int index = start + i * kRowThreads + tid;
      if (index >= p.valid) break;
      z[i] = p.transform(z[i]);
      if (z[i] > total.max || isnan(z[i])) {
        total.merge({z[i], 1.0f});
      } else {
        // Equal infinities would give NaN.
        total.sum += z[i] == total.max ? 1.0f : expf(z[i] - total.max);
      }
      const bool candidate = !(z[i] < threshold);
      if (!candidate && !ranked) continue;
      const uint64_t key = make_key(ordered_bits(z[i]), index);
      count += key > label_key;
      if (candidate) keys[atomicAdd(&num_keys, 1)] = key;
    }
    __syncthreads();
    const bool full = num_keys + kRowStep > kCapacity;
    __syncthreads();
    if (full) keep_best();
  }
  keep_best();

  for (int i = tid; i < p.k; i += kRowThreads) {
    const bool found = keys[i] != 0;
    p.out.values[row * p.k + i] = found ? key_value(keys[i]) : -INFINITY;
    p.out.indices[row * p.k + i] = found ? key_index(keys[i]) : -1;
  }
  sums[tid] = total;
  counts[tid] = count;
  for (int half = kRowThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (tid >= half) continue;
    sums[tid].merge(sums[tid + half]);
    counts[tid] += counts[tid + half];
  }
  if (tid != 0) return;
  p.out.logsumexp[row] = sums[0].logsumexp();
  if (p.labels == nullptr || write_odd_label(p.out, row, label, p.vocab, p.valid)) return;
  p.out.rank[row] = counts[0];
  p.out.label_logit[row] = label_logit;
}

inline cudaError_t launch_topk_rows(const RowParams& params, int64_t num_rows,
                                    cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  // The buffer takes k keys and at least one step's candidates; for large k a roomier one is sorted
  // less often.
  if (params.k <= 256) {
    topk_rows_kernel<2048><<<num_rows, kRowThreads, 0, stream>>>(params);
  } else {
    topk_rows_kernel<4096><<<num_rows, kRowThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace dflash
