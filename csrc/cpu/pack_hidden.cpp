#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"

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
  TORCH_CHECK(!layers.empty(), "layers: found none, want at least one");
  CHECK_DIM(layers[0], 3);
  const int64_t batch = layers[0].size(0), length = layers[0].size(1), width = layers[0].size(2);
  for (const at::Tensor& layer : layers) {
    CHECK_CPU(layer);
    CHECK_SHAPE(layer, batch, length, width);
    CHECK_SAME_DTYPE(layer, out);
    CHECK_LAST_DIM_CONTIGUOUS(layer);
  }
  CHECK_CPU(src_index);
  CHECK_DTYPE(src_index, at::kLong);
  CHECK_DIM(src_index, 1);
  CHECK_CONTIGUOUS(src_index);
  CHECK_CPU(out);
  TORCH_CHECK(out.dim() == 2 || out.dim() == 3, "out: found shape ", out.sizes(),
              ", want [T, L*H] or [L, T, H]");
  CHECK_LAST_DIM_CONTIGUOUS(out);
  const int64_t capacity = src_index.size(0);
  const bool split = out.dim() == 3;
  TORCH_CHECK(out.size(split ? 1 : 0) == capacity, "out: found shape ", out.sizes(),
              ", want T = ", capacity, " like src_index");
  TORCH_CHECK(split ? out.size(2) == width : width > 0 && out.size(1) % width == 0,
              "out: found shape ", out.sizes(), ", want H = ", width, " like the layers");
  const int64_t num_layers = split ? out.size(0) : out.size(1) / width;
  const int64_t end_layer = first_layer + static_cast<int64_t>(layers.size());
  TORCH_CHECK(first_layer >= 0 && end_layer <= num_layers, "first_layer: found layers ",
              first_layer, " to ", end_layer, ", want at most the ", num_layers, " of out");
  CHECK_DTYPE(n_rows, at::kLong);
  CHECK_SHAPE(n_rows);
  CHECK_CPU(n_rows);
  CHECK_DTYPE(high_water, at::kLong);
  CHECK_SHAPE(high_water);
  CHECK_CPU(high_water);

  const int64_t rows = *n_rows.const_data_ptr<int64_t>();
  const int64_t dirty = *high_water.const_data_ptr<int64_t>();
  TORCH_CHECK(rows >= 0 && rows <= capacity, "n_rows: found ", rows, ", want 0 to ", capacity);
  TORCH_CHECK(dirty >= 0 && dirty <= capacity, "high_water: found ", dirty, ", want 0 to ",
              capacity);
  const int64_t* index = src_index.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < rows; ++t) {
    TORCH_CHECK(index[t] >= -1 && index[t] < batch * length, "src_index: found ", index[t], " at ",
                t, ", want -1 to ", batch * length - 1);
  }

  const int64_t item = out.element_size();
  std::vector<LayerSource> sources;
  for (const at::Tensor& layer : layers) {
    sources.push_back({static_cast<const char*>(layer.const_data_ptr()), layer.stride(0) * item,
                       layer.stride(1) * item});
  }
  char* base = static_cast<char*>(out.mutable_data_ptr());
  const int64_t out_row = out.stride(split ? 1 : 0) * item;
  const int64_t out_layer = split ? out.stride(0) * item : width * item;
  const int64_t bytes = width * item;
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / (bytes * sources.size() + 1));
  at::parallel_for(0, std::max(rows, dirty), grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t from = t < rows ? index[t] : -1;
      char* to = base + t * out_row + first_layer * out_layer;
      for (const LayerSource& source : sources) {
        if (from >= 0) {
          const int64_t offset =
              from / length * source.row_stride + from % length * source.position_stride;
          std::memcpy(to, source.data + offset, bytes);
        } else {
          std::memset(to, 0, bytes);
        }
        to += out_layer;
      }
    }
  });
  // Until the last layer is written, other layers still have to clear the rows up to the old mark.
  *high_water.mutable_data_ptr<int64_t>() = end_layer == num_layers ? rows : std::max(rows, dirty);
}

}  // namespace

TORCH_LIBRARY_IMPL(dflash_ext, CPU, m) { m.impl("pack_hidden", &pack_hidden_cpu); }

}  // namespace dflash
