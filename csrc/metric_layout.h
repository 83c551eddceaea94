// The words of a metric accumulator; dflash_ext/ops/metric_add/layout.py is the Python twin.
#pragma once

#include <cstdint>

namespace dflash {

constexpr int64_t kMaxBlock = 32;
constexpr int64_t kMetricTerms = 4;  // loss, ce, kl, cap

enum MetricWord : int64_t {
  kLossSum,
  kLossWeight,
  kCeSum,
  kKlSum,
  kCapSum,
  kTermWeight,
  kSlots,
  kTop1,
  kTop4,
  kTop8,
  kBlocks,
  kStreak1,
  kStreak4,
  kStreak8,
  kNonfiniteValues,
  kBatches,
  kMeasuredBatches,
  kNonfiniteSteps,
  kTokens,
  kGradNormSum,
  kGradNormSteps,
  kSlotN,
  kSlotHit = kSlotN + kMaxBlock,
  kNumWords = kSlotHit + kMaxBlock,
};

constexpr double kMetricScale = 1 << 24;
constexpr double kMaxValue = 1LL << 31;

}  // namespace dflash
