// Rows of draft_loss on Hopper and later: 16-bit logits are read once and replaced by their
// gradient.
//
// A cluster of blocks holds a row in its shared memory, each block a slice. In a block some warps
// scan their part of the slice of row i and then, when all is known about row i - 1, turn that into
// its gradient; one warp puts the parts together, with those of the other blocks; and one thread
// lets the copy engine write finished slices back and fetch new ones. So the warps that compute
// wait for neither memory nor the other blocks.
#pragma once

#include <algorithm>

#include "draft_loss_cluster.cuh"
#include "sm90.cuh"

namespace dflash::loss {

constexpr int kScanWarps = 16;
constexpr int kClusterThreads = 32 * (kScanWarps + 2);  // and the warps that merge and copy
constexpr int kMaxCluster = 16;                         // beyond 8 only where the device allows it
constexpr int kStages = 3, kMaxStages = 5;

// How a row lies in shared memory: slices of z and t per stage, then what is small.
struct Plan {
  int cluster, stages;
  int vectors;  // of a slice
  int room;     // vectors that a slice has in memory

  __host__ __device__ int slice_bytes() const { return 16 * room; }
};

template <typename T, bool kTeacher, bool kSoftcap, int kWarps = kScanWarps>
class ClusterBlock {
 public:
  static constexpr int kThreads = 32 * kWarps;  // that scan
  using Slice = loss::Slice<kThreads>;
  static_assert(kMaxThreadVectors * kThreads * 16 > 227 << 10, "more than a block can hold");

  // Two sets of everything: who writes the next but one knows that all have read this one.
  struct Shared {
    Parts<kTeacher> warp_parts[2][kWarps];
    Parts<kTeacher> block_parts[2][kMaxCluster];
    Gradient gradient[2];
    uint4 label_vector[kMaxStages];  // this and the next for the other kernel
    int label[kMaxStages];
    uint32_t label_bits[2];
    uint64_t filled[kMaxStages], finished[kMaxStages];
    uint64_t scanned[2], merged[2], received[2];
  };

  static __host__ __device__ int shared_bytes(const Plan& plan) {
    return static_cast<int>(sizeof(Shared)) + plan.stages * plan.slice_bytes() * (kTeacher ? 2 : 1);
  }

  __device__ ClusterBlock(const RowParams<float>& params, const Plan& plan, uint8_t* memory)
      : p_(params),
        plan_(plan),
        shared_(*reinterpret_cast<Shared*>(memory)),
        slices_(memory + sizeof(Shared)),
        rank_(sm90::cluster_rank()),
        live_(static_cast<int>(params.live())),
        begin_(sm90::cluster_id()),
        step_(sm90::cluster_count()) {
    const int total = (p_.vocab + kVector - 1) / kVector;
    first_ = min(rank_ * plan.vectors, total);
    vectors_ = min(plan.vectors, total - first_);
  }

  __device__ __forceinline__ void init_barriers() {
    for (int i = 0; i < kMaxStages; ++i) {
      sm90::barrier_init(address(shared_.filled[i]), 1);
      sm90::barrier_init(address(shared_.finished[i]), kWarps);
    }
    for (int i = 0; i < 2; ++i) {
      sm90::barrier_init(address(shared_.scanned[i]), kWarps);
      sm90::barrier_init(address(shared_.merged[i]), 1);
      sm90::barrier_init(address(shared_.received[i]), 1);
    }
    sm90::fence_barrier_init();
  }

  // One thread: rows in, gradients out.
  __device__ __forceinline__ void copy() {
    int to_fetch = begin_;
    int64_t teacher = teacher_of(begin_);
    for (int stage = 0; stage < plan_.stages; ++stage) fetch(to_fetch, teacher, stage);
    int stage = 0;
    uint32_t parity = 0;
    for (int row = begin_; row < live_; row += step_) {
      sm90::wait(address(shared_.finished[stage]), parity);
      if (p_.coefficients.need_grad && vectors_ > 0) {
        sm90::copy_out(row_start(row), sm90::shared_address(slice(stage).z), 16 * vectors_);
        sm90::wait_copied_out();
      }
      fetch(to_fetch, teacher, stage);
      advance(stage, parity);
    }
  }

  // One warp: the parts of the block's warps, sent to all blocks, and from all blocks the row's.
  __device__ __forceinline__ void merge_parts() {
    const BinaryLogit<T, kSoftcap> logit(p_.coefficients);
    const int lane = threadIdx.x % 32;
    uint32_t turn = 0;
    for (int row = begin_; row < live_; row += step_, ++turn) {
      const uint32_t set = turn & 1, parity = turn >> 1 & 1;
      const uint32_t received = address(shared_.received[set]);
      if (lane == 0) {
        sm90::arrive_expect(received, plan_.cluster * static_cast<int>(sizeof(Parts<kTeacher>)));
      }
      sm90::wait(address(shared_.scanned[set]), parity);
      const Parts<kTeacher> mine = merge<kTeacher>(shared_.warp_parts[set], kWarps);
      if (lane < plan_.cluster) {
        const uint32_t target = sm90::shared_address(&shared_.block_parts[set][rank_]);
        sm90::send(target, received, lane, reinterpret_cast<const float4&>(mine.own));
        if constexpr (kTeacher) {
          sm90::send(target + sizeof(Part), received, lane,
                     reinterpret_cast<const float4&>(mine.teacher));
        }
      }
      sm90::wait(received, parity);
      const Parts<kTeacher> all = merge<kTeacher>(shared_.block_parts[set], plan_.cluster);
      __syncwarp();  // lane 0 also tells that the other lanes have read their parts
      if (lane == 0) {
        shared_.gradient[set] = gradient_factors<kTeacher>(all, p_.coefficients);
        const float label_x = Pair<T>::unpack(shared_.label_bits[set]).x;
        sm90::arrive(address(shared_.merged[set]));
        if (rank_ == 0) write_row(p_, row, row_values<kTeacher>(all, logit(label_x, all.own.max)));
      }
      __syncwarp();
    }
  }

  // The other warps.
  __device__ __forceinline__ void compute() {
    const BinaryLogit<T, kSoftcap> logit(p_.coefficients);
    Turn last{}, now = turn_of(begin_);
    int stage = 0;
    uint32_t parity = 0;
    for (uint32_t turn = 0;; ++turn) {
      const int row = begin_ + turn * step_;
      const Turn next = turn_of(row + step_);
      now.stage = stage;
      if (row < live_) {
        sm90::wait(address(shared_.filled[stage]), parity);
        scan_row(turn & 1, now, logit);
      }
      if (turn > 0) differentiate_row(turn - 1, last, logit);
      if (row >= live_) break;
      last = now;
      now = next;
      advance(stage, parity);
    }
  }

 protected:
  struct Turn {
    int label;
    uint32_t label_bits;
    int stage;
    float max, teacher_max;  // of this warp
  };

  static __device__ __forceinline__ uint32_t address(const uint64_t& barrier) {
    return sm90::shared_address(&barrier);
  }

  __device__ __forceinline__ void advance(int& stage, uint32_t& parity) const {
    if (++stage == plan_.stages) {
      stage = 0;
      parity ^= 1;
    }
  }

  __device__ __forceinline__ Slice slice(int stage) const {
    uint4* z = reinterpret_cast<uint4*>(slices_) + stage * plan_.room * (kTeacher ? 2 : 1);
    return {z, z + plan_.room, first_, vectors_};
  }

  __device__ __forceinline__ T* row_start(int64_t row) const {
    return static_cast<T*>(p_.logits) + row * p_.stride + first_ * kVector;
  }

  __device__ __forceinline__ int64_t teacher_of(int row) const {
    return kTeacher && row < live_ ? p_.teacher_of(row) : 0;
  }

  // Moves both on to the next row: where its teacher is will be known when it is to be fetched.
  __device__ __forceinline__ void fetch(int& row, int64_t& teacher, int stage) {
    fetch_rows(row, teacher, stage);
    row += step_;
    teacher = teacher_of(row);
  }

  __device__ __forceinline__ void fetch_rows(int row, int64_t teacher, int stage) {
    if (row >= live_) return;
    const uint32_t filled = address(shared_.filled[stage]), bytes = 16 * vectors_;
    if (bytes == 0) {
      sm90::arrive(filled);
      return;
    }
    const Slice to = slice(stage);
    sm90::arrive_expect(filled, kTeacher ? 2 * bytes : bytes);
    sm90::copy_in(sm90::shared_address(to.z), row_start(row), bytes, filled);
    if constexpr (kTeacher) {
      sm90::copy_in(sm90::shared_address(to.t), row_start(teacher), bytes, filled);
    }
  }

  // The label's logit, while it is one: gradients come when all warps of the cluster have scanned.
  __device__ __forceinline__ Turn turn_of(int row) const {
    if (row >= live_) return {};
    const int label = p_.labels[row];
    const uint16_t* logits = static_cast<const uint16_t*>(p_.logits) + int64_t{row} * p_.stride;
    return {label, logits[label]};
  }

  __device__ __forceinline__ void scan_row(uint32_t set, Turn& turn,
                                           const BinaryLogit<T, kSoftcap>& logit) {
    const Slice s = slice(turn.stage);
    pad(s);
    const Parts<kTeacher> parts =
        scan<T, kTeacher, kSoftcap>(s, logit, turn.label, turn.label_bits);
    turn.max = parts.own.max;
    if constexpr (kTeacher) turn.teacher_max = parts.teacher.max;
    if (threadIdx.x == 0) shared_.label_bits[set] = turn.label_bits;
    if (threadIdx.x % 32 == 0) {
      shared_.warp_parts[set][threadIdx.x / 32] = parts;
      sm90::arrive(address(shared_.scanned[set]));
    }
  }

  // Behind a vocabulary that is no multiple of kVector; by the thread that alone reads there.
  __device__ __forceinline__ void pad(const Slice& s) const {
    const int end = p_.vocab % kVector, last = s.vectors - 1;
    if (end == 0 || last < 0 || (s.first + s.vectors) * kVector < p_.vocab) return;
    if (last % kThreads != threadIdx.x) return;
    for (int i = end; i < kVector; ++i) {
      reinterpret_cast<uint16_t*>(s.z + last)[i] = Pair<T>::kPadding;
      if constexpr (kTeacher) reinterpret_cast<uint16_t*>(s.t + last)[i] = Pair<T>::kPadding;
    }
  }

  __device__ __forceinline__ void differentiate_row(uint32_t turn, const Turn& row,
                                                    const BinaryLogit<T, kSoftcap>& logit) {
    const uint32_t set = turn & 1;
    sm90::wait(address(shared_.merged[set]), turn >> 1 & 1);
    if (p_.coefficients.need_grad) {
      const Gradient g = shared_.gradient[set];
      const float label_loss = p_.coefficients.gradient_scale * p_.coefficients.ce_weight;
      const Slice s = slice(row.stage);
      if (g.own_log == 0) {
        const Differential<T, kTeacher, kSoftcap, false> d(g, logit, row.max, row.teacher_max);
        differentiate<T, kTeacher>(s, d, row.label, label_loss);
      } else {
        const Differential<T, kTeacher, kSoftcap, true> d(g, logit, row.max, row.teacher_max);
        differentiate<T, kTeacher>(s, d, row.label, label_loss);
      }
    }
    sm90::fence_async_proxy();  // also of what `scan` has stored, before the next row comes there
    __syncwarp();
    if (threadIdx.x % 32 == 0) sm90::arrive(address(shared_.finished[row.stage]));
  }

  const RowParams<float>& p_;
  const Plan& plan_;
  Shared& shared_;
  uint8_t* slices_;
  int rank_, first_, vectors_;
  int live_, begin_, step_;  // rows of this cluster
};

template <typename T, bool kTeacher, bool kSoftcap>
__global__ void __launch_bounds__(kClusterThreads, 1)
    loss_cluster_kernel(const __grid_constant__ RowParams<float> params,
                        const __grid_constant__ Plan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t memory[];
  ClusterBlock<T, kTeacher, kSoftcap> block(params, plan, memory);
  if (threadIdx.x == 0) block.init_barriers();
  sm90::cluster_sync();
  if (sm90::cluster_id() >= params.live()) return;
  if (threadIdx.x < block.kThreads) {
    block.compute();
  } else if (threadIdx.x < block.kThreads + 32) {
    block.merge_parts();
  } else if (threadIdx.x == block.kThreads + 32) {
    block.copy();
  }
#endif
}

// The smallest cluster, of two blocks at least as compute-sanitizer wants it, with room for all
// stages, else for two; cluster 0 if there is none.
template <typename Block>
Plan plan_cluster(int vocab, int64_t shared_limit) {
  const int vectors = (vocab + kVector - 1) / kVector;
  for (int stages = kStages; stages >= 2; --stages) {
    for (int cluster = 2; cluster <= kMaxCluster; cluster *= 2) {
      const int slice = (vectors + cluster - 1) / cluster;
      const Plan plan{cluster, stages, slice, slice};
      if (Block::shared_bytes(plan) <= shared_limit) return plan;
    }
  }
  return {};
}

// The shared memory that a block may have on this device.
inline cudaError_t find_shared_limit(int& bytes) {
  int device;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

// cudaErrorNotSupported if this device, this build or these rows do not allow it.
template <typename Kernel>
cudaError_t launch_clusters(Kernel kernel, int threads, const Plan& plan, int shared_bytes,
                            const RowParams<float>& params, cudaStream_t stream) {
  cudaFuncAttributes facts;
  cudaError_t error = cudaFuncGetAttributes(&facts, kernel);
  if (error != cudaSuccess) return error;
  if (facts.ptxVersion < 90 || plan.cluster == 0) return cudaErrorNotSupported;

  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = plan.cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(plan.cluster);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  if (error != cudaSuccess) return error;
  if (clusters == 0) return cudaErrorNotSupported;
  config.gridDim = dim3(plan.cluster * std::min<int64_t>(clusters, params.count));
  return cudaLaunchKernelEx(&config, kernel, params, plan);
}

template <typename T, bool kTeacher, bool kSoftcap>
cudaError_t launch_loss_cluster(const RowParams<float>& params, cudaStream_t stream) {
  using Block = ClusterBlock<T, kTeacher, kSoftcap>;
  int shared_limit;
  const cudaError_t error = find_shared_limit(shared_limit);
  if (error != cudaSuccess) return error;
  const Plan plan = plan_cluster<Block>(params.vocab, shared_limit);
  return launch_clusters(loss_cluster_kernel<T, kTeacher, kSoftcap>, kClusterThreads, plan,
                         Block::shared_bytes(plan), params, stream);
}

}  // namespace dflash::loss
