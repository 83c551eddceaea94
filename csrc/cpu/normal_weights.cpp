// Initial weights: the normal numbers that torch.randn draws one after another, by many threads.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

#include "../check.h"

namespace dflash {
namespace {

constexpr int64_t CHUNK = 1 << 18;  // numbers of one task: a MiB that stays in the cache
// From so many numbers on torch draws one 32-bit word for each, in groups of this many; for an
// incomplete last group it draws another whole one.
constexpr int64_t GROUP = 16;

// The next 624 words of the generator (Matsumoto and Nishimura 1998, doi 10.1145/272991.272995).
void regenerate(std::array<uint32_t, at::MERSENNE_STATE_N>& words) {
  constexpr int n = at::MERSENNE_STATE_N, m = at::MERSENNE_STATE_M;
  uint32_t* p = words.data();
  auto next = [](uint32_t high, uint32_t low) {
    const uint32_t joined = (high & 0x80000000u) | (low & 0x7fffffffu);
    return (joined >> 1) ^ (0x9908b0dfu & -(low & 1u));
  };
  for (int i = 0; i < n - m; ++i) p[i] = p[i + m] ^ next(p[i], p[i + 1]);
  for (int i = n - m; i < n - 1; ++i) p[i] = p[i + m - n] ^ next(p[i], p[i + 1]);
  p[n - 1] = p[m - 1] ^ next(p[n - 1], p[0]);
}

// The engine as it is after `count` draws of 32 bits.
void skip(at::CPUGeneratorImpl& generator, int64_t count) {
  at::mt19937 engine = generator.engine();
  at::mt19937_data_pod data = engine.data();
  while (count > 0) {
    const int64_t rest = data.left_ - 1;  // a draw that finds none left renews the words
    if (count <= rest) {
      data.next_ += static_cast<uint32_t>(count);
      data.left_ -= static_cast<int>(count);
      break;
    }
    regenerate(data.state_);
    data.left_ = at::MERSENNE_STATE_N;
    data.next_ = 1;
    count -= rest + 1;
  }
  engine.set_data(data);
  generator.set_engine(engine);
}

void fill(const at::Tensor& out, const at::Generator& generator, double std) {
  at::AutoDispatchBelowADInplaceOrView guard;  // of this thread
  at::Tensor drawn = at::randn(out.sizes(), generator, out.options().dtype(at::kFloat));
  out.copy_(drawn.mul_(std));
}

void normal_weights_cpu(at::Tensor& out, at::Generator generator, double std) {
  CHECK_CPU(out);
  TORCH_CHECK(out.is_contiguous(), "out: found strides ", out.strides(), ", want contiguous");
  at::Tensor flat = out.view(-1);
  const int64_t total = flat.numel();
  if (total < GROUP) return fill(flat, generator, std);

  struct Piece {
    int64_t start, size;
    at::Generator generator;
  };
  std::vector<Piece> pieces;
  for (int64_t start = 0; start < total;) {
    int64_t size = std::min(CHUNK, total - start);
    if (total - start - size < GROUP) size = total - start;
    auto& own = *at::check_generator<at::CPUGeneratorImpl>(generator);
    std::lock_guard<std::mutex> lock(own.mutex_);
    pieces.push_back({start, size, generator.clone()});
    skip(own, size + (size % GROUP ? GROUP : 0));
    start += size;
  }
  at::parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      fill(flat.narrow(0, pieces[i].start, pieces[i].size), pieces[i].generator, std);
    }
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(dflash_ext, CPU, m) { m.impl("normal_weights", &normal_weights_cpu); }

}  // namespace dflash
