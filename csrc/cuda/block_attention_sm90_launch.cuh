// Launches the Hopper kernel of block_attention's context gradients.
#pragma once

#include <cudaTypedefs.h>

#include "block_attention_sm90.cuh"

namespace dflash::sm90 {

struct ContextInputs {
  const void* q;  // [A, K, Hq, D]
  const void* grad_out;
  const void* k;  // [T, Hk, D]
  const void* v;
  int64_t row_k, row_v;  // elements from one token to the next
};

// Boxes of 64 elements x `box` of a tensor whose dimensions, from the innermost, have these sizes
// and, but for the first, these strides. What is out of bounds reads as zero.
template <typename T, int kRank>
cudaError_t attention_map(const void* data, const cuuint64_t (&sizes)[kRank],
                          const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank],
                          CUtensorMap& map) {
  void* symbol = nullptr;
  cudaDriverEntryPointQueryResult query;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol,
                                                             12000, cudaEnableDefault, &query);
  if (error != cudaSuccess) return error;
  if (query != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const auto encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(symbol);
  const cuuint32_t element_strides[] = {1, 1, 1};
  constexpr auto kType = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(&map, kType, kRank, const_cast<void*>(data), sizes, strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename T, int kDim>
cudaError_t launch_context(const ContextInputs& in, const ContextParams& p, cudaStream_t stream) {
  constexpr int kShared = ContextShared<kDim>::kBytes;
  cudaError_t error = cudaFuncSetAttribute(context_kernel<T, kDim>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  const cuuint64_t q_heads = static_cast<cuuint64_t>(p.kv_heads) * p.group;
  const cuuint64_t slots = static_cast<cuuint64_t>(p.blocks) * p.slots;
  const cuuint32_t group = p.group;
  CUtensorMap maps[4];
  const void* queries[] = {in.q, in.grad_out};
  for (int i = 0; i < 2; ++i) {
    error = attention_map<T, 3>(queries[i], {kDim, q_heads, slots}, {kDim * 2, q_heads * kDim * 2},
                                {64, group, kContextRows / group}, maps[i]);
    if (error != cudaSuccess) return error;
  }
  const void* contexts[] = {in.k, in.v};
  const cuuint64_t rows[] = {static_cast<cuuint64_t>(in.row_k), static_cast<cuuint64_t>(in.row_v)};
  const cuuint64_t heads[] = {static_cast<cuuint64_t>(p.head_k), static_cast<cuuint64_t>(p.head_v)};
  for (int i = 0; i < 2; ++i) {
    const cuuint64_t width = (p.kv_heads - 1) * heads[i] + kDim;
    error = attention_map<T, 2>(contexts[i], {width, static_cast<cuuint64_t>(p.tokens)},
                                {rows[i] * 2}, {64, kContextKeys}, maps[2 + i]);
    if (error != cudaSuccess) return error;
  }
  const int tiles = (p.tokens + kContextKeys - 1) / kContextKeys;
  context_kernel<T, kDim><<<tiles * p.kv_heads, kContextThreads, kShared, stream>>>(
      maps[0], maps[1], maps[2], maps[3], p);
  return cudaGetLastError();
}

}  // namespace dflash::sm90
