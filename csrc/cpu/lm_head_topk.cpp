#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "lm_head_topk.h"
#include "row_stats.h"

namespace dflash {
namespace {

// A chunk of rows has all its logits in memory, so that the label's is one of them, bit for bit.
constexpr int64_t kLogitsBytes = 32 << 20;
constexpr int64_t kWeightBytes = 16 << 20;  // of the head converted to fp32 at a time

using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// logits = scale * hidden @ weight^T in fp32, from inputs of any floating type.
void head_logits(const at::Tensor& hidden, const at::Tensor& weight, double scale,
                 const at::Tensor& scratch, at::Tensor logits) {
  const at::Tensor rows = hidden.to(at::kFloat);
  for (int64_t start = 0; start < weight.size(0); start += scratch.size(0)) {
    const int64_t count = std::min(scratch.size(0), weight.size(0) - start);
    at::Tensor part = weight.narrow(0, start, count);
    if (part.scalar_type() != at::kFloat) part = scratch.narrow(0, 0, count).copy_(part);
    at::Tensor target = logits.narrow(1, start, count);
    at::addmm_out(target, target, rows, part.t(), /*beta=*/0, /*alpha=*/scale);
  }
}

Outputs lm_head_topk_cpu(const at::Tensor& hidden, const at::Tensor& weight, int64_t k,
                         const std::optional<at::Tensor>& labels,
                         std::optional<int64_t> valid_vocab, std::optional<double> softcap,
                         double logit_scale) {
  CHECK_CPU(hidden);
  CHECK_CPU(weight);
  const int64_t valid = check_lm_head_topk(hidden, weight, k, labels, valid_vocab, softcap);
  const int64_t num_rows = hidden.size(0), width = hidden.size(1), vocab = weight.size(0);
  const int64_t* label = nullptr;
  at::Tensor labels_c;
  if (labels) {
    CHECK_CPU(*labels);
    labels_c = labels->contiguous();
    label = labels_c.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < num_rows; ++i) {
      TORCH_CHECK(label[i] >= 0 && label[i] < vocab, "labels: found ", label[i], " at ", i,
                  ", want 0 to ", vocab - 1);
    }
  }

  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto floats = hidden.options().dtype(at::kFloat);
  const auto ids = hidden.options().dtype(at::kLong);
  const int64_t labelled = label == nullptr ? 0 : num_rows;
  Outputs outputs{at::empty({num_rows, k}, floats), at::empty({num_rows, k}, ids),
                  at::empty({num_rows}, floats), at::empty({labelled}, ids),
                  at::empty({labelled}, floats)};
  float* values = std::get<0>(outputs).mutable_data_ptr<float>();
  int64_t* indices = std::get<1>(outputs).mutable_data_ptr<int64_t>();
  float* logsumexp = std::get<2>(outputs).mutable_data_ptr<float>();
  int64_t* rank = std::get<3>(outputs).mutable_data_ptr<int64_t>();
  float* label_logit = std::get<4>(outputs).mutable_data_ptr<float>();

  const at::Tensor head = weight.narrow(0, 0, valid);
  const int64_t row_bytes = valid * static_cast<int64_t>(sizeof(float));
  const int64_t chunk_rows =
      std::clamp<int64_t>(kLogitsBytes / row_bytes, 1, std::max<int64_t>(num_rows, 1));
  const bool convert = hidden.scalar_type() != at::kFloat;
  const int64_t part_rows =
      convert ? std::clamp<int64_t>(kWeightBytes / (4 * std::max<int64_t>(width, 1)), 1, valid)
              : valid;
  const at::Tensor scratch = at::empty({part_rows, convert ? width : 0}, floats);
  const at::Tensor logits = at::empty({chunk_rows, valid}, floats);
  const int64_t found = std::min(k, valid);

  for (int64_t first = 0; first < num_rows; first += chunk_rows) {
    const int64_t count = std::min(chunk_rows, num_rows - first);
    at::Tensor chunk = logits.narrow(0, 0, count);
    head_logits(hidden.narrow(0, first, count), head, logit_scale / softcap.value_or(1), scratch,
                chunk);
    if (softcap) chunk.tanh_().mul_(*softcap);
    const float* z = chunk.const_data_ptr<float>();
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> block_max((valid + kBlock - 1) / kBlock);
      std::vector<uint64_t> keys;
      for (int64_t i = begin; i < end; ++i) {
        const float* row = z + i * valid;
        const int64_t n = first + i;
        const RowMax max = row_max(row, valid, block_max.data());
        logsumexp[n] = row_logsumexp(row, valid, max);
        row_top_k(row, valid, found, block_max.data(), keys, values + n * k, indices + n * k);
        std::fill(values + n * k + found, values + (n + 1) * k,
                  -std::numeric_limits<float>::infinity());
        std::fill(indices + n * k + found, indices + (n + 1) * k, -1);
        if (label == nullptr) continue;
        // A masked id is -inf and comes after every valid one, so its rank is its index.
        const bool masked = label[n] >= valid;
        rank[n] = masked ? label[n] : row_rank(row, valid, label[n]);
        label_logit[n] = masked ? -std::numeric_limits<float>::infinity() : row[label[n]];
      }
    });
  }
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(dflash_ext, CPU, m) { m.impl("lm_head_topk", &lm_head_topk_cpu); }

}  // namespace dflash
