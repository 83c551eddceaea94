// Which keys a block sees, and keys and values packed for block_attention's kernels.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace dflash::attention {

// Keys are worked off in panels of this many, one tile of the kernels.
template <typename acc_t>
constexpr int64_t kPanel = 64 / sizeof(acc_t);

// Columns of one row's scores: its context keys, then slots of its own block; the rest is hidden.
struct SeenColumns {
  int64_t context_begin, context_end, block_begin, block_end, padded;
};

inline int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

struct Shape {
  int64_t blocks, slots, q_heads, kv_heads, dim, context;  // A, K, Hq, Hk, D, T
  double scale;
  std::optional<int64_t> window;
  bool causal;

  int64_t group() const { return q_heads / kv_heads; }
  int64_t rows() const { return slots * group(); }
};

// A block's columns: its context range, padded to whole panels, then its own slots.
struct Columns {
  int64_t begin, end;           // context keys that slot 0, or any later one, sees
  int64_t first_panel, panels;  // that hold them
  int64_t offset;               // column of key `begin`
  int64_t block;                // column of the block's slot 0
  int64_t padded;               // all columns
};

struct Problem {
  Shape shape;
  std::vector<int64_t> ctx_start, ctx_end;
  int64_t panel;

  Columns columns(int64_t a) const {
    Columns c;
    c.end = ctx_end[a];
    c.begin = ctx_start[a];
    if (shape.window) c.begin = std::max(c.begin, std::min(c.end, c.end - *shape.window + 1));
    c.first_panel = c.begin / panel;
    c.panels = c.begin < c.end ? (c.end + panel - 1) / panel - c.first_panel : 0;
    c.offset = c.panels > 0 ? c.begin - c.first_panel * panel : 0;
    c.block = c.panels * panel;
    c.padded = c.block + round_up(shape.slots, panel);
    return c;
  }

  SeenColumns seen(const Columns& c, int64_t slot) const {
    const int64_t size = c.end - c.begin;
    SeenColumns s{c.offset, c.offset + size, c.block, c.block + shape.slots, c.padded};
    if (shape.window) {
      const int64_t window = *shape.window;
      s.context_begin += std::clamp<int64_t>(size + slot - window + 1, 0, size);
      s.block_begin += std::max<int64_t>(0, slot - window + 1);
      s.block_end = std::min(s.block_end, c.block + slot + window);
    }
    if (shape.causal) s.block_end = c.block + slot + 1;
    return s;
  }

  int64_t max_columns() const {
    int64_t most = 0;
    for (int64_t a = 0; a < shape.blocks; ++a) most = std::max(most, columns(a).padded);
    return most;
  }

  // Blocks, grouped so that different groups see no key in common: they may add to the gradient of
  // the context at the same time. Ascending within a group, groups of most work first.
  std::vector<std::vector<int64_t>> separate_runs() const {
    std::vector<int64_t> order(shape.blocks);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return ctx_start[a] < ctx_start[b]; });
    std::vector<std::vector<int64_t>> runs;
    int64_t end = 0;
    for (const int64_t a : order) {
      if (runs.empty() || ctx_start[a] >= end) runs.emplace_back();
      runs.back().push_back(a);
      end = std::max(end, ctx_end[a]);
    }
    std::vector<std::pair<int64_t, size_t>> work;
    for (std::vector<int64_t>& run : runs) {
      std::sort(run.begin(), run.end());
      int64_t keys = 0;
      for (const int64_t a : run) keys += columns(a).padded;
      work.emplace_back(-keys, work.size());
    }
    std::sort(work.begin(), work.end());
    std::vector<std::vector<int64_t>> sorted;
    for (const auto& [keys, i] : work) sorted.push_back(std::move(runs[i]));
    return sorted;
  }

  std::vector<char> seen_panels() const {
    std::vector<char> seen((shape.context + panel - 1) / panel, 0);
    for (int64_t a = 0; a < shape.blocks; ++a) {
      const Columns c = columns(a);
      std::fill_n(seen.begin() + c.first_panel, c.panels, 1);
    }
    return seen;
  }
};

// A tensor of rows [.., heads, D] with any strides but that of D.
template <typename scalar_t>
struct Strided {
  explicit Strided(const at::Tensor& x)
      : tensor(x.stride(-1) == 1 ? x : x.contiguous()),
        data(tensor.const_data_ptr<scalar_t>()),
        head_stride(tensor.stride(-2)),
        row_stride(tensor.stride(-3)),
        block_stride(x.dim() == 4 ? tensor.stride(0) : 0) {}

  const scalar_t* at(int64_t block, int64_t row, int64_t head) const {
    return data + block * block_stride + row * row_stride + head * head_stride;
  }

  at::Tensor tensor;
  const scalar_t* data;
  int64_t head_stride, row_stride, block_stride;
};

// Rows of keys or values as a row-major matrix [rows, padded] in acc_t.
template <typename scalar_t, typename acc_t>
void pack_rows(const scalar_t* from, int64_t stride, int64_t rows, int64_t dim, int64_t padded,
               acc_t* to, acc_t scale = 1) {
  for (int64_t j = 0; j < rows; ++j, from += stride, to += padded) {
    for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<acc_t>(from[d]) * scale;
    std::fill(to + dim, to + padded, acc_t(0));
  }
}

// Up to kPanel<acc_t> rows as the columns of a panel [dim, kPanel]; missing ones are 0.
template <typename scalar_t, typename acc_t>
void pack_panel(const scalar_t* from, int64_t stride, int64_t rows, int64_t dim, acc_t* to) {
  if (rows < kPanel<acc_t>) std::fill(to, to + dim * kPanel<acc_t>, acc_t(0));
  for (int64_t j = 0; j < std::min(rows, kPanel<acc_t>); ++j, from += stride) {
    for (int64_t d = 0; d < dim; ++d) to[d * kPanel<acc_t> + j] = static_cast<acc_t>(from[d]);
  }
}

// Context keys or values, packed per KV head in those panels that some block sees.
template <typename acc_t>
struct PackedContext {
  at::Tensor panels, rows;  // [Hk, P, D, kPanel] and [Hk, P * kPanel, padded D]; or undefined

  template <typename scalar_t>
  static PackedContext make(const at::Tensor& x, const std::vector<char>& seen, bool with_panels,
                            bool with_rows) {
    const Strided<scalar_t> source(x);
    const int64_t length = x.size(0), heads = x.size(1), dim = x.size(2), count = seen.size();
    const int64_t padded = round_up(dim, kPanel<acc_t>);
    const auto options = x.options().dtype(c10::CppTypeToScalarType<acc_t>::value);
    PackedContext packed;
    if (with_panels) packed.panels = at::empty({heads, count, dim, kPanel<acc_t>}, options);
    if (with_rows) packed.rows = at::empty({heads, count * kPanel<acc_t>, padded}, options);
    at::parallel_for(0, count * heads, 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t panel = i / heads, head = i % heads, row = panel * kPanel<acc_t>;
        if (!seen[panel]) continue;
        const scalar_t* from = source.at(0, row, head);
        const int64_t rows = std::min(kPanel<acc_t>, length - row);
        if (with_panels) {
          pack_panel(from, source.row_stride, rows, dim, packed.panel(head, panel));
        }
        if (with_rows) {
          pack_rows(from, source.row_stride, rows, dim, padded, packed.row(head, row));
        }
      }
    });
    return packed;
  }

  acc_t* panel(int64_t head, int64_t panel) const {
    return panels.mutable_data_ptr<acc_t>() + head * panels.stride(0) + panel * panels.stride(1);
  }
  acc_t* row(int64_t head, int64_t row) const {
    return rows.mutable_data_ptr<acc_t>() + head * rows.stride(0) + row * rows.stride(1);
  }
};

}  // namespace dflash::attention
