#include <torch/library.h>

#include <algorithm>

#include "metrics.h"

namespace dflash {
namespace {

void metric_publish_cpu(at::Tensor& acc, at::Tensor& staging, at::Tensor& step) {
  check_metric_publish(acc, staging, step);
  CHECK_CPU(acc);
  CHECK_CPU(staging);
  CHECK_CPU(step);
  const int64_t rows = staging.size(0), words = acc.size(0);

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
