// The steps around the Hopper kernel of lm_head_topk: the labels' logits before it, which its ids
// are compared with, and the merge of the strips' partial results after it.
#pragma once

#include <cudaTypedefs.h>

#include <type_traits>

#include "lm_head_topk_sm90.cuh"

namespace dflash::sm90 {

constexpr int kLabelRows = 16;  // of a block: few, so that there are many blocks
constexpr int kLabelStages = 4;
constexpr int kLabelTiles = 4;                        // of K, in a stage
constexpr int kLabelBytes = kLabelRows * kTileK * 2;  // of one operand and tile
constexpr int kLabelStageBytes = kLabelTiles * 2 * kLabelBytes;
constexpr int kLabelThreads = 128;

// 16 bytes, or zeros, from global into shared memory.
__device__ __forceinline__ void copy_16(uint32_t target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(valid ? 16 : 0)
               : "memory");
}

// label_logits[row] = transform(hidden[row] . weight[labels[row]]), by the same products in the
// same order as head_kernel, so that it equals that kernel's logit bit for bit: the diagonal of
// hidden @ weight[labels]^T, 16 x 16 a block. A product has 64 rows; those after the 16 are of
// whatever follows in shared memory, and not looked at.
template <typename T>
__global__ void __launch_bounds__(kLabelThreads)
    label_logits_kernel(const T* hidden, int64_t hidden_stride, const T* weight,
                        int64_t weight_stride, HeadParams p, float* label_logits) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t stages = shared_address(shared);
  const int first_row = blockIdx.x * kLabelRows;
  const int steps = (p.width + kLabelTiles * kTileK - 1) / (kLabelTiles * kTileK);

  // Thread t copies chunk t % 8 (8 elements) of row t / 8 of both operands.
  const int chunk = threadIdx.x % 8, copy_row = threadIdx.x / 8;
  const int row_read = min(first_row + copy_row, p.num_rows - 1);
  const int64_t label = p.labels[row_read];
  const T* sources[2] = {hidden + row_read * hidden_stride,
                         weight + (label >= 0 && label < p.valid ? label : 0) * weight_stride};
  const uint32_t place = copy_row * kTileK * 2 + (chunk ^ (copy_row & 7)) * 16;
  const auto copy_step = [&](int step) {
    const uint32_t stage = stages + step % kLabelStages * kLabelStageBytes;
#pragma unroll
    for (int tile = 0; tile < kLabelTiles; ++tile) {
      const int k = (step * kLabelTiles + tile) * kTileK + chunk * 8;
#pragma unroll
      for (int input = 0; input < 2; ++input) {
        copy_16(stage + (2 * tile + input) * kLabelBytes + place,
                sources[input] + (k < p.width ? k : 0), k < p.width);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  float logits[8];
  for (int step = 0; step < kLabelStages - 1; ++step) copy_step(step);
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLabelStages - 2) : "memory");
    fence_async_proxy();
    __syncthreads();
    const uint32_t stage = stages + step % kLabelStages * kLabelStageBytes;
    pin(logits);
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < kLabelTiles; ++tile) {
      const uint64_t a = operand(stage + 2 * tile * kLabelBytes);
      const uint64_t b = operand(stage + (2 * tile + 1) * kLabelBytes);
#pragma unroll
      for (int i = 0; i < kTileK / 16; ++i) {
        wgmma<T>(logits, a + i * kOperandStep, b + i * kOperandStep, step + tile + i > 0);
      }
    }
    wgmma_commit();
    // Meanwhile the stage of the step before is filled, whose products all threads have seen done.
    copy_step(step + kLabelStages - 1);
    wgmma_wait<0>();
    pin(logits);
  }

  // Row 8 half + lane / 4 of warp 0 meets itself in logits[4 j + 2 half + e] for j = half and
  // 2 (lane % 4) + e = lane / 4.
  const int lane = threadIdx.x;
  if (lane >= 32 || lane % 4 != lane / 8) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float z = lane / 4 % 2 == 0 ? logits[6 * half] : logits[6 * half + 1];
    const int row = first_row + 8 * half + lane / 4;
    if (row < p.num_rows) label_logits[row] = p.transform(z);
  }
#endif
}

constexpr int kMergeSlots = 4;  // of each lane

// A warp a row: joins the partial results of its strips.
__global__ void __launch_bounds__(128) merge_kernel(HeadParams p, int vocab, TopkOutputs out) {
  const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x & 31;
  if (row >= p.num_rows) return;
  const int slots = p.schedule.slots;
  const int64_t first = static_cast<int64_t>(row) * slots;

  float max = -INFINITY, sum = 0.0f;
  int count = 0;
  for (int slot = lane; slot < slots; slot += 32) {
    const Part part = p.parts[first + slot];
    if (part.sum > 0 && part.max > max) {
      sum *= exp2f((max - part.max) * kLog2e);
      max = part.max;
    }
    // Equal infinities would give NaN.
    if (part.sum > 0) sum += part.sum * (part.max == max ? 1 : exp2f((part.max - max) * kLog2e));
    count += part.count;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other_max = __shfl_xor_sync(~0u, max, step);
    const float other_sum = __shfl_xor_sync(~0u, sum, step);
    const float larger = fmaxf(max, other_max);
    const float mine = max == larger ? sum : __fmul_rn(sum, exp2f((max - larger) * kLog2e));
    const float theirs = other_max == larger
                             ? other_sum
                             : __fmul_rn(other_sum, exp2f((other_max - larger) * kLog2e));
    sum = mine + theirs;
    max = larger;
    count += __shfl_xor_sync(~0u, count, step);
  }

  // Each lane offers the first keys left of its slots; the largest of all comes next.
  const uint64_t* lists[kMergeSlots];
  int used[kMergeSlots];
#pragma unroll
  for (int i = 0; i < kMergeSlots; ++i) {
    const int slot = lane + 32 * i;
    lists[i] = slot < slots ? p.keys + (first + slot) * p.k : nullptr;
    used[i] = 0;
  }
  for (int place = 0; place < p.k; ++place) {
    uint64_t mine = 0;
    int from = 0;
#pragma unroll
    for (int i = 0; i < kMergeSlots; ++i) {
      if (lists[i] == nullptr || used[i] == p.k) continue;
      const uint64_t key = lists[i][used[i]];
      if (key <= mine) continue;
      mine = key;
      from = i;
    }
    uint64_t best = mine;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const uint64_t other = __shfl_xor_sync(~0u, best, step);
      best = other > best ? other : best;
    }
    if (best != 0 && best == mine) {
#pragma unroll
      for (int i = 0; i < kMergeSlots; ++i) used[i] += i == from;
    }
    if (place == 0 && isnan(key_value(best))) max = NAN;
    if (lane == 0) {
      const int64_t at = static_cast<int64_t>(row) * p.k + place;
      out.values[at] = best == 0 ? -INFINITY : key_value(best);
      out.indices[at] = best == 0 ? -1 : key_index(best);
    }
  }
  if (lane != 0) return;
  out.logsumexp[row] = isinf(max) ? max : max + logf(sum);
  if (p.labels == nullptr) return;
  if (write_odd_label(out, row, p.labels[row], vocab, p.valid)) return;
  out.rank[row] = count;
  out.label_logit[row] = p.label_logits[row];
}

struct HeadInputs {
  const void *hidden, *weight;           // T[rows, width], T[vocab, width]
  int64_t hidden_stride, weight_stride;  // multiples of 8
  int64_t num_rows;
  int vocab, valid, width, k;
  const int64_t* labels;  // or null
  Transform transform;
};

// Rows [first_row, first_row + num_rows) of the inputs.
inline HeadParams plan(const HeadInputs& in, int64_t first_row, int64_t num_rows,
                       int num_multiprocessors) {
  HeadParams p{};
  p.num_rows = static_cast<int>(num_rows);
  p.valid = in.valid;
  p.width = in.width;
  p.k = in.k;
  p.transform = in.transform;
  p.labels = in.labels == nullptr ? nullptr : in.labels + first_row;
  p.schedule = plan_schedule(p.num_rows, in.valid, in.width, num_multiprocessors / 2);
  return p;
}

inline int64_t num_progress(const HeadParams& p) {
  return static_cast<int64_t>(p.schedule.num_groups) * p.schedule.smaller.strips * kMostPairs;
}

// Scratch: partial results, published logits, progress, keys (all zero at first), label logits.
inline int64_t zeroed_bytes(const HeadParams& p) {
  const int64_t parts = static_cast<int64_t>(p.num_rows) * p.schedule.slots;
  return parts * (p.k * 8 + static_cast<int64_t>(sizeof(Part))) +
         4 * (int64_t{kPublished} * p.num_rows + num_progress(p));
}

// Rows of one launch, so that its scratch is bounded.
inline int64_t launch_rows(const HeadInputs& in, int num_multiprocessors) {
  constexpr int64_t kMostBytes = 56 << 20;
  int64_t rows = std::min<int64_t>(in.num_rows, 16384);
  while (rows > kPairRows && zeroed_bytes(plan(in, 0, rows, num_multiprocessors)) > kMostBytes) {
    rows = (rows / 2 + kPairRows - 1) / kPairRows * kPairRows;
  }
  return rows;
}

inline int64_t scratch_bytes(const HeadInputs& in, int num_multiprocessors) {
  const int64_t rows = launch_rows(in, num_multiprocessors);
  // A last launch of fewer rows has more strips of each.
  const int64_t last = (in.num_rows - 1) % rows + 1;
  return std::max(zeroed_bytes(plan(in, 0, rows, num_multiprocessors)),
                  zeroed_bytes(plan(in, 0, last, num_multiprocessors))) +
         4 * rows;
}

template <typename T>
CUtensorMap tensor_map(PFN_cuTensorMapEncodeTiled_v12000 encode, const void* data, int64_t rows,
                       int64_t width, int64_t stride, int box_rows, CUresult& result) {
  CUtensorMap map;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[] = {kTileK, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[] = {1, 1};
  constexpr auto kType = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  // What is out of bounds reads as zero.
  const CUresult found =
      encode(&map, kType, 2, const_cast<void*>(data), sizes, strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (found != CUDA_SUCCESS) result = found;
  return map;
}

// `scratch` has scratch_bytes(in, num_multiprocessors).
template <typename T>
cudaError_t launch_head(const HeadInputs& in, const TopkOutputs& outputs, uint8_t* scratch,
                        int num_multiprocessors, cudaStream_t stream) {
  void* symbol = nullptr;
  cudaDriverEntryPointQueryResult query;
  cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000,
                                                       cudaEnableDefault, &query);
  if (error != cudaSuccess) return error;
  if (query != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const auto encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(symbol);

  constexpr int kLabelShared = kLabelStages * kLabelStageBytes + 64 * kTileK * 2;
  const int head_shared = kStages * kStageBytes + shared_list_bytes(in.k);
  error = cudaFuncSetAttribute(head_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               head_shared);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(label_logits_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kLabelShared);
  if (error != cudaSuccess) return error;

  const int64_t rows = launch_rows(in, num_multiprocessors);
  for (int64_t first = 0; first < in.num_rows; first += rows) {
    HeadParams p = plan(in, first, std::min(rows, in.num_rows - first), num_multiprocessors);
    if (p.schedule.slots > 32 * kMergeSlots) return cudaErrorInvalidConfiguration;
    const int64_t parts = static_cast<int64_t>(p.num_rows) * p.schedule.slots;
    p.parts = reinterpret_cast<Part*>(scratch);
    p.published = reinterpret_cast<uint32_t*>(p.parts + parts);  // 16-byte aligned
    p.progress = p.published + kPublished * p.num_rows;
    p.keys = reinterpret_cast<uint64_t*>(p.progress + num_progress(p));
    float* label_logits = reinterpret_cast<float*>(p.keys + parts * p.k);
    p.label_logits = label_logits;
    error = cudaMemsetAsync(scratch, 0, zeroed_bytes(p), stream);
    if (error != cudaSuccess) return error;

    const T* hidden = static_cast<const T*>(in.hidden) + first * in.hidden_stride;
    const T* weight = static_cast<const T*>(in.weight);
    if (p.labels != nullptr) {
      const int blocks = (p.num_rows + kLabelRows - 1) / kLabelRows;
      label_logits_kernel<T><<<blocks, kLabelThreads, kLabelShared, stream>>>(
          hidden, in.hidden_stride, weight, in.weight_stride, p, label_logits);
    }
    CUresult result = CUDA_SUCCESS;
    const CUtensorMap hidden_map =
        tensor_map<T>(encode, hidden, p.num_rows, in.width, in.hidden_stride, kTileRows, result);
    const CUtensorMap weight_map =
        tensor_map<T>(encode, weight, in.valid, in.width, in.weight_stride, kTileIds / 2, result);
    if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
    head_kernel<T>
        <<<2 * p.schedule.clusters, kThreads, head_shared, stream>>>(hidden_map, weight_map, p);
    TopkOutputs out = outputs;
    out.values += first * in.k;
    out.indices += first * in.k;
    out.logsumexp += first;
    if (p.labels != nullptr) {
      out.rank += first;
      out.label_logit += first;
    }
    merge_kernel<<<(p.num_rows + 3) / 4, 128, 0, stream>>>(p, in.vocab, out);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace dflash::sm90
