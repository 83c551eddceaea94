#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "check.h"

namespace dflash {
namespace {

void metric_publish_cpu(at::Tensor& acc, at::Tensor& staging, at::Tensor& step) {
  CHECK_CPU(acc);
  CHECK_DTYPE(acc, at::kLong);
  CHECK_DIM(acc, 1);
  CHECK_CONTIGUOUS(acc);
  const int64_t words = acc.size(0);
  CHECK_CPU(staging);
  CHECK_DTYPE(staging, at::kLong);
  CHECK_DIM(staging, 2);
  CHECK_CONTIGUOUS(staging);
  const int64_t rows = staging.size(0);
  TORCH_CHECK(rows >= 1, "staging: found no rows, want at least one");
  CHECK_SHAPE(staging, rows, words + 1);
  CHECK_CPU(step);
  CHECK_DTYPE(step, at::kLong);
  CHECK_SHAPE(step);

  int64_t* now = step.mutable_data_ptr<int64_t>();
  TORCH_CHECK(*now >= 0, "step: found ", *now, ", want >= 0");
  int64_t* source = acc.mutable_data_ptr<int64_t>();
  int64_t* row = staging.mutable_data_ptr<int64_t>() + *now % rows * (words + 1);
  std::copy_n(source, words, row);
  row[words] = *now;
  std::fill_n(source, words, 0);
  *now += 1;
}

}  // namespace

TORCH_LIBRARY_IMPL(dflash_ext, CPU, m) { m.impl("metric_publish", &metric_publish_cpu); }

}  // namespace dflash
