#include <torch/library.h>

#include <cmath>

#include "metrics.h"

namespace dflash {
namespace {

int64_t fixed_point(double value) { return std::llrint(value * kMetricScale); }

void add_streaks(int64_t* acc, const int64_t* rank, const bool* supervised, const bool* good,
                 int64_t block_size) {
  constexpr struct {
    int64_t width;
    MetricWord word;
  } kStreaks[] = {{1, kStreak1}, {4, kStreak4}, {8, kStreak8}};
  for (const auto& streak : kStreaks) {
    int64_t k = supervised[0] ? 0 : 1;
    for (; k < block_size && good[k] && rank[k] < streak.width; ++k) ++acc[streak.word];
  }
}

void add_block(int64_t* acc, const int64_t* rank, const float* terms, const float* weights,
               int64_t block_size) {
  bool supervised[kMaxBlock], good[kMaxBlock];
  bool any = false;
  for (int64_t k = 0; k < block_size; ++k) {
    supervised[k] = weights[k] > 0;
    good[k] = false;
    if (!supervised[k]) continue;
    any = true;
    const double weight = weights[k];
    double product[kMetricTerms];
    int64_t bad = 0;
    for (int64_t i = 0; i < kMetricTerms; ++i) {
      product[i] = weight * terms[k * kMetricTerms + i];
      // Written so that NaN is bad too.
      bad += !(std::abs(product[i]) < kMaxValue && weight < kMaxValue);
    }
    acc[kNonfiniteValues] += bad;
    if (bad > 0) continue;
    good[k] = true;
    acc[kLossSum] += fixed_point(product[0]);
    acc[kLossWeight] += fixed_point(weight);
    if (rank == nullptr) continue;
    acc[kCeSum] += fixed_point(product[1]);
    acc[kKlSum] += fixed_point(product[2]);
    acc[kCapSum] += fixed_point(product[3]);
    acc[kTermWeight] += fixed_point(weight);
    acc[kSlots] += 1;
    acc[kTop1] += rank[k] < 1;
    acc[kTop4] += rank[k] < 4;
    acc[kTop8] += rank[k] < 8;
    acc[kSlotN + k] += 1;
    acc[kSlotHit + k] += rank[k] < 1;
  }
  if (rank == nullptr || !any) return;
  acc[kBlocks] += 1;
  add_streaks(acc, rank, supervised, good, block_size);
}

void metric_add_cpu(at::Tensor& acc, const at::Tensor& rank, const at::Tensor& terms,
                    const at::Tensor& weights) {
  const bool measured = check_metric_add(acc, rank, terms, weights);
  CHECK_CPU(acc);
  CHECK_CPU(rank);
  CHECK_CPU(terms);
  CHECK_CPU(weights);
  const int64_t blocks = weights.size(0), block_size = weights.size(1);

  const at::Tensor rank_c = rank.contiguous(), terms_c = terms.contiguous(),
                   weights_c = weights.contiguous();
  int64_t* words = acc.mutable_data_ptr<int64_t>();
  const int64_t* ranks = measured ? rank_c.const_data_ptr<int64_t>() : nullptr;
  for (int64_t a = 0; a < blocks; ++a) {
    const int64_t first = a * block_size;
    add_block(words, measured ? ranks + first : nullptr,
              terms_c.const_data_ptr<float>() + first * kMetricTerms,
              weights_c.const_data_ptr<float>() + first, block_size);
  }
  words[kBatches] += 1;
  words[kMeasuredBatches] += measured;
}

}  // namespace

TORCH_LIBRARY_IMPL(dflash_ext, CPU, m) { m.impl("metric_add", &metric_add_cpu); }

}  // namespace dflash
