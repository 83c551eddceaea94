// A row of 16-bit logits in the registers of a cluster's threads: scanned into the same parts as by
// draft_loss_cluster.cuh, and turned into its gradient. draft_loss_registers.cuh moves the data.
#pragma once

#include "draft_loss_cluster.cuh"

namespace dflash::loss {

constexpr int kHeldWarps = 8, kHeldThreads = 32 * kHeldWarps;

// What a thread holds of a row: vectors i, i + kHeldThreads, ... of the block's slice, first as
// logits and then as exponentials, rounded and scaled as draft_loss_cluster.cuh stores them.
template <bool kTeacher, int kVectors>
struct Held {
  uint32_t z[kVectors][4], t[kTeacher ? kVectors : 1][4];
  int label;
  float label_exp, label_teacher_exp;  // the latter only where the label is this thread's
  float max, teacher_max;              // of this warp
};

// Whether a thread's vectors from j on are of no use, for slices of this many at most; asked now
// and then. Also keeps ptxas from mixing the work on so many that it runs out of registers.
template <int kVectors>
__device__ __forceinline__ bool none_from(int j, int most) {
  constexpr int kStep = kVectors % 4 == 0 ? kVectors / 4 : kVectors;
  return j > 0 && j % kStep == 0 && j * kHeldThreads >= most;
}

template <int kVectors>
__device__ __forceinline__ void load_vectors(uint32_t (&words)[kVectors][4], const uint4* slice,
                                             int most) {
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (none_from<kVectors>(j, most)) break;
    const uint4 q = slice[threadIdx.x + j * kHeldThreads];
    words[j][0] = q.x, words[j][1] = q.y, words[j][2] = q.z, words[j][3] = q.w;
  }
}

// Of vector `last` of the slice, everything from logit `end` on.
template <typename T, int kVectors>
__device__ __forceinline__ void pad_vectors(uint32_t (&words)[kVectors][4], int last, int end) {
  constexpr uint32_t kLow = Pair<T>::kPadding, kHigh = kLow << 16;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (threadIdx.x + j * kHeldThreads != last) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (2 * i >= end) words[j][i] = (words[j][i] & 0xffff0000u) | kLow;
      if (2 * i + 1 >= end) words[j][i] = (words[j][i] & 0xffffu) | kHigh;
    }
  }
}

template <typename T>
__device__ __forceinline__ uint32_t larger_of(uint32_t a, uint32_t b) {
  using T2 = typename Pair<T>::Type;
  const T2 both = __hmax2(reinterpret_cast<const T2&>(a), reinterpret_cast<const T2&>(b));
  return reinterpret_cast<const uint32_t&>(both);
}

// The largest logit of the warp.
template <typename T, int kVectors>
__device__ __forceinline__ float vectors_max(const uint32_t (&words)[kVectors][4], int most) {
  uint32_t best = Pair<T>::kPadding * 0x10001u;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (none_from<kVectors>(j, most)) break;
    best = larger_of<T>(best, larger_of<T>(larger_of<T>(words[j][0], words[j][1]),
                                           larger_of<T>(words[j][2], words[j][3])));
  }
  const float2 both = Pair<T>::unpack(best);
  return warp_max(fmaxf(both.x, both.y));
}

// How many logits of the warp come before the label, but for ties in the label's own vector.
template <typename T, int kVectors>
__device__ __forceinline__ int count_before(const uint32_t (&words)[kVectors][4], int most,
                                            int label_vector, uint32_t label_bits) {
  using T2 = typename Pair<T>::Type;
  constexpr uint32_t kPadding = Pair<T>::kPadding * 0x10001u;  // never counts
  const uint32_t larger = larger_of<T>(label_bits * 0x10001u, kPadding),
                 as_large = larger_of<T>(next_below(label_bits) * 0x10001u, kPadding);
  uint32_t found = 0;  // minus the number in the low halves, minus 2^16 times that in the high ones
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (none_from<kVectors>(j, most)) break;
    const int v = threadIdx.x + j * kHeldThreads;
    const uint32_t bound = v < label_vector ? as_large : larger;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t mask =
          __hgt2_mask(reinterpret_cast<const T2&>(words[j][i]), reinterpret_cast<const T2&>(bound));
      found += mask;
    }
  }
  // A mask of both halves is -1, of the low one 2^16 - 1, of the high one -2^16.
  const uint32_t low = -found & 0xffffu;
  return static_cast<int>(2 * low) + (static_cast<int>(-found - low) >> 16);
}

template <typename T>
__device__ __forceinline__ uint32_t store_pair(float low, float high) {
  constexpr float kScale = 1 << static_cast<int>(Pair<T>::kStoredLog2);
  const auto both = Pair<T>::pack(low * kScale, high * kScale);
  return reinterpret_cast<const uint32_t&>(both);
}

// Logits into exponentials, and their sums. exp_u is of use only to rows whose label comes first.
template <typename T, bool kTeacher, bool kExpU, int kVectors>
__device__ __forceinline__ void exponentiate(Held<kTeacher, kVectors>& row,
                                             const BinaryLogit<T, false>& logit, int most,
                                             float shift, float teacher_shift, Part& part,
                                             TeacherPart& teacher) {
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (none_from<kVectors>(j, most)) break;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = Pair<T>::unpack(row.z[j][i]);
      const float u0 = logit(x.x, shift), u1 = logit(x.y, shift);
      const float e0 = exp2_fast(u0), e1 = exp2_fast(u1);
      part.exp += e0 + e1;
      if constexpr (kExpU) {
        part.exp_u = fmaf(e0, u0, part.exp_u);
        part.exp_u = fmaf(e1, u1, part.exp_u);
      }
      row.z[j][i] = store_pair<T>(e0, e1);
      if constexpr (kTeacher) {
        const float2 y = Pair<T>::unpack(row.t[j][i]);
        const float v0 = logit(y.x, teacher_shift), v1 = logit(y.y, teacher_shift);
        const float q0 = exp2_fast(v0), q1 = exp2_fast(v1);
        teacher.exp += q0 + q1;
        teacher.diff = fmaf(q0, v0 - u0, teacher.diff);
        teacher.diff = fmaf(q1, v1 - u1, teacher.diff);
        row.t[j][i] = store_pair<T>(q0, q1);
      }
    }
  }
}

// What the warp of this thread finds, as `scan` of a slice. `row` holds logits, and so does the
// slice still; behind its end both hold padding, which must not count where there is nothing else.
template <typename T, bool kTeacher, int kVectors>
__device__ __forceinline__ Parts<kTeacher> scan_held(Held<kTeacher, kVectors>& row,
                                                     const Slice<kHeldThreads>& slice, int most,
                                                     const BinaryLogit<T, false>& logit,
                                                     uint32_t label_bits) {
  const auto shift_of = [&](float max) { return max <= Pair<T>::kLowest ? 0 : logit(max, 0); };
  const int label_vector = row.label / kVector - slice.first, place = row.label % kVector;
  const bool has_label = slice.is_mine(label_vector);
  const float max = vectors_max<T>(row.z, most), label_x = Pair<T>::unpack(label_bits).x;
  const float shift = shift_of(max);
  Part part{logit(max, 0), 0, 0, 0};
  row.label_exp = Pair<T>::unpack(store_pair<T>(exp2_fast(logit(label_x, shift)), 0)).x;
  TeacherPart teacher{};
  float teacher_shift = 0;
  if constexpr (kTeacher) {
    const float teacher_max = vectors_max<T>(row.t, most);
    teacher.max = logit(teacher_max, 0);
    teacher_shift = shift_of(teacher_max);
    if (has_label) {
      const auto* words = reinterpret_cast<const uint16_t*>(slice.t + label_vector);
      const float q = exp2_fast(logit(Pair<T>::unpack(words[place]).x, teacher_shift));
      row.label_teacher_exp = Pair<T>::unpack(store_pair<T>(q, 0)).x;
    }
  }
  // The warp is of one mind. None comes before the label if all logits are smaller.
  if (!(max < label_x)) {
    int before = count_before<T>(row.z, most, label_vector, label_bits);
    if (has_label) before += ties_before<T>(slice.z[label_vector], place);
    part.before = __reduce_add_sync(~0u, before);
  }
  if (max > label_x) {
    exponentiate<T, kTeacher, false>(row, logit, most, shift, teacher_shift, part, teacher);
  } else {
    exponentiate<T, kTeacher, true>(row, logit, most, shift, teacher_shift, part, teacher);
  }
  part.exp = warp_sum(part.exp);
  part.exp_u = warp_sum(part.exp_u);
  row.max = part.max;
  Parts<kTeacher> parts;
  parts.own = part;
  if constexpr (kTeacher) {
    teacher.exp = warp_sum(teacher.exp);
    teacher.diff = warp_sum(teacher.diff);
    row.teacher_max = teacher.max;
    parts.teacher = teacher;
  }
  return parts;
}

// The gradient of what `scan_held` left behind, into this thread's vectors of a slice.
template <typename T, bool kTeacher, int kVectors, typename Differential>
__device__ __forceinline__ void differentiate_held(const Held<kTeacher, kVectors>& row,
                                                   const Slice<kHeldThreads>& to, int most,
                                                   const Differential& d, float label_loss) {
  const int left = to.vectors - static_cast<int>(threadIdx.x);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (none_from<kVectors>(j, most)) break;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = Pair<T>::unpack(row.z[j][i]);
      const float2 y = kTeacher ? Pair<T>::unpack(row.t[j][i]) : x;
      const auto both = Pair<T>::pack(d(x.x, y.x), d(x.y, y.y));
      words[i] = reinterpret_cast<const uint32_t&>(both);
    }
    if (j * kHeldThreads < left) {
      to.z[threadIdx.x + j * kHeldThreads] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  // At the label 1 is taken off p before both are rounded.
  const int label_vector = row.label / kVector - to.first;
  if (to.is_mine(label_vector)) {
    const float g = d(row.label_exp, kTeacher ? row.label_teacher_exp : 0, label_loss);
    reinterpret_cast<T*>(to.z + label_vector)[row.label % kVector] = round_to<T>(g);
  }
}

}  // namespace dflash::loss
