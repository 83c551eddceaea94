// What lm_head_topk's arguments have to agree on, the same on every device.
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>

#include "check.h"

namespace dflash {

// The number of ids that are ranked.
inline int64_t check_lm_head_topk(const at::Tensor& hidden, const at::Tensor& weight, int64_t k,
                                  const std::optional<at::Tensor>& labels,
                                  std::optional<int64_t> valid_vocab,
                                  std::optional<double> softcap) {
  constexpr int64_t kMaxK = 1024, kMaxVocab = std::numeric_limits<int32_t>::max();
  CHECK_DIM(hidden, 2);
  CHECK_DIM(weight, 2);
  const int64_t vocab = weight.size(0);
  CHECK_SHAPE(weight, vocab, hidden.size(1));
  CHECK_SAME_DTYPE(weight, hidden);
  const auto dtype = hidden.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, "hidden: found ",
              dtype, ", want float, bfloat16 or half");
  TORCH_CHECK(k >= 1 && k <= kMaxK, "k: found ", k, ", want 1 to ", kMaxK);
  TORCH_CHECK(vocab >= 1 && vocab <= kMaxVocab, "weight: found ", vocab,
              " rows, want 1 to 2^31 - 1");
  const int64_t valid = valid_vocab.value_or(vocab);
  TORCH_CHECK(valid >= 1 && valid <= vocab, "valid_vocab: found ", valid, ", want 1 to ", vocab);
  TORCH_CHECK(!softcap || *softcap > 0, "softcap: found ", softcap.value_or(0), ", want > 0");
  if (labels) {
    CHECK_DTYPE(*labels, at::kLong);
    CHECK_SHAPE(*labels, hidden.size(0));
  }
  return valid;
}

}  // namespace dflash
