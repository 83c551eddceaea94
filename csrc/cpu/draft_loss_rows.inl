// Row kernels of draft_loss, included once per instruction set. Rows are cut
// into tiles of the vocabulary, whose length is padded with kPadding to a multiple of kRowPad.

#include "simd.inl"
//
#include "divergence.inl"

// Soft cap in place, then the padding, which the head did not write.
template <typename T>
DFLASH_INLINE void cap_and_pad(T* z, const TileShape& tile, double softcap) {
  if (softcap > 0) {
    const T cap = softcap, inverse = 1 / softcap;
    for (int64_t i = 0; i < tile.padded; i += kLanes<T>) {
      store(z + i, cap * tanh_vec<T>(load(z + i) * inverse));
    }
  }
  for (int64_t i = tile.width; i < tile.padded; ++i) z[i] = kPadding;
}

template <typename T>
DFLASH_INLINE T tile_max(const T* z, int64_t padded) {
  constexpr int kChains = 4;  // independent ones hide the latency of max
  Vec<T> best[kChains];
  for (int j = 0; j < kChains; ++j) best[j] = load(z + j * kLanes<T>);
  for (int64_t i = kChains * kLanes<T>; i < padded; i += kChains * kLanes<T>) {
    for (int j = 0; j < kChains; ++j) best[j] = larger<T>(load(z + i + j * kLanes<T>), best[j]);
  }
  return lane_max<T>(larger<T>(larger<T>(best[0], best[1]), larger<T>(best[2], best[3])));
}

// Sums of a tile of logits z, and if kTeacher of the teacher's logits t of the same ids, relative
// to the tile's maxima. Both are soft-capped and padded first.
template <typename T, bool kTeacher>
TileSums scan_tile(T* z, T* t, const TileShape& tile, double softcap) {
  cap_and_pad(z, tile, softcap);
  const T max = tile_max(z, tile.padded);
  T teacher_max = 0;
  if constexpr (kTeacher) {
    cap_and_pad(t, tile, softcap);
    teacher_max = tile_max(t, tile.padded);
  }
  Vec<T> exp[2] = {}, exp_u[2] = {}, teacher[2] = {}, teacher_v[2] = {}, teacher_u[2] = {};
  for (int64_t i = 0; i < tile.padded; i += 2 * kLanes<T>) {
    for (int j = 0; j < 2; ++j) {
      const Vec<T> u = load(z + i + j * kLanes<T>) - max;
      const Vec<T> e = exp_nonpositive(u);
      exp[j] += e;
      exp_u[j] += e * u;
      if constexpr (kTeacher) {
        const Vec<T> v = load(t + i + j * kLanes<T>) - teacher_max;
        const Vec<T> p = exp_nonpositive(v);
        teacher[j] += p;
        teacher_v[j] += p * v;
        teacher_u[j] += p * u;
      }
    }
  }
  TileSums sums;
  sums.max = max;
  sums.exp = lane_sum<T>(exp[0] + exp[1]);
  sums.exp_u = lane_sum<T>(exp_u[0] + exp_u[1]);
  if constexpr (kTeacher) {
    sums.teacher_max = teacher_max;
    sums.teacher = lane_sum<T>(teacher[0] + teacher[1]);
    sums.teacher_v = lane_sum<T>(teacher_v[0] + teacher_v[1]);
    sums.teacher_u = lane_sum<T>(teacher_u[0] + teacher_u[1]);
  }
  return sums;
}

// Ids of a tile that come before the label in (value descending, index ascending) order; `label`
// may lie outside the tile, counted from its start.
template <typename T>
int64_t count_before(const T* z, const TileShape& tile, int64_t label, T label_logit) {
  const int64_t inside = label < 0 ? 0 : label < tile.padded ? label : tile.padded;
  const int64_t turn = inside / kLanes<T> * kLanes<T>;
  IntVec<T> count = {};
  int64_t i = 0;
  for (; i < turn; i += kLanes<T>) count -= load(z + i) >= label_logit;
  for (; i < tile.padded && i < turn + kLanes<T>; ++i) {
    count[0] += i < label ? z[i] >= label_logit : z[i] > label_logit;
  }
  for (; i < tile.padded; i += kLanes<T>) count -= load(z + i) > label_logit;
  int64_t total = 0;
  for (int64_t j = 0; j < kLanes<T>; ++j) total += count[j];
  return total;
}

// Sums over a tile of a divergence's values and of its slopes times q, for a row whose sums are
// known.
template <typename T, Divergence kKind>
DivergenceSums compare_tile(const T* z, const T* t, const TileShape& tile, const RowGradient& row) {
  const T max = row.max, inverse = 1 / row.exp, teacher_max = row.teacher_max;
  const T teacher = row.teacher, shift = row.log_ratio;
  Vec<T> value = {}, slope = {};
  for (int64_t i = 0; i < tile.padded; i += kLanes<T>) {
    const Vec<T> u = load(z + i) - max, v = load(t + i) - teacher_max;
    const Vec<T> q = exp_nonpositive(u) * inverse, p = exp_nonpositive(v) * teacher;
    const auto term = divergence_term<kKind, T>(p, q, u - v + shift);
    value += term.value;
    slope += term.slope * q;
  }
  return {lane_sum<T>(value), lane_sum<T>(slope)};
}

// d := d loss / d logits of a tile, without the label's own term.
template <typename T, Divergence kKind>
void gradient_tile(const T* z, const T* t, const TileShape& tile, const RowGradient& row, T* d) {
  const T max = row.max, inverse = 1 / row.exp, own = row.own, cap = row.cap;
  const T entropy_shift = row.entropy - std::log(row.exp);
  const T teacher_max = row.teacher_max, teacher = row.teacher;
  const T inverse_cap = row.softcap > 0 ? 1 / row.softcap : 0;
  const T kl_weight = row.kl_weight, shift = row.log_ratio, mean_slope = row.mean_slope;
  for (int64_t i = 0; i < tile.padded; i += kLanes<T>) {
    const Vec<T> x = load(z + i), u = x - max;
    // The entropy's gradient is -p (log p + entropy), log p = u - log(sum).
    const Vec<T> q = exp_nonpositive(u) * inverse;
    Vec<T> g = q * (own - cap * (u + entropy_shift));
    if constexpr (kKind != Divergence::kNone) {
      const Vec<T> v = load(t + i) - teacher_max, p = exp_nonpositive(v) * teacher;
      if constexpr (kKind == Divergence::kForward) {
        g -= p * kl_weight;
      } else {
        const auto term = divergence_term<kKind, T>(p, q, u - v + shift);
        g += q * (term.slope - mean_slope) * kl_weight;
      }
    }
    const Vec<T> tanh = x * inverse_cap;
    store(d + i, g * (T(1) - tanh * tanh));
  }
}
