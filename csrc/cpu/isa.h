// Kernels are compiled twice, for the build's own instruction set and (x86) for AVX2 with FMA, and
// picked at run time, so that a package built anywhere is fast wherever it runs:
//   namespace baseline {
//   #include "kernels.inl"
//   }
//   #ifdef DFLASH_HAS_AVX2
//   DFLASH_AVX2_BEGIN
//   namespace avx2 {
//   #include "kernels.inl"
//   }
//   DFLASH_AVX2_END
//   #endif
// Nothing but such .inl files may be included in between: inline functions of other headers must
// not be compiled for AVX2, for the linker may keep that copy for everybody.
#pragma once

#include <ATen/Version.h>

#include <string>

#ifdef __GNUC__
// Vectors are only passed to functions that are always inlined.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#if defined(__x86_64__) && defined(__clang__)
#define DFLASH_HAS_AVX2 1
#define DFLASH_AVX2_BEGIN \
  _Pragma("clang attribute push(__attribute__((target(\"avx2,fma\"))), apply_to=function)")
#define DFLASH_AVX2_END _Pragma("clang attribute pop")
#elif defined(__x86_64__) && defined(__GNUC__)
#define DFLASH_HAS_AVX2 1
#define DFLASH_AVX2_BEGIN _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,fma\")")
#define DFLASH_AVX2_END _Pragma("GCC pop_options")
#endif

// KERNEL(name): the copy of kernel `name` for this processor; follows ATEN_CPU_CAPABILITY.
#ifdef DFLASH_HAS_AVX2
#define KERNEL(...) (::dflash::use_avx2() ? &avx2::__VA_ARGS__ : &baseline::__VA_ARGS__)
#else
#define KERNEL(...) (&baseline::__VA_ARGS__)
#endif

namespace dflash {

inline bool use_avx2() {
  static const bool yes = [] {
    const std::string found = at::get_cpu_capability();
    return found == "AVX2" || found.rfind("AVX512", 0) == 0;
  }();
  return yes;
}

}  // namespace dflash
