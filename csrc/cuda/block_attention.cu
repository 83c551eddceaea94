#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "block_attention_forward_sm90_launch.cuh"
#include "block_attention_sm90_launch.cuh"
#include "check.h"

namespace dflash {
namespace {

constexpr double kLog2E = 1.4426950408889634;

struct Sizes {
  int64_t blocks, slots, q_heads, dim, tokens, kv_heads;
};

// Of what both kernels read: the queries and all that is known of the context.
Sizes check_context(const at::Tensor& q, const at::Tensor& k_ctx, const at::Tensor& v_ctx,
                    const at::Tensor& ctx_start, const at::Tensor& ctx_end) {
  CHECK_CUDA(q);
  CHECK_DIM(q, 4);
  CHECK_DIM(k_ctx, 3);
  const Sizes sizes{q.size(0), q.size(1), q.size(2), q.size(3), k_ctx.size(0), k_ctx.size(1)};
  const at::ScalarType dtype = q.scalar_type();
  TORCH_CHECK(dtype == at::kBFloat16 || dtype == at::kHalf, "q: found ", dtype,
              ", want bfloat16 or half");
  TORCH_CHECK(sizes.dim == 64 || sizes.dim == 128, "q: found heads of ", sizes.dim,
              ", want 64 or 128");
  TORCH_CHECK(sizes.kv_heads > 0 && sizes.q_heads % sizes.kv_heads == 0 &&
                  sizes.q_heads / sizes.kv_heads <= 64,
              "q: found ", sizes.q_heads, " heads, want at most 64 for each of the ",
              sizes.kv_heads, " of k_ctx");
  CHECK_CONTIGUOUS(q);
  for (const at::Tensor& x : {k_ctx, v_ctx}) {
    CHECK_SAME_DEVICE(x, q);
    CHECK_SAME_DTYPE(x, q);
    CHECK_SHAPE(x, sizes.tokens, sizes.kv_heads, sizes.dim);
    TORCH_CHECK(
        x.stride(2) == 1 && x.stride(0) > 0 && x.stride(0) % 8 == 0 && x.stride(1) % 8 == 0 &&
            reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0,
        "k_ctx, v_ctx: found strides ", x.strides(), ", want rows and heads aligned to 16 bytes");
  }
  for (const at::Tensor& x : {ctx_start, ctx_end}) {
    CHECK_SAME_DEVICE(x, q);
    CHECK_CONTIGUOUS(x);
    CHECK_DTYPE(x, at::kLong);
    CHECK_SHAPE(x, sizes.blocks);
  }
  return sizes;
}

void context_gradients_cuda(const at::Tensor& q, const at::Tensor& grad_out,
                            const at::Tensor& shift, const at::Tensor& delta,
                            const at::Tensor& k_ctx, const at::Tensor& v_ctx,
                            const at::Tensor& ctx_start, const at::Tensor& ctx_end,
                            const at::Tensor& sight, at::Tensor& dk_ctx, at::Tensor& dv_ctx,
                            double scale, std::optional<int64_t> window, bool add) {
  const auto [blocks, slots, q_heads, dim, tokens, kv_heads] =
      check_context(q, k_ctx, v_ctx, ctx_start, ctx_end);
  const at::ScalarType dtype = q.scalar_type();
  for (const at::Tensor& x : {grad_out, shift, delta, sight, dk_ctx, dv_ctx}) {
    CHECK_SAME_DEVICE(x, q);
    CHECK_CONTIGUOUS(x);
  }
  CHECK_SAME_DTYPE(grad_out, q);
  CHECK_SHAPE(grad_out, blocks, slots, q_heads, dim);
  for (const at::Tensor& x : {shift, delta}) {
    CHECK_DTYPE(x, at::kFloat);
    CHECK_SHAPE(x, blocks, slots, q_heads);
  }
  CHECK_DTYPE(sight, at::kInt);
  CHECK_SHAPE(sight, (tokens + sm90::kContextKeys - 1) / sm90::kContextKeys, 4);
  for (const at::Tensor& x : {dk_ctx, dv_ctx}) {
    CHECK_DTYPE(x, add ? at::kFloat : dtype);
    CHECK_SHAPE(x, tokens, kv_heads, dim);
  }
  if (q.numel() == 0 || tokens == 0) return;

  const c10::cuda::CUDAGuard guard(q.device());
  const sm90::ContextInputs inputs{q.const_data_ptr(),     grad_out.const_data_ptr(),
                                   k_ctx.const_data_ptr(), v_ctx.const_data_ptr(),
                                   k_ctx.stride(0),        v_ctx.stride(0)};
  const sm90::ContextParams params{shift.const_data_ptr<float>(),
                                   delta.const_data_ptr<float>(),
                                   ctx_start.const_data_ptr<int64_t>(),
                                   ctx_end.const_data_ptr<int64_t>(),
                                   static_cast<const sm90::Sight*>(sight.const_data_ptr()),
                                   dk_ctx.mutable_data_ptr(),
                                   dv_ctx.mutable_data_ptr(),
                                   static_cast<int>(blocks),
                                   static_cast<int>(slots),
                                   static_cast<int>(q_heads / kv_heads),
                                   static_cast<int>(kv_heads),
                                   static_cast<int>(tokens),
                                   static_cast<int>(window.value_or(0)),
                                   static_cast<int>(k_ctx.stride(1)),
                                   static_cast<int>(v_ctx.stride(1)),
                                   static_cast<float>(scale * kLog2E),
                                   static_cast<float>(scale),
                                   add};
  const auto launch =
      dtype == at::kHalf
          ? (dim == 128 ? sm90::launch_context<__half, 128> : sm90::launch_context<__half, 64>)
          : (dim == 128 ? sm90::launch_context<__nv_bfloat16, 128>
                        : sm90::launch_context<__nv_bfloat16, 64>);
  C10_CUDA_CHECK(launch(inputs, params, c10::cuda::getCurrentCUDAStream()));
}

std::tuple<at::Tensor, at::Tensor> forward_cuda(const at::Tensor& q, const at::Tensor& k_ctx,
                                                const at::Tensor& v_ctx, const at::Tensor& k_blk,
                                                const at::Tensor& v_blk,
                                                const at::Tensor& ctx_start,
                                                const at::Tensor& ctx_end, double scale,
                                                std::optional<int64_t> window, bool causal) {
  const auto [blocks, slots, q_heads, dim, tokens, kv_heads] =
      check_context(q, k_ctx, v_ctx, ctx_start, ctx_end);
  const at::ScalarType dtype = q.scalar_type();
  TORCH_CHECK(dim == sm90::kForwardDim, "q: found heads of ", dim, ", want ", sm90::kForwardDim);
  TORCH_CHECK(tokens > 0 && q.numel() > 0, "q, k_ctx: found shapes ", q.sizes(), ", ",
              k_ctx.sizes(), ", want some of each");
  for (const at::Tensor& x : {k_blk, v_blk}) {
    CHECK_SAME_DEVICE(x, q);
    CHECK_CONTIGUOUS(x);
    CHECK_SAME_DTYPE(x, q);
    CHECK_SHAPE(x, blocks, slots, kv_heads, dim);
  }
  const c10::cuda::CUDAGuard guard(q.device());
  at::Tensor out = at::empty_like(q);
  at::Tensor lse = at::empty({blocks, slots, q_heads}, q.options().dtype(at::kFloat));
  at::Tensor taken = at::empty({1}, q.options().dtype(at::kInt));
  const int64_t tile_slots = sm90::kForwardRows / (q_heads / kv_heads);
  const int64_t work = (blocks * slots + tile_slots - 1) / tile_slots * kv_heads;
  const sm90::ForwardInputs inputs{q.const_data_ptr(),     k_ctx.const_data_ptr(),
                                   v_ctx.const_data_ptr(), k_blk.const_data_ptr(),
                                   v_blk.const_data_ptr(), k_ctx.stride(0),
                                   v_ctx.stride(0)};
  const sm90::ForwardParams params{out.mutable_data_ptr(),
                                   lse.mutable_data_ptr<float>(),
                                   ctx_start.const_data_ptr<int64_t>(),
                                   ctx_end.const_data_ptr<int64_t>(),
                                   taken.mutable_data_ptr<int>(),
                                   static_cast<int>(work),
                                   static_cast<int>(blocks),
                                   static_cast<int>(slots),
                                   static_cast<int>(q_heads / kv_heads),
                                   static_cast<int>(kv_heads),
                                   static_cast<int>(tokens),
                                   window.value_or(0),
                                   static_cast<int>(k_ctx.stride(1)),
                                   static_cast<int>(v_ctx.stride(1)),
                                   static_cast<float>(scale * kLog2E),
                                   causal};
  const auto launch =
      dtype == at::kHalf ? sm90::launch_forward<__half> : sm90::launch_forward<__nv_bfloat16>;
  C10_CUDA_CHECK(launch(inputs, params, c10::cuda::getCurrentCUDAStream()));
  return {out, lse};
}

}  // namespace

TORCH_LIBRARY_IMPL(dflash_ext, CUDA, m) {
  m.impl("block_attention_forward_hopper", &forward_cuda);
  m.impl("block_attention_context_gradients", &context_gradients_cuda);
}

}  // namespace dflash
