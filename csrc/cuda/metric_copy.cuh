// A staging row, filled by metric_publish, into the ring that host threads read (metric_ring.h).
//
// One small kernel on the metric stream. Should the training stream be a whole round of staging
// rows ahead, it may overwrite the row meanwhile: nothing waits for anything, the record is dropped
// and counted. Publishing can therefore also be part of a captured graph.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dflash {

struct MetricCopyParams {
  const int64_t* row;  // [words], the last word is the step
  int64_t words;
  int64_t step;   // that the row should hold
  int64_t* ring;  // pinned memory of a MetricRing
  int64_t slots;
  int64_t* state;  // [2] of this GPU: records in the ring so far, records dropped so far
};

__device__ __forceinline__ void store_release_host(int64_t* word, int64_t value) {
  asm volatile("st.release.sys.global.s64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// A thread a word.
__global__ void metric_copy_kernel(const __grid_constant__ MetricCopyParams params) {
  const int i = threadIdx.x;
  const volatile int64_t* row = params.row;
  int64_t word = 0;
  if (i < params.words) word = row[i];
  // metric_publish writes the step first, so an overwritten word comes with an overwritten step.
  __threadfence();
  __syncthreads();
  if (__syncthreads_or(i == 0 && row[params.words - 1] != params.step)) {
    if (i == 0) {
      const int64_t dropped = ++params.state[1];
      store_release_host(params.ring + params.slots * (params.words + 1), dropped);
    }
    return;
  }

  const int64_t n = params.state[0];
  int64_t* slot = params.ring + n % params.slots * (params.words + 1);
  if (i == 0) *static_cast<volatile int64_t*>(slot) = 2 * n + 1;
  __threadfence_system();
  __syncthreads();
  if (i < params.words) static_cast<volatile int64_t*>(slot)[1 + i] = word;
  __threadfence_system();
  __syncthreads();
  if (i == 0) {
    store_release_host(slot, 2 * n + 2);
    params.state[0] = n + 1;
  }
}

inline cudaError_t launch_metric_copy(const MetricCopyParams& params, cudaStream_t stream) {
  const unsigned threads = (params.words + 31) / 32 * 32;
  metric_copy_kernel<<<1, threads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace dflash
