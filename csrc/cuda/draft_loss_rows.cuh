// Rows of draft_loss whose logits lie in memory: values, and in place of the logits their gradient.
// This kernel takes any GPU, type and vocabulary and reads a row three times; the one in
// draft_loss_cluster.cuh reads it once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace dflash::loss {

// Between a stored type and the one that is computed in, by name: torch switches the conversions
// of 16-bit types off.
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T, typename acc_t>
__device__ __forceinline__ T round_to(acc_t x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

struct RowCoefficients {
  double ce_weight, kl_weight, cap_lambda;
  double logit_scale;
  double softcap;         // 0: none
  double gradient_scale;  // multiplies the gradient, lest its small parts underflow
  bool with_teacher, need_grad;
};

// The rows of a chunk that starts at row `first`; those from n_rows on are not looked at.
template <typename acc_t>
struct RowParams {
  void* logits;             // [count, stride], with a teacher's rows behind
  int64_t stride, count;    // stride in elements
  const int32_t* labels;    // [count] in [0, vocab)
  const int64_t* slots;     // [count], -1 where the index of a row was out of range
  const int32_t* teachers;  // [count]: where in logits a row's teacher is; null: count rows behind
  const int64_t* n_rows;    // []
  int64_t first;
  int vocab;
  RowCoefficients coefficients;
  acc_t* terms;   // [slots, 4]: loss, ce, kl, cap
  int64_t* rank;  // [slots]
  acc_t* lse;     // [slots]

  __device__ __forceinline__ int64_t teacher_of(int64_t row) const {
    return teachers == nullptr ? row + count : teachers[row];
  }

  __device__ __forceinline__ int64_t live() const {
    const int64_t left = *n_rows - first;
    return left < 0 ? 0 : left < count ? left : count;
  }
};

template <typename acc_t>
struct RowValues {
  acc_t ce, kl, entropy, lse, before;  // before: ids that come before the label
};

template <typename acc_t>
__device__ __forceinline__ void write_row(const RowParams<acc_t>& p, int64_t row,
                                          const RowValues<acc_t>& values) {
  const int64_t slot = p.slots[row];
  if (slot < 0) return;
  const bool finite = isfinite(values.lse);
  const acc_t cap = finite && values.before == 0 ? values.entropy : acc_t(0);
  const RowCoefficients& o = p.coefficients;
  acc_t* terms = p.terms + slot * 4;
  terms[0] =
      acc_t(o.ce_weight) * values.ce + acc_t(o.kl_weight) * values.kl + acc_t(o.cap_lambda) * cap;
  terms[1] = values.ce, terms[2] = values.kl, terms[3] = cap;
  p.rank[slot] = finite ? static_cast<int64_t>(values.before) : p.vocab;
  p.lse[slot] = values.lse;
}

// z = logit_scale x, then softcap tanh(z / softcap).
template <typename acc_t>
struct Logit {
  acc_t scale, softcap, inverse_cap;

  explicit __device__ Logit(const RowCoefficients& o)
      : scale(o.logit_scale), softcap(o.softcap), inverse_cap(o.softcap > 0 ? 1 / o.softcap : 0) {}

  __device__ __forceinline__ acc_t operator()(acc_t x) const {
    const acc_t z = x * scale;
    return softcap > 0 ? softcap * tanh(z * inverse_cap) : z;
  }

  // The derivative by scale x.
  __device__ __forceinline__ acc_t slope(acc_t x) const {
    if (softcap == 0) return 1;
    const acc_t e = exp(-2 * fabs(x * scale * inverse_cap));  // 1 - tanh^2 would cancel
    return 4 * e / ((1 + e) * (1 + e));
  }
};

constexpr int kRowThreads = 512;

// The same result in every thread, whatever the order in which the warps run.
template <typename acc_t, typename Op>
__device__ acc_t reduce_block(acc_t value, const Op& op) {
  __shared__ acc_t parts[kRowThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) {
    value = op(value, __shfl_xor_sync(~0u, value, offset));
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  value = parts[0];
  for (int i = 1; i < kRowThreads / 32; ++i) value = op(value, parts[i]);
  return value;
}

// One block a row. Sums are relative to the maxima: of e^u, e^u u, e^v, e^v (v - u) for logits with
// u = z - max and a teacher's with v = t - max.
template <typename T, typename acc_t>
__global__ void __launch_bounds__(kRowThreads)
    loss_rows_kernel(const __grid_constant__ RowParams<acc_t> p) {
  const int64_t row = blockIdx.x;
  if (row >= p.live()) return;
  const RowCoefficients& o = p.coefficients;
  T* z = static_cast<T*>(p.logits) + row * p.stride;
  const T* t = o.with_teacher ? z + (p.teacher_of(row) - row) * p.stride : z;
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
    if (o.with_teacher) teacher_max = larger(logit(widen(t[i])), teacher_max);
  }
  max = reduce_block(max, larger);
  const acc_t before = reduce_block(acc_t(count), add);
  if (o.with_teacher) teacher_max = reduce_block(teacher_max, larger);

  acc_t sum = 0, sum_u = 0, teacher = 0, teacher_diff = 0;
  for (int64_t i = tid; i < p.vocab; i += kRowThreads) {
    const acc_t u = logit(widen(z[i])) - max, e = exp(u);
    sum += e;
    sum_u += e * u;
    if (!o.with_teacher) continue;
    const acc_t v = logit(widen(t[i])) - teacher_max, q = exp(v);
    teacher += q;
    teacher_diff += q * (v - u);
  }
  sum = reduce_block(sum, add);
  sum_u = reduce_block(sum_u, add);
  const acc_t log_sum = log(sum), entropy = log_sum - sum_u / sum;
  RowValues<acc_t> values{log_sum - (mine - max), 0, entropy, max + log_sum, before};
  if (o.with_teacher) {
    teacher = reduce_block(teacher, add);
    teacher_diff = reduce_block(teacher_diff, add);
    values.kl = teacher_diff / teacher - log(teacher) + log_sum;
  }
  if (tid == 0) write_row(p, row, values);
  if (!o.need_grad) return;

  // The entropy's gradient is -p (log p + entropy), log p = u - log(sum).
  const acc_t own = o.ce_weight + (o.with_teacher ? o.kl_weight : 0);
  const acc_t cap = before == 0 ? o.cap_lambda : 0;
  const acc_t inverse = 1 / sum, teacher_share = o.kl_weight / teacher;
  for (int64_t i = tid; i < p.vocab; i += kRowThreads) {
    const acc_t x = widen(z[i]), u = logit(x) - max;
    acc_t factor = own;
    if (cap != 0) factor -= cap * (u - log_sum + entropy);
    acc_t g = exp(u) * inverse * factor;
    if (o.with_teacher) {
      g -= exp(logit(widen(t[i])) - teacher_max) * teacher_share;
    }
    if (i == label) g -= acc_t(o.ce_weight);
    z[i] = round_to<T>(g * logit.slope(x) * acc_t(o.gradient_scale));
  }
}

template <typename T, typename acc_t>
cudaError_t launch_loss_rows(const RowParams<acc_t>& params, cudaStream_t stream) {
  loss_rows_kernel<T, acc_t><<<params.count, kRowThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace dflash::loss
