// Launches the Hopper kernel of block_attention's forward.
#pragma once

#include <algorithm>

#include "block_attention_forward_sm90.cuh"
#include "block_attention_sm90_launch.cuh"

namespace dflash::sm90 {

struct ForwardInputs {
  const void* q;  // [A, K, Hq, D]
  const void* k;  // [T, Hk, D]
  const void* v;
  const void* k_own;  // [A, K, Hk, D]
  const void* v_own;
  int64_t row_k, row_v;  // elements from one token to the next
};

template <typename T>
cudaError_t launch_forward(const ForwardInputs& in, const ForwardParams& p, cudaStream_t stream) {
  constexpr int kShared = ForwardShared::kBytes;
  cudaError_t error =
      cudaFuncSetAttribute(forward_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  const cuuint64_t q_heads = static_cast<cuuint64_t>(p.kv_heads) * p.group;
  const cuuint64_t slots = static_cast<cuuint64_t>(p.blocks) * p.slots;
  const cuuint32_t group = p.group;
  ForwardMaps maps;
  error = attention_map<T, 3>(in.q, {kForwardDim, q_heads, slots},
                              {kForwardDim * 2, q_heads * kForwardDim * 2},
                              {64, group, kForwardRows / group}, maps.q);
  if (error != cudaSuccess) return error;
  const auto matrix = [&](const void* data, int64_t head, int64_t row, cuuint64_t rows,
                          cuuint32_t box, CUtensorMap& map) {
    const cuuint64_t width = (p.kv_heads - 1) * head + kForwardDim;
    return attention_map<T, 2>(data, {width, rows}, {static_cast<cuuint64_t>(row) * 2}, {64, box},
                               map);
  };
  const int64_t own_row = int64_t{p.kv_heads} * kForwardDim;
  error = matrix(in.k, p.head_k, in.row_k, p.tokens, kForwardKeys, maps.k);
  if (error != cudaSuccess) return error;
  error = matrix(in.v, p.head_v, in.row_v, p.tokens, kForwardKeys, maps.v);
  if (error != cudaSuccess) return error;
  error = matrix(in.k_own, kForwardDim, own_row, slots, kShortKeys, maps.k_own);
  if (error != cudaSuccess) return error;
  error = matrix(in.v_own, kForwardDim, own_row, slots, kShortKeys, maps.v_own);
  if (error != cudaSuccess) return error;
  error = cudaMemsetAsync(p.taken, 0, sizeof(int), stream);
  if (error != cudaSuccess) return error;
  int device, multiprocessors;
  error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  forward_kernel<T>
      <<<std::min(p.work, multiprocessors), kForwardThreads, kShared, stream>>>(maps, p);
  return cudaGetLastError();
}

}  // namespace dflash::sm90
