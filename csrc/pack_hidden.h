// What pack_hidden's tensors have to agree on, the same on every device.
#pragma once

#include <ATen/core/Tensor.h>

#include "check.h"

namespace dflash {

struct PackShape {
  int64_t length;       // S: a source row is (index / S, index % S)
  int64_t num_sources;  // B * S
  int64_t capacity;     // T
  int64_t row_bytes;    // of one layer
  int64_t out_row;      // bytes from row to row of out
  int64_t out_layer;    // bytes from layer to layer of out
  bool last;            // this call writes out's last layer
};

inline PackShape check_pack_hidden(at::TensorList layers, const at::Tensor& src_index,
                                   const at::Tensor& out, const at::Tensor& n_rows,
                                   const at::Tensor& high_water, int64_t first_layer) {
  TORCH_CHECK(!layers.empty(), "layers: found none, want at least one");
  CHECK_DIM(layers[0], 3);
  const int64_t batch = layers[0].size(0), length = layers[0].size(1), width = layers[0].size(2);
  for (const at::Tensor& layer : layers) {
    CHECK_SHAPE(layer, batch, length, width);
    CHECK_SAME_DTYPE(layer, out);
    CHECK_LAST_DIM_CONTIGUOUS(layer);
  }
  CHECK_DTYPE(src_index, at::kLong);
  CHECK_DIM(src_index, 1);
  CHECK_CONTIGUOUS(src_index);
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
  CHECK_DTYPE(high_water, at::kLong);
  CHECK_SHAPE(high_water);

  const int64_t item = out.element_size();
  return {
      length,
      batch * length,
      capacity,
      width * item,
      out.stride(split ? 1 : 0) * item,
      split ? out.stride(0) * item : width * item,
      end_layer == num_layers,
  };
}

}  // namespace dflash
