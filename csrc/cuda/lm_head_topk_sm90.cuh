// lm_head_topk on Hopper: hidden @ weight^T by TMA and wgmma, its logits consumed in registers.
//
// A cluster of two blocks takes 256 rows of hidden and a strip of the vocabulary, which it walks in
// ascending order, 256 ids at a time; both blocks need the same ids, so each copies half of them
// into both. In a block one warpgroup copies and two multiply, 64 rows each. After each 256 ids a
// multiplying thread holds 2 x 64 logits and folds them into its rows' running maximum, sum of
// exponentials, number of ids before the label and candidates for the k best. Candidates are
// buffered and from time to time put into the row's sorted list. Strips publish the best of their
// lists, from which each infers a bound on the row's k-th best, so that there are few candidates.
#pragma once

#include "lm_head_topk_rows.cuh"
#include "lm_head_topk_schedule.cuh"
#include "sm90.cuh"

namespace dflash::sm90 {

// Position in the ring of stages; parity flips at each round.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The clusters that walk the same strip read the same ids, from L2 if they do so at about the same
// time. So none begins an interval before all have begun the one before; but only for a while, as
// nothing promises that all of them run at once.
__device__ __forceinline__ void keep_pace(uint32_t* progress, const Strip& strip,
                                          uint32_t interval) {
  constexpr int kMostPolls = 40;
  store_relaxed(progress + strip.walker, interval);
  for (int poll = 0; poll < kMostPolls; ++poll) {
    uint32_t slowest = interval;
#pragma unroll
    for (int i = 0; i < kMostPairs; ++i) {
      if (i < strip.walkers) slowest = min(slowest, load_relaxed(progress + i));
    }
    if (slowest + 1 >= interval) return;
  }
}

// Other architectures know no clusters, and have no code for this kernel.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define DFLASH_CLUSTER_OF_2 __cluster_dims__(2)
#else
#define DFLASH_CLUSTER_OF_2
#endif

template <typename T>
__global__ void DFLASH_CLUSTER_OF_2 __launch_bounds__(kThreads, 1)
    head_kernel(const __grid_constant__ CUtensorMap hidden,
                const __grid_constant__ CUtensorMap weight, const __grid_constant__ HeadParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  uint64_t* buffers = reinterpret_cast<uint64_t*>(shared + kStages * kStageBytes);
  uint64_t* lists = buffers + kTileRows * kBufferPitch;
  __shared__ uint64_t barriers[2 * kStages];
  const uint32_t stages = shared_address(shared);
  const uint32_t full = shared_address(barriers), empty = full + kStages * 8;
  const int rank = cluster_rank();
  const int cluster = blockIdx.x / 2;
  const int warpgroup = threadIdx.x / 128;
  const int steps = (p.width + kTileK - 1) / kTileK;
  StripIterator strips;
  Strip strip;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 2 * 8);  // the multiplying warps of both blocks
    }
    fence_barrier_init();
  }
  cluster_sync();

  if (warpgroup == 2) {
    give_registers<40>();
    if (threadIdx.x == 256) {
      Ring ring;
      while (strips.next(p.schedule, cluster, strip)) {
        const int row = strip.pair * kPairRows + rank * kTileRows;
        const int strip_index = strip.group * p.schedule.smaller.strips + strip.slot;
        uint32_t* progress = p.progress + static_cast<int64_t>(strip_index) * kMostPairs;
        uint32_t interval = 0;
        int steps_left = 0;
        for (int tile = strip.begin; tile < strip.end; ++tile) {
          const int id = tile * kTileIds + rank * (kTileIds / 2);
#pragma unroll 1
          for (int step = 0; step < steps; ++step) {
            if (rank == 0 && strip.walkers > 1 && --steps_left < 0) {
              keep_pace(progress, strip, ++interval);
              steps_left = kPaceSteps - 1;
            }
            const uint32_t stage = stages + ring.stage * kStageBytes;
            const uint32_t barrier = full + 8 * ring.stage;
            wait(empty + 8 * ring.stage, ring.parity ^ 1);
            arrive_expect(barrier, kStageBytes);
            copy_box(stage, &hidden, step * kTileK, row, barrier);
            copy_box_multicast(stage + kRowsBytes + rank * (kIdsBytes / 2), &weight, step * kTileK,
                               id, barrier, 3);
            ring.advance();
          }
        }
      }
    }
  } else {
    take_registers<232>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int first_row = warp * 16 + lane / 4;  // of the lane's two, in the tile
    const uint32_t my_rows = warpgroup * (kRowsBytes / 2);
    const auto release = [&](int stage) {
      if (lane < 2) arrive_cluster(empty + 8 * stage, lane);
    };
    Ring ring;
    float logits[128];

    while (strips.next(p.schedule, cluster, strip)) {
      int index = strip.pair * kPairRows + rank * kTileRows + first_row;
      Row rows[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[half] = {-INFINITY, 0.0f, 0, -INFINITY, 0, -1, 0.0f};
        if (p.labels == nullptr || index + 8 * half >= p.num_rows) continue;
        // A label out of range is dealt with at the end; any number will do here.
        rows[half].label = static_cast<int>(p.labels[index + 8 * half]);
        rows[half].label_logit = p.label_logits[index + 8 * half];
      }
      if (p.k <= kSharedK) {
        for (int i = lane; i < 16 * p.k; i += 32) lists[warp * 16 * p.k + i] = 0;
      }
      __syncwarp();
      const auto published_of = [&](int half) {
        const int row = index + 8 * half;
        return row < p.num_rows ? p.published + static_cast<int64_t>(row) * kPublished : nullptr;
      };
      const auto store_of = [&](int half) {
        const int row = min(index + 8 * half, p.num_rows - 1);  // one beyond has no candidates
        const int first = strip.slot * p.schedule.published;
        const int64_t part = static_cast<int64_t>(row) * p.schedule.slots + strip.slot;
        return RowStore{
            buffers + (first_row + 8 * half) * kBufferPitch,
            p.k <= kSharedK ? lists + (first_row + 8 * half) * p.k : p.keys + part * p.k,
            p.published + static_cast<int64_t>(row) * kPublished + first,
            min(p.schedule.published, kPublished - first)};
      };

      for (int tile = strip.begin; tile < strip.end; ++tile) {
        int previous = 0;
        for (int step = 0; step < steps; ++step) {
          wait(full + 8 * ring.stage, ring.parity);
          const uint32_t stage = stages + ring.stage * kStageBytes;
          const uint64_t a = operand(stage + my_rows), b = operand(stage + kRowsBytes);
          pin(logits);
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kTileK / 16; ++i) {
            wgmma<T>(logits, a + i * kOperandStep, b + i * kOperandStep, step > 0 || i > 0);
          }
          wgmma_commit();
          pin(logits);
          // Only now are the products of the step before done, and its stage free.
          wgmma_wait<1>();
          if (step > 0) release(previous);
          previous = ring.stage;
          ring.advance();
        }
        wgmma_wait<0>();
        pin(logits);
        release(previous);

        const int first_id = tile * kTileIds;
        if (p.transform.softcap > 0 || p.transform.scale != 1.0f) {
#pragma unroll
          for (int i = 0; i < 128; ++i) logits[i] = p.transform(logits[i]);
        }
        if (first_id + kTileIds > p.valid) {
#pragma unroll
          for (int i = 0; i < 128; ++i) {
            const int id = first_id + 8 * (i / 4) + 2 * (lane & 3) + i % 2;
            if (id >= p.valid) logits[i] = -INFINITY;
          }
        }
        const int age = tile - strip.begin;
        const uint32_t groups[2] = {fold<0>(logits, rows[0], first_id),
                                    fold<1>(logits, rows[1], first_id)};
        if (__any_sync(~0u, needs_close_count(rows[0], first_id) ||
                                needs_close_count(rows[1], first_id))) {
          count_closely<0>(logits, rows[0], first_id);
          count_closely<1>(logits, rows[1], first_id);
        }
        keep_order(index);  // no pointers in registers meanwhile
        collect<0>(logits, rows[0], store_of(0), published_of(0), first_id, age, groups[0], p);
        collect<1>(logits, rows[1], store_of(1), published_of(1), first_id, age, groups[1], p);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        flush(rows[half], store_of(half), p.k);
        write_part(rows[half], index + 8 * half, store_of(half), strip.slot, p);
      }
      __syncwarp();
    }
  }
  // The other block may still copy into this one or arrive at its barriers.
  cluster_sync();
#endif
}

#undef DFLASH_CLUSTER_OF_2

}  // namespace dflash::sm90
