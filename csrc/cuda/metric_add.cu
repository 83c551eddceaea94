#include "cuda/metric_add.cuh"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "metrics.h"

namespace dflash {
namespace {

void metric_add_cuda(at::Tensor& acc, const at::Tensor& rank, const at::Tensor& terms,
                     const at::Tensor& weights) {
  const bool measured = check_metric_add(acc, rank, terms, weights);
  CHECK_CUDA(acc);
  if (measured) CHECK_SAME_DEVICE(rank, acc);
  CHECK_SAME_DEVICE(terms, acc);
  CHECK_SAME_DEVICE(weights, acc);

  const c10::cuda::CUDAGuard guard(acc.device());
  const at::Tensor rank_c = rank.contiguous(), terms_c = terms.contiguous(),
                   weights_c = weights.contiguous();
  const MetricAddParams params = {
      acc.mutable_data_ptr<int64_t>(),
      rank_c.const_data_ptr<int64_t>(),
      terms_c.const_data_ptr<float>(),
      weights_c.const_data_ptr<float>(),
      weights.size(0),
      static_cast<int>(weights.size(1)),
      measured,
  };
  C10_CUDA_CHECK(launch_metric_add(params, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(dflash_ext, CUDA, m) { m.impl("metric_add", &metric_add_cuda); }

}  // namespace dflash
