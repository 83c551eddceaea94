// The kernels of draft_loss on small shapes with equal logits, whose results are known, in buffers
// without a byte to spare: a program for compute-sanitizer, without torch.
#include <cmath>
#include <cstdio>
#include <vector>

#include "cuda/draft_loss.cuh"
#include "cuda/draft_loss_divergence.cuh"
#include "cuda/draft_loss_registers.cuh"
#include "cuda/draft_loss_sm90.cuh"
#include "device.h"

namespace {

using dflash::loss::RowParams;

// All logits are 0: the label's rank is its id, and the cross entropy is log(vocab). The last row
// is dead.
template <typename T, typename acc_t, typename Launch>
void rows(int count, int vocab, bool teacher, double softcap, const Launch& launch,
          bool shared = false) {
  RowParams<acc_t> p{};
  p.stride = (vocab + 63) / 64 * 64;
  p.count = count;
  const int teachers = shared ? 1 : teacher ? count : 0;
  p.logits = on_device(std::vector<T>((count + teachers) * p.stride));
  if (shared) p.teachers = on_device(std::vector<int32_t>(count, count));
  std::vector<int32_t> labels(count);
  std::vector<int64_t> slots(count);
  for (int row = 0; row < count; ++row) labels[row] = row * 31 % vocab, slots[row] = row;
  p.labels = on_device(labels);
  p.slots = on_device(slots);
  p.n_rows = on_device<int64_t>({count - 1});
  p.vocab = vocab;
  p.coefficients = {1, teacher ? 1. : 0., 0.5, 1, softcap, 1, teacher, true};
  p.terms = on_device(std::vector<acc_t>(4 * count, -1));
  p.rank = on_device(std::vector<int64_t>(count, -1));
  p.lse = on_device(std::vector<acc_t>(count));
  check(launch(p, nullptr), "rows");
  check(cudaDeviceSynchronize(), "rows");
  const auto terms = read_back(p.terms, 4 * count);
  const auto rank = read_back(p.rank, count);
  for (int row = 0; row < count - 1; ++row) {
    expect(rank[row], labels[row], "rank");
    expect(std::llround(1000 * terms[4 * row + 1]), std::llround(1000 * std::log(vocab)), "ce");
    expect(std::llround(1000 * terms[4 * row + 2]), 0, "kl");
  }
  expect(rank[count - 1], -1, "dead row");
}

template <typename T>
void rows_of_16_bits() {
  for (const int vocab : {1, 7, 1000, 40000}) {
    for (const bool teacher : {false, true}) {
      rows<T, float>(3, vocab, teacher, 0, dflash::loss::launch_loss_rows<T, float>);
    }
    rows<T, float>(3, vocab, true, 0, dflash::loss::launch_loss_rows<T, float>, true);
  }
}

template <typename T, typename acc_t>
void rows_of_divergences(int vocab, double softcap) {
  using dflash::loss::Divergence;
  for (const auto kind : {Divergence::kReverse, Divergence::kJs, Divergence::kTv}) {
    rows<T, acc_t>(3, vocab, true, softcap, [kind](const auto& params, cudaStream_t stream) {
      return dflash::loss::launch_divergence_rows<T, acc_t>(kind, params, stream);
    });
  }
}

// On Hopper and later, whose blocks form clusters. One row a cluster: racecheck does not take a
// lane's arrival after __syncwarp for that of its warp, and reports all reuse of shared memory.
template <typename T>
void rows_in_clusters() {
  using dflash::loss::launch_loss_cluster;
  for (const int vocab : {1, 7, 1000, 40000}) {
    rows<T, float>(3, vocab, false, 0, launch_loss_cluster<T, false, false>);
    rows<T, float>(3, vocab, false, 30, launch_loss_cluster<T, false, true>);
    rows<T, float>(3, vocab, true, 0, launch_loss_cluster<T, true, false>);
    rows<T, float>(3, vocab, true, 0, launch_loss_cluster<T, true, false>, true);
    rows<T, float>(3, vocab, true, 30, launch_loss_cluster<T, true, true>);
  }
}

// The same on Hopper, once more by each number of vectors that a thread may hold.
template <typename T>
void rows_in_registers() {
  using dflash::loss::launch_loss_registers;
  for (const int vocab : {1, 7, 1000, 40000, 50001}) {
    rows<T, float>(3, vocab, false, 0, launch_loss_registers<T, false>);
    rows<T, float>(3, vocab, true, 0, launch_loss_registers<T, true>);
    rows<T, float>(3, vocab, true, 0, launch_loss_registers<T, true>, true);
  }
}

// Slots of two blocks into rows and back; the last row is dead.
template <typename T, typename acc_t>
void around(int width, bool dpace, bool shared) {
  constexpr int64_t kBlocks = 2, kBlockSize = 4, kSlots = kBlocks * kBlockSize, kRows = 5;
  const std::vector<int64_t> slot_of = {1, 2, 3, 6, 7};
  acc_t* terms = on_device(std::vector<acc_t>(4 * kSlots));
  int64_t* rank = on_device(std::vector<int64_t>(kSlots));
  int64_t* row_of = on_device(std::vector<int64_t>(kSlots));
  dflash::loss::fill_slots_kernel<<<1, dflash::loss::kThreads>>>(
      kSlots, int64_t{9}, terms, rank, on_device(std::vector<acc_t>(kSlots)), row_of);
  check(cudaGetLastError(), "fill_slots");

  dflash::loss::GatherParams gather{};
  gather.rows = on_device(slot_of);
  gather.n_rows = on_device<int64_t>({kRows - 1});
  gather.count = kRows;
  const int64_t row_bytes = width * sizeof(T);
  gather.hidden = reinterpret_cast<const char*>(on_device(std::vector<T>(kSlots * width)));
  gather.block_stride = kBlockSize * row_bytes;
  gather.slot_stride = gather.row_bytes = row_bytes;
  gather.block_size = kBlockSize;
  gather.slots = kSlots;
  gather.teacher = reinterpret_cast<const char*>(on_device(std::vector<T>(3 * width)));
  gather.teacher_index = on_device<int64_t>({0, 1, 2, 0, 1, 2, 0, 1});
  gather.teacher_stride = row_bytes;
  gather.teachers = 3;
  gather.labels = on_device(std::vector<int64_t>(kSlots, 4));
  gather.vocab = 9;
  gather.teacher_rows = shared ? 4 : kRows;
  if (shared) {
    gather.tokens = on_device<int64_t>({0, 1, 2, -1});
    gather.place = on_device<int32_t>({1, 2, 0, 0, -1});
    gather.row_teachers = on_device(std::vector<int32_t>(kRows));
  }
  const int64_t bytes = (kRows + gather.teacher_rows) * row_bytes;
  gather.states = on_device(std::vector<char>(bytes, 7));
  gather.row_labels = on_device(std::vector<int32_t>(kRows));
  gather.row_slots = on_device(std::vector<int64_t>(kRows));
  gather.row_of = row_of;
  check(dflash::loss::launch_gather(gather, nullptr), "gather");

  acc_t* used = on_device(std::vector<acc_t>(kSlots, 1));
  const double* weight_sum = on_device<double>({4});
  acc_t* loss = on_device<acc_t>({-1});
  dflash::loss::sum_loss_kernel<<<1, dflash::loss::kSumThreads>>>(
      dflash::loss::SumParams<acc_t>{kBlocks, kBlockSize, kRows, gather.rows, gather.n_rows, terms,
                                     weight_sum, 0.5, dpace, used, loss});
  check(cudaGetLastError(), "sum_loss");
  T* d_hidden = on_device(std::vector<T>(kSlots * width));
  check((dflash::loss::launch_scatter<T, acc_t>(on_device(std::vector<acc_t>(kRows * width, 1)),
                                                row_of, used, weight_sum, 1.0, kSlots, width,
                                                d_hidden, nullptr)),
        "scatter");
  check(cudaDeviceSynchronize(), "draft_loss");
  expect(read_back(gather.states + bytes - 1), 0, "dead row");
  if (shared) expect(read_back(gather.row_teachers + 1), kRows + 2, "teacher of a row");
  expect(read_back(gather.row_slots + 3), 6, "slot of a row");
  expect(read_back(row_of + 6), 3, "row of a slot");
  expect(read_back(row_of + 7), -1, "slot without a row");
  expect(std::llround(read_back(loss)), 0, "loss");
}

}  // namespace

int main() {
  rows_of_16_bits<__half>();
  rows_of_16_bits<__nv_bfloat16>();
  rows<float, float>(3, 1000, true, 30, dflash::loss::launch_loss_rows<float, float>);
  rows<double, double>(3, 1000, true, 30, dflash::loss::launch_loss_rows<double, double>);
  rows_of_divergences<__half, float>(1000, 30);
  rows_of_divergences<__nv_bfloat16, float>(40000, 0);
  rows_of_divergences<float, float>(7, 0);
  rows_of_divergences<double, double>(1, 30);
  int major;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "attribute");
  if (major >= 9) {
    rows_in_clusters<__half>();
    rows_in_clusters<__nv_bfloat16>();
  }
  if (major == 9) {
    rows_in_registers<__half>();
    rows_in_registers<__nv_bfloat16>();
  }
  around<__half, float>(24, false, false);
  around<__nv_bfloat16, float>(24, false, true);
  around<__nv_bfloat16, float>(5, true, false);
  around<float, float>(6, true, false);
  around<double, double>(3, false, false);
  std::printf("done\n");
  return 0;
}
