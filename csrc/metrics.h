// What the metric ops' tensors have to look like, the same on every device.
#pragma once

#include <ATen/core/Tensor.h>

#include "check.h"
#include "metric_layout.h"

namespace dflash {

// True if the batch is measured.
inline bool check_metric_add(const at::Tensor& acc, const at::Tensor& rank, const at::Tensor& terms,
                             const at::Tensor& weights) {
  CHECK_DTYPE(acc, at::kLong);
  CHECK_SHAPE(acc, kNumWords);
  CHECK_CONTIGUOUS(acc);
  CHECK_DTYPE(weights, at::kFloat);
  CHECK_DIM(weights, 2);
  const int64_t blocks = weights.size(0), block_size = weights.size(1);
  TORCH_CHECK(block_size >= 1 && block_size <= kMaxBlock, "weights: found blocks of ", block_size,
              ", want 1 to ", kMaxBlock);
  CHECK_DTYPE(terms, at::kFloat);
  CHECK_SHAPE(terms, blocks, block_size, kMetricTerms);
  CHECK_DTYPE(rank, at::kLong);
  CHECK_DIM(rank, 2);
  const bool measured = rank.size(1) > 0;
  if (measured) CHECK_SHAPE(rank, blocks, block_size);
  return measured;
}

inline void check_metric_publish(const at::Tensor& acc, const at::Tensor& staging,
                                 const at::Tensor& step) {
  CHECK_DTYPE(acc, at::kLong);
  CHECK_DIM(acc, 1);
  CHECK_CONTIGUOUS(acc);
  CHECK_DTYPE(staging, at::kLong);
  CHECK_DIM(staging, 2);
  CHECK_CONTIGUOUS(staging);
  const int64_t rows = staging.size(0), words = acc.size(0);
  TORCH_CHECK(rows >= 1, "staging: found no rows, want at least one");
  CHECK_SHAPE(staging, rows, words + 1);
  CHECK_DTYPE(step, at::kLong);
  CHECK_SHAPE(step);
}

}  // namespace dflash
