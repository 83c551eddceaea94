// Runtime values to compile-time constants. The body is a lambda that reads the name.
#pragma once

#include <ATen/Dispatch.h>

// scalar_t is float, double, at::BFloat16 or at::Half in the body.
#define FLOAT_SWITCH(dtype, op_name, ...) \
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dtype, op_name, __VA_ARGS__)
