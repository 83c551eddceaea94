#include "cuda/metric_copier.h"

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>
#include <utility>

#include "check.h"
#include "cuda/metric_copy.cuh"

namespace dflash {
namespace {

constexpr int64_t kMaxWords = 1024;  // a thread a word

static_assert(sizeof(MetricRing::Word) == sizeof(int64_t) && MetricRing::Word::is_always_lock_free);

// Zeroed pinned memory that every GPU can write.
std::shared_ptr<MetricRing::Word[]> pinned_words(int64_t count) {
  void* memory;
  C10_CUDA_CHECK(cudaHostAlloc(&memory, count * sizeof(MetricRing::Word),
                               cudaHostAllocPortable | cudaHostAllocMapped));
  std::memset(memory, 0, count * sizeof(MetricRing::Word));
  // The context may be gone by the time the last reader is.
  const auto release = [](MetricRing::Word* words) { C10_CUDA_IGNORE_ERROR(cudaFreeHost(words)); };
  return {static_cast<MetricRing::Word*>(memory), release};
}

}  // namespace

MetricCopier::MetricCopier(at::Tensor staging, int64_t slots)
    : staging_(std::move(staging)), slots_(slots) {
  CHECK_CUDA(staging_);
  CHECK_DTYPE(staging_, at::kLong);
  CHECK_DIM(staging_, 2);
  CHECK_CONTIGUOUS(staging_);
  const int64_t words = staging_.size(1);
  TORCH_CHECK(staging_.size(0) >= 1 && words >= 1 && words <= kMaxWords, "staging: found shape ",
              staging_.sizes(), ", want [R, words] with R >= 1 and words in 1 to ", kMaxWords);
  const c10::cuda::CUDAGuard guard(staging_.device());
  auto memory = pinned_words(MetricRing::memory_words(slots, words));
  memory_ = reinterpret_cast<int64_t*>(memory.get());
  ring_ = std::make_shared<MetricRing>(slots, words, std::move(memory));
  state_ = at::zeros({2}, staging_.options());
  int lowest, highest;
  C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  C10_CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest));
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&published_, cudaEventDisableTiming));
  // Loads the kernel, which may synchronise, now rather than at the first step.
  cudaFuncAttributes attributes;
  C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, metric_copy_kernel));
  C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream()));
}

MetricCopier::~MetricCopier() {
  const c10::cuda::CUDAGuard guard(staging_.device());
  C10_CUDA_IGNORE_ERROR(cudaStreamSynchronize(stream_));
  C10_CUDA_IGNORE_ERROR(cudaEventDestroy(published_));
  C10_CUDA_IGNORE_ERROR(cudaStreamDestroy(stream_));
}

void MetricCopier::copy(int64_t step) {
  TORCH_CHECK(step >= 0, "step: found ", step, ", want >= 0");
  const c10::cuda::CUDAGuard guard(staging_.device());
  const cudaStream_t training = c10::cuda::getCurrentCUDAStream();
  cudaStreamCaptureStatus capture;
  C10_CUDA_CHECK(cudaStreamIsCapturing(training, &capture));
  TORCH_CHECK(capture == cudaStreamCaptureStatusNone,
              "copy: found the current stream in a capture, want a call after each replay");
  const int64_t words = staging_.size(1);
  const MetricCopyParams params = {
      staging_.const_data_ptr<int64_t>() + step % staging_.size(0) * words,
      words,
      step,
      memory_,
      slots_,
      state_.mutable_data_ptr<int64_t>(),
  };
  C10_CUDA_CHECK(cudaEventRecord(published_, training));
  C10_CUDA_CHECK(cudaStreamWaitEvent(stream_, published_));
  C10_CUDA_CHECK(launch_metric_copy(params, stream_));
}

}  // namespace dflash
