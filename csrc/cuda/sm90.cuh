// Hopper's barriers, tensor copies and warpgroup products: names for PTX instructions, no more.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace dflash::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives at this block's barrier, which then also waits for `bytes` of copies.
__device__ __forceinline__ void arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier with this address in block `rank` of the cluster. Orders nothing between
// the blocks: with .release.cluster it would cost a fence of all memory.
__device__ __forceinline__ void arrive_cluster(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Of a grid of clusters in one dimension: which one this is, and how many there are.
__device__ __forceinline__ uint32_t cluster_id() {
  uint32_t id;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  return id;
}

__device__ __forceinline__ uint32_t cluster_count() {
  uint32_t count;
  asm("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
  return count;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
}

// Box at element (x, y) of a matrix into this block's shared memory.
__device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap* map, int x, int y,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(target),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

// The same into every block of the cluster named in `mask`, at the same address.
__device__ __forceinline__ void copy_box_multicast(uint32_t target, const CUtensorMap* map, int x,
                                                   int y, uint32_t barrier, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(mask)
      : "memory");
}

// Copies of plain memory, all 16-byte aligned and multiples of 16 bytes.
__device__ __forceinline__ void copy_in(uint32_t target, const void* source, uint32_t bytes,
                                        uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void copy_out(void* target, uint32_t source, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(target),
      "r"(source), "r"(bytes)
      : "memory");
}

// Until this thread's copy_out have read their sources.
__device__ __forceinline__ void wait_copied_out() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Orders stores to shared memory before what a copy or a product reads there afterwards.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// 16 bytes to this address in block `rank` of the cluster, counted by its barrier.
__device__ __forceinline__ void send(uint32_t target, uint32_t barrier, uint32_t rank, float4 x) {
  asm volatile(
      "{\n.reg .b32 to, by;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 by, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, "
      "[by];\n}" ::"r"(target),
      "r"(barrier), "r"(rank), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
      : "memory");
}

__device__ __forceinline__ void store_relaxed(uint32_t* target, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(target), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* source) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Shared memory operand: rows of 128 bytes (64 16-bit elements of K), 128-byte swizzle.
__device__ __forceinline__ uint64_t operand(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t{1} << 16 | (address >> 4 & 0x3fff);
}

constexpr uint64_t kOperandStep = 32 >> 4;  // 16 elements further in K

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler must not move accumulator registers across.
template <int kSize>
__device__ __forceinline__ void pin(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(d[i]));
}

// clang-format off
#define DFLASH_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                     "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define DFLASH_D32(i) DFLASH_D8(i), DFLASH_D8(i + 8), DFLASH_D8(i + 16), DFLASH_D8(i + 24)

#define DFLASH_WGMMA_N16(type)                                                             \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %10, 0;\n"                            \
               "wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type " {"            \
               "%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, add, 1, 1, 0, 0;\n}"              \
               : DFLASH_D8(0)                                                              \
               : "l"(a), "l"(b), "r"(add))

#define DFLASH_WGMMA_N256(type)                                                            \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"                           \
               "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {"           \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "    \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "    \
               "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "    \
               "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, "    \
               "%58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "    \
               "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "    \
               "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "    \
               "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "  \
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, "  \
               "%124, %125, %126, %127}, %128, %129, add, 1, 1, 0, 0;\n}"                  \
               : DFLASH_D32(0), DFLASH_D32(32), DFLASH_D32(64), DFLASH_D32(96)             \
               : "l"(a), "l"(b), "r"(add))
// clang-format on

// d[64 x N] = (add ? d : 0) + a[64 x 16] b[N x 16]^T. N = 2 * size of d. Thread t of the warpgroup
// holds in d[4 j + 2 h + e] row 16 (t / 32) + 8 h + t % 32 / 4, column 8 j + 2 (t % 4) + e.
template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[8], uint64_t a, uint64_t b, int add) {
  if constexpr (std::is_same_v<T, __half>) {
    DFLASH_WGMMA_N16("f16");
  } else {
    DFLASH_WGMMA_N16("bf16");
  }
}

template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b, int add) {
  if constexpr (std::is_same_v<T, __half>) {
    DFLASH_WGMMA_N256("f16");
  } else {
    DFLASH_WGMMA_N256("bf16");
  }
}

#undef DFLASH_D8
#undef DFLASH_D32
#undef DFLASH_WGMMA_N16
#undef DFLASH_WGMMA_N256

}  // namespace dflash::sm90
