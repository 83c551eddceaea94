#include "cuda/pack_hidden.cuh"

#include <ATen/cuda/PeerToPeerAccess.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "pack_hidden.h"

namespace dflash {
namespace {

// Kernels of `device` are going to store to `other`.
void need_peer_access(c10::Device device, c10::Device other) {
  TORCH_CHECK(device == other || at::cuda::get_p2p_access(device.index(), other.index()),
              "out: found a tensor on ", other, ", want one that ", device, " can store to");
}

int64_t lowest_bit(int64_t x) { return x & -x; }

void pack_hidden_cuda(at::TensorList layers, const at::Tensor& src_index, at::Tensor& out,
                      const at::Tensor& n_rows, at::Tensor& high_water, int64_t first_layer) {
  const PackShape shape =
      check_pack_hidden(layers, src_index, out, n_rows, high_water, first_layer);
  for (const at::Tensor& layer : layers) {
    CHECK_CUDA(layer);
    CHECK_SAME_DEVICE(layer, layers[0]);
  }
  CHECK_SAME_DEVICE(src_index, layers[0]);
  CHECK_SAME_DEVICE(n_rows, layers[0]);
  CHECK_CUDA(out);
  CHECK_CUDA(high_water);
  TORCH_CHECK(shape.row_bytes <= std::numeric_limits<int>::max(), "layers: found rows of ",
              shape.row_bytes, " bytes, want less than 2 GiB");

  // The default stream of another device would neither wait for the layers nor be waited for.
  const c10::cuda::CUDAGuard guard(layers[0].device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  need_peer_access(layers[0].device(), out.device());
  need_peer_access(layers[0].device(), high_water.device());

  const int64_t item = out.element_size(), num_layers = layers.size();
  char* base = static_cast<char*>(out.mutable_data_ptr()) + first_layer * shape.out_layer;
  for (int64_t first = 0; first < num_layers; first += kPackLayers) {
    PackParams params{};
    params.num_layers = std::min<int64_t>(kPackLayers, num_layers - first);
    params.src_index = src_index.const_data_ptr<int64_t>();
    params.n_rows = n_rows.const_data_ptr<int64_t>();
    params.high_water = high_water.const_data_ptr<int64_t>();
    params.length = shape.length;
    params.num_sources = shape.num_sources;
    params.capacity = shape.capacity;
    params.out = base + first * shape.out_layer;
    params.out_row = shape.out_row;
    params.out_layer = shape.out_layer;
    params.row_bytes = shape.row_bytes;
    int64_t bits = reinterpret_cast<int64_t>(params.out) | shape.out_row | shape.out_layer |
                   shape.row_bytes | 16;
    for (int l = 0; l < params.num_layers; ++l) {
      const at::Tensor& layer = layers[first + l];
      params.layers[l] = {static_cast<const char*>(layer.const_data_ptr()), layer.stride(0) * item,
                          layer.stride(1) * item};
      bits |= reinterpret_cast<int64_t>(params.layers[l].data) | params.layers[l].row_stride |
              params.layers[l].position_stride;
    }
    C10_CUDA_CHECK(launch_pack_hidden(params, lowest_bit(bits), stream));
  }
  C10_CUDA_CHECK(launch_pack_mark(n_rows.const_data_ptr<int64_t>(),
                                  high_water.mutable_data_ptr<int64_t>(), shape.last, stream));
}

}  // namespace

TORCH_LIBRARY_IMPL(dflash_ext, CUDA, m) { m.impl("pack_hidden", &pack_hidden_cuda); }

}  // namespace dflash
