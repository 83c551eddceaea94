// Checks and device memory of the programs for compute-sanitizer.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("FAILED: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

inline void expect(int64_t found, int64_t wanted, const char* what) {
  if (found == wanted) return;
  std::printf("FAILED: %s: found %lld, want %lld\n", what, static_cast<long long>(found),
              static_cast<long long>(wanted));
  std::exit(1);
}

// A buffer without a byte to spare.
template <typename T>
T* on_device(const std::vector<T>& values) {
  T* data;
  check(cudaMalloc(&data, values.size() * sizeof(T)), "cudaMalloc");
  check(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
        "cudaMemcpy");
  return data;
}

template <typename T>
std::vector<T> read_back(const T* data, size_t count) {
  std::vector<T> values(count);
  check(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return values;
}

template <typename T>
T read_back(const T* data) {
  return read_back(data, 1)[0];
}
