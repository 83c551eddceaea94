#include "lm_head_topk.cuh"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "lm_head_topk.h"
#include "lm_head_topk_sm90_launch.cuh"

namespace dflash {
namespace {

// A chunk of rows has all its logits in memory, so that the label's is one of them, bit for bit.
constexpr int64_t kLogitsBytes = 512 << 20;

using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

bool fits_tensor_map(const at::Tensor& x) {
  return x.stride(1) == 1 && x.stride(0) % 8 == 0 && x.stride(0) >= x.size(1) &&
         reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

// The Hopper kernel needs its machine code (sm_90a), 16-bit inputs and rows that TMA can copy.
bool use_hopper(const at::Tensor& hidden, const at::Tensor& weight, int64_t k) {
  if (std::strstr(DFLASH_CUDA_ARCHS, "9.0a") == nullptr) return false;
  int major, minor;
  C10_CUDA_CHECK(
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, hidden.get_device()));
  C10_CUDA_CHECK(
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, hidden.get_device()));
  return major == 9 && minor == 0 && k <= sm90::kMaxK && hidden.scalar_type() != at::kFloat &&
         hidden.size(1) >= 8 && hidden.size(1) <= 1 << 20 && fits_tensor_map(hidden) &&
         fits_tensor_map(weight);
}

Outputs lm_head_topk_cuda(const at::Tensor& hidden, const at::Tensor& weight, int64_t k,
                          const std::optional<at::Tensor>& labels,
                          std::optional<int64_t> valid_vocab, std::optional<double> softcap,
                          double logit_scale) {
  CHECK_CUDA(hidden);
  CHECK_SAME_DEVICE(weight, hidden);
  const int64_t valid = check_lm_head_topk(hidden, weight, k, labels, valid_vocab, softcap);
  const int64_t num_rows = hidden.size(0), width = hidden.size(1), vocab = weight.size(0);
  at::Tensor labels_c;
  if (labels) {
    CHECK_SAME_DEVICE(*labels, hidden);
    labels_c = labels->contiguous();
  }

  const c10::cuda::CUDAGuard device_guard(hidden.device());
  const at::AutoDispatchBelowADInplaceOrView dispatch_guard;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const auto floats = hidden.options().dtype(at::kFloat);
  const auto ids = hidden.options().dtype(at::kLong);
  const int64_t labelled = labels ? num_rows : 0;
  Outputs outputs{at::empty({num_rows, k}, floats), at::empty({num_rows, k}, ids),
                  at::empty({num_rows}, floats), at::empty({labelled}, ids),
                  at::empty({labelled}, floats)};
  if (num_rows == 0) return outputs;
  const auto outputs_from = [&](int64_t row) {
    const int64_t label_row = labels ? row : 0;
    return TopkOutputs{std::get<0>(outputs).mutable_data_ptr<float>() + row * k,
                       std::get<1>(outputs).mutable_data_ptr<int64_t>() + row * k,
                       std::get<2>(outputs).mutable_data_ptr<float>() + row,
                       std::get<3>(outputs).mutable_data_ptr<int64_t>() + label_row,
                       std::get<4>(outputs).mutable_data_ptr<float>() + label_row};
  };
  const int64_t* label = labels ? labels_c.const_data_ptr<int64_t>() : nullptr;
  const Transform transform{static_cast<float>(logit_scale / softcap.value_or(1)),
                            static_cast<float>(softcap.value_or(0))};

  if (use_hopper(hidden, weight, k)) {
    int multiprocessors;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount,
                                          hidden.get_device()));
    const sm90::HeadInputs inputs{hidden.const_data_ptr(),
                                  weight.const_data_ptr(),
                                  hidden.stride(0),
                                  weight.stride(0),
                                  num_rows,
                                  static_cast<int>(vocab),
                                  static_cast<int>(valid),
                                  static_cast<int>(width),
                                  static_cast<int>(k),
                                  label,
                                  transform};
    const at::Tensor scratch = at::empty({sm90::scratch_bytes(inputs, multiprocessors)},
                                         hidden.options().dtype(at::kByte));
    uint8_t* bytes = scratch.mutable_data_ptr<uint8_t>();
    const auto launch = hidden.scalar_type() == at::kHalf ? sm90::launch_head<__half>
                                                          : sm90::launch_head<__nv_bfloat16>;
    C10_CUDA_CHECK(launch(inputs, outputs_from(0), bytes, multiprocessors, stream));
    return outputs;
  }

  int64_t chunk_rows = std::clamp<int64_t>(kLogitsBytes / (4 * valid), 1, num_rows);
  if (chunk_rows > 64) chunk_rows -= chunk_rows % 64;
  const at::Tensor logits = at::empty({chunk_rows, valid}, floats);
  const at::Tensor head = weight.narrow(0, 0, valid).t();
  for (int64_t first = 0; first < num_rows; first += chunk_rows) {
    const int64_t count = std::min(chunk_rows, num_rows - first);
    at::Tensor chunk = logits.narrow(0, 0, count);
    const at::Tensor rows = hidden.narrow(0, first, count);
    if (hidden.scalar_type() == at::kFloat) {
      at::mm_out(chunk, rows, head);
    } else {
      at::mm_out(chunk, rows, head, at::kFloat);
    }
    const RowParams params{chunk.const_data_ptr<float>(),
                           label == nullptr ? nullptr : label + first,
                           outputs_from(first),
                           static_cast<int>(k),
                           static_cast<int>(vocab),
                           static_cast<int>(valid),
                           transform};
    C10_CUDA_CHECK(launch_topk_rows(params, count, stream));
  }
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(dflash_ext, CUDA, m) { m.impl("lm_head_topk", &lm_head_topk_cuda); }

}  // namespace dflash
