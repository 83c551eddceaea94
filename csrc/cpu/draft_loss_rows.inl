// Row kernels of draft_loss, included once per instruction set (isa.h) after simd.inl. A row holds
// the logits of `width` ids, padded with kPadding to a multiple of kRowPad.

// Sums over chunks of this many elements are kept in T, sums of chunks in double.
constexpr int64_t kSumChunk = 1024;

// What one pass over a row of logits z with maximum m yields, u = z - m.
struct ExpSums {
  double exp = 0;       // sum of e^u
  double exp_u = 0;     // sum of e^u u
  double teacher_u = 0; // sum of E u, E the teacher's row
};

// Soft cap in place, then the padding (which the head did not write) is set.
template <typename T>
DFLASH_INLINE void cap_and_pad(T* z, const RowShape& row, double softcap) {
  if (softcap > 0) {
    const T cap = softcap, inverse = 1 / softcap;
    for (int64_t i = 0; i < row.padded; i += kLanes<T>) {
      store(z + i, cap * tanh_vec<T>(load(z + i) * inverse));
    }
  }
  for (int64_t i = row.width; i < row.padded; ++i) z[i] = kPadding;
}

// Ids that come before `label` in (value descending, index ascending) order; *max: the maximum.
template <typename T>
DFLASH_INLINE int64_t rank_and_max(const T* z, int64_t padded, int64_t label, T* max) {
  constexpr int64_t kStep = 4 * kLanes<T>;  // independent chains hide the latency of max
  const Vec<T> mine = splat<T>(z[label]);
  const int64_t turn = label / kStep * kStep;
  Vec<T> best[4];
  IntVec<T> count[4];
  for (int j = 0; j < 4; ++j) best[j] = splat<T>(z[label]), count[j] = IntVec<T>{};
  for (int64_t i = 0; i < turn; i += kStep) {
    for (int j = 0; j < 4; ++j) {
      const Vec<T> x = load(z + i + j * kLanes<T>);
      best[j] = larger<T>(x, best[j]);
      count[j] -= x >= mine;
    }
  }
  for (int64_t i = turn + kStep; i < padded; i += kStep) {
    for (int j = 0; j < 4; ++j) {
      const Vec<T> x = load(z + i + j * kLanes<T>);
      best[j] = larger<T>(x, best[j]);
      count[j] -= x > mine;
    }
  }
  int64_t rank = 0;
  for (int64_t i = turn; i < turn + kStep; ++i) {
    rank += i < label ? z[i] >= z[label] : z[i] > z[label];
    best[0][0] = z[i] > best[0][0] ? z[i] : best[0][0];
  }
  for (int j = 0; j < 4; ++j) {
    for (int64_t i = 0; i < kLanes<T>; ++i) rank += count[j][i];
  }
  *max = lane_max<T>(larger<T>(larger<T>(best[0], best[1]), larger<T>(best[2], best[3])));
  return rank;
}

template <typename T>
DFLASH_INLINE T row_max(const T* z, int64_t padded) {
  T max;
  rank_and_max(z, padded, 0, &max);
  return max;
}

// Replaces z by e^(z - max) if kStore.
template <typename T, bool kStore, bool kTeacher>
DFLASH_INLINE ExpSums exp_row(T* z, int64_t padded, T max, const T* teacher) {
  ExpSums sums;
  for (int64_t begin = 0; begin < padded; begin += kSumChunk) {
    const int64_t end = begin + kSumChunk < padded ? begin + kSumChunk : padded;
    Vec<T> exp[2] = {}, exp_u[2] = {}, teacher_u[2] = {};
    for (int64_t i = begin; i < end; i += 2 * kLanes<T>) {
      for (int j = 0; j < 2; ++j) {
        T* at = z + i + j * kLanes<T>;
        const Vec<T> u = load(at) - max;
        const Vec<T> e = exp_nonpositive(u);
        exp[j] += e;
        exp_u[j] += e * u;
        if constexpr (kTeacher) teacher_u[j] += load(teacher + i + j * kLanes<T>) * u;
        if constexpr (kStore) store(at, e);
      }
    }
    sums.exp += lane_sum<T>(exp[0] + exp[1]);
    sums.exp_u += lane_sum<T>(exp_u[0] + exp_u[1]);
    if constexpr (kTeacher) sums.teacher_u += lane_sum<T>(teacher_u[0] + teacher_u[1]);
  }
  return sums;
}

// z := d loss / d logits, without the label's -ce_weight. From z = e^u if kStored, else from logits.
template <typename T, bool kStored, bool kTeacher>
DFLASH_INLINE void gradient_row(T* z, int64_t padded, const T* teacher, T max,
                                const RowGradient& g) {
  const T inverse = 1 / g.sum, own = g.own, kl = g.teacher, cap = g.cap, softcap = g.softcap;
  const T log_sum = std::log(g.sum), entropy = g.entropy;
  for (int64_t i = 0; i < padded; i += kLanes<T>) {
    const Vec<T> x = load(z + i);
    Vec<T> d;
    if constexpr (kStored) {
      d = x * (inverse * own);
    } else {
      const Vec<T> log_p = (x - max) - log_sum;
      const Vec<T> p = exp_nonpositive(x - max) * inverse;
      d = p * (own - cap * (log_p + entropy));
    }
    if constexpr (kTeacher) d -= load(teacher + i) * kl;
    if constexpr (!kStored) {
      if (softcap > 0) d *= T(1) - (x / softcap) * (x / softcap);
    }
    store(z + i, d);
  }
}

// A teacher's row of logits becomes e^(z - max).
template <typename T>
TeacherRow teacher_row(T* z, const RowShape& row, double softcap) {
  cap_and_pad(z, row, softcap);
  const ExpSums sums = exp_row<T, true, false>(z, row.padded, row_max(z, row.padded), nullptr);
  return {sums.exp, sums.exp_u / sums.exp - std::log(sums.exp)};
}

// A row of logits z of the drafter: its statistics and, if wanted, z := G with
// d loss / d logits = result.scale * G. `teacher` is a row that teacher_row has seen, or null.
template <typename T>
RowResult student_row(T* z, const RowShape& row, int64_t label, const T* teacher,
                      const TeacherRow& teacher_stats, const RowOptions& options) {
  cap_and_pad(z, row, options.softcap);
  RowResult result;
  T max;
  result.rank = rank_and_max(z, row.padded, label, &max);
  const double label_u = double(z[label]) - double(max);
  const T label_logit = z[label];
  const bool with_cap = options.cap_lambda != 0 && result.rank == 0;
  const bool keep_logits = options.softcap > 0 || with_cap;
  const bool store_exp = options.need_grad && !keep_logits;

  ExpSums sums;
  if (teacher == nullptr) {
    sums = store_exp ? exp_row<T, true, false>(z, row.padded, max, nullptr)
                     : exp_row<T, false, false>(z, row.padded, max, nullptr);
  } else {
    sums = store_exp ? exp_row<T, true, true>(z, row.padded, max, teacher)
                     : exp_row<T, false, true>(z, row.padded, max, teacher);
  }
  const double log_sum = std::log(sums.exp);
  const double entropy = log_sum - sums.exp_u / sums.exp;
  result.lse = double(max) + log_sum;
  result.ce = log_sum - label_u;
  result.cap = result.rank == 0 ? entropy : 0.0;
  result.kl = 0;
  if (teacher != nullptr) {
    result.kl = teacher_stats.negative_entropy - sums.teacher_u / teacher_stats.sum + log_sum;
  }
  if (!std::isfinite(result.lse)) result.rank = row.width;
  if (!options.need_grad) return result;

  if (store_exp && teacher == nullptr) {
    // e^u / sum - [label] without another pass: the factor goes into the scale.
    z[label] -= T(sums.exp);
    result.scale = options.ce_weight / sums.exp;
    return result;
  }
  RowGradient g;
  g.sum = sums.exp;
  g.entropy = entropy;
  g.softcap = options.softcap;
  g.own = options.ce_weight + (teacher != nullptr ? options.kl_weight : 0);
  g.cap = with_cap ? options.cap_lambda : 0;
  g.teacher = teacher != nullptr ? options.kl_weight / teacher_stats.sum : 0;
  if (teacher != nullptr) {
    store_exp ? gradient_row<T, true, true>(z, row.padded, teacher, max, g)
              : gradient_row<T, false, true>(z, row.padded, teacher, max, g);
  } else {
    gradient_row<T, false, false>(z, row.padded, nullptr, max, g);
  }
  double at_label = options.ce_weight;
  if (options.softcap > 0) {
    const double t = label_logit / options.softcap;
    at_label *= 1 - t * t;
  }
  z[label] -= T(at_label);
  result.scale = 1;
  return result;
}
