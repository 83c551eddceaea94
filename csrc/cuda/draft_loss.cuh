// What draft_loss does around its products and its rows: gather, weights and loss, scatter.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "draft_loss_rows.cuh"

namespace dflash::loss {

constexpr int kThreads = 256;
constexpr int kSumThreads = 1024;

inline unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

// Values of slots that are not projected.
template <typename acc_t>
__global__ void fill_slots_kernel(int64_t slots, int64_t vocab, acc_t* terms, int64_t* rank,
                                  acc_t* lse, int64_t* row_of) {
  const int64_t slot = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (slot >= slots) return;
  for (int i = 0; i < 4; ++i) terms[slot * 4 + i] = 0;
  rank[slot] = vocab;
  lse[slot] = 0;
  row_of[slot] = -1;
}

// States to project, in units of `Unit`, the largest that all addresses and sizes are multiples of.
struct GatherParams {
  const int64_t* rows;    // [R]
  const int64_t* n_rows;  // []
  int64_t first, count;   // rows of this chunk
  const char* hidden;     // [A, K, H], strides in bytes
  int64_t block_stride, slot_stride, block_size, slots;
  const char* teacher;           // [T, H] or null
  const int64_t* teacher_index;  // [A, K]
  int64_t teacher_stride, teachers;
  const int64_t* tokens;  // [teacher_rows] of this chunk, -1: none; null: a teacher for each row
  const int32_t* place;   // [R]: where among a chunk's tokens a row's teacher is
  int64_t teacher_rows;
  const int64_t* labels;  // [A, K]
  int64_t vocab;
  int64_t row_bytes;
  char* states;           // [count, H], or [count + teacher_rows, H] with the teachers' behind
  int32_t* row_labels;    // [count]
  int64_t* row_slots;     // [count]
  int32_t* row_teachers;  // [count], with tokens: which of `states`
  int64_t* row_of;        // [slots]: the row that projects a slot
};

// Nothing here can raise an error: what an index out of range would name is NaN, which then shows
// in the loss. Dead rows are zero.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherParams p) {
  const int64_t i = blockIdx.x, row = p.first + i;
  const bool is_teacher = blockIdx.y == 1;
  if (i >= (is_teacher ? p.teacher_rows : p.count)) return;
  const bool shared = p.tokens != nullptr;
  const bool live = is_teacher && shared ? p.tokens[i] >= 0 : row < *p.n_rows;
  const char* source = nullptr;
  if (is_teacher && shared) {
    if (live && p.tokens[i] < p.teachers) source = p.teacher + p.tokens[i] * p.teacher_stride;
  } else if (live) {
    const int64_t slot = p.rows[row];
    const bool valid = slot >= 0 && slot < p.slots;
    const int64_t label = valid ? p.labels[slot] : -1;
    const bool labelled = label >= 0 && label < p.vocab;
    if (is_teacher) {
      const int64_t index = valid ? p.teacher_index[slot] : -1;
      if (index >= 0 && index < p.teachers) source = p.teacher + index * p.teacher_stride;
    } else {
      // More tokens than there is room for show as an index out of range does.
      const int64_t place = shared ? p.place[row] : 0;
      const bool taught = place >= 0 && (!shared || place < p.teacher_rows);
      if (labelled && taught) {
        source =
            p.hidden + slot / p.block_size * p.block_stride + slot % p.block_size * p.slot_stride;
      }
      if (threadIdx.x == 0) {
        p.row_labels[i] = labelled ? label : 0;
        p.row_slots[i] = valid ? slot : -1;
        if (shared) p.row_teachers[i] = static_cast<int32_t>(p.count + (taught ? place : 0));
        if (valid) p.row_of[slot] = row;
      }
    }
  }
  Unit fill;
  for (unsigned j = 0; j < sizeof(Unit); ++j) {
    reinterpret_cast<uint8_t*>(&fill)[j] = live ? 0xff : 0;  // all ones are a NaN
  }
  Unit* target = reinterpret_cast<Unit*>(p.states + (is_teacher ? p.count + i : i) * p.row_bytes);
  for (int64_t j = threadIdx.x; j < p.row_bytes / int64_t{sizeof(Unit)}; j += kThreads) {
    target[j] = source != nullptr ? reinterpret_cast<const Unit*>(source)[j] : fill;
  }
}

inline cudaError_t launch_gather(const GatherParams& p, cudaStream_t stream) {
  const dim3 grid(std::max(p.count, p.teacher_rows), p.teacher != nullptr ? 2 : 1);
  const int64_t bits = reinterpret_cast<int64_t>(p.hidden) | p.block_stride | p.slot_stride |
                       reinterpret_cast<int64_t>(p.teacher) | p.teacher_stride | p.row_bytes;
  if (bits % 16 == 0) {
    gather_kernel<uint4><<<grid, kThreads, 0, stream>>>(p);
  } else {
    gather_kernel<uint16_t><<<grid, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

template <typename acc_t>
struct SumParams {
  int64_t blocks, block_size, capacity;
  const int64_t* rows;    // [R = capacity]
  const int64_t* n_rows;  // []
  const acc_t* terms;     // [A, K, 4]
  const double* weight_sum;
  double dpace_alpha;  // read with dpace
  bool dpace;
  acc_t* used;  // [A, K]: the weights, replaced by D-PACE's
  acc_t* loss;  // []
};

// D-PACE (arXiv 2605.18810): w_j = sum over m >= j of C_m, with C_j the product over supervised
// i <= j of (1 - alpha) e^-ce + alpha. A NaN counts as no confidence: the loss itself carries it.
template <typename acc_t>
__device__ void dpace_block(const acc_t* terms, acc_t* weights, int64_t block_size, double alpha) {
  constexpr double kTiny = 1.17549435082228750797e-38;  // a supervised slot stays one
  double prefix = 1;
  for (int64_t k = 0; k < block_size; ++k) {
    if (!(weights[k] > 0)) continue;
    const double confidence = exp(-static_cast<double>(terms[k * 4 + 1]));
    prefix *= (1 - alpha) * (confidence >= 0 ? confidence : 0) + alpha;
    weights[k] = prefix > kTiny ? prefix : kTiny;
  }
  double sum = 0;
  for (int64_t k = block_size - 1; k >= 0; --k) {
    if (!(weights[k] > 0)) continue;
    sum += weights[k];
    weights[k] = sum;
  }
}

// One block, so that the order of the sum is fixed.
template <typename acc_t>
__global__ void __launch_bounds__(kSumThreads)
    sum_loss_kernel(const __grid_constant__ SumParams<acc_t> p) {
  __shared__ double sums[kSumThreads];
  const int64_t tid = threadIdx.x, slots = p.blocks * p.block_size, n_rows = *p.n_rows;
  if (p.dpace) {
    for (int64_t a = tid; a < p.blocks; a += kSumThreads) {
      const int64_t slot = a * p.block_size;
      dpace_block(p.terms + slot * 4, p.used + slot, p.block_size, p.dpace_alpha);
    }
    __syncthreads();
  }
  double sum = n_rows < 0 || n_rows > p.capacity ? NAN : 0;
  for (int64_t slot = tid; slot < slots; slot += kSumThreads) {
    const acc_t weight = p.used[slot];
    if (weight != 0) sum += static_cast<double>(weight) * p.terms[slot * 4];
  }
  for (int64_t i = tid; i < p.capacity && i < n_rows; i += kSumThreads) {
    if (p.rows[i] < 0 || p.rows[i] >= slots) sum = NAN;
  }
  sums[tid] = sum;
  for (int half = kSumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (tid < half) sums[tid] += sums[tid + half];
  }
  if (tid == 0) *p.loss = *p.weight_sum > 0 ? sums[0] / *p.weight_sum : 0;
}

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T x[kCount];
};

// d_hidden [slots, width] = gradient [R, width] of the slot's row, times its weight / weight_sum
// and `scale`; 0 where there is no row or no weight.
template <typename T, typename acc_t, int kCount>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const acc_t* gradient, const int64_t* row_of, const acc_t* used,
                   const double* weight_sum, double scale, int64_t width, T* d_hidden) {
  const int64_t slot = blockIdx.x, row = row_of[slot];
  const acc_t weight = row < 0 ? 0 : used[slot];
  const acc_t factor =
      *weight_sum > 0 ? static_cast<acc_t>(weight / *weight_sum * scale) : acc_t(0);
  const auto* from = reinterpret_cast<const Vector<acc_t, kCount>*>(gradient + row * width);
  auto* to = reinterpret_cast<Vector<T, kCount>*>(d_hidden + slot * width);
  for (int64_t i = threadIdx.x; i < width / kCount; i += kThreads) {
    Vector<T, kCount> result;
    if (weight != 0) {
      const Vector<acc_t, kCount> value = from[i];
#pragma unroll
      for (int j = 0; j < kCount; ++j) result.x[j] = round_to<T>(value.x[j] * factor);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) result.x[j] = round_to<T>(acc_t(0));
    }
    to[i] = result;
  }
}

template <typename T, typename acc_t>
cudaError_t launch_scatter(const acc_t* gradient, const int64_t* row_of, const acc_t* used,
                           const double* weight_sum, double scale, int64_t slots, int64_t width,
                           T* d_hidden, cudaStream_t stream) {
  constexpr int kCount = 16 / sizeof(acc_t);
  const auto kernel =
      width % kCount == 0 ? scatter_kernel<T, acc_t, kCount> : scatter_kernel<T, acc_t, 1>;
  kernel<<<static_cast<unsigned>(slots), kThreads, 0, stream>>>(gradient, row_of, used, weight_sum,
                                                                scale, width, d_hidden);
  return cudaGetLastError();
}

}  // namespace dflash::loss
