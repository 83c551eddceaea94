// Rows of draft_loss on Hopper and later: 16-bit logits are read once and replaced by their
// gradient.
//
// A cluster of blocks holds a row in its shared memory, each warp a segment of its own: the warp
// lets the copy engine fetch it, takes maximum, sums and count relative to its own maximum, sends
// them to every block of the cluster, waits for those of all other warps, turns the segment into
// its gradient and lets the copy engine write it back. So warps wait for each other once per row,
// and the several blocks of a multiprocessor, each at another row, fill each other's gaps.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "draft_loss_rows.cuh"
#include "sm90.cuh"

namespace dflash::loss {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr int kVector = 8;  // logits of a 16-byte access
constexpr int kWarps = 8;
constexpr int kClusterThreads = 32 * kWarps;
constexpr int kBlocksPerMultiprocessor = 3;
constexpr int kMaxCluster = 16;       // beyond 8 only where the device allows it
constexpr int kMaxSegment = 64 * 32;  // vectors of a warp: what count_before can count

// Two 16-bit logits in a word.
template <typename T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  // Finite: e^u u must be 0 at the padding, not NaN.
  static constexpr uint16_t kPadding = 0xf149;  // -1e30
  static constexpr float kLowest = -1e30f;

  static __device__ __forceinline__ float2 unpack(uint32_t word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  }
  static __device__ __forceinline__ __nv_bfloat162 pack(float low, float high) {
    return __floats2bfloat162_rn(low, high);
  }
};

template <>
struct Pair<__half> {
  using Type = __half2;
  static constexpr uint16_t kPadding = 0xfbff;  // -65504
  static constexpr float kLowest = -65504;

  static __device__ __forceinline__ float2 unpack(uint32_t word) {
    return __half22float2(reinterpret_cast<const __half2&>(word));
  }
  static __device__ __forceinline__ __half2 pack(float low, float high) {
    return __floats2half2_rn(low, high);
  }
};

// The same 16-bit float as bits, and the next one below; of NaN and -inf any.
__device__ __forceinline__ uint32_t next_below(uint32_t bits) {
  if ((bits & 0x7fff) == 0) return 0x8001;
  return bits & 0x8000 ? bits + 1 : bits - 1;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(e) times the logit, minus a shift. With a soft cap, tanh(x) = 1 - 2 r of the capped x.
template <typename T, bool kSoftcap>
struct BinaryLogit {
  float scale, cap;

  __device__ explicit BinaryLogit(const RowCoefficients& o)
      : scale(kSoftcap ? 2 * kLog2E * o.logit_scale / o.softcap : kLog2E * o.logit_scale),
        cap(kLog2E * o.softcap) {}

  __device__ __forceinline__ float operator()(float x, float shift, float& r) const {
    if constexpr (!kSoftcap) return fmaf(x, scale, -shift);
    r = __fdividef(1, exp2_fast(x * scale) + 1);
    const float z = fmaf(fmaf(-2, r, 1), cap, -shift);
    return x > Pair<T>::kLowest ? z : Pair<T>::kLowest;  // the cap would let padding count
  }

  __device__ __forceinline__ float operator()(float x, float shift) const {
    float r;
    return (*this)(x, shift, r);
  }

  // The derivative of the capped logit by the uncapped, 1 - tanh^2.
  static __device__ __forceinline__ float slope(float r) { return kSoftcap ? 4 * r * (1 - r) : 1; }
};

// What a warp found in its segment; `max` and logarithms are binary.
struct alignas(16) Part {
  float max, exp, exp_u, before;
};
struct alignas(16) TeacherPart {
  float max, exp, diff, unused;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// The copy engine: 16-byte aligned, multiples of 16 bytes.
__device__ __forceinline__ void copy_in(uint32_t target, const void* source, uint32_t bytes,
                                        uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
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

// Until copy_out has read its source.
__device__ __forceinline__ void wait_copied_out() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Orders stores to shared memory before what the copy engine then reads.
__device__ __forceinline__ void fence_copy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// 16 bytes to the block `rank` of the cluster, counted there by its barrier.
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

#endif

__device__ __forceinline__ float warp_max(float x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  }
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// `vectors` of a row from `first` on, in shared memory.
struct Segment {
  uint4* z;
  const uint4* t;  // the teacher's
  int first, vectors;
};

template <typename T>
__device__ float segment_max(const uint4* z, int vectors, int lane) {
  using T2 = typename Pair<T>::Type;
  const uint32_t lowest = Pair<T>::kPadding * 0x10001u;
  T2 best = reinterpret_cast<const T2&>(lowest);
#pragma unroll 4
  for (int v = lane; v < vectors; v += 32) {
    const uint4 q = z[v];
    const T2* x = reinterpret_cast<const T2*>(&q);
    best = __hmax2(best, __hmax2(__hmax2(x[0], x[1]), __hmax2(x[2], x[3])));
  }
  const float2 both = Pair<T>::unpack(reinterpret_cast<const uint32_t&>(best));
  return warp_max(fmaxf(both.x, both.y));
}

// Ids of the label's own vector that tie with it and come before it.
template <typename T>
__device__ int ties_before(const uint4& vector, int place) {
  const T* x = reinterpret_cast<const T*>(&vector);
  int ties = 0;
  for (int i = 0; i < kVector; ++i) ties += i < place && widen(x[i]) == widen(x[place]);
  return ties;
}

template <typename T, bool kTeacher, bool kSoftcap>
__device__ void scan_segment(const Segment& segment, const BinaryLogit<T, kSoftcap>& logit,
                             int label, uint32_t label_bits, int lane, Part& part,
                             TeacherPart& teacher) {
  using T2 = typename Pair<T>::Type;
  part.max = logit(segment_max<T>(segment.z, segment.vectors, lane), 0);
  part.exp = part.exp_u = 0;
  if constexpr (kTeacher) {
    teacher.max = logit(segment_max<T>(segment.t, segment.vectors, lane), 0);
    teacher.exp = teacher.diff = teacher.unused = 0;
  }
  // Before the label's vector an equal logit counts too: it is larger than the next one below.
  const uint32_t larger = label_bits * 0x10001u, as_large = next_below(label_bits) * 0x10001u;
  const int label_vector = label / kVector - segment.first;
  uint32_t zero = 0;
  T2 count = reinterpret_cast<T2&>(zero);  // exact for kMaxSegment
#pragma unroll 2
  for (int v = lane; v < segment.vectors; v += 32) {
    const uint4 q = segment.z[v], r = kTeacher ? segment.t[v] : q;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&q);
    const uint32_t* teacher_words = reinterpret_cast<const uint32_t*>(&r);
    const uint32_t bound = v < label_vector ? as_large : larger;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      count = __hadd2(
          count, __hgt2(reinterpret_cast<const T2&>(words[i]), reinterpret_cast<const T2&>(bound)));
      const float2 x = Pair<T>::unpack(words[i]);
      const float u0 = logit(x.x, part.max), u1 = logit(x.y, part.max);
      const float e0 = exp2_fast(u0), e1 = exp2_fast(u1);
      part.exp += e0 + e1;
      part.exp_u = fmaf(e0, u0, part.exp_u);
      part.exp_u = fmaf(e1, u1, part.exp_u);
      if constexpr (kTeacher) {
        const float2 y = Pair<T>::unpack(teacher_words[i]);
        const float v0 = logit(y.x, teacher.max), v1 = logit(y.y, teacher.max);
        const float q0 = exp2_fast(v0), q1 = exp2_fast(v1);
        teacher.exp += q0 + q1;
        teacher.diff = fmaf(q0, v0 - u0, teacher.diff);
        teacher.diff = fmaf(q1, v1 - u1, teacher.diff);
      }
    }
  }
  const float2 counts = Pair<T>::unpack(reinterpret_cast<const uint32_t&>(count));
  part.before = counts.x + counts.y;
  if (lane == 0 && label_vector >= 0 && label_vector < segment.vectors) {
    part.before += ties_before<T>(segment.z[label_vector], label % kVector);
  }
  part.exp = warp_sum(part.exp);
  part.exp_u = warp_sum(part.exp_u);
  part.before = warp_sum(part.before);
  if constexpr (kTeacher) {
    teacher.exp = warp_sum(teacher.exp);
    teacher.diff = warp_sum(teacher.diff);
  }
}

// The parts of all `warps` of the cluster as one; the same bits in every warp.
template <bool kTeacher>
__device__ void merge_parts(const Part* parts, const TeacherPart* teachers, int warps, int lane,
                            Part& all, TeacherPart& teacher) {
  float max = -INFINITY, teacher_max = -INFINITY;
  for (int i = lane; i < warps; i += 32) {
    max = fmaxf(max, parts[i].max);
    if constexpr (kTeacher) teacher_max = fmaxf(teacher_max, teachers[i].max);
  }
  all = {warp_max(max), 0, 0, 0};
  if constexpr (kTeacher) teacher = {warp_max(teacher_max), 0, 0, 0};
  for (int i = lane; i < warps; i += 32) {
    const Part part = parts[i];
    const float shift = part.max - all.max, scale = exp2_fast(shift);
    all.exp = fmaf(scale, part.exp, all.exp);
    all.exp_u = fmaf(scale, fmaf(part.exp, shift, part.exp_u), all.exp_u);
    all.before += part.before;
    if constexpr (kTeacher) {
      const TeacherPart other = teachers[i];
      const float their_shift = other.max - teacher.max, their_scale = exp2_fast(their_shift);
      teacher.exp = fmaf(their_scale, other.exp, teacher.exp);
      teacher.diff =
          fmaf(their_scale, fmaf(other.exp, their_shift - shift, other.diff), teacher.diff);
    }
  }
  all.exp = warp_sum(all.exp);
  all.exp_u = warp_sum(all.exp_u);
  all.before = warp_sum(all.before);
  if constexpr (kTeacher) {
    teacher.exp = warp_sum(teacher.exp);
    teacher.diff = warp_sum(teacher.diff);
  }
}

// g = own p - teacher q, p and q the drafter's and the teacher's probabilities, with the factors in
// the shifts; with the entropy g = (own + own_log log2 p) p - teacher q.
struct Gradient {
  float shift, teacher_shift;
  float own, own_log;
};

template <typename T, bool kTeacher, bool kSoftcap, bool kEntropy>
__device__ __forceinline__ float gradient_of(const Gradient& g,
                                             const BinaryLogit<T, kSoftcap>& logit, float x,
                                             float y, float& slope) {
  float r;
  const float log_p = logit(x, g.shift, r);
  float d = exp2_fast(log_p);
  if constexpr (kEntropy) d *= fmaf(g.own_log, log_p, g.own);
  if constexpr (kTeacher) d -= exp2_fast(logit(y, g.teacher_shift));
  slope = BinaryLogit<T, kSoftcap>::slope(r);
  return d * slope;
}

template <typename T, bool kTeacher, bool kSoftcap, bool kEntropy>
__device__ void differentiate(const Segment& segment, const Gradient& g,
                              const BinaryLogit<T, kSoftcap>& logit, int lane) {
#pragma unroll 2
  for (int v = lane; v < segment.vectors; v += 32) {
    uint4 q = segment.z[v];
    const uint4 r = kTeacher ? segment.t[v] : q;
    uint32_t* words = reinterpret_cast<uint32_t*>(&q);
    const uint32_t* teacher_words = reinterpret_cast<const uint32_t*>(&r);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = Pair<T>::unpack(words[i]);
      const float2 y = kTeacher ? Pair<T>::unpack(teacher_words[i]) : x;
      float slope;
      const auto d =
          Pair<T>::pack(gradient_of<T, kTeacher, kSoftcap, kEntropy>(g, logit, x.x, y.x, slope),
                        gradient_of<T, kTeacher, kSoftcap, kEntropy>(g, logit, x.y, y.y, slope));
      words[i] = reinterpret_cast<const uint32_t&>(d);
    }
    segment.z[v] = q;
  }
}

// Shared memory: parts [2][warps], teacher parts [2][warps], barriers, segments of z, of t.
struct Plan {
  int cluster, segment;  // blocks of a cluster, vectors of a warp

  __host__ __device__ int warps() const { return cluster * kWarps; }
  __host__ __device__ int part_bytes(bool teacher) const {
    return 2 * warps() * static_cast<int>(sizeof(Part) + (teacher ? sizeof(TeacherPart) : 0));
  }
  __host__ __device__ int shared_bytes(bool teacher) const {
    return part_bytes(teacher) + 16 * (kWarps / 2 + 1) + 16 * kWarps * segment * (teacher ? 2 : 1);
  }
};

template <typename T, bool kTeacher, bool kSoftcap>
__global__ void __launch_bounds__(kClusterThreads, kBlocksPerMultiprocessor)
    loss_cluster_kernel(const __grid_constant__ RowParams<float> p,
                        const __grid_constant__ Plan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  const int warps = plan.warps();
  Part* parts = reinterpret_cast<Part*>(shared);
  TeacherPart* teacher_parts = reinterpret_cast<TeacherPart*>(parts + 2 * warps);
  uint8_t* after_parts = shared + plan.part_bytes(kTeacher);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t received = sm90::shared_address(after_parts);  // [2]
  const uint32_t filled = received + 16 + 8 * warp;
  uint4* segments = reinterpret_cast<uint4*>(after_parts + 16 * (kWarps / 2 + 1));

  const int place = sm90::cluster_rank() * kWarps + warp;  // of this warp in the cluster
  const int total = (p.vocab + kVector - 1) / kVector;
  Segment segment;
  segment.first = min(place * plan.segment, total);
  segment.vectors = min(plan.segment, total - segment.first);
  segment.z = segments + warp * plan.segment;
  segment.t = segment.z + kWarps * plan.segment;
  const bool has_end = segment.vectors > 0 && segment.first + segment.vectors == total;
  const uint32_t bytes = 16 * segment.vectors;

  if (threadIdx.x == 0) {
    sm90::barrier_init(received, 1);
    sm90::barrier_init(received + 8, 1);
    for (int i = 0; i < kWarps; ++i) sm90::barrier_init(received + 16 + 8 * i, 1);
    sm90::fence_barrier_init();
  }
  sm90::cluster_sync();

  const int64_t live = p.live(), step = gridDim.x / plan.cluster;
  T* logits = static_cast<T*>(p.logits);
  const auto fetch = [&](int64_t row) {
    if (lane != 0 || bytes == 0) return;
    const T* source = logits + row * p.stride + segment.first * kVector;
    sm90::arrive_expect(filled, kTeacher ? 2 * bytes : bytes);
    copy_in(sm90::shared_address(segment.z), source, bytes, filled);
    if constexpr (kTeacher) {
      copy_in(sm90::shared_address(segment.t), source + p.count * p.stride, bytes, filled);
    }
  };
  // The label's logit, before another warp replaces it by its gradient.
  const auto label_logit = [&](int64_t row, int label) {
    return static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(logits)[row * p.stride + label]);
  };

  const RowCoefficients& o = p.coefficients;
  const BinaryLogit<T, kSoftcap> logit(o);
  int64_t row = blockIdx.x / plan.cluster;
  if (row >= live) return;
  fetch(row);
  int label = p.labels[row];
  uint32_t label_bits = label_logit(row, label);
  for (uint32_t turn = 0; row < live; ++turn, row += step) {
    const bool another = row + step < live;
    const int next_label = another ? p.labels[row + step] : 0;
    if (bytes != 0) sm90::wait(filled, turn & 1);
    if (has_end && p.vocab % kVector != 0) {
      const int end = (segment.vectors - 1) * kVector;
      if (lane >= p.vocab % kVector && lane < kVector) {
        reinterpret_cast<uint16_t*>(segment.z)[end + lane] = Pair<T>::kPadding;
        if constexpr (kTeacher) {
          const_cast<uint16_t*>(reinterpret_cast<const uint16_t*>(segment.t))[end + lane] =
              Pair<T>::kPadding;
        }
      }
      __syncwarp();
    }

    Part part;
    TeacherPart teacher;
    scan_segment<T, kTeacher>(segment, logit, label, label_bits, lane, part, teacher);
    // Two sets of parts suffice: who sends the next but one has everybody's parts of the next,
    // sent after they had read this row's.
    const uint32_t set = turn & 1, arrived = received + 8 * set;
    Part* set_parts = parts + set * warps;
    TeacherPart* set_teachers = teacher_parts + set * warps;
    if (threadIdx.x == 0) {
      sm90::arrive_expect(arrived, plan.part_bytes(kTeacher) / 2);
    }
    if (lane < plan.cluster) {
      send(sm90::shared_address(set_parts + place), arrived, lane,
           reinterpret_cast<const float4&>(part));
      if constexpr (kTeacher) {
        send(sm90::shared_address(set_teachers + place), arrived, lane,
             reinterpret_cast<const float4&>(teacher));
      }
    }
    sm90::wait(arrived, turn >> 1 & 1);
    merge_parts<kTeacher>(set_parts, set_teachers, warps, lane, part, teacher);

    const float2 label_pair = Pair<T>::unpack(label_bits);
    const float log_sum = log2f(part.exp), entropy = kLn2 * (log_sum - part.exp_u / part.exp);
    RowValues<float> values{kLn2 * (log_sum - logit(label_pair.x, part.max)), 0, entropy,
                            kLn2 * (part.max + log_sum), part.before};
    const float gradient_scale = o.gradient_scale, kl_weight = kTeacher ? o.kl_weight : 0;
    Gradient g{part.max + log_sum, 0, static_cast<float>(o.ce_weight) + kl_weight, 0};
    if constexpr (kTeacher) {
      const float teacher_log_sum = log2f(teacher.exp);
      values.kl = kLn2 * (teacher.diff / teacher.exp - teacher_log_sum + log_sum);
      g.teacher_shift = teacher.max + teacher_log_sum - log2f(gradient_scale * kl_weight);
    }
    const bool with_entropy = part.before == 0 && o.cap_lambda != 0;
    if (with_entropy) {
      // The entropy's gradient is -p (log p + entropy).
      const float cap = o.cap_lambda;
      g.own = gradient_scale * (g.own - cap * entropy);
      g.own_log = gradient_scale * -cap * kLn2;
    } else {
      g.shift -= log2f(gradient_scale * g.own);
    }
    if (place == 0 && lane == 0) write_row(p, row, values);

    if (o.need_grad) {
      const int at = label - segment.first * kVector;
      const bool has_label = at >= 0 && at < segment.vectors * kVector;
      float teacher_label = 0;
      if (kTeacher && has_label) {
        teacher_label = Pair<T>::unpack(reinterpret_cast<const uint16_t*>(segment.t)[at]).x;
      }
      float slope, d;
      if (!with_entropy) {
        differentiate<T, kTeacher, kSoftcap, false>(segment, g, logit, lane);
        d = gradient_of<T, kTeacher, kSoftcap, false>(g, logit, label_pair.x, teacher_label, slope);
      } else {
        differentiate<T, kTeacher, kSoftcap, true>(segment, g, logit, lane);
        d = gradient_of<T, kTeacher, kSoftcap, true>(g, logit, label_pair.x, teacher_label, slope);
      }
      __syncwarp();
      if (has_label && lane == 0) {
        d -= slope * gradient_scale * static_cast<float>(o.ce_weight);
        reinterpret_cast<T*>(segment.z)[at] = round_to<T>(d);
      }
      fence_copy();
    }
    __syncwarp();
    if (o.need_grad && lane == 0 && bytes != 0) {
      copy_out(logits + row * p.stride + segment.first * kVector, sm90::shared_address(segment.z),
               bytes);
      wait_copied_out();
    }
    if (another) {
      fetch(row + step);
      label = next_label;
      label_bits = label_logit(row + step, label);
    }
  }
#endif
}

// The smallest cluster that leaves a multiprocessor several blocks, else one block.
inline Plan plan_cluster(int vocab, bool teacher, int64_t shared_limit) {
  const int vectors = (vocab + kVector - 1) / kVector;
  Plan plan{};
  for (const int64_t limit : {shared_limit / kBlocksPerMultiprocessor, shared_limit}) {
    for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
      plan = {cluster, (vectors + cluster * kWarps - 1) / (cluster * kWarps)};
      if (plan.segment <= kMaxSegment && plan.shared_bytes(teacher) + 1024 <= limit) return plan;
    }
  }
  return {};
}

// cudaErrorNotSupported if this device, this build or these rows do not allow it.
template <typename T, bool kTeacher, bool kSoftcap>
cudaError_t launch_loss_cluster(const RowParams<float>& params, cudaStream_t stream) {
  const auto kernel = loss_cluster_kernel<T, kTeacher, kSoftcap>;
  cudaFuncAttributes facts;
  cudaError_t error = cudaFuncGetAttributes(&facts, kernel);
  if (error != cudaSuccess) return error;
  int device, shared_limit;
  cudaGetDevice(&device);
  error =
      cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error != cudaSuccess) return error;
  const Plan plan = plan_cluster(params.vocab, kTeacher, shared_limit);
  if (facts.ptxVersion < 90 || plan.cluster == 0) return cudaErrorNotSupported;

  const int shared_bytes = plan.shared_bytes(kTeacher);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = plan.cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(plan.cluster);
  config.blockDim = dim3(kClusterThreads);
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

}  // namespace dflash::loss
