// A ring of records of int64 words between one publisher and one reader thread.
//
// Each slot is a seqlock: its sequence word is 2n + 1 while record n is written and 2n + 2 once it
// is complete. The publisher never waits. The payload is atomic words, stored with release and
// loaded with acquire, which orders them with the sequence word without fences (the thread
// sanitizer does not model fences): a reader that saw one word of a newer record also sees that
// record's odd sequence word, and discards what it copied.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace dflash {

class MetricRing {
 public:
  // Throws std::invalid_argument unless slots >= 2 and words >= 1.
  MetricRing(int64_t slots, int64_t words);

  // Publishes record[words]; one thread.
  void push(const int64_t* record);

  // Copies the oldest record that was not read yet to record[words]; false if there is none.
  // Records that were overwritten in the meantime are skipped and counted. One thread.
  bool pop(int64_t* record);

  // Records skipped by pop so far; any thread.
  int64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }
  int64_t words() const { return words_; }

 private:
  using Word = std::atomic<int64_t>;

  // A slot is its sequence word followed by the payload.
  Word* slot(int64_t n) { return &memory_[(n % slots_) * (words_ + 1)]; }

  const int64_t slots_;
  const int64_t words_;
  std::unique_ptr<Word[]> memory_;
  int64_t next_push_ = 0;  // the publisher's
  int64_t next_pop_ = 0;   // the reader's
  std::atomic<int64_t> dropped_{0};
};

}  // namespace dflash
