// A task of draft_loss: some rows through the head, tile of the vocabulary by tile.
#pragma once

#include <ATen/ATen.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "divergence.h"
#include "isa.h"

namespace dflash::loss {

constexpr int64_t kRowPad = 32;
constexpr int64_t kSkew = 32;       // between rows, lest all fall into the same sets of the cache
constexpr double kPadding = -1e30;  // finite: e^u * u must be 0 there, not NaN
// Rows of a task and ids of a tile: large enough for the GEMMs, small enough for a tile of logits
// to stay in cache between GEMM and row kernels.
constexpr int64_t kTaskRows = 256;
constexpr int64_t kVocabTile = 1024;

inline int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

struct TileShape {
  int64_t width, padded;
};

struct RowOptions {
  double ce_weight, kl_weight, cap_lambda;
  double softcap;  // 0: none
  bool need_grad;
  Divergence kl;  // kNone: no teacher
};

// Sums over logits z with maximum max, u = z - max, and over a teacher's t, v = t - teacher_max.
struct TileSums {
  double max = 0, exp = 0, exp_u = 0;                                 // sums of e^u, e^u u
  double teacher_max = 0, teacher = 0, teacher_v = 0, teacher_u = 0;  // sums of e^v, e^v v, e^v u

  // The same relative to other maxima.
  void rescale(double new_max, double new_teacher_max) {
    const double shift = max - new_max, scale = std::exp(shift);
    exp_u = scale * (exp_u + exp * shift);
    exp *= scale;
    const double teacher_shift = teacher_max - new_teacher_max;
    const double teacher_scale = std::exp(teacher_shift);
    teacher_u = teacher_scale * (teacher_u + teacher * shift);
    teacher_v = teacher_scale * (teacher_v + teacher * teacher_shift);
    teacher *= teacher_scale;
    max = new_max;
    teacher_max = new_teacher_max;
  }

  void add(TileSums other) {
    const double larger = std::max(max, other.max);
    const double teacher_larger = std::max(teacher_max, other.teacher_max);
    rescale(larger, teacher_larger);
    other.rescale(larger, teacher_larger);
    exp += other.exp;
    exp_u += other.exp_u;
    teacher += other.teacher;
    teacher_v += other.teacher_v;
    teacher_u += other.teacher_u;
  }
};

struct RowGradient {
  double max, exp, entropy, softcap;
  double own, cap;  // coefficients of the drafter's q and of its entropy
  // With a teacher: p = teacher e^v and log q - log p = u - v + log_ratio.
  double teacher_max, teacher, log_ratio, kl_weight;
  double mean_slope;  // of a divergence other than forward KL: sum of q times the slope
};

struct DivergenceSums {
  double value, slope;  // of f and of q g (divergence.inl)
};

struct RowResult {
  double ce, kl, cap, lse;
  int64_t rank = 0;
};

namespace baseline {
#include "draft_loss_rows.inl"
}  // namespace baseline
#ifdef DFLASH_HAS_AVX2
DFLASH_AVX2_BEGIN
namespace avx2 {
#include "draft_loss_rows.inl"
}  // namespace avx2
DFLASH_AVX2_END
#endif

// Uninitialised rows of logits, in huge pages where the system grants them: with small ones, the
// page faults of a new buffer cost as much as all the row kernels.
template <typename acc_t>
at::Tensor make_logits(int64_t rows, int64_t width) {
  constexpr size_t kHugePage = size_t{1} << 21;
  const size_t bytes = (rows * width * sizeof(acc_t) + kHugePage - 1) / kHugePage * kHugePage;
  void* data = std::aligned_alloc(kHugePage, bytes);
  TORCH_CHECK(data != nullptr, "draft_loss: no memory for ", bytes, " bytes of logits");
#ifdef MADV_HUGEPAGE
  madvise(data, bytes, MADV_HUGEPAGE);
#endif
  return at::from_blob(data, {rows, width}, &std::free,
                       at::TensorOptions(c10::CppTypeToScalarType<acc_t>::value));
}

// weight[:V] in tiles of ids, in acc_t.
template <typename acc_t>
class Head {
 public:
  Head(const at::Tensor& weight, int64_t vocab) : weight_(weight), vocab_(vocab) {
    if (weight.scalar_type() != kType) {
      buffer_ = at::empty({std::min(vocab, kVocabTile), weight.size(1)}, kType);
    }
  }

  template <typename F>
  void for_each_tile(const F& use) {
    for (int64_t begin = 0; begin < vocab_; begin += kVocabTile) {
      const int64_t ids = std::min(kVocabTile, vocab_ - begin);
      at::Tensor tile = weight_.narrow(0, begin, ids);
      if (buffer_.defined()) tile = buffer_.narrow(0, 0, ids).copy_(tile);
      use(tile, begin, TileShape{ids, round_up(ids, kRowPad)});
    }
  }

 private:
  static constexpr at::ScalarType kType = c10::CppTypeToScalarType<acc_t>::value;

  at::Tensor weight_, buffer_;
  int64_t vocab_;
};

struct Rows {
  at::Tensor states, teacher_states;   // [n, H], in the inputs' dtype
  std::vector<int64_t> slots, labels;  // [n]
  std::vector<RowResult> results;      // [n]
  at::Tensor gradient;                 // [n, H] in acc_t, not weighted yet; or undefined
};

// The values of one row, and the coefficients of its gradient; those of a divergence other than
// forward KL are not known yet.
inline RowResult finish_row(const TileSums& sums, double label_logit, bool label_is_best,
                            const RowOptions& options, RowGradient* gradient) {
  RowResult result;
  const double log_sum = std::log(sums.exp), entropy = log_sum - sums.exp_u / sums.exp;
  result.lse = sums.max + log_sum;
  result.ce = log_sum - (label_logit - sums.max);
  result.cap = label_is_best ? entropy : 0;
  result.kl = 0;
  *gradient = {};
  gradient->max = sums.max, gradient->exp = sums.exp, gradient->entropy = entropy;
  gradient->softcap = options.softcap;
  gradient->own = options.ce_weight;
  if (label_is_best) gradient->cap = options.cap_lambda;
  if (sums.teacher != 0) {  // also if NaN
    gradient->teacher_max = sums.teacher_max;
    gradient->teacher = 1 / sums.teacher;
    gradient->log_ratio = std::log(sums.teacher) - log_sum;
    gradient->kl_weight = options.kl_weight;
  }
  if (options.kl == Divergence::kForward) {
    // Sum of p (log p - log q), log p = v - log(teacher) and log q = u - log(exp).
    result.kl = (sums.teacher_v - sums.teacher_u) / sums.teacher - gradient->log_ratio;
    gradient->own += options.kl_weight;
  }
  return result;
}

// Rows [begin, end): project tile by tile, taking sums while a tile is in cache; then, with the
// sums of whole rows, form the gradient tile by tile and project it back while it is in cache.
template <typename acc_t>
class Task {
 public:
  Task(const at::Tensor& weight, int64_t vocab, const RowOptions& options, double logit_scale,
       int64_t max_rows, bool with_teacher)
      : head_(weight, vocab), vocab_(vocab), options_(options), logit_scale_(logit_scale) {
    logits_ = make_logits<acc_t>(max_rows, round_up(vocab, kRowPad) + kSkew);
    if (with_teacher) teacher_ = make_logits<acc_t>(max_rows, logits_.size(1));
    if (options.need_grad) d_tile_ = make_logits<acc_t>(max_rows, kVocabTile + kSkew);
  }

  void run(Rows& rows, int64_t begin, int64_t end) {
    count_ = end - begin;
    labels_ = rows.labels.data() + begin;
    results_ = rows.results.data() + begin;
    project(rows, begin);
    gradients_.resize(count_);
    label_logits_.resize(count_);
    for (int64_t i = 0; i < count_; ++i) {
      const acc_t* z = row(logits_, i, 0);
      const acc_t mine = label_logits_[i] = z[labels_[i]];
      const bool is_best =
          mine == sums_[i].max && std::find(z, z + labels_[i], mine) == z + labels_[i];
      results_[i] = finish_row(sums_[i], mine, is_best, options_, &gradients_[i]);
      if (options_.kl != Divergence::kNone && options_.kl != Divergence::kForward) compare_row(i);
    }
    head_.for_each_tile([&](const at::Tensor& tile, int64_t first, const TileShape& shape) {
      rank_and_differentiate(first, shape);
      if (options_.need_grad) {
        project_back(tile, first, rows.gradient.narrow(0, begin, count_));
      }
    });
    for (int64_t i = 0; i < count_; ++i) {
      if (!std::isfinite(results_[i].lse)) results_[i].rank = vocab_;
    }
  }

 private:
  static constexpr at::ScalarType kType = c10::CppTypeToScalarType<acc_t>::value;

  static acc_t* row(const at::Tensor& x, int64_t i, int64_t column) {
    return x.mutable_data_ptr<acc_t>() + i * x.size(1) + column;
  }

  void project(const Rows& rows, int64_t begin) {
    const auto prepare = [&](const at::Tensor& states) {
      const at::Tensor x = states.narrow(0, begin, count_).to(kType);
      return logit_scale_ == 1 ? x : x * logit_scale_;
    };
    const at::Tensor states = prepare(rows.states);
    const at::Tensor teacher_states = teacher_.defined() ? prepare(rows.teacher_states) : states;
    const auto scan =
        teacher_.defined() ? KERNEL(scan_tile<acc_t, true>) : KERNEL(scan_tile<acc_t, false>);
    sums_.resize(count_);
    head_.for_each_tile([&](const at::Tensor& tile, int64_t first, const TileShape& shape) {
      at::Tensor out = logits_.narrow(0, 0, count_).narrow(1, first, shape.width);
      at::mm_out(out, states, tile.t());
      if (teacher_.defined()) {
        out = teacher_.narrow(0, 0, count_).narrow(1, first, shape.width);
        at::mm_out(out, teacher_states, tile.t());
      }
      for (int64_t i = 0; i < count_; ++i) {
        acc_t* t = teacher_.defined() ? row(teacher_, i, first) : nullptr;
        const TileSums sums = scan(row(logits_, i, first), t, shape, options_.softcap);
        if (first == 0) {
          sums_[i] = sums;
        } else {
          sums_[i].add(sums);
        }
      }
    });
  }

  // A divergence other than forward KL: only with the sums of a whole row are its p and q known.
  void compare_row(int64_t i) {
    const auto compare =
        options_.kl == Divergence::kReverse ? KERNEL(compare_tile<acc_t, Divergence::kReverse>)
        : options_.kl == Divergence::kJs    ? KERNEL(compare_tile<acc_t, Divergence::kJs>)
                                            : KERNEL(compare_tile<acc_t, Divergence::kTv>);
    for (int64_t first = 0; first < vocab_; first += kVocabTile) {
      const int64_t ids = std::min(kVocabTile, vocab_ - first);
      const auto part = compare(row(logits_, i, first), row(teacher_, i, first),
                                TileShape{ids, round_up(ids, kRowPad)}, gradients_[i]);
      results_[i].kl += part.value;
      gradients_[i].mean_slope += part.slope;
    }
  }

  auto gradient_kernel() const {
    switch (options_.kl) {
      case Divergence::kForward:
        return KERNEL(gradient_tile<acc_t, Divergence::kForward>);
      case Divergence::kReverse:
        return KERNEL(gradient_tile<acc_t, Divergence::kReverse>);
      case Divergence::kJs:
        return KERNEL(gradient_tile<acc_t, Divergence::kJs>);
      case Divergence::kTv:
        return KERNEL(gradient_tile<acc_t, Divergence::kTv>);
      default:
        return KERNEL(gradient_tile<acc_t, Divergence::kNone>);
    }
  }

  void rank_and_differentiate(int64_t first, const TileShape& shape) {
    const auto count_before = KERNEL(count_before<acc_t>);
    const auto differentiate = gradient_kernel();
    for (int64_t i = 0; i < count_; ++i) {
      const acc_t* z = row(logits_, i, first);
      const int64_t label = labels_[i] - first;
      results_[i].rank += count_before(z, shape, label, label_logits_[i]);
      if (!options_.need_grad) continue;
      acc_t* d = row(d_tile_, i, 0);
      const acc_t* t = teacher_.defined() ? row(teacher_, i, first) : nullptr;
      differentiate(z, t, shape, gradients_[i], d);
      if (label < 0 || label >= shape.width) continue;
      const double tanh = options_.softcap > 0 ? label_logits_[i] / options_.softcap : 0;
      d[label] -= options_.ce_weight * (1 - tanh * tanh);
    }
  }

  void project_back(const at::Tensor& tile, int64_t first, at::Tensor gradient) {
    const at::Tensor d_tile = d_tile_.narrow(0, 0, count_).narrow(1, 0, tile.size(0));
    if (first == 0) {
      at::mm_out(gradient, d_tile, tile);
    } else {
      at::addmm_out(gradient, gradient, d_tile, tile);
    }
  }

  Head<acc_t> head_;
  int64_t vocab_;
  const RowOptions& options_;
  double logit_scale_;
  at::Tensor logits_, teacher_;  // [max rows, V padded]
  at::Tensor d_tile_;            // [max rows, kVocabTile padded]

  int64_t count_;
  const int64_t* labels_;
  RowResult* results_;
  std::vector<TileSums> sums_;
  std::vector<RowGradient> gradients_;
  std::vector<acc_t> label_logits_;
};

}  // namespace dflash::loss
