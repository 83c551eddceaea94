// Brings staged metric records of one GPU to host memory, behind the training stream's back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "metric_ring.h"

struct CUevent_st;
struct CUstream_st;

namespace dflash {

class MetricCopier {
 public:
  // staging: int64[R, words] that metric_publish fills; slots: records that the ring holds.
  // Waits for the current stream, which may just have cleared staging.
  MetricCopier(at::Tensor staging, int64_t slots);
  ~MetricCopier();
  MetricCopier(const MetricCopier&) = delete;
  MetricCopier& operator=(const MetricCopier&) = delete;

  // Sends off the row of `step` once the current stream has filled it. Neither the calling thread
  // nor its stream waits: a row that is overwritten before it was copied is dropped and counted.
  // One thread, ascending steps.
  void copy(int64_t step);

  // Where the records arrive; its reader makes no CUDA call.
  const std::shared_ptr<MetricRing>& ring() const { return ring_; }

  // The metric stream.
  int64_t stream() const { return reinterpret_cast<int64_t>(stream_); }

 private:
  at::Tensor staging_;
  at::Tensor state_;
  int64_t slots_;
  int64_t* memory_;
  std::shared_ptr<MetricRing> ring_;
  CUstream_st* stream_ = nullptr;
  CUevent_st* published_ = nullptr;
};

}  // namespace dflash
