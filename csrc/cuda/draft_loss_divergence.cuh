// Rows of draft_loss with a divergence to the target other than forward KL: as in
// draft_loss_rows.cuh for any GPU, type and vocabulary. A row and its teacher's are read four
// times: p and q are known only with both rows' sums, and the gradient with the divergence's own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "divergence.h"
#include "draft_loss_rows.cuh"

namespace dflash::loss {
namespace on_gpu {

#define DFLASH_INLINE __device__ __forceinline__

template <typename T>
DFLASH_INLINE T exp_nonpositive(T x) {
  return exp(x);
}

template <typename T>
DFLASH_INLINE T log1p_fraction(T x) {
  return log1p(x);
}

#include "divergence.inl"

#undef DFLASH_INLINE

}  // namespace on_gpu

template <Divergence kKind, typename T, typename acc_t>
__global__ void __launch_bounds__(kRowThreads, 1)  // without the 1 registers spill
    divergence_rows_kernel(const __grid_constant__ RowParams<acc_t> p) {
  const int64_t row = blockIdx.x;
  if (row >= p.live()) return;
  T* z = static_cast<T*>(p.logits) + row * p.stride;
  const T* t = static_cast<const T*>(p.logits) + p.teacher_of(row) * p.stride;
  const RowCoefficients& o = p.coefficients;
  const Logit<acc_t> logit(o);
  const int tid = threadIdx.x, label = p.labels[row];
  const auto add = [](acc_t a, acc_t b) { return a + b; };
  const auto larger = [](acc_t a, acc_t b) { return a > b ? a : b; };

  // Ranks are taken before the transform, which rises with the sign of its scale.
  const acc_t sign = logit.scale > 0 ? 1 : logit.scale < 0 ? -1 : 0;
  const acc_t label_x = widen(z[label]), mine = logit(label_x);
  acc_t max = -INFINITY, teacher_max = -INFINITY;
  int count = 0;  // of ids that come before the label
  for (int64_t i = tid; i < p.vocab; i += kRowThreads) {
    const acc_t x = widen(z[i]);
    max = larger(logit(x), max);
    count += i < label ? sign * x >= sign * label_x : sign * x > sign * label_x;
    teacher_max = larger(logit(widen(t[i])), teacher_max);
  }
  max = reduce_block(max, larger);
  const acc_t before = reduce_block(acc_t(count), add);
  teacher_max = reduce_block(teacher_max, larger);

  acc_t sum = 0, sum_u = 0, teacher = 0;
  for (int64_t i = tid; i < p.vocab; i += kRowThreads) {
    const acc_t u = logit(widen(z[i])) - max, e = exp(u);
    sum += e;
    sum_u += e * u;
    teacher += exp(logit(widen(t[i])) - teacher_max);
  }
  sum = reduce_block(sum, add);
  sum_u = reduce_block(sum_u, add);
  teacher = reduce_block(teacher, add);
  const acc_t log_sum = log(sum), entropy = log_sum - sum_u / sum;

  const acc_t inverse = 1 / sum, teacher_inverse = 1 / teacher, shift = log(teacher) - log_sum;
  const auto term = [&](acc_t u, acc_t v) {
    return on_gpu::divergence_term<kKind, acc_t>(exp(v) * teacher_inverse, exp(u) * inverse,
                                                 u - v + shift);
  };
  acc_t value = 0, mean_slope = 0;
  for (int64_t i = tid; i < p.vocab; i += kRowThreads) {
    const acc_t u = logit(widen(z[i])) - max, v = logit(widen(t[i])) - teacher_max;
    const auto [f, slope] = term(u, v);
    value += f;
    mean_slope += exp(u) * inverse * slope;
  }
  value = reduce_block(value, add);
  mean_slope = reduce_block(mean_slope, add);
  if (tid == 0) write_row(p, row, {log_sum - (mine - max), value, entropy, max + log_sum, before});
  if (!o.need_grad) return;

  const acc_t cap = before == 0 ? o.cap_lambda : 0;
  for (int64_t i = tid; i < p.vocab; i += kRowThreads) {
    const acc_t x = widen(z[i]), u = logit(x) - max, v = logit(widen(t[i])) - teacher_max;
    // The entropy's gradient is -q (log q + entropy), log q = u - log(sum).
    acc_t factor = acc_t(o.ce_weight) + acc_t(o.kl_weight) * (term(u, v).slope - mean_slope);
    if (cap != 0) factor -= cap * (u - log_sum + entropy);
    acc_t g = exp(u) * inverse * factor;
    if (i == label) g -= acc_t(o.ce_weight);
    z[i] = round_to<T>(g * logit.slope(x) * acc_t(o.gradient_scale));
  }
}

template <typename T, typename acc_t>
cudaError_t launch_divergence_rows(Divergence kind, const RowParams<acc_t>& params,
                                   cudaStream_t stream) {
  const auto kernel = kind == Divergence::kReverse
                          ? divergence_rows_kernel<Divergence::kReverse, T, acc_t>
                      : kind == Divergence::kJs ? divergence_rows_kernel<Divergence::kJs, T, acc_t>
                                                : divergence_rows_kernel<Divergence::kTv, T, acc_t>;
  kernel<<<params.count, kRowThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace dflash::loss
