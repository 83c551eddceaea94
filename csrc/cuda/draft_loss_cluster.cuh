// A row of 16-bit logits in the shared memory of a cluster, thread by thread: scanned into parts
// that add up to the row's sums, and turned into its gradient. draft_loss_sm90.cuh moves the data.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "draft_loss_rows.cuh"

namespace dflash::loss {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr int kVector = 8;  // logits of a 16-byte access
// Of a thread in a row, so that the counts of before stay exact in bf16.
constexpr int kMaxThreadVectors = 64;

// Two 16-bit logits in a word.
template <typename T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  // Finite: e^u u must be 0 at the padding, not NaN.
  static constexpr uint16_t kPadding = 0xf14a;  // just below kLowest
  static constexpr float kLowest = -1e30f;
  static constexpr float kStoredLog2 = 0;  // an exponential <= 1 is stored 2^this times as large

  static __device__ __forceinline__ float2 unpack(uint32_t word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  }
  static __device__ __forceinline__ __nv_bfloat162 pack(float low, float high) {
    return __floats2bfloat162_rn(low, high);
  }
};

template <>
struct Pair<__half> {
  using Type = __half2;
  static constexpr uint16_t kPadding = 0xfbff;  // kLowest
  static constexpr float kLowest = -65504;
  static constexpr float kStoredLog2 = 15;

  static __device__ __forceinline__ float2 unpack(uint32_t word) {
    return __half22float2(reinterpret_cast<const __half2&>(word));
  }
  static __device__ __forceinline__ __half2 pack(float low, float high) {
    return __floats2half2_rn(low, high);
  }
};

// The same 16-bit float as bits, and the next one below; of NaN and -inf any.
__device__ __forceinline__ uint32_t next_below(uint32_t bits) {
  if ((bits & 0x7fff) == 0) return 0x8001;
  return bits & 0x8000 ? bits + 1 : bits - 1;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(e) times the logit, minus a shift. With a soft cap, tanh(x) = 1 - 2 r of the capped x.
template <typename T, bool kSoftcap>
struct BinaryLogit {
  float scale, cap;

  __device__ explicit BinaryLogit(const RowCoefficients& o)
      : scale(kSoftcap ? 2 * kLog2E * o.logit_scale / o.softcap : kLog2E * o.logit_scale),
        cap(kLog2E * o.softcap) {}

  __device__ __forceinline__ float operator()(float x, float shift, float& r) const {
    if constexpr (!kSoftcap) return fmaf(x, scale, -shift);
    r = __fdividef(1, exp2_fast(x * scale) + 1);
    const float z = fmaf(fmaf(-2, r, 1), cap, -shift);
    // The cap would let padding count; a NaN stays one.
    return x <= Pair<T>::kLowest ? Pair<T>::kLowest : z;
  }

  __device__ __forceinline__ float operator()(float x, float shift) const {
    float r;
    return (*this)(x, shift, r);
  }

  // The derivative of the capped logit by the uncapped, 1 - tanh^2.
  static __device__ __forceinline__ float slope(float r) { return kSoftcap ? 4 * r * (1 - r) : 1; }
};

// Sums over logits of a row, u = log2(e) (logit - max), v the same of a teacher's logits: of 2^u,
// 2^u u, 2^v and 2^v (v - u); and the number of ids that come before the label.
struct alignas(16) Part {
  float max, exp, exp_u, before;
};
struct alignas(16) TeacherPart {
  float max, exp, diff, unused;
};

template <bool kTeacher>
struct Parts {
  Part own;
};
template <>
struct Parts<true> {
  Part own;
  TeacherPart teacher;
};

__device__ __forceinline__ float warp_max(float x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  }
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// `vectors` of a row from its vector `first` on: those of thread i are i, i + kThreads, ...
template <int kThreads>
struct Slice {
  uint4* z;
  uint4* t;  // the teacher's
  int first, vectors;

  __device__ __forceinline__ bool is_mine(int v) const {
    return v >= 0 && v < vectors && v % kThreads == threadIdx.x;
  }
};

template <typename T, int kThreads>
__device__ __forceinline__ float slice_max(const uint4* z, int vectors) {
  using T2 = typename Pair<T>::Type;
  const uint32_t lowest = Pair<T>::kPadding * 0x10001u;
  T2 best = reinterpret_cast<const T2&>(lowest);
#pragma unroll 4
  for (int v = threadIdx.x; v < vectors; v += kThreads) {
    const uint4 q = z[v];
    const T2* x = reinterpret_cast<const T2*>(&q);
    best = __hmax2(best, __hmax2(__hmax2(x[0], x[1]), __hmax2(x[2], x[3])));
  }
  const float2 both = Pair<T>::unpack(reinterpret_cast<const uint32_t&>(best));
  return warp_max(fmaxf(both.x, both.y));
}

// Ids of the label's own vector that tie with it and come before it.
template <typename T>
__device__ __forceinline__ int ties_before(const uint4& vector, int place) {
  const T* x = reinterpret_cast<const T*>(&vector);
  int ties = 0;
  for (int i = 0; i < kVector; ++i) ties += i < place && widen(x[i]) == widen(x[place]);
  return ties;
}

// What the warp of this thread finds, relative to its own maxima. Without a soft cap, exponentials
// take the place of the logits, so that none is computed twice: a relative error of half a unit of
// 16 bits, where the rounding of a logit z costs p z times that.
template <typename T, bool kTeacher, bool kSoftcap, int kThreads>
__device__ __forceinline__ Parts<kTeacher> scan(const Slice<kThreads>& slice,
                                                const BinaryLogit<T, kSoftcap>& logit, int label,
                                                uint32_t label_bits) {
  using T2 = typename Pair<T>::Type;
  const auto store = [](float low, float high) {
    constexpr float kScale = 1 << static_cast<int>(Pair<T>::kStoredLog2);
    const T2 both = Pair<T>::pack(low * kScale, high * kScale);
    return reinterpret_cast<const uint32_t&>(both);
  };
  Part part{logit(slice_max<T, kThreads>(slice.z, slice.vectors), 0), 0, 0, 0};
  TeacherPart teacher{};
  if constexpr (kTeacher) teacher.max = logit(slice_max<T, kThreads>(slice.t, slice.vectors), 0);
  // Before the label's vector an equal logit counts too: it is larger than the next one below.
  const uint32_t larger = label_bits * 0x10001u, as_large = next_below(label_bits) * 0x10001u;
  const int label_vector = label / kVector - slice.first;
  const int ties =
      slice.is_mine(label_vector) ? ties_before<T>(slice.z[label_vector], label % kVector) : 0;
  uint32_t zero = 0;
  T2 count = reinterpret_cast<T2&>(zero);
#pragma unroll(kSoftcap ? 1 : 2)  // else registers spill
  for (int v = threadIdx.x; v < slice.vectors; v += kThreads) {
    uint4 q = slice.z[v], r = kTeacher ? slice.t[v] : q;
    uint32_t* words = reinterpret_cast<uint32_t*>(&q);
    uint32_t* teacher_words = reinterpret_cast<uint32_t*>(&r);
    const uint32_t bound = v < label_vector ? as_large : larger;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      count = __hadd2(
          count, __hgt2(reinterpret_cast<const T2&>(words[i]), reinterpret_cast<const T2&>(bound)));
      const float2 x = Pair<T>::unpack(words[i]);
      const float u0 = logit(x.x, part.max), u1 = logit(x.y, part.max);
      const float e0 = exp2_fast(u0), e1 = exp2_fast(u1);
      part.exp += e0 + e1;
      part.exp_u = fmaf(e0, u0, part.exp_u);
      part.exp_u = fmaf(e1, u1, part.exp_u);
      words[i] = store(e0, e1);
      if constexpr (kTeacher) {
        const float2 y = Pair<T>::unpack(teacher_words[i]);
        const float v0 = logit(y.x, teacher.max), v1 = logit(y.y, teacher.max);
        const float q0 = exp2_fast(v0), q1 = exp2_fast(v1);
        teacher.exp += q0 + q1;
        teacher.diff = fmaf(q0, v0 - u0, teacher.diff);
        teacher.diff = fmaf(q1, v1 - u1, teacher.diff);
        teacher_words[i] = store(q0, q1);
      }
    }
    if constexpr (!kSoftcap) {
      slice.z[v] = q;
      if constexpr (kTeacher) slice.t[v] = r;
    }
  }
  const float2 counts = Pair<T>::unpack(reinterpret_cast<const uint32_t&>(count));
  part.before = warp_sum(counts.x + counts.y + ties);
  part.exp = warp_sum(part.exp);
  part.exp_u = warp_sum(part.exp_u);
  Parts<kTeacher> parts;
  parts.own = part;
  if constexpr (kTeacher) {
    teacher.exp = warp_sum(teacher.exp);
    teacher.diff = warp_sum(teacher.diff);
    parts.teacher = teacher;
  }
  return parts;
}

// One of each lane below `count` <= 32, as one; the same bits in every lane.
template <bool kTeacher>
__device__ __forceinline__ Parts<kTeacher> merge(const Parts<kTeacher>* parts, int count) {
  const int lane = threadIdx.x % 32;
  const bool mine = lane < count;
  Part part = mine ? parts[lane].own : Part{-INFINITY, 0, 0, 0};
  const float max = warp_max(part.max), shift = mine ? part.max - max : 0;
  const float scale = exp2_fast(shift);
  Parts<kTeacher> all;
  all.own = {max, warp_sum(scale * part.exp), warp_sum(scale * fmaf(part.exp, shift, part.exp_u)),
             warp_sum(part.before)};
  if constexpr (kTeacher) {
    const TeacherPart teacher = mine ? parts[lane].teacher : TeacherPart{-INFINITY, 0, 0, 0};
    const float their_max = warp_max(teacher.max), their_shift = mine ? teacher.max - their_max : 0;
    const float their_scale = exp2_fast(their_shift);
    all.teacher = {their_max, warp_sum(their_scale * teacher.exp),
                   warp_sum(their_scale * fmaf(teacher.exp, their_shift - shift, teacher.diff)), 0};
  }
  return all;
}

// g = own p - teacher q, p and q the drafter's and the teacher's probabilities, with the factors in
// the shifts; with the entropy g = (own + own_log log2 p) p - teacher q.
struct alignas(16) Gradient {
  float shift, teacher_shift;
  float own, own_log;  // own_log 0: without the entropy
};

template <bool kTeacher>
__device__ __forceinline__ Gradient gradient_factors(const Parts<kTeacher>& row,
                                                     const RowCoefficients& o) {
  const float scale = o.gradient_scale, log_sum = log2f(row.own.exp);
  Gradient g{row.own.max + log_sum, 0, static_cast<float>(o.ce_weight), 0};
  if constexpr (kTeacher) {
    const float kl_weight = o.kl_weight;
    g.own += kl_weight;
    g.teacher_shift = row.teacher.max + log2f(row.teacher.exp) - log2f(scale * kl_weight);
  }
  if (row.own.before == 0 && o.cap_lambda != 0) {
    // The entropy's gradient is -p (log p + entropy).
    const float cap = o.cap_lambda;
    g.own = scale * (g.own - cap * kLn2 * (log_sum - row.own.exp_u / row.own.exp));
    g.own_log = scale * -cap * kLn2;
  } else {
    g.shift -= log2f(scale * g.own);
  }
  return g;
}

template <bool kTeacher>
__device__ __forceinline__ RowValues<float> row_values(const Parts<kTeacher>& row, float label_u) {
  const float log_sum = log2f(row.own.exp);
  RowValues<float> values{kLn2 * (log_sum - label_u), 0,
                          kLn2 * (log_sum - row.own.exp_u / row.own.exp),
                          kLn2 * (row.own.max + log_sum), row.own.before};
  if constexpr (kTeacher) {
    values.kl = kLn2 * (row.teacher.diff / row.teacher.exp - log2f(row.teacher.exp) + log_sum);
  }
  return values;
}

// g of what `scan` left behind, for a warp whose parts had these maxima.
template <typename T, bool kTeacher, bool kSoftcap, bool kEntropy>
class Differential {
 public:
  __device__ __forceinline__ Differential(const Gradient& g, const BinaryLogit<T, kSoftcap>& logit,
                                          float max, float teacher_max)
      : g_(g),
        logit_(logit),
        shift_(max - g.shift - Pair<T>::kStoredLog2),
        factor_(exp2_fast(shift_)),
        teacher_factor_(kTeacher ? exp2_fast(teacher_max - g.teacher_shift - Pair<T>::kStoredLog2)
                                 : 0) {}

  // x is the drafter's, y the teacher's.
  __device__ __forceinline__ float operator()(float x, float y, float label_loss = 0) const {
    if constexpr (kSoftcap) {
      float r;
      const float log_p = logit_(x, g_.shift, r);
      float d = exp2_fast(log_p) - label_loss;
      if constexpr (kEntropy)
        d = fmaf(exp2_fast(log_p), fmaf(g_.own_log, log_p, g_.own), -label_loss);
      if constexpr (kTeacher) d -= exp2_fast(logit_(y, g_.teacher_shift));
      return d * logit_.slope(r);
    } else {
      float d = x * factor_;
      if constexpr (kEntropy) {
        constexpr float kTiny = 1.2e-38f;  // the logarithm of 0 would give NaN
        d *= fmaf(g_.own_log, log2_fast(fmaxf(x, kTiny)) + shift_, g_.own);
      }
      if constexpr (kTeacher) d = fmaf(y, -teacher_factor_, d);
      return d - label_loss;
    }
  }

 private:
  const Gradient& g_;
  const BinaryLogit<T, kSoftcap>& logit_;
  float shift_, factor_, teacher_factor_;
};

template <typename T, bool kTeacher, int kThreads, typename Differential>
__device__ __forceinline__ void differentiate(const Slice<kThreads>& slice, const Differential& d,
                                              int label, float label_loss) {
  // At the label 1 is taken off p before both are rounded.
  const int label_vector = label / kVector - slice.first,
            at = label_vector * kVector + label % kVector;
  const bool has_label = slice.is_mine(label_vector);
  const auto value = [&](const uint4* from) {
    return Pair<T>::unpack(reinterpret_cast<const uint16_t*>(from)[at]).x;
  };
  float label_gradient = 0;
  if (has_label) {
    label_gradient = d(value(slice.z), kTeacher ? value(slice.t) : 0, label_loss);
  }
#pragma unroll 2
  for (int v = threadIdx.x; v < slice.vectors; v += kThreads) {
    uint4 q = slice.z[v];
    const uint4 r = kTeacher ? slice.t[v] : q;
    uint32_t* words = reinterpret_cast<uint32_t*>(&q);
    const uint32_t* teacher_words = reinterpret_cast<const uint32_t*>(&r);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = Pair<T>::unpack(words[i]);
      const float2 y = kTeacher ? Pair<T>::unpack(teacher_words[i]) : x;
      const auto both = Pair<T>::pack(d(x.x, y.x), d(x.y, y.y));
      words[i] = reinterpret_cast<const uint32_t&>(both);
    }
    slice.z[v] = q;
  }
  if (has_label) reinterpret_cast<T*>(slice.z)[at] = round_to<T>(label_gradient);
}

}  // namespace dflash::loss
