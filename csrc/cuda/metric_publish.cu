#include "cuda/metric_publish.cuh"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "metrics.h"

namespace dflash {
namespace {

void metric_publish_cuda(at::Tensor& acc, at::Tensor& staging, at::Tensor& step) {
  check_metric_publish(acc, staging, step);
  CHECK_CUDA(acc);
  CHECK_SAME_DEVICE(staging, acc);
  CHECK_SAME_DEVICE(step, acc);

  const c10::cuda::CUDAGuard guard(acc.device());
  const MetricPublishParams params = {
      acc.mutable_data_ptr<int64_t>(),
      staging.mutable_data_ptr<int64_t>(),
      step.mutable_data_ptr<int64_t>(),
      staging.size(0),
      acc.size(0),
  };
  C10_CUDA_CHECK(launch_metric_publish(params, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(dflash_ext, CUDA, m) { m.impl("metric_publish", &metric_publish_cuda); }

}  // namespace dflash
