// Argument checks of the ops: each names the tensor, the rule and what it got.
#pragma once

#include <ATen/core/Tensor.h>

#define CHECK_CPU(x) \
  TORCH_CHECK((x).device().is_cpu(), #x ": found a tensor on ", (x).device(), ", want cpu")

#define CHECK_CUDA(x) \
  TORCH_CHECK((x).device().is_cuda(), #x ": found a tensor on ", (x).device(), ", want cuda")

#define CHECK_SAME_DEVICE(x, y)                                                                 \
  TORCH_CHECK((x).device() == (y).device(), #x ": found a tensor on ", (x).device(), ", want ", \
              (y).device(), " like " #y)

#define CHECK_DTYPE(x, dtype) \
  TORCH_CHECK((x).scalar_type() == (dtype), #x ": found ", (x).scalar_type(), ", want ", (dtype))

#define CHECK_SAME_DTYPE(x, y)                                                                     \
  TORCH_CHECK((x).scalar_type() == (y).scalar_type(), #x ": found ", (x).scalar_type(), ", want ", \
              (y).scalar_type(), " like " #y)

#define CHECK_FLOATING(x)                                                              \
  TORCH_CHECK(at::isFloatingType((x).scalar_type()), #x ": found ", (x).scalar_type(), \
              ", want a floating point type")

#define CHECK_DIM(x, n) \
  TORCH_CHECK((x).dim() == (n), #x ": found ", (x).dim(), " dimensions, want ", (n))

// CHECK_SHAPE(x, a, b): the shape of x is [a, b].
#define CHECK_SHAPE(x, ...)                                                                    \
  TORCH_CHECK((x).sizes() == at::IntArrayRef({__VA_ARGS__}), #x ": found shape ", (x).sizes(), \
              ", want ", at::IntArrayRef({__VA_ARGS__}))

#define CHECK_CONTIGUOUS(x) \
  TORCH_CHECK((x).is_contiguous(), #x ": found strides ", (x).strides(), ", want contiguous")

#define CHECK_LAST_DIM_CONTIGUOUS(x)                                                          \
  TORCH_CHECK((x).size(-1) <= 1 || (x).stride(-1) == 1, #x ": found strides ", (x).strides(), \
              ", want a contiguous last dimension")
