// A task is an anchor and a KV head: the K slots of the G query heads that share it are the M rows
// of small GEMMs against a contiguous range of keys, [context | own block]. The context is packed
// once per call, in the accumulation type: transposed in panels for products over D, row-major for
// products over keys.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "block_attention_pack.h"
#include "check.h"
#include "isa.h"
#include "switch.h"

namespace dflash::attention {
namespace {

namespace baseline {
#include "block_attention_kernels.inl"
}  // namespace baseline
#ifdef DFLASH_HAS_AVX2
DFLASH_AVX2_BEGIN
namespace avx2 {
#include "block_attention_kernels.inl"
}  // namespace avx2
DFLASH_AVX2_END
#endif

static_assert(baseline::kTile<float> == kPanel<float>);

// Runs body(scratch, i) for i < tasks on all threads, each with its own scratch; a thread that is
// held up gets fewer tasks.
template <typename MakeScratch, typename Body>
void for_each_task(int64_t tasks, const MakeScratch& make_scratch, const Body& body) {
  std::atomic<int64_t> next{0};
  const int64_t workers = std::min<int64_t>(at::get_num_threads(), tasks);
  at::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    auto scratch = make_scratch();
    for (int64_t i; (i = next.fetch_add(1)) < tasks;) body(scratch, i);
  });
}

// Per-thread buffers. M = K * G rows of queries, Dp = D rounded up to whole panels.
template <typename acc_t>
struct Scratch {
  Scratch(const Problem& problem, bool backward)
      : columns(problem.max_columns()),
        width(round_up(problem.shape.dim, kPanel<acc_t>)),
        q(problem.shape.rows() * width),
        out(problem.shape.rows() * width),
        inverse(problem.shape.rows()),
        scores(problem.shape.rows() * columns),
        key_panels(round_up(problem.shape.slots, kPanel<acc_t>) * problem.shape.dim),
        values(problem.shape.slots * width) {
    if (!backward) return;
    d_scores.resize(scores.size());
    d_out.resize(q.size());
    value_panels.resize(key_panels.size());
    keys.resize(values.size());
    sums.resize(std::max(columns, problem.shape.slots) * width);
  }

  int64_t columns, width;
  std::vector<acc_t> q, out, inverse, scores, key_panels, values;
  std::vector<acc_t> d_scores, d_out, value_panels, keys, sums;
};

template <typename scalar_t, typename acc_t>
struct Gradients {
  acc_t *k_ctx, *v_ctx;         // [T, Hk, D], added to
  scalar_t *q, *k_blk, *v_blk;  // written
};

template <typename scalar_t, typename acc_t>
class Attention {
 public:
  using Source = Strided<scalar_t>;

  Attention(const Problem& problem, const at::Tensor& q, const at::Tensor& k_blk,
            const at::Tensor& v_blk)
      : problem_(problem), q_(q), k_blk_(k_blk), v_blk_(v_blk) {}

  void forward(const at::Tensor& k_ctx, const at::Tensor& v_ctx, at::Tensor& out, at::Tensor& lse) {
    const std::vector<char> seen = problem_.seen_panels();
    keys_ = PackedContext<acc_t>::template make<scalar_t>(k_ctx, seen, true, false);
    values_ = PackedContext<acc_t>::template make<scalar_t>(v_ctx, seen, false, true);
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    acc_t* to_lse = lse.mutable_data_ptr<acc_t>();
    const Shape& s = problem_.shape;
    for_each_task(
        s.blocks * s.kv_heads, [&] { return Scratch<acc_t>(problem_, false); },
        [&](Scratch<acc_t>& scratch, int64_t task) {
          forward_task(task / s.kv_heads, task % s.kv_heads, scratch, to, to_lse);
        });
  }

  // Adds to dk_ctx and dv_ctx; the other gradients are written.
  void backward(const at::Tensor& grad_out, const at::Tensor& lse, const at::Tensor& k_ctx,
                const at::Tensor& v_ctx, Gradients<scalar_t, acc_t> to) {
    const std::vector<char> seen = problem_.seen_panels();
    keys_ = PackedContext<acc_t>::template make<scalar_t>(k_ctx, seen, true, true);
    values_ = PackedContext<acc_t>::template make<scalar_t>(v_ctx, seen, true, false);
    const Source d_out(grad_out);
    const acc_t* row_lse = lse.const_data_ptr<acc_t>();
    const std::vector<std::vector<int64_t>> runs = problem_.separate_runs();
    const int64_t heads = problem_.shape.kv_heads;
    for_each_task(
        runs.size() * heads, [&] { return Scratch<acc_t>(problem_, true); },
        [&](Scratch<acc_t>& scratch, int64_t task) {
          for (const int64_t a : runs[task / heads]) {
            backward_task(a, task % heads, scratch, d_out, row_lse, to);
          }
        });
  }

 private:
  // Rows of a block's queries (or outputs) for one KV head: row k * G + g is slot k, head h * G +
  // g.
  void pack_queries(const Source& from, int64_t a, int64_t h, acc_t* to, int64_t width,
                    acc_t scale) {
    const Shape& s = problem_.shape;
    for (int64_t k = 0; k < s.slots; ++k) {
      pack_rows(from.at(a, k, h * s.group()), from.head_stride, s.group(), s.dim, width,
                to + k * s.group() * width, scale);
    }
  }

  void pack_block_panels(const Source& from, int64_t a, int64_t h, acc_t* to) {
    const Shape& s = problem_.shape;
    for (int64_t k = 0; k < s.slots; k += kPanel<acc_t>) {
      pack_panel(from.at(a, k, h), from.row_stride, s.slots - k, s.dim, to + k * s.dim);
    }
  }

  // scores = a (keys or values)^T over all columns of a block.
  void score(const Columns& c, int64_t h, const std::vector<acc_t>& a, int64_t a_width,
             const PackedContext<acc_t>& context, const std::vector<acc_t>& block,
             std::vector<acc_t>& scores) {
    const Shape& s = problem_.shape;
    const int64_t panel = kPanel<acc_t> * s.dim;
    if (c.panels > 0) {
      gemm_(s.rows(), c.panels, s.dim, a.data(), a_width, 1, context.panel(h, c.first_panel),
            kPanel<acc_t>, panel, scores.data(), c.padded);
    }
    gemm_(s.rows(), (c.padded - c.block) / kPanel<acc_t>, s.dim, a.data(), a_width, 1, block.data(),
          kPanel<acc_t>, panel, scores.data() + c.block, c.padded);
  }

  // out = scores (keys or values) over all columns of a block.
  void mix(const Columns& c, int64_t h, const std::vector<acc_t>& scores,
           const PackedContext<acc_t>& context, const std::vector<acc_t>& block,
           std::vector<acc_t>& out, int64_t width) {
    const Shape& s = problem_.shape;
    const int64_t tiles = width / kPanel<acc_t>;
    gemm_(s.rows(), tiles, s.slots, scores.data() + c.block, c.padded, 1, block.data(), width,
          kPanel<acc_t>, out.data(), width);
    if (c.panels == 0) return;
    gemm_add_(s.rows(), tiles, c.end - c.begin, scores.data() + c.offset, c.padded, 1,
              context.row(h, c.begin), width, kPanel<acc_t>, out.data(), width);
  }

  void forward_task(int64_t a, int64_t h, Scratch<acc_t>& x, scalar_t* out, acc_t* lse) {
    const Shape& s = problem_.shape;
    const Columns c = problem_.columns(a);
    pack_queries(q_, a, h, x.q.data(), x.width, s.scale);
    pack_block_panels(k_blk_, a, h, x.key_panels.data());
    pack_rows(v_blk_.at(a, 0, h), v_blk_.row_stride, s.slots, s.dim, x.width, x.values.data());
    score(c, h, x.q, x.width, keys_, x.key_panels, x.scores);
    for (int64_t m = 0; m < s.rows(); ++m) {
      double sum;
      const int64_t k = m / s.group(), head = h * s.group() + m % s.group();
      lse[(a * s.slots + k) * s.q_heads + head] =
          softmax_row_(x.scores.data() + m * c.padded, problem_.seen(c, k), &sum);
      x.inverse[m] = 1 / sum;
    }
    mix(c, h, x.scores, values_, x.values, x.out, x.width);
    for (int64_t m = 0; m < s.rows(); ++m) {
      const int64_t k = m / s.group(), head = h * s.group() + m % s.group();
      scalar_t* to = out + ((a * s.slots + k) * s.q_heads + head) * s.dim;
      for (int64_t d = 0; d < s.dim; ++d) to[d] = x.out[m * x.width + d] * x.inverse[m];
    }
  }

  // d_context[keys, h] += a^T b over a block's context columns, d_block = a^T b over its slots.
  void spread(const Columns& c, int64_t a, int64_t h, const std::vector<acc_t>& weights,
              const std::vector<acc_t>& rows, Scratch<acc_t>& x, acc_t* d_context,
              scalar_t* d_block) {
    const Shape& s = problem_.shape;
    const int64_t tiles = x.width / kPanel<acc_t>, size = c.end - c.begin;
    const int64_t stride = s.kv_heads * s.dim;
    acc_t* to = d_context + c.begin * stride + h * s.dim;
    if (x.width == s.dim) {
      gemm_add_(size, tiles, s.rows(), weights.data() + c.offset, 1, c.padded, rows.data(), x.width,
                kPanel<acc_t>, to, stride);
    } else {
      gemm_(size, tiles, s.rows(), weights.data() + c.offset, 1, c.padded, rows.data(), x.width,
            kPanel<acc_t>, x.sums.data(), x.width);
      for (int64_t j = 0; j < size; ++j) {
        for (int64_t d = 0; d < s.dim; ++d) to[j * stride + d] += x.sums[j * x.width + d];
      }
    }
    gemm_(s.slots, tiles, s.rows(), weights.data() + c.block, 1, c.padded, rows.data(), x.width,
          kPanel<acc_t>, x.sums.data(), x.width);
    for (int64_t k = 0; k < s.slots; ++k) {
      scalar_t* row = d_block + (a * s.slots + k) * stride + h * s.dim;
      for (int64_t d = 0; d < s.dim; ++d) row[d] = x.sums[k * x.width + d];
    }
  }

  void backward_task(int64_t a, int64_t h, Scratch<acc_t>& x, const Source& d_out, const acc_t* lse,
                     const Gradients<scalar_t, acc_t>& to) {
    const Shape& s = problem_.shape;
    const Columns c = problem_.columns(a);
    pack_queries(q_, a, h, x.q.data(), x.width, s.scale);
    pack_queries(d_out, a, h, x.d_out.data(), x.width, 1);
    pack_block_panels(k_blk_, a, h, x.key_panels.data());
    pack_block_panels(v_blk_, a, h, x.value_panels.data());
    pack_rows(k_blk_.at(a, 0, h), k_blk_.row_stride, s.slots, s.dim, x.width, x.keys.data());
    score(c, h, x.q, x.width, keys_, x.key_panels, x.scores);
    score(c, h, x.d_out, x.width, values_, x.value_panels, x.d_scores);
    for (int64_t m = 0; m < s.rows(); ++m) {
      const int64_t k = m / s.group(), head = h * s.group() + m % s.group();
      backward_row_(x.scores.data() + m * c.padded, x.d_scores.data() + m * c.padded,
                    problem_.seen(c, k), lse[(a * s.slots + k) * s.q_heads + head]);
    }
    spread(c, a, h, x.d_scores, x.q, x, to.k_ctx, to.k_blk);
    spread(c, a, h, x.scores, x.d_out, x, to.v_ctx, to.v_blk);
    mix(c, h, x.d_scores, keys_, x.keys, x.out, x.width);
    for (int64_t m = 0; m < s.rows(); ++m) {
      const int64_t k = m / s.group(), head = h * s.group() + m % s.group();
      scalar_t* row = to.q + ((a * s.slots + k) * s.q_heads + head) * s.dim;
      for (int64_t d = 0; d < s.dim; ++d) row[d] = x.out[m * x.width + d] * acc_t(s.scale);
    }
  }

  const Problem& problem_;
  const Source q_, k_blk_, v_blk_;
  PackedContext<acc_t> keys_, values_;
  const decltype(&baseline::gemm<acc_t, false>) gemm_ = KERNEL(gemm<acc_t, false>);
  const decltype(&baseline::gemm<acc_t, true>) gemm_add_ = KERNEL(gemm<acc_t, true>);
  const decltype(&baseline::softmax_row<acc_t>) softmax_row_ = KERNEL(softmax_row<acc_t>);
  const decltype(&baseline::backward_row<acc_t>) backward_row_ = KERNEL(backward_row<acc_t>);
};

Problem make_problem(const at::Tensor& q, const at::Tensor& k_ctx, const at::Tensor& v_ctx,
                     const at::Tensor& k_blk, const at::Tensor& v_blk, const at::Tensor& ctx_start,
                     const at::Tensor& ctx_end, double scale, std::optional<int64_t> window,
                     bool causal) {
  CHECK_CPU(q);
  CHECK_FLOATING(q);
  CHECK_DIM(q, 4);
  CHECK_DIM(k_blk, 4);
  CHECK_DIM(k_ctx, 3);
  Problem problem;
  problem.shape = {q.size(0),     q.size(1), q.size(2), k_blk.size(2), q.size(3),
                   k_ctx.size(0), scale,     window,    causal};
  const Shape& s = problem.shape;
  for (const at::Tensor& x : {k_ctx, v_ctx, k_blk, v_blk}) {
    CHECK_CPU(x);
    CHECK_SAME_DTYPE(x, q);
  }
  CHECK_SHAPE(k_ctx, s.context, s.kv_heads, s.dim);
  CHECK_SHAPE(v_ctx, s.context, s.kv_heads, s.dim);
  CHECK_SHAPE(k_blk, s.blocks, s.slots, s.kv_heads, s.dim);
  CHECK_SHAPE(v_blk, s.blocks, s.slots, s.kv_heads, s.dim);
  TORCH_CHECK(s.kv_heads > 0 && s.q_heads % s.kv_heads == 0, "q: found ", s.q_heads,
              " heads, want a multiple of the ", s.kv_heads, " of k_blk");
  TORCH_CHECK(!window.has_value() || *window >= 1, "window: found ", *window, ", want >= 1");
  for (const at::Tensor& x : {ctx_start, ctx_end}) {
    CHECK_CPU(x);
    CHECK_DTYPE(x, at::kLong);
    CHECK_SHAPE(x, s.blocks);
  }
  const at::Tensor start = ctx_start.contiguous(), end = ctx_end.contiguous();
  const int64_t* from = start.const_data_ptr<int64_t>();
  const int64_t* to = end.const_data_ptr<int64_t>();
  for (int64_t a = 0; a < s.blocks; ++a) {
    TORCH_CHECK_INDEX(0 <= from[a] && from[a] <= to[a] && to[a] <= s.context,
                      "ctx_start, ctx_end: found [", from[a], ", ", to[a], ") of block ", a,
                      ", want a range in 0 to ", s.context);
  }
  problem.ctx_start.assign(from, from + s.blocks);
  problem.ctx_end.assign(to, to + s.blocks);
  return problem;
}

at::ScalarType accumulate_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

std::tuple<at::Tensor, at::Tensor> block_attention_cpu(
    const at::Tensor& q, const at::Tensor& k_ctx, const at::Tensor& v_ctx, const at::Tensor& k_blk,
    const at::Tensor& v_blk, const at::Tensor& ctx_start, const at::Tensor& ctx_end, double scale,
    std::optional<int64_t> window, bool causal) {
  Problem problem =
      make_problem(q, k_ctx, v_ctx, k_blk, v_blk, ctx_start, ctx_end, scale, window, causal);
  at::Tensor out = at::empty(q.sizes(), q.options());
  at::Tensor lse = at::empty(q.sizes().slice(0, 3), q.options().dtype(accumulate_type(q)));
  if (q.numel() == 0) return {out, lse};
  FLOAT_SWITCH(q.scalar_type(), "block_attention", [&] {
    using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    problem.panel = kPanel<acc_t>;
    Attention<scalar_t, acc_t>(problem, q, k_blk, v_blk).forward(k_ctx, v_ctx, out, lse);
  });
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> block_attention_backward_cpu(
    const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k_ctx,
    const at::Tensor& v_ctx, const at::Tensor& k_blk, const at::Tensor& v_blk,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& ctx_start,
    const at::Tensor& ctx_end, at::Tensor& dk_ctx, at::Tensor& dv_ctx, double scale,
    std::optional<int64_t> window, bool causal) {
  Problem problem =
      make_problem(q, k_ctx, v_ctx, k_blk, v_blk, ctx_start, ctx_end, scale, window, causal);
  const Shape& s = problem.shape;
  for (const at::Tensor& x : {grad_out, out}) {
    CHECK_CPU(x);
    CHECK_SAME_DTYPE(x, q);
    CHECK_SHAPE(x, s.blocks, s.slots, s.q_heads, s.dim);
  }
  CHECK_CPU(lse);
  CHECK_DTYPE(lse, accumulate_type(q));
  CHECK_SHAPE(lse, s.blocks, s.slots, s.q_heads);
  CHECK_CONTIGUOUS(lse);
  for (const at::Tensor& x : {dk_ctx, dv_ctx}) {
    CHECK_CPU(x);
    CHECK_DTYPE(x, accumulate_type(q));
    CHECK_SHAPE(x, s.context, s.kv_heads, s.dim);
    CHECK_CONTIGUOUS(x);
  }
  at::Tensor dq = at::empty(q.sizes(), q.options());
  at::Tensor dk_blk = at::empty(k_blk.sizes(), q.options());
  at::Tensor dv_blk = at::empty(v_blk.sizes(), q.options());
  if (q.numel() == 0) return {dq, dk_blk, dv_blk};
  FLOAT_SWITCH(q.scalar_type(), "block_attention_backward", [&] {
    using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    problem.panel = kPanel<acc_t>;
    const Gradients<scalar_t, acc_t> to{
        dk_ctx.mutable_data_ptr<acc_t>(), dv_ctx.mutable_data_ptr<acc_t>(),
        dq.mutable_data_ptr<scalar_t>(), dk_blk.mutable_data_ptr<scalar_t>(),
        dv_blk.mutable_data_ptr<scalar_t>()};
    Attention<scalar_t, acc_t>(problem, q, k_blk, v_blk).backward(grad_out, lse, k_ctx, v_ctx, to);
  });
  return {dq, dk_blk, dv_blk};
}

}  // namespace

TORCH_LIBRARY_IMPL(dflash_ext, CPU, m) {
  m.impl("block_attention", &block_attention_cpu);
  m.impl("block_attention_backward", &block_attention_backward_cpu);
}

}  // namespace dflash::attention
