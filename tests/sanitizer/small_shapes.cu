// Every kernel of pack_hidden and the metrics once, on shapes that leave parts of warps and blocks
// idle, in buffers without a byte to spare: a program for compute-sanitizer, without torch.
#include <cstdio>
#include <vector>

#include "cuda/metric_add.cuh"
#include "cuda/metric_copy.cuh"
#include "cuda/metric_publish.cuh"
#include "cuda/pack_hidden.cuh"
#include "device.h"

namespace {

void pack(int64_t row_bytes, int64_t alignment) {
  constexpr int64_t kBatch = 3, kLength = 5, kLayers = 2, kRows = 9, kDirty = 11, kCapacity = 13;
  dflash::PackParams params{};
  for (int l = 0; l < kLayers; ++l) {
    const std::vector<char> layer(kBatch * kLength * row_bytes, static_cast<char>(l + 1));
    params.layers[l] = {on_device(layer), kLength * row_bytes, row_bytes};
  }
  params.num_layers = kLayers;
  params.src_index = on_device<int64_t>({0, 14, -1, 3, 4, 5, 6, 7, 8, 99, 99, 99, 99});
  params.n_rows = on_device<int64_t>({kRows});
  int64_t* high_water = on_device<int64_t>({kDirty});
  params.high_water = high_water;
  params.length = kLength;
  params.num_sources = kBatch * kLength;
  params.capacity = kCapacity;
  params.out = on_device(std::vector<char>(kCapacity * kLayers * row_bytes, 7));
  params.out_row = kLayers * row_bytes;
  params.out_layer = row_bytes;
  params.row_bytes = row_bytes;
  check(dflash::launch_pack_hidden(params, alignment, nullptr), "pack_hidden");
  check(dflash::launch_pack_mark(params.n_rows, high_water, true, nullptr), "pack_mark");
  check(cudaDeviceSynchronize(), "pack_hidden");
  expect(read_back(high_water), kRows, "high_water");
  expect(read_back(params.out + params.out_row + 2 * row_bytes - 1), 2, "packed row");
  expect(read_back(params.out + 2 * params.out_row), 0, "row without a source");
  expect(read_back(params.out + kDirty * params.out_row - 1), 0, "dirty row");
  expect(read_back(params.out + kDirty * params.out_row), 7, "row beyond the mark");
}

void metrics(int64_t blocks, int block_size, bool measured) {
  constexpr int64_t kWords = dflash::kNumWords, kRows = 3, kSlots = 2, kStep = 7;
  const int64_t slots = blocks * block_size;
  int64_t* acc = on_device(std::vector<int64_t>(kWords));
  check(dflash::launch_metric_add(
            {acc, on_device(std::vector<int64_t>(slots)),
             on_device(std::vector<float>(slots * dflash::kMetricTerms, 1.f)),
             on_device(std::vector<float>(slots, 1.f)), blocks, block_size, measured},
            nullptr),
        "metric_add");
  int64_t* staging = on_device(std::vector<int64_t>(kRows * (kWords + 1)));
  int64_t* step = on_device<int64_t>({kStep});
  check(dflash::launch_metric_publish({acc, staging, step, kRows, kWords}, nullptr),
        "metric_publish");
  int64_t* ring;
  const size_t bytes = (kSlots * (kWords + 2) + 1) * sizeof(int64_t);
  check(cudaHostAlloc(&ring, bytes, cudaHostAllocMapped), "cudaHostAlloc");
  for (size_t i = 0; i < bytes / sizeof(int64_t); ++i) ring[i] = 0;
  const int64_t* row = staging + kStep % kRows * (kWords + 1);
  int64_t* state = on_device<int64_t>({1, 0});
  for (const int64_t wanted : {kStep, kStep + kRows}) {  // the second one is dropped
    check(dflash::launch_metric_copy({row, kWords + 1, wanted, ring, kSlots, state}, nullptr),
          "metric_copy");
  }
  check(cudaDeviceSynchronize(), "metrics");
  const int64_t* slot = ring + 1 * (kWords + 2);
  expect(slot[0], 4, "sequence word");
  expect(slot[1 + dflash::kLossSum], slots << 24, "loss");
  expect(slot[1 + dflash::kStreak1], measured ? slots : 0, "streak");
  expect(slot[1 + kWords], kStep, "step");
  expect(ring[kSlots * (kWords + 2)], 1, "dropped");
  expect(read_back(step), kStep + 1, "next step");
  expect(read_back(acc), 0, "cleared accumulator");
}

}  // namespace

int main() {
  pack(1040, 16);
  pack(5136, 16);  // wide: other launch sizes, and a whole round of loads
  pack(24, 8);
  pack(516, 4);
  pack(26, 2);
  pack(33, 1);
  metrics(1, 1, true);
  metrics(300, 16, true);
  metrics(9, 32, true);
  metrics(9, 5, false);
  std::printf("done\n");
  return 0;
}
