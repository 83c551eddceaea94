// Statistics of one row of float logits; NaN is larger than every other value, as in torch.topk.
#pragma once

#include <cstdint>
#include <vector>

namespace dflash {

// Elements of a row that share an entry of `block_max`.
constexpr int64_t kBlock = 64;

struct RowMax {
  float value;  // of the elements that are not NaN, -inf if there are none
  bool has_nan;
};

// Also fills block_max[ceil(n / kBlock)]; a block that has a NaN gets +inf.
RowMax row_max(const float* z, int64_t n, float* block_max);

// log of the sum of exp(z); NaN if a NaN is in the row.
float row_logsumexp(const float* z, int64_t n, RowMax max);

// Elements that come before element `label` < n in (value descending, index ascending) order.
int64_t row_rank(const float* z, int64_t n, int64_t label);

// The k <= n first elements in that order. `keys` is scratch that is kept between rows.
void row_top_k(const float* z, int64_t n, int64_t k, const float* block_max,
               std::vector<uint64_t>& keys, float* values, int64_t* indices);

}  // namespace dflash
