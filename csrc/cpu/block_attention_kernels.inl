// Kernels of block_attention, included once per instruction set. Matrices
// are row-major; tiles are kTile columns wide, and depths and row counts are arbitrary.

#include "simd.inl"

template <typename T>
constexpr int64_t kTile = 2 * kLanes<T>;

// One tile of c (+)= a b, kept in registers: a(i, k) = a[i * a_row + k * a_depth].
template <typename T, int kRows, bool kAdd>
DFLASH_INLINE void gemm_tile(int64_t depth, const T* a, int64_t a_row, int64_t a_depth, const T* b,
                             int64_t b_row, T* c, int64_t c_row) {
  Vec<T> sum[kRows][2];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < 2; ++j) {
      sum[i][j] = kAdd ? load(c + i * c_row + j * kLanes<T>) : Vec<T>{};
    }
  }
  for (int64_t k = 0; k < depth; ++k, a += a_depth, b += b_row) {
    const Vec<T> left = load(b), right = load(b + kLanes<T>);
    for (int i = 0; i < kRows; ++i) {
      const Vec<T> x = splat<T>(a[i * a_row]);
      sum[i][0] += x * left;
      sum[i][1] += x * right;
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < 2; ++j) store(c + i * c_row + j * kLanes<T>, sum[i][j]);
  }
}

// c[rows, tiles * kTile] (+)= a b. Tile t of b starts at b + t * b_tile: kTile for a row-major b,
// the panel size for one packed in panels.
template <typename T, bool kAdd>
void gemm(int64_t rows, int64_t tiles, int64_t depth, const T* a, int64_t a_row, int64_t a_depth,
          const T* b, int64_t b_row, int64_t b_tile, T* c, int64_t c_row) {
  constexpr int64_t kRows = 6;  // 12 sums, 2 of b and 1 of a: 15 of AVX2's 16 registers
  for (int64_t t = 0; t < tiles; ++t, b += b_tile, c += kTile<T>) {
    int64_t i = 0;
    for (; i + kRows <= rows; i += kRows) {
      gemm_tile<T, kRows, kAdd>(depth, a + i * a_row, a_row, a_depth, b, b_row, c + i * c_row,
                                c_row);
    }
    const T* a_rest = a + i * a_row;
    T* c_rest = c + i * c_row;
    switch (rows - i) {
      case 5:
        gemm_tile<T, 5, kAdd>(depth, a_rest, a_row, a_depth, b, b_row, c_rest, c_row);
        break;
      case 4:
        gemm_tile<T, 4, kAdd>(depth, a_rest, a_row, a_depth, b, b_row, c_rest, c_row);
        break;
      case 3:
        gemm_tile<T, 3, kAdd>(depth, a_rest, a_row, a_depth, b, b_row, c_rest, c_row);
        break;
      case 2:
        gemm_tile<T, 2, kAdd>(depth, a_rest, a_row, a_depth, b, b_row, c_rest, c_row);
        break;
      case 1:
        gemm_tile<T, 1, kAdd>(depth, a_rest, a_row, a_depth, b, b_row, c_rest, c_row);
        break;
    }
  }
}

// Scores outside the two visible ranges become -inf.
template <typename T>
DFLASH_INLINE void mask_row(T* s, const SeenColumns& seen) {
  const T hidden = -std::numeric_limits<T>::infinity();
  for (int64_t i = 0; i < seen.context_begin; ++i) s[i] = hidden;
  for (int64_t i = seen.context_end; i < seen.block_begin; ++i) s[i] = hidden;
  for (int64_t i = seen.block_end; i < seen.padded; ++i) s[i] = hidden;
}

// s := e^(s - max) over the visible columns, 0 elsewhere; returns the log-sum-exp, *sum the sum.
template <typename T>
double softmax_row(T* s, const SeenColumns& seen, double* sum) {
  mask_row(s, seen);
  Vec<T> best[2] = {load(s), load(s + kLanes<T>)};
  for (int64_t i = kTile<T>; i < seen.padded; i += kTile<T>) {
    for (int j = 0; j < 2; ++j) best[j] = larger<T>(load(s + i + j * kLanes<T>), best[j]);
  }
  const T max = lane_max<T>(larger<T>(best[0], best[1]));
  Vec<T> total[2] = {};
  for (int64_t i = 0; i < seen.padded; i += kTile<T>) {
    for (int j = 0; j < 2; ++j) {
      T* at = s + i + j * kLanes<T>;
      const Vec<T> e = exp_nonpositive(load(at) - max);
      total[j] += e;
      store(at, e);
    }
  }
  *sum = lane_sum<T>(total[0] + total[1]);
  return double(max) + std::log(*sum);
}

// s := p = e^(s - lse) over the visible columns, 0 elsewhere; dp := p (dp - sum of p dp).
template <typename T>
void backward_row(T* s, T* dp, const SeenColumns& seen, T lse) {
  mask_row(s, seen);
  Vec<T> total[2] = {};
  for (int64_t i = 0; i < seen.padded; i += kTile<T>) {
    for (int j = 0; j < 2; ++j) {
      T* at = s + i + j * kLanes<T>;
      const Vec<T> p = exp_nonpositive(load(at) - lse);
      // Hidden columns of dp hold anything.
      const Vec<T> d = p > T(0) ? load(dp + i + j * kLanes<T>) : Vec<T>{};
      total[j] += p * d;
      store(at, p);
      store(dp + i + j * kLanes<T>, d);
    }
  }
  const T delta = lane_sum<T>(total[0] + total[1]);
  for (int64_t i = 0; i < seen.padded; i += kLanes<T>) {
    store(dp + i, load(s + i) * (load(dp + i) - delta));
  }
}
