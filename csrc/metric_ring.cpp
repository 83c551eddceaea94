#include "metric_ring.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace dflash {

namespace {

// The test suite also builds this file without the ordering, to see its checks fail.
#ifdef DFLASH_RING_UNORDERED
constexpr auto kRelease = std::memory_order_relaxed;
constexpr auto kAcquire = std::memory_order_relaxed;
#else
constexpr auto kRelease = std::memory_order_release;
constexpr auto kAcquire = std::memory_order_acquire;
#endif

std::shared_ptr<MetricRing::Word[]> host_memory(int64_t slots, int64_t words) {
  if (slots < 2 || words < 1) return nullptr;  // the constructor refuses
  return std::shared_ptr<MetricRing::Word[]>(
      new MetricRing::Word[MetricRing::memory_words(slots, words)]());
}

}  // namespace

MetricRing::MetricRing(int64_t slots, int64_t words)
    : MetricRing(slots, words, host_memory(slots, words)) {}

MetricRing::MetricRing(int64_t slots, int64_t words, std::shared_ptr<Word[]> memory)
    : slots_(slots), words_(words), memory_(std::move(memory)) {
  if (slots < 2 || words < 1) {
    throw std::invalid_argument("MetricRing: want slots >= 2 and words >= 1, found " +
                                std::to_string(slots) + " and " + std::to_string(words));
  }
}

void MetricRing::push(const int64_t* record) {
  Word* sequence = slot(next_push_);
  sequence->store(2 * next_push_ + 1, std::memory_order_relaxed);
  for (int64_t i = 0; i < words_; ++i) {
    // Release: whoever reads this word also sees the odd sequence word above.
    sequence[1 + i].store(record[i], kRelease);
  }
  sequence->store(2 * next_push_ + 2, kRelease);
  ++next_push_;
}

bool MetricRing::pop(int64_t* record) {
  while (true) {
    Word* sequence = slot(next_pop_);
    const int64_t complete = 2 * next_pop_ + 2;
    int64_t seen = sequence->load(kAcquire);
    if (seen < complete) return false;
    if (seen == complete) {
      for (int64_t i = 0; i < words_; ++i) record[i] = sequence[1 + i].load(kAcquire);
      seen = sequence->load(std::memory_order_relaxed);
      if (seen == complete) {
        ++next_pop_;
        return true;
      }
    }
    // Overrun: the slot holds, or is about to hold, record `newest`, and the slots after it the
    // slots_ - 1 records before it.
    const int64_t newest = (seen - 1) / 2;
    const int64_t oldest = newest - slots_ + 1;
    dropped_.fetch_add(oldest - next_pop_, std::memory_order_relaxed);
    next_pop_ = oldest;
  }
}

}  // namespace dflash
