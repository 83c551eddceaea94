// Rows of draft_loss on Hopper, without a soft cap: as in draft_loss_sm90.cuh, but a row is in
// shared memory only on its way in and out.
//
// A thread takes its part of row i into registers, where exponentials replace it until all is known
// about the row; meanwhile it scans row i + 1, in other registers. Then it writes the gradient of
// row i to where it took its part of row i + 1 from: no thread waits for another's reading, and a
// stage is needed again only when all others have been.
#pragma once

#include "draft_loss_held.cuh"
#include "draft_loss_sm90.cuh"

namespace dflash::loss {

// A third warpgroup merges and copies, and gives registers to the others, which need them.
constexpr int kRegisterThreads = kHeldThreads + 128;
constexpr int kHeldRegisters = 224, kOtherRegisters = 56;

template <typename T, bool kTeacher, int kVectors>
class RegisterBlock : public ClusterBlock<T, kTeacher, false, kHeldWarps> {
  using Base = ClusterBlock<T, kTeacher, false, kHeldWarps>;
  using Row = Held<kTeacher, kVectors>;
  using Base::begin_, Base::live_, Base::step_, Base::p_, Base::plan_, Base::shared_;
  using Base::vectors_;

 public:
  using Base::Base;
  using typename Base::Slice;

  // All threads, before anything is fetched: what lies behind the slices stays as it is.
  __device__ __forceinline__ void pad_slices() {
    constexpr uint32_t kWord = Pair<T>::kPadding * 0x10001u;
    const uint4 padding = make_uint4(kWord, kWord, kWord, kWord);
    for (int stage = 0; stage < plan_.stages; ++stage) {
      const Slice s = this->slice(stage);
      for (int v = vectors_ + threadIdx.x; v < plan_.room; v += kRegisterThreads) {
        s.z[v] = padding;
        if constexpr (kTeacher) s.t[v] = padding;
      }
    }
  }

  // One thread: rows in, gradients out. The turn after that of a row brings its gradient, so there
  // is one more of them than rows.
  __device__ __forceinline__ void copy() {
    int to_fetch = begin_;
    Ahead ahead = ahead_of(begin_);
    for (int stage = 0; stage < plan_.stages; ++stage) fetch(to_fetch, ahead, stage);
    int stage = 0;
    uint32_t parity = 0;
    for (int row = begin_; row - step_ < live_; row += step_) {
      sm90::wait(this->address(shared_.finished[stage]), parity);
      if (row > begin_ && p_.coefficients.need_grad && vectors_ > 0) {
        const uint32_t from = sm90::shared_address(this->slice(stage).z);
        sm90::copy_out(this->row_start(row - step_), from, 16 * vectors_);
        sm90::wait_copied_out();
      }
      fetch(to_fetch, ahead, stage);
      this->advance(stage, parity);
    }
  }

  // The warps that compute.
  __device__ __forceinline__ void compute() {
    BinaryLogit<T, false> logit(p_.coefficients);
    // Else the compiler computes them anew for each row, in fp64.
    float fixed[] = {logit.scale, static_cast<float>(p_.coefficients.gradient_scale *
                                                     p_.coefficients.ce_weight)};
    sm90::pin(fixed);
    logit.scale = fixed[0];
    const float label_loss = fixed[1];
    Row now, last;
    int row = begin_, stage = 0;
    uint32_t parity = 0;
    for (uint32_t turn = 0;; ++turn) {
      sm90::wait(this->address(shared_.filled[stage]), parity);
      if (row < live_) scan_row(turn & 1, stage, now, logit);
      if (turn > 0) differentiate_row(turn - 1, stage, last, logit, label_loss);
      __syncwarp();
      if (threadIdx.x % 32 == 0) sm90::arrive(this->address(shared_.finished[stage]));
      if (row >= live_) break;
      last = now;
      row += step_;
      this->advance(stage, parity);
    }
  }

 private:
  // Read from memory before they are needed.
  struct Ahead {
    int label;
    int64_t teacher;
  };

  __device__ __forceinline__ Ahead ahead_of(int row) const {
    if (row >= live_) return {};
    return {p_.labels[row], this->teacher_of(row)};
  }

  // Moves both on to the next row. The label's logit comes with the row, while it is one: gradients
  // are written when all blocks of the cluster have the row.
  __device__ __forceinline__ void fetch(int& row, Ahead& ahead, int stage) {
    const uint32_t filled = this->address(shared_.filled[stage]), bytes = 16 * vectors_;
    if (row < live_) {
      shared_.label[stage] = ahead.label;
      sm90::arrive_expect(filled, sizeof(uint4) + (kTeacher ? 2 * bytes : bytes));
      const T* logits = static_cast<const T*>(p_.logits) + row * p_.stride;
      sm90::copy_in(sm90::shared_address(&shared_.label_vector[stage]),
                    logits + ahead.label / kVector * kVector, sizeof(uint4), filled);
      if (bytes > 0) {
        const Slice to = this->slice(stage);
        sm90::copy_in(sm90::shared_address(to.z), this->row_start(row), bytes, filled);
        if constexpr (kTeacher) {
          sm90::copy_in(sm90::shared_address(to.t), this->row_start(ahead.teacher), bytes, filled);
        }
      }
    } else if (row - step_ < live_) {
      sm90::arrive(filled);  // the stage of the last gradient, now that it is empty
    }
    row += step_;
    ahead = ahead_of(row);
  }

  __device__ __forceinline__ void scan_row(uint32_t set, int stage, Row& now,
                                           const BinaryLogit<T, false>& logit) {
    const Slice s = this->slice(stage);
    load_vectors(now.z, s.z, plan_.vectors);
    if constexpr (kTeacher) load_vectors(now.t, s.t, plan_.vectors);
    now.label = shared_.label[stage];
    const auto* label_logits = reinterpret_cast<const uint16_t*>(&shared_.label_vector[stage]);
    const uint32_t label_bits = label_logits[now.label % kVector];
    const int end = p_.vocab % kVector;
    if (end != 0 && vectors_ > 0 && (s.first + vectors_) * kVector > p_.vocab) {
      pad_vectors<T>(now.z, vectors_ - 1, end);
      if constexpr (kTeacher) pad_vectors<T>(now.t, vectors_ - 1, end);
    }
    const Parts<kTeacher> parts = scan_held<T>(now, s, plan_.vectors, logit, label_bits);
    if (threadIdx.x == 0) shared_.label_bits[set] = label_bits;
    if (threadIdx.x % 32 == 0) {
      shared_.warp_parts[set][threadIdx.x / 32] = parts;
      sm90::arrive(this->address(shared_.scanned[set]));
    }
  }

  // Into the slice that this thread has just taken its next vectors from.
  __device__ __forceinline__ void differentiate_row(uint32_t turn, int stage, const Row& row,
                                                    const BinaryLogit<T, false>& logit,
                                                    float label_loss) {
    const uint32_t set = turn & 1;
    sm90::wait(this->address(shared_.merged[set]), turn >> 1 & 1);
    if (!p_.coefficients.need_grad) return;
    const Slice to = this->slice(stage);
    const Gradient g = shared_.gradient[set];
    if (g.own_log == 0) {
      const Differential<T, kTeacher, false, false> d(g, logit, row.max, row.teacher_max);
      differentiate_held<T>(row, to, plan_.vectors, d, label_loss);
    } else {
      const Differential<T, kTeacher, false, true> d(g, logit, row.max, row.teacher_max);
      differentiate_held<T>(row, to, plan_.vectors, d, label_loss);
    }
    sm90::fence_async_proxy();
  }
};

template <typename T, bool kTeacher, int kVectors>
__global__ void __launch_bounds__(kRegisterThreads, 1)
    loss_register_kernel(const __grid_constant__ RowParams<float> params,
                         const __grid_constant__ Plan plan) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t memory[];
  using Block = RegisterBlock<T, kTeacher, kVectors>;
  {
    Block block(params, plan, memory);
    if (threadIdx.x == 0) block.init_barriers();
    block.pad_slices();
  }
  sm90::cluster_sync();
  if (sm90::cluster_id() >= params.live()) return;
  if (threadIdx.x < kHeldThreads) {
    sm90::take_registers<kHeldRegisters>();
    Block(params, plan, memory).compute();
    return;
  }
  sm90::give_registers<kOtherRegisters>();
  if (threadIdx.x < kHeldThreads + 32) {
    Block(params, plan, memory).merge_parts();
  } else if (threadIdx.x == kHeldThreads + 32) {
    Block(params, plan, memory).copy();
  }
#endif
}

// Launches with clusters of this size if a thread's part of a row fits kVectors and three stages
// fit shared memory, else cudaErrorNotSupported.
template <typename T, bool kTeacher, int kVectors>
cudaError_t try_loss_registers(int cluster, int shared_limit, const RowParams<float>& params,
                               cudaStream_t stream) {
  using Block = RegisterBlock<T, kTeacher, kVectors>;
  const int vectors = (params.vocab + kVector - 1) / kVector;
  Plan plan{cluster, kMaxStages, (vectors + cluster - 1) / cluster, kVectors * kHeldThreads};
  while (Block::shared_bytes(plan) > shared_limit) --plan.stages;
  if (plan.vectors > plan.room || plan.stages < kStages) return cudaErrorNotSupported;
  return launch_clusters(loss_register_kernel<T, kTeacher, kVectors>, kRegisterThreads, plan,
                         Block::shared_bytes(plan), params, stream);
}

// With the smallest cluster of at least two blocks whose registers hold a row. Needs machine code
// for sm_90a. cudaErrorNotSupported elsewhere, and for vocabularies that are too large.
template <typename T, bool kTeacher>
cudaError_t launch_loss_registers(const RowParams<float>& params, cudaStream_t stream) {
  constexpr int kFew = kTeacher ? 5 : 10, kMany = kTeacher ? 8 : 16;
  int shared_limit, device, major;
  cudaError_t error = find_shared_limit(shared_limit);
  if (error != cudaSuccess) return error;
  error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  error = cudaErrorNotSupported;
  if (major != 9) return error;
  for (int cluster = 2; error == cudaErrorNotSupported && cluster <= kMaxCluster; cluster *= 2) {
    error = try_loss_registers<T, kTeacher, kFew>(cluster, shared_limit, params, stream);
    if (error != cudaErrorNotSupported) break;
    error = try_loss_registers<T, kTeacher, kMany>(cluster, shared_limit, params, stream);
  }
  return error;
}

}  // namespace dflash::loss
