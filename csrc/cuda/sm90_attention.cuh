// What attention's kernels share: arrivals at barriers, warpgroup products, rows of results.
#pragma once

#include "sm90.cuh"

namespace dflash::sm90 {

// Racecheck does not follow what __syncwarp orders before one lane's arrival at a barrier: it
// reports even a program that does nothing else. For it every lane arrives.
#ifdef DFLASH_RACECHECK
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

// Arrives once all of the warp have met: kWarpArrivals of what the barrier counts.
__device__ __forceinline__ void warp_arrive(uint32_t barrier) {
  __syncwarp();
  if (kWarpArrivals == 32 || threadIdx.x % 32 == 0) arrive(barrier);
}

// Shared memory operand whose contiguous dimension is not K: rows of 64 16-bit elements, one for
// each element of K, 128-byte swizzle; the next 64 elements are `columns` bytes further.
__device__ __forceinline__ uint64_t operand_across(uint32_t address, uint32_t columns) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t{columns >> 4} << 16 | (address >> 4 & 0x3fff);
}

constexpr uint64_t kAcrossStep = 16 * 128 >> 4;  // 16 elements further in K

// clang-format off
#define DFLASH_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                     "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define DFLASH_D32(i) DFLASH_D8(i), DFLASH_D8(i + 8), DFLASH_D8(i + 16), DFLASH_D8(i + 24)

#define DFLASH_WGMMA_SHARED_N64(type)                                                          \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"                                \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {"                \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "        \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
               "}, %32, %33, add, 1, 1, 0, 0;\n}"                                              \
               : DFLASH_D32(0)                                                                 \
               : "l"(a), "l"(b), "r"(add))

#define DFLASH_WGMMA_SHARED_N128(type)                                                         \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                \
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {"               \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "        \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63" \
               "}, %64, %65, add, 1, 1, 0, 0;\n}"                                              \
               : DFLASH_D32(0), DFLASH_D32(32)                                                 \
               : "l"(a), "l"(b), "r"(add))

#define DFLASH_WGMMA_REGISTERS_N64(type)                                                       \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"                                \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {"                \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "        \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
               "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}"                                \
               : DFLASH_D32(0)                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

#define DFLASH_WGMMA_REGISTERS_N128(type)                                                      \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"                                \
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {"               \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "        \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63" \
               "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"                                \
               : DFLASH_D32(0), DFLASH_D32(32)                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
// clang-format on

#define DFLASH_WGMMA_TYPES(product)          \
  if constexpr (std::is_same_v<T, __half>) { \
    product("f16");                          \
  } else {                                   \
    product("bf16");                         \
  }

// d[64 x N] = (add ? d : 0) + a[64 x 16] b[N x 16]^T, N = 2 * size of d; d lies as in sm90.cuh.
template <typename T, int kSize>
__device__ __forceinline__ void multiply(float (&d)[kSize], uint64_t a, uint64_t b, int add) {
  if constexpr (kSize == 32) {
    DFLASH_WGMMA_TYPES(DFLASH_WGMMA_SHARED_N64)
  } else {
    static_assert(kSize == 64);
    DFLASH_WGMMA_TYPES(DFLASH_WGMMA_SHARED_N128)
  }
}

// d[64 x N] = (add ? d : 0) + a[64 x 16] b[16 x N], b as of operand_across. Thread t of the
// warpgroup holds in a[2 c + h] row 16 (t / 32) + 8 h + t % 32 / 4, columns 8 c + 2 (t % 4) and
// the next: what a thread has of a product, rounded, is its part of an operand.
template <typename T, int kSize>
__device__ __forceinline__ void multiply(float (&d)[kSize], const uint32_t* a, uint64_t b,
                                         int add) {
  if constexpr (kSize == 32) {
    DFLASH_WGMMA_TYPES(DFLASH_WGMMA_REGISTERS_N64)
  } else {
    static_assert(kSize == 64);
    DFLASH_WGMMA_TYPES(DFLASH_WGMMA_REGISTERS_N128)
  }
}

#undef DFLASH_D8
#undef DFLASH_D32
#undef DFLASH_WGMMA_SHARED_N64
#undef DFLASH_WGMMA_SHARED_N128
#undef DFLASH_WGMMA_REGISTERS_N64
#undef DFLASH_WGMMA_REGISTERS_N128
#undef DFLASH_WGMMA_TYPES

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// Of x[j] of a quad's thread c, thread t gets x[t] of threads 0, ..., 3.
__device__ __forceinline__ uint4 transpose_quad(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const uint32_t ab = __shfl_xor_sync(0xffffffff, odd ? a : b, 1);
  const uint32_t cd = __shfl_xor_sync(0xffffffff, odd ? c : d, 1);
  (odd ? a : b) = ab;
  (odd ? c : d) = cd;
  const uint32_t ac = __shfl_xor_sync(0xffffffff, upper ? a : c, 2);
  const uint32_t bd = __shfl_xor_sync(0xffffffff, upper ? b : d, 2);
  (upper ? a : c) = ac;
  (upper ? b : d) = bd;
  return {a, b, c, d};
}

// A product's row h of this thread's two, times `factor`, rounded: 16 bytes a thread of its quad.
// By whole warps, of which those `there` write.
template <typename T, int kSize>
__device__ __forceinline__ void write_row(const float (&d)[kSize], int h, float factor, T* to,
                                          bool there) {
#pragma unroll
  for (int j = 0; j < kSize / 4; j += 4) {
    const auto pair = [&](int of) {
      return pack<T>(d[4 * of + 2 * h] * factor, d[4 * of + 2 * h + 1] * factor);
    };
    const uint4 x = transpose_quad(pair(j), pair(j + 1), pair(j + 2), pair(j + 3));
    if (there) reinterpret_cast<uint4*>(to)[j + (threadIdx.x & 3)] = x;
  }
}

// Box at element (x, y, z) of a tensor into this block's shared memory.
__device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap* map, int x, int y,
                                         int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(target),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

}  // namespace dflash::sm90
