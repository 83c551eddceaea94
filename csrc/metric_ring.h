// A ring of records of int64 words between one publisher and one reader thread.
//
// Each slot is a seqlock: its sequence word is 2n + 1 while record n is written and 2n + 2 once it
// is complete. The publisher never waits. The payload is atomic words, stored with release and
// loaded with acquire, which orders them with the sequence word without fences (the thread
// sanitizer does not model fences): a reader that saw one word of a newer record also sees that
// record's odd sequence word, and discards what it copied.
//
// The publisher is push, or a GPU that writes the same words in the same order to pinned memory
// (cuda/metric_copy.cuh); the reader makes no CUDA call in either case.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace dflash {

class MetricRing {
 public:
  using Word = std::atomic<int64_t>;

  // Both throw std::invalid_argument unless slots >= 2 and words >= 1.
  MetricRing(int64_t slots, int64_t words);

  // In memory_words(slots, words) zeros that another publisher writes: slots of a sequence word and
  // the payload, then the number of records that the publisher had to drop.
  MetricRing(int64_t slots, int64_t words, std::shared_ptr<Word[]> memory);

  static int64_t memory_words(int64_t slots, int64_t words) { return slots * (words + 1) + 1; }

  // Publishes record[words]; one thread.
  void push(const int64_t* record);

  // Copies the oldest record that was not read yet to record[words]; false if there is none.
  // Records that were overwritten in the meantime are skipped and counted. One thread.
  bool pop(int64_t* record);

  // Records skipped by pop or dropped by the publisher so far; any thread.
  int64_t dropped() const {
    return dropped_.load(std::memory_order_relaxed) +
           memory_[slots_ * (words_ + 1)].load(std::memory_order_relaxed);
  }
  int64_t words() const { return words_; }

 private:
  // A slot is its sequence word followed by the payload.
  Word* slot(int64_t n) { return &memory_[(n % slots_) * (words_ + 1)]; }

  const int64_t slots_;
  const int64_t words_;
  const std::shared_ptr<Word[]> memory_;
  int64_t next_push_ = 0;  // the publisher's
  int64_t next_pop_ = 0;   // the reader's
  std::atomic<int64_t> dropped_{0};
};

}  // namespace dflash
