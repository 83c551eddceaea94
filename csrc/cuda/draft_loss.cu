#include "cuda/draft_loss.cuh"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "cuda/draft_loss_divergence.cuh"
#include "cuda/draft_loss_registers.cuh"
#include "cuda/draft_loss_sm90.cuh"
#include "draft_loss.h"
#include "switch.h"

namespace dflash::loss {
namespace {

using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

template <typename scalar_t>
struct OnGpu {
  using Type = scalar_t;
};
template <>
struct OnGpu<at::BFloat16> {
  using Type = __nv_bfloat16;
};
template <>
struct OnGpu<at::Half> {
  using Type = __half;
};

// The frozen head. With 16-bit rows whose number is no multiple of 8, cuBLAS is 5 to 9 times slower
// than with one, so the last few are apart and padded with zeros.
class Head {
 public:
  Head(const at::Tensor& weight, int64_t vocab)
      : main_(weight.element_size() == 2 ? vocab / kVector * kVector : vocab),
        weight_(weight.narrow(0, 0, main_)) {
    if (main_ == vocab) return;
    tail_ = at::zeros({kVector, weight.size(1)}, weight.options());
    tail_.narrow(0, 0, vocab - main_).copy_(weight.narrow(0, main_, vocab - main_));
  }

  // logits [n, >= V rounded up to kVector] = states [n, H] times the head, transposed.
  void project(const at::Tensor& states, const at::Tensor& logits) const {
    if (main_ > 0) multiply(states, weight_.t(), logits.narrow(1, 0, main_));
    if (tail_.defined()) multiply(states, tail_.t(), logits.narrow(1, main_, kVector));
  }

  // gradient [n, H] = d_logits times the head.
  void project_back(const at::Tensor& d_logits, const at::Tensor& gradient) const {
    if (main_ > 0) {
      multiply(d_logits.narrow(1, 0, main_), weight_, gradient);
    } else {
      gradient.zero_();
    }
    if (!tail_.defined()) return;
    const at::Tensor part = at::empty_like(gradient);
    multiply(d_logits.narrow(1, main_, kVector), tail_, part);
    gradient.add_(part);
  }

 private:
  static void multiply(const at::Tensor& a, const at::Tensor& b, at::Tensor out) {
    if (out.scalar_type() == a.scalar_type()) {
      at::mm_out(out, a, b);
    } else {
      at::mm_out(out, a, b, out.scalar_type());
    }
  }

  int64_t main_;
  at::Tensor weight_, tail_;
};

// A power of two that brings the largest gradient of a logit to about 4096: in fp16 the small ones
// would underflow.
double half_gradient_scale(const Options& options) {
  constexpr double kEntropy = 16;  // bounds |log p + entropy| p
  constexpr double kRatio = 64;    // bounds |log(q / p) - KL(q || p)| q, while logs stay below 256
  const double kl_bound = options.kl == Divergence::kReverse ? kRatio : 1;
  const double largest = std::abs(options.ce_weight) + kl_bound * std::abs(options.kl_weight) +
                         kEntropy * std::abs(options.cap_lambda);
  return std::exp2(std::floor(std::log2(4096 / std::max(largest, 1.0))));
}

// By a kernel whose blocks share a row in clusters; cudaErrorNotSupported if none of them can.
template <typename T>
cudaError_t launch_rows_in_clusters(const RowParams<float>& params, cudaStream_t stream) {
  const RowCoefficients& o = params.coefficients;
  // A negative scale turns the order around, which those kernels take for granted, as they do the
  // sign of the weights, of which they take logarithms.
  const bool usual = o.logit_scale > 0 && o.ce_weight >= 0 && o.kl_weight >= 0;
  if (!usual) return cudaErrorNotSupported;
  if (o.softcap > 0) {
    return o.with_teacher ? launch_loss_cluster<T, true, true>(params, stream)
                          : launch_loss_cluster<T, false, true>(params, stream);
  }
  // Padding of fp16 is the lowest number, which has to come to nothing in the register kernel.
  if (o.logit_scale >= 1. / 256 && std::strstr(DFLASH_CUDA_ARCHS, "9.0a") != nullptr) {
    const cudaError_t error = o.with_teacher ? launch_loss_registers<T, true>(params, stream)
                                             : launch_loss_registers<T, false>(params, stream);
    if (error != cudaErrorNotSupported) return error;
  }
  return o.with_teacher ? launch_loss_cluster<T, true, false>(params, stream)
                        : launch_loss_cluster<T, false, false>(params, stream);
}

template <typename T, typename acc_t>
void run_rows(Divergence kl, const RowParams<acc_t>& params, cudaStream_t stream) {
  if (kl != Divergence::kNone && kl != Divergence::kForward) {
    C10_CUDA_CHECK((launch_divergence_rows<T, acc_t>(kl, params, stream)));
    return;
  }
  if constexpr (sizeof(T) == 2) {
    const cudaError_t error = launch_rows_in_clusters<T>(params, stream);
    if (error != cudaErrorNotSupported) {
      C10_CUDA_CHECK(error);
      return;
    }
  }
  C10_CUDA_CHECK((launch_loss_rows<T, acc_t>(params, stream)));
}

template <typename scalar_t, typename acc_t>
Outputs draft_loss_impl(const Arguments& arguments, const Options& options, int64_t vocab) {
  using T = typename OnGpu<scalar_t>::Type;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const bool with_teacher = arguments.teacher_hidden.has_value();
  const auto contiguous_rows = [](const at::Tensor& x) {
    return x.stride(-1) == 1 || x.size(-1) <= 1 ? x : x.contiguous();
  };
  const at::Tensor hidden = contiguous_rows(arguments.hidden);
  const at::Tensor labels = arguments.labels.contiguous(), rows = arguments.rows.contiguous();
  const int64_t blocks = hidden.size(0), block_size = hidden.size(1), width = hidden.size(2);
  const int64_t slots = blocks * block_size, capacity = rows.size(0), item = sizeof(T);

  const auto acc = hidden.options().dtype(c10::CppTypeToScalarType<acc_t>::value);
  const auto ids = hidden.options().dtype(at::kLong);
  const at::Tensor loss = at::empty({}, acc), rank = at::empty({blocks, block_size}, ids);
  const at::Tensor terms = at::empty({blocks, block_size, 4}, acc);
  const at::Tensor lse = at::empty({blocks, block_size}, acc);
  const at::Tensor used = at::empty({blocks, block_size}, acc).copy_(arguments.weights);
  const at::Tensor d_hidden =
      at::empty({options.need_grad ? blocks : 0, block_size, width}, hidden.options());
  const at::Tensor weight_sum = arguments.weight_sum.to(at::kDouble);
  const at::Tensor row_of = at::empty({slots}, ids);
  if (slots > 0) {
    fill_slots_kernel<<<blocks_for(slots), kThreads, 0, stream>>>(
        slots, vocab, terms.mutable_data_ptr<acc_t>(), rank.mutable_data_ptr<int64_t>(),
        lse.mutable_data_ptr<acc_t>(), row_of.mutable_data_ptr<int64_t>());
    C10_CUDA_CHECK(cudaGetLastError());
  }

  const int64_t chunk_rows = std::min(options.chunk_rows, capacity);
  const bool shared = arguments.teacher_tokens.has_value();
  const auto teacher_rows = [&](int64_t count) {  // of a chunk of so many
    if (!with_teacher) return int64_t{0};
    return shared ? std::min(count, arguments.teacher_tokens->size(1)) : count;
  };
  const int64_t most_rows = chunk_rows + teacher_rows(chunk_rows);
  const int64_t padded = (vocab + 63) / 64 * 64;
  const at::Tensor states = at::empty({most_rows, width}, hidden.options());
  const at::Tensor logits = at::empty({most_rows, padded}, hidden.options());
  const at::Tensor gradient = at::empty({options.need_grad ? capacity : 0, width}, acc);
  const at::Tensor row_labels = at::empty({chunk_rows}, hidden.options().dtype(at::kInt));
  const at::Tensor row_slots = at::empty({chunk_rows}, ids);
  const at::Tensor row_teachers = at::empty_like(row_labels);
  const Head head(arguments.weight, vocab);

  GatherParams gather{};
  gather.rows = rows.const_data_ptr<int64_t>();
  gather.n_rows = arguments.n_rows.const_data_ptr<int64_t>();
  gather.hidden = static_cast<const char*>(hidden.const_data_ptr());
  gather.block_stride = hidden.stride(0) * item;
  gather.slot_stride = hidden.stride(1) * item;
  gather.block_size = block_size;
  gather.slots = slots;
  gather.labels = labels.const_data_ptr<int64_t>();
  gather.vocab = vocab;
  gather.row_bytes = width * item;
  gather.states = static_cast<char*>(states.mutable_data_ptr());
  gather.row_labels = row_labels.mutable_data_ptr<int32_t>();
  gather.row_slots = row_slots.mutable_data_ptr<int64_t>();
  gather.row_of = row_of.mutable_data_ptr<int64_t>();
  at::Tensor teacher, teacher_index, tokens, place;
  if (with_teacher) {
    teacher = contiguous_rows(*arguments.teacher_hidden);
    teacher_index = arguments.teacher_index->contiguous();
    gather.teacher = static_cast<const char*>(teacher.const_data_ptr());
    gather.teacher_index = teacher_index.const_data_ptr<int64_t>();
    gather.teacher_stride = teacher.stride(0) * item;
    gather.teachers = teacher.size(0);
  }
  if (shared) {
    tokens = arguments.teacher_tokens->contiguous();
    place = arguments.teacher_place->contiguous();
    gather.place = place.const_data_ptr<int32_t>();
    gather.row_teachers = row_teachers.mutable_data_ptr<int32_t>();
  }

  RowParams<acc_t> row_params{};
  row_params.logits = logits.mutable_data_ptr();
  row_params.stride = padded;
  row_params.labels = gather.row_labels;
  row_params.slots = gather.row_slots;
  row_params.teachers = gather.row_teachers;
  row_params.n_rows = gather.n_rows;
  row_params.vocab = static_cast<int>(vocab);
  row_params.coefficients = {options.ce_weight,
                             options.kl_weight,
                             options.cap_lambda,
                             options.logit_scale,
                             options.softcap.value_or(0),
                             std::is_same_v<T, __half> ? half_gradient_scale(options) : 1,
                             with_teacher,
                             options.need_grad};
  row_params.terms = terms.mutable_data_ptr<acc_t>();
  row_params.rank = rank.mutable_data_ptr<int64_t>();
  row_params.lse = lse.mutable_data_ptr<acc_t>();

  for (int64_t first = 0; first < capacity; first += chunk_rows) {
    const int64_t count = std::min(chunk_rows, capacity - first);
    gather.first = row_params.first = first;
    gather.count = row_params.count = count;
    gather.teacher_rows = teacher_rows(count);
    if (shared) {
      gather.tokens = tokens.const_data_ptr<int64_t>() + first / chunk_rows * tokens.size(1);
    }
    const int64_t projected = count + gather.teacher_rows;
    C10_CUDA_CHECK(launch_gather(gather, stream));
    head.project(states.narrow(0, 0, projected), logits.narrow(0, 0, projected));
    run_rows<T>(options.kl, row_params, stream);
    if (options.need_grad) {
      head.project_back(logits.narrow(0, 0, count), gradient.narrow(0, first, count));
    }
  }

  const double* denominator = weight_sum.const_data_ptr<double>();
  const SumParams<acc_t> sum{blocks,
                             block_size,
                             capacity,
                             gather.rows,
                             gather.n_rows,
                             row_params.terms,
                             denominator,
                             options.dpace_alpha.value_or(0),
                             options.dpace_alpha.has_value(),
                             used.mutable_data_ptr<acc_t>(),
                             loss.mutable_data_ptr<acc_t>()};
  sum_loss_kernel<<<1, kSumThreads, 0, stream>>>(sum);
  C10_CUDA_CHECK(cudaGetLastError());
  if (d_hidden.numel() > 0) {
    const double scale = options.logit_scale / row_params.coefficients.gradient_scale;
    C10_CUDA_CHECK((launch_scatter<T, acc_t>(
        gradient.const_data_ptr<acc_t>(), row_of.const_data_ptr<int64_t>(), sum.used, denominator,
        scale, slots, width, static_cast<T*>(d_hidden.mutable_data_ptr()), stream)));
  }
  return {loss, d_hidden, terms, rank, lse, used};
}

Outputs draft_loss_cuda(const at::Tensor& hidden, const at::Tensor& weight,
                        const at::Tensor& labels, const at::Tensor& weights,
                        const at::Tensor& weight_sum, const at::Tensor& rows,
                        const at::Tensor& n_rows, const std::optional<at::Tensor>& teacher_hidden,
                        const std::optional<at::Tensor>& teacher_index,
                        const std::optional<at::Tensor>& teacher_tokens,
                        const std::optional<at::Tensor>& teacher_place, double ce_weight,
                        double kl_weight, std::string_view kl, double cap_lambda,
                        std::optional<double> dpace_alpha, std::optional<double> softcap,
                        double logit_scale, int64_t chunk_rows, std::optional<int64_t> valid_vocab,
                        bool need_grad) {
  CHECK_CUDA(hidden);
  const Arguments arguments{hidden,        weight,         labels,       weights,
                            weight_sum,    rows,           n_rows,       teacher_hidden,
                            teacher_index, teacher_tokens, teacher_place};
  const Options options{ce_weight,   kl_weight,   divergence_of(kl, kl_weight),
                        cap_lambda,  dpace_alpha, softcap,
                        logit_scale, chunk_rows,  need_grad};
  const int64_t vocab = check_draft_loss(arguments, options, valid_vocab);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 64;
  TORCH_CHECK(vocab <= kMost, "weight: found ", vocab, " ids, want fewer than 2^31");
  TORCH_CHECK(labels.numel() <= kMost, "labels: found ", labels.numel(),
              " slots, want fewer than 2^31");

  const c10::cuda::CUDAGuard guard(hidden.device());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Outputs outputs;
  FLOAT_SWITCH(hidden.scalar_type(), "draft_loss", [&] {
    using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    outputs = draft_loss_impl<scalar_t, acc_t>(arguments, options, vocab);
  });
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(dflash_ext, CUDA, m) { m.impl("draft_loss", &draft_loss_cuda); }

}  // namespace dflash::loss
