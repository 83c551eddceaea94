// Tasks of rows run in parallel, each on its own buffer of logits (draft_loss_task.h). Weights are
// applied to the finished gradient rows, since D-PACE knows them only once a block's last row is
// done.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "draft_loss.h"
#include "draft_loss_task.h"
#include "switch.h"

namespace dflash::loss {
namespace {

template <typename acc_t>
void run_tasks(Rows& rows, const at::Tensor& weight, int64_t vocab, const RowOptions& options,
               double logit_scale, int64_t chunk_rows) {
  const int64_t count = rows.slots.size(), threads = at::get_num_threads();
  const int64_t limit = std::max<int64_t>(1, std::min(kTaskRows, chunk_rows / threads));
  const int64_t workers = std::min(threads, chunk_rows);
  const int64_t rounds = (count + limit * workers - 1) / (limit * workers);
  const int64_t tasks = rounds * workers;
  const int64_t task_rows = (count + tasks - 1) / tasks;
  std::atomic<int64_t> next{0};
  at::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    at::NoGradGuard no_grad;
    Task<acc_t> task(weight, vocab, options, logit_scale, task_rows, rows.teacher_states.defined());
    for (int64_t begin; (begin = next.fetch_add(task_rows)) < count;) {
      task.run(rows, begin, std::min(begin + task_rows, count));
    }
  });
}

// D-PACE (arXiv 2605.18810): w_j = sum over m >= j of C_m, with C_j the product over supervised
// i <= j of (1 - alpha) e^-ce + alpha. A NaN counts as no confidence: the loss itself carries it.
void dpace_block(const double* ce, double* weights, int64_t block_size, double alpha) {
  constexpr double kTiny = std::numeric_limits<float>::min();  // a supervised slot stays one
  double prefix = 1;
  for (int64_t k = 0; k < block_size; ++k) {
    if (weights[k] <= 0) continue;
    const double confidence = std::exp(-ce[k]);
    prefix *= (1 - alpha) * (confidence >= 0 ? confidence : 0) + alpha;
    weights[k] = std::max(prefix, kTiny);
  }
  double sum = 0;
  for (int64_t k = block_size - 1; k >= 0; --k) {
    if (weights[k] <= 0) continue;
    sum += weights[k];
    weights[k] = sum;
  }
}

// The rows to project, with their labels and teacher states; all indices are checked.
Rows select_rows(const at::Tensor& hidden, const at::Tensor& labels, const at::Tensor& rows,
                 int64_t n_rows, int64_t vocab, const std::optional<at::Tensor>& teacher_hidden,
                 const std::optional<at::Tensor>& teacher_index) {
  TORCH_CHECK(n_rows >= 0 && n_rows <= rows.size(0), "n_rows: found ", n_rows, ", want 0 to ",
              rows.size(0));
  const int64_t slots = labels.numel();
  const at::Tensor flat_labels = labels.contiguous();
  const at::Tensor picked = rows.narrow(0, 0, n_rows).contiguous();
  const int64_t* label = flat_labels.const_data_ptr<int64_t>();
  const int64_t* row = picked.const_data_ptr<int64_t>();
  Rows result;
  for (int64_t i = 0; i < n_rows; ++i) {
    TORCH_CHECK_INDEX(row[i] >= 0 && row[i] < slots, "rows: found ", row[i], " at ", i,
                      ", want 0 to ", slots - 1);
    TORCH_CHECK_INDEX(label[row[i]] >= 0 && label[row[i]] < vocab, "labels: found ", label[row[i]],
                      " in slot ", row[i], ", want 0 to ", vocab - 1);
    result.slots.push_back(row[i]);
    result.labels.push_back(label[row[i]]);
  }
  result.results.resize(n_rows);
  result.states = hidden.reshape({slots, hidden.size(2)}).index_select(0, picked);
  if (teacher_hidden.has_value()) {
    // index_select checks the range.
    const at::Tensor index = teacher_index->reshape({-1}).index_select(0, picked);
    result.teacher_states = teacher_hidden->index_select(0, index);
  }
  return result;
}

using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

template <typename scalar_t, typename acc_t>
Outputs draft_loss_impl(const at::Tensor& hidden, const at::Tensor& weight, int64_t vocab,
                        const at::Tensor& weights, double weight_sum, Rows rows,
                        const Options& options) {
  const at::TensorOptions acc = hidden.options().dtype(c10::CppTypeToScalarType<acc_t>::value);
  const int64_t blocks = hidden.size(0), block_size = hidden.size(1), width = hidden.size(2);
  const int64_t count = rows.slots.size(), slots = blocks * block_size;
  const RowOptions o{options.ce_weight,           options.kl_weight, options.cap_lambda,
                     options.softcap.value_or(0), options.need_grad, options.kl};
  if (o.need_grad) rows.gradient = at::empty({count, width}, acc);
  if (count > 0) {
    run_tasks<acc_t>(rows, weight, vocab, o, options.logit_scale, options.chunk_rows);
  }

  at::Tensor terms = at::zeros({blocks, block_size, 4}, acc);
  at::Tensor rank = at::full({blocks, block_size}, vocab, hidden.options().dtype(at::kLong));
  at::Tensor lse = at::zeros({blocks, block_size}, acc);
  std::vector<double> loss_of(slots, 0.0), ce_of(slots, 0.0);
  for (int64_t i = 0; i < count; ++i) {
    const RowResult& r = rows.results[i];
    const int64_t slot = rows.slots[i];
    ce_of[slot] = r.ce;
    loss_of[slot] = o.ce_weight * r.ce + o.kl_weight * r.kl + o.cap_lambda * r.cap;
    acc_t* term = terms.mutable_data_ptr<acc_t>() + slot * 4;
    term[0] = loss_of[slot], term[1] = r.ce, term[2] = r.kl, term[3] = r.cap;
    rank.mutable_data_ptr<int64_t>()[slot] = r.rank;
    lse.mutable_data_ptr<acc_t>()[slot] = r.lse;
  }

  at::Tensor used = weights.to(at::kDouble).contiguous().clone();
  double* w = used.mutable_data_ptr<double>();
  if (options.dpace_alpha.has_value()) {
    for (int64_t begin = 0; begin < slots; begin += block_size) {
      dpace_block(ce_of.data() + begin, w + begin, block_size, *options.dpace_alpha);
    }
  }
  const double inverse = weight_sum > 0 ? 1 / weight_sum : 0;
  double loss = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (w[slot] != 0) loss += w[slot] * loss_of[slot];
  }

  at::Tensor d_hidden = at::zeros({o.need_grad ? blocks : 0, block_size, width}, hidden.options());
  if (o.need_grad && count > 0) {
    const acc_t* from = rows.gradient.const_data_ptr<acc_t>();
    scalar_t* to = d_hidden.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, count, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t slot = rows.slots[i];
        if (w[slot] == 0) continue;
        const acc_t factor = w[slot] * inverse * options.logit_scale;
        for (int64_t h = 0; h < width; ++h) to[slot * width + h] = from[i * width + h] * factor;
      }
    });
  }
  return {at::full({}, loss * inverse, acc), d_hidden, terms, rank, lse, used.to(acc.dtype())};
}

Outputs draft_loss_cpu(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                       const at::Tensor& weights, const at::Tensor& weight_sum,
                       const at::Tensor& rows, const at::Tensor& n_rows,
                       const std::optional<at::Tensor>& teacher_hidden,
                       const std::optional<at::Tensor>& teacher_index,
                       const std::optional<at::Tensor>& teacher_tokens,
                       const std::optional<at::Tensor>& teacher_place, double ce_weight,
                       double kl_weight, std::string_view kl, double cap_lambda,
                       std::optional<double> dpace_alpha, std::optional<double> softcap,
                       double logit_scale, int64_t chunk_rows, std::optional<int64_t> valid_vocab,
                       bool need_grad) {
  CHECK_CPU(hidden);
  const Options options{ce_weight,   kl_weight,   divergence_of(kl, kl_weight),
                        cap_lambda,  dpace_alpha, softcap,
                        logit_scale, chunk_rows,  need_grad};
  // Which teacher states rows share is of use to GPUs only.
  const int64_t vocab =
      check_draft_loss({hidden, weight, labels, weights, weight_sum, rows, n_rows, teacher_hidden,
                        teacher_index, teacher_tokens, teacher_place},
                       options, valid_vocab);
  Rows picked = select_rows(hidden, labels, rows, *n_rows.const_data_ptr<int64_t>(), vocab,
                            teacher_hidden, teacher_index);
  const double denominator = weight_sum.item<double>();
  Outputs outputs;
  FLOAT_SWITCH(hidden.scalar_type(), "draft_loss", [&] {
    using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    outputs = draft_loss_impl<scalar_t, acc_t>(hidden, weight, vocab, weights, denominator,
                                               std::move(picked), options);
  });
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(dflash_ext, CPU, m) { m.impl("draft_loss", &draft_loss_cpu); }

}  // namespace dflash::loss
