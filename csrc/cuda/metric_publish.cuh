// metric_publish on a GPU: the accumulator into a staging row, then zero, in one small kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dflash {

constexpr int kPublishThreads = 128;

struct MetricPublishParams {
  int64_t* acc;      // [words]
  int64_t* staging;  // [rows, words + 1]
  int64_t* step;
  int64_t rows;
  int64_t words;
};

__global__ void __launch_bounds__(kPublishThreads)
    metric_publish_kernel(const __grid_constant__ MetricPublishParams params) {
  const int64_t step = *params.step;
  // Unsigned: a row in any case.
  const int64_t r = static_cast<uint64_t>(step) % static_cast<uint64_t>(params.rows);
  int64_t* row = params.staging + r * (params.words + 1);
  // The new step goes first: whoever copies this row on another stream, finds a word of this record
  // in it and looks at the step afterwards, sees that the row was overwritten (metric_copy.cuh).
  if (threadIdx.x == 0) row[params.words] = step;
  __threadfence();
  __syncthreads();
  for (int64_t i = threadIdx.x; i < params.words; i += kPublishThreads) {
    row[i] = params.acc[i];
    params.acc[i] = 0;
  }
  if (threadIdx.x == 0) *params.step = step + 1;
}

inline cudaError_t launch_metric_publish(const MetricPublishParams& params, cudaStream_t stream) {
  metric_publish_kernel<<<1, kPublishThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace dflash
