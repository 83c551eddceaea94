#include "pack_hidden.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace dflash {
namespace {

constexpr int64_t kGrainBytes = 1 << 17;

struct LayerSource {
  const char* data;
  int64_t row_stride;  // bytes from row to row of the batch
  int64_t position_stride;
};

void pack_hidden_cpu(at::TensorList layers, const at::Tensor& src_index, at::Tensor& out,
                     const at::Tensor& n_rows, at::Tensor& high_water, int64_t first_layer) {
  const PackShape shape =
      check_pack_hidden(layers, src_index, out, n_rows, high_water, first_layer);
  for (const at::Tensor& layer : layers) CHECK_CPU(layer);
  CHECK_CPU(src_index);
  CHECK_CPU(out);
  CHECK_CPU(n_rows);
  CHECK_CPU(high_water);

  const int64_t rows = *n_rows.const_data_ptr<int64_t>();
  const int64_t dirty = *high_water.const_data_ptr<int64_t>();
  TORCH_CHECK(rows >= 0 && rows <= shape.capacity, "n_rows: found ", rows, ", want 0 to ",
              shape.capacity);
  TORCH_CHECK(dirty >= 0 && dirty <= shape.capacity, "high_water: found ", dirty, ", want 0 to ",
              shape.capacity);
  const int64_t* index = src_index.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < rows; ++t) {
    TORCH_CHECK(index[t] >= -1 && index[t] < shape.num_sources, "src_index: found ", index[t],
                " at ", t, ", want -1 to ", shape.num_sources - 1);
  }

  const int64_t item = out.element_size();
  std::vector<LayerSource> sources;
  for (const at::Tensor& layer : layers) {
    sources.push_back({static_cast<const char*>(layer.const_data_ptr()), layer.stride(0) * item,
                       layer.stride(1) * item});
  }
  char* base = static_cast<char*>(out.mutable_data_ptr()) + first_layer * shape.out_layer;
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / (shape.row_bytes * sources.size() + 1));
  at::parallel_for(0, std::max(rows, dirty), grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t from = t < rows ? index[t] : -1;
      char* to = base + t * shape.out_row;
      for (const LayerSource& source : sources) {
        if (from >= 0) {
          const int64_t offset = from / shape.length * source.row_stride +
                                 from % shape.length * source.position_stride;
          std::memcpy(to, source.data + offset, shape.row_bytes);
        } else {
          std::memset(to, 0, shape.row_bytes);
        }
        to += shape.out_layer;
      }
    }
  });
  // Until the last layer is written, other layers still have to clear the rows up to the old mark.
  *high_water.mutable_data_ptr<int64_t>() = shape.last ? rows : std::max(rows, dirty);
}

}  // namespace

TORCH_LIBRARY_IMPL(dflash_ext, CPU, m) { m.impl("pack_hidden", &pack_hidden_cpu); }

}  // namespace dflash
