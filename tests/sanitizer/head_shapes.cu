// The kernels of lm_head_topk on shapes that leave parts of tiles idle, in buffers without a byte
// to spare: a program for compute-sanitizer, without torch.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "cuda/lm_head_topk.cuh"
#include "cuda/lm_head_topk_sm90_launch.cuh"
#include "device.h"

namespace {

constexpr int kRows = 64;  // after them the same logits again

// Logits of row n: 8 * ((7919 * id + n) % 509 - 254), many of them equal.
int logit(int row, int id) { return 8 * ((7919 * id + row) % 509 - 254); }

struct Result {
  std::vector<float> values, logsumexp, label_logit;
  std::vector<int64_t> indices, rank;
  dflash::TopkOutputs out;

  Result(int rows, int k)
      : values(rows * k), logsumexp(rows), label_logit(rows), indices(rows * k), rank(rows) {
    out = {on_device(values), on_device(indices), on_device(logsumexp), on_device(rank),
           on_device(label_logit)};
  }

  // Row n has the logits of row n % kRows.
  void expect_sorted(int rows, int vocab, int k, const std::vector<int64_t>& labels) {
    check(cudaDeviceSynchronize(), "kernel");
    const auto found = read_back(out.indices, rows * k), places = read_back(out.rank, rows);
    for (int first = 0; first < std::min(rows, kRows); ++first) {
      std::vector<int64_t> order(vocab);
      for (int id = 0; id < vocab; ++id) order[id] = id;
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
        return logit(first, static_cast<int>(a)) > logit(first, static_cast<int>(b));
      });
      for (int row = first; row < rows; row += kRows) {
        for (int i = 0; i < k; ++i) expect(found[row * k + i], i < vocab ? order[i] : -1, "id");
        expect(places[row] >= 0 && places[row] < vocab, true, "rank in range");
        expect(order[places[row]], labels[row], "id at the label's rank");
      }
    }
  }
};

std::vector<int64_t> make_labels(int rows, int vocab) {
  std::vector<int64_t> labels(rows);
  for (int row = 0; row < rows; ++row) labels[row] = row * 31 % vocab;
  return labels;
}

void rows_in_memory(int rows, int vocab, int k) {
  std::vector<float> logits(rows * vocab);
  for (int i = 0; i < rows * vocab; ++i) logits[i] = logit(i / vocab, i % vocab);
  const auto labels = make_labels(rows, vocab);
  Result result(rows, k);
  check(dflash::launch_topk_rows(
            {on_device(logits), on_device(labels), result.out, k, vocab, vocab, {1.0f, 0.0f}}, rows,
            nullptr),
        "topk_rows");
  result.expect_sorted(rows, vocab, k, labels);
}

// Row n of hidden is one-hot at n % kRows; id's weight there is its logit, which T holds exactly.
template <typename T>
void head(int rows, int vocab, int k) {
  constexpr int kWidth = 72;
  std::vector<T> hidden(rows * kWidth), weight(vocab * kWidth);
  for (int row = 0; row < rows; ++row) hidden[row * kWidth + row % kRows] = 8.0f;
  for (int id = 0; id < vocab; ++id) {
    for (int i = 0; i < kRows; ++i) weight[id * kWidth + i] = logit(i, id) / 8.0f;
  }
  const auto labels = make_labels(rows, vocab);
  Result result(rows, k);
  int multiprocessors;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0), "attribute");
  const dflash::sm90::HeadInputs inputs{
      on_device(hidden), on_device(weight), kWidth, kWidth, rows, vocab, vocab, kWidth, k,
      on_device(labels), {1.0f, 0.0f}};
  uint8_t* scratch =
      on_device(std::vector<uint8_t>(dflash::sm90::scratch_bytes(inputs, multiprocessors), 255));
  check(dflash::sm90::launch_head<T>(inputs, result.out, scratch, multiprocessors, nullptr),
        "head");
  result.expect_sorted(rows, vocab, k, labels);
}

}  // namespace

int main() {
  rows_in_memory(3, 5000, 8);
  rows_in_memory(2, 700, 300);
  rows_in_memory(2, 7, 8);
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "properties");
  if (properties.major == 9) {
    head<__nv_bfloat16>(1, 7, 8);
    head<__nv_bfloat16>(300, 1100, 8);
    head<__nv_bfloat16>(70, 20000, 32);
    head<__half>(300, 1100, 8);
    head<__nv_bfloat16>(600, 30000, 8);   // clusters of a strip wait for each other several times
    head<__nv_bfloat16>(2100, 2500, 16);  // two groups of row pairs, one larger
  }
  std::printf("done\n");
  return 0;
}
