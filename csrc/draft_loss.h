// What draft_loss' arguments have to look like, the same on every device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "check.h"
#include "divergence.h"

namespace dflash::loss {

struct Arguments {
  const at::Tensor& hidden;                         // [A, K, H]
  const at::Tensor& weight;                         // [V, H]
  const at::Tensor& labels;                         // [A, K]
  const at::Tensor& weights;                        // [A, K]
  const at::Tensor& weight_sum;                     // []
  const at::Tensor& rows;                           // [R]
  const at::Tensor& n_rows;                         // []
  const std::optional<at::Tensor>& teacher_hidden;  // [T, H]
  const std::optional<at::Tensor>& teacher_index;   // [A, K]
  // Where each different teacher state of a chunk of rows is projected once: their tokens, -1
  // behind the last one, and where among its chunk's tokens a row's is.
  const std::optional<at::Tensor>& teacher_tokens;  // [chunks, U]
  const std::optional<at::Tensor>& teacher_place;   // [R] int32
};

struct Options {
  double ce_weight, kl_weight;
  Divergence kl;
  double cap_lambda;
  std::optional<double> dpace_alpha, softcap;
  double logit_scale;
  int64_t chunk_rows;
  bool need_grad;
};

// kNone with a weight of 0.
inline Divergence divergence_of(std::string_view kl, double kl_weight) {
  const bool known = kl == "forward" || kl == "reverse" || kl == "js" || kl == "tv";
  TORCH_CHECK(known, "kl: found ", kl, ", want forward, reverse, js or tv");
  if (kl_weight == 0) return Divergence::kNone;
  if (kl == "forward") return Divergence::kForward;
  if (kl == "reverse") return Divergence::kReverse;
  return kl == "js" ? Divergence::kJs : Divergence::kTv;
}

// The size of the vocabulary.
inline int64_t check_draft_loss(const Arguments& arguments, const Options& options,
                                std::optional<int64_t> valid_vocab) {
  const auto& [hidden, weight, labels, weights, weight_sum, rows, n_rows, teacher_hidden,
               teacher_index, teacher_tokens, teacher_place] = arguments;
  CHECK_FLOATING(hidden);
  CHECK_DIM(hidden, 3);
  const int64_t blocks = hidden.size(0), block_size = hidden.size(1), width = hidden.size(2);
  CHECK_SAME_DEVICE(weight, hidden);
  CHECK_SAME_DTYPE(weight, hidden);
  CHECK_SHAPE(weight, weight.size(0), width);
  CHECK_SAME_DEVICE(labels, hidden);
  CHECK_DTYPE(labels, at::kLong);
  CHECK_SHAPE(labels, blocks, block_size);
  CHECK_SAME_DEVICE(weights, hidden);
  CHECK_FLOATING(weights);
  CHECK_SHAPE(weights, blocks, block_size);
  CHECK_SAME_DEVICE(weight_sum, hidden);
  CHECK_SHAPE(weight_sum);
  CHECK_SAME_DEVICE(rows, hidden);
  CHECK_DTYPE(rows, at::kLong);
  CHECK_DIM(rows, 1);
  CHECK_SAME_DEVICE(n_rows, hidden);
  CHECK_DTYPE(n_rows, at::kLong);
  CHECK_SHAPE(n_rows);
  TORCH_CHECK(teacher_hidden.has_value() == teacher_index.has_value() &&
                  teacher_hidden.has_value() == (options.kl_weight != 0),
              "teacher_hidden, teacher_index: want both with kl_weight != 0, else none");
  if (teacher_hidden.has_value()) {
    CHECK_SAME_DEVICE(*teacher_hidden, hidden);
    CHECK_SAME_DEVICE(*teacher_index, hidden);
    CHECK_SAME_DTYPE(*teacher_hidden, hidden);
    CHECK_SHAPE(*teacher_hidden, teacher_hidden->size(0), width);
    CHECK_DTYPE(*teacher_index, at::kLong);
    CHECK_SHAPE(*teacher_index, blocks, block_size);
  }
  TORCH_CHECK(teacher_tokens.has_value() == teacher_place.has_value() &&
                  (teacher_hidden.has_value() || !teacher_tokens.has_value()),
              "teacher_tokens, teacher_place: want both with a teacher, or none");
  if (teacher_tokens.has_value()) {
    const int64_t chunks = (rows.size(0) + options.chunk_rows - 1) / options.chunk_rows;
    CHECK_SAME_DEVICE(*teacher_tokens, hidden);
    CHECK_SAME_DEVICE(*teacher_place, hidden);
    CHECK_DTYPE(*teacher_tokens, at::kLong);
    CHECK_SHAPE(*teacher_tokens, chunks, teacher_tokens->size(1));
    CHECK_DTYPE(*teacher_place, at::kInt);
    CHECK_SHAPE(*teacher_place, rows.size(0));
  }
  TORCH_CHECK(!options.softcap.has_value() || *options.softcap > 0, "softcap: found ",
              *options.softcap, ", want > 0");
  TORCH_CHECK(options.chunk_rows >= 1, "chunk_rows: found ", options.chunk_rows,
              ", want at least 1");
  const int64_t vocab = valid_vocab.value_or(weight.size(0));
  TORCH_CHECK(vocab >= 1 && vocab <= weight.size(0), "valid_vocab: found ", vocab,
              ", want 1 to V = ", weight.size(0));
  return vocab;
}

}  // namespace dflash::loss
