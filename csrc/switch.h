// Runtime values to compile-time constants. The body is a lambda that reads the name.
#pragma once

#include <ATen/Dispatch.h>

#define BOOL_SWITCH(condition, kName, ...) \
  [&] {                                    \
    if (condition) {                       \
      constexpr bool kName = true;         \
      return __VA_ARGS__();                \
    }                                      \
    constexpr bool kName = false;          \
    return __VA_ARGS__();                  \
  }()

// scalar_t is float, double, at::BFloat16 or at::Half in the body.
#define FLOAT_SWITCH(dtype, op_name, ...) \
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dtype, op_name, __VA_ARGS__)
