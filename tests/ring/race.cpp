// One thread publishes records to a MetricRing while another reads them: no record may be torn,
// repeated or out of order, and those that the reader missed must be counted.
// usage: race PUBLISHES SLOTS WORDS
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "metric_ring.h"

namespace {

int64_t word(int64_t record, int64_t i) {
  return static_cast<int64_t>((record + 1) * 0x9e3779b97f4a7c15ull) ^ i;
}

[[noreturn]] void fail(const char* what, int64_t record) {
  std::printf("FAILED: %s at record %" PRId64 "\n", what, record);
  std::exit(1);
}

void spin(int64_t turns) {
  for (volatile int64_t i = 0; i < turns;) i = i + 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int64_t publishes = std::atoll(argv[1]), slots = std::atoll(argv[2]),
                words = std::atoll(argv[3]);
  dflash::MetricRing ring(slots, words);
  // Ordinary memory that push must make visible to whoever pops the record.
  std::vector<int64_t> note(publishes, -1);

  // Bursts of up to two rounds overrun the reader, in the pauses it catches up; where it does not
  // get to run beside the publisher it is waited for now and then.
  std::atomic<int64_t> num_read{0};
  std::thread publisher([&] {
    std::vector<int64_t> record(words);
    int64_t burst = 1;
    for (int64_t n = 0; n < publishes; ++n) {
      record[0] = n;
      for (int64_t i = 1; i < words; ++i) record[i] = word(n, i);
      note[n] = word(n, 0);
      ring.push(record.data());
      if (--burst > 0) continue;
      burst = 1 + (word(n, 0) >> 32 & 0xffff) % (2 * slots);
      spin(words * burst / 2);
      if (num_read.load(std::memory_order_relaxed) < n / 32) {
        std::this_thread::sleep_for(std::chrono::microseconds(10));
      }
    }
  });

  std::vector<int64_t> record(words);
  int64_t last = -1, read = 0;
  while (last < publishes - 1) {
    if (!ring.pop(record.data())) continue;
    const int64_t n = record[0];
    if (n <= last) fail("repeated or out of order", n);
    if (n >= publishes) fail("never published", n);
    for (int64_t i = 1; i < words; ++i) {
      if (record[i] != word(n, i)) fail("torn", n);
    }
    if (note[n] != word(n, 0)) fail("stale", n);
    last = n;
    num_read.store(++read, std::memory_order_relaxed);
    if (ring.dropped() + read != n + 1) fail("miscounted", n);
  }
  publisher.join();
  if (ring.pop(record.data())) fail("read after the last", record[0]);
  std::printf("read %" PRId64 " dropped %" PRId64 "\n", read, ring.dropped());
  return 0;
}
