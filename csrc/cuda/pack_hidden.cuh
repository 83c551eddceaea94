// pack_hidden on a GPU: rows of the captured layers, without padding, into a slot of this GPU or,
// by peer stores, of another one.
//
// A warp copies one layer's row at a time with 16-byte accesses, the widest that all addresses
// allow. The grid is persistent, as the number of rows is only known on the device. Counts are read
// there and layers travel by value, so that a captured graph can replay the call.
#pragma once

#include <cuda_runtime.h>

#include <cassert>
#include <cstdint>

namespace dflash {

constexpr int kPackLayers = 16;  // of one launch
constexpr int kPackThreads = 256;
constexpr int kPackUnroll = 10;  // loads in flight of a thread
constexpr int kPackBlocksPerSm = 3;

struct PackLayer {
  const char* data;
  int64_t row_stride;
  int64_t position_stride;
};

// All strides are in bytes.
struct PackParams {
  PackLayer layers[kPackLayers];
  int num_layers;
  const int64_t* src_index;
  const int64_t* n_rows;
  const int64_t* high_water;
  int64_t length;       // S
  int64_t num_sources;  // B * S
  int64_t capacity;     // T
  char* out;            // row 0 of layers[0]
  int64_t out_row;
  int64_t out_layer;
  int64_t row_bytes;
};

// All loads of a round are issued before its first store.
template <typename Vec>
__device__ __forceinline__ void copy_row(Vec* to, const Vec* from, int count, int lane) {
  Vec value[kPackUnroll];
  int i = lane;
  for (; i + 32 * (kPackUnroll - 1) < count; i += 32 * kPackUnroll) {
#pragma unroll
    for (int j = 0; j < kPackUnroll; ++j) value[j] = from[i + 32 * j];
#pragma unroll
    for (int j = 0; j < kPackUnroll; ++j) to[i + 32 * j] = value[j];
  }
#pragma unroll
  for (int j = 0; j < kPackUnroll; ++j) {
    if (i + 32 * j < count) value[j] = from[i + 32 * j];
  }
#pragma unroll
  for (int j = 0; j < kPackUnroll; ++j) {
    if (i + 32 * j < count) to[i + 32 * j] = value[j];
  }
}

template <typename Vec>
__global__ void __launch_bounds__(kPackThreads, kPackBlocksPerSm)
    pack_hidden_kernel(const __grid_constant__ PackParams params) {
  const int64_t rows = *params.n_rows, dirty = *params.high_water;
  assert(rows >= 0 && rows <= params.capacity);
  assert(dirty >= 0 && dirty <= params.capacity);
  const int64_t items = max(rows, dirty) * params.num_layers;
  const int count = params.row_bytes / sizeof(Vec), lane = threadIdx.x % 32;
  const int64_t num_warps = int64_t{gridDim.x} * (kPackThreads / 32);
  const int64_t warp = int64_t{blockIdx.x} * (kPackThreads / 32) + threadIdx.x / 32;
  for (int64_t item = warp; item < items; item += num_warps) {
    const int64_t t = item / params.num_layers;
    const int l = item - t * params.num_layers;
    const int64_t from = t < rows ? params.src_index[t] : -1;
    assert(from >= -1 && from < params.num_sources);
    Vec* to = reinterpret_cast<Vec*>(params.out + t * params.out_row + l * params.out_layer);
    if (from >= 0) {
      const PackLayer& layer = params.layers[l];
      const char* source = layer.data + from / params.length * layer.row_stride +
                           from % params.length * layer.position_stride;
      copy_row(to, reinterpret_cast<const Vec*>(source), count, lane);
    } else {
      for (int i = lane; i < count; i += 32) to[i] = Vec{};
    }
  }
}

// On its own, after every block of pack_hidden_kernel has read the old mark. Until the last layer
// is written, other layers still have to clear the rows up to it.
__global__ void pack_mark_kernel(const int64_t* n_rows, int64_t* high_water, bool last) {
  *high_water = last ? *n_rows : max(*n_rows, *high_water);
}

template <typename Vec>
cudaError_t launch_pack_rows(const PackParams& params, cudaStream_t stream) {
  int device, num_sms;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  // On wide rows one block fills an SM's share of the memory's bandwidth, and more of them only
  // disturb each other (measured); on narrow ones it would mostly wait for indices.
  const bool wide = sizeof(Vec) == 16 && params.row_bytes >= 32 * kPackUnroll * 16;
  const int grid = num_sms * (wide ? 1 : kPackBlocksPerSm);
  pack_hidden_kernel<Vec><<<grid, kPackThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

// alignment: a power of two that divides every address, stride and row_bytes of params.
inline cudaError_t launch_pack_hidden(const PackParams& params, int64_t alignment,
                                      cudaStream_t stream) {
  switch (alignment) {
    case 1:
      return launch_pack_rows<unsigned char>(params, stream);
    case 2:
      return launch_pack_rows<unsigned short>(params, stream);
    case 4:
      return launch_pack_rows<unsigned int>(params, stream);
    case 8:
      return launch_pack_rows<uint2>(params, stream);
    default:
      return launch_pack_rows<uint4>(params, stream);
  }
}

inline cudaError_t launch_pack_mark(const int64_t* n_rows, int64_t* high_water, bool last,
                                    cudaStream_t stream) {
  pack_mark_kernel<<<1, 1, 0, stream>>>(n_rows, high_water, last);
  return cudaGetLastError();
}

}  // namespace dflash
