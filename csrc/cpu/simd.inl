// Vectors of 32 bytes in the compiler's own notation. Included inside a namespace per instruction
// set (isa.h), so no include guard and no includes: the includer has <cmath>, <cstdint>, <cstring>.

template <typename T>
struct VecTypes;
template <>
struct VecTypes<float> {
  typedef float Vec __attribute__((vector_size(32)));
  typedef int32_t Int __attribute__((vector_size(32)));
};
template <>
struct VecTypes<double> {
  typedef double Vec __attribute__((vector_size(32)));
  typedef int64_t Int __attribute__((vector_size(32)));
};
template <typename T>
using Vec = typename VecTypes<T>::Vec;
template <typename T>
using IntVec = typename VecTypes<T>::Int;
template <typename T>
constexpr int64_t kLanes = 32 / sizeof(T);

#define DFLASH_INLINE inline __attribute__((always_inline))

template <typename T>
DFLASH_INLINE Vec<T> load(const T* from) {
  Vec<T> x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}

template <typename T>
DFLASH_INLINE void store(T* to, Vec<T> x) {
  __builtin_memcpy(to, &x, sizeof(x));
}

// All lanes x: written out, this is one broadcast from memory.
template <typename T>
DFLASH_INLINE Vec<T> splat(T x) {
  if constexpr (kLanes<T> == 8) {
    return Vec<T>{x, x, x, x, x, x, x, x};
  } else {
    return Vec<T>{x, x, x, x};
  }
}

template <typename T>
DFLASH_INLINE Vec<T> larger(Vec<T> x, Vec<T> y) {
  return x > y ? x : y;
}

// Sums and maxima over lanes, in a fixed order.
template <typename T>
DFLASH_INLINE double lane_sum(Vec<T> x) {
  double total = 0;
  for (int64_t i = 0; i < kLanes<T>; ++i) total += x[i];
  return total;
}

template <typename T>
DFLASH_INLINE T lane_max(Vec<T> x) {
  T best = x[0];
  for (int64_t i = 1; i < kLanes<T>; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

// exp(x) for x <= 0, within 2 ulp; 0 below -87, NaN for NaN. x = n ln 2 + r with |r| <= ln 2 / 2,
// then a polynomial in r (Cephes expf) times 2^n, made by adding n to the exponent bits.
DFLASH_INLINE Vec<float> exp_nonpositive(Vec<float> x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vec<float> shifted = x * 1.44269504f + kRound;
  const Vec<float> n = shifted - kRound;
  const Vec<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntVec<float> bits;
  __builtin_memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits + 127) << 23;
  Vec<float> power;
  __builtin_memcpy(&power, &bits, sizeof(power));
  return x < -87.0f ? Vec<float>{} : p * power;
}

DFLASH_INLINE Vec<double> exp_nonpositive(Vec<double> x) {
  Vec<double> y = {};
  for (int64_t i = 0; i < kLanes<double>; ++i) y[i] = std::exp(x[i]);
  return y;
}

// log(1 + x) for 0 <= x <= 1, within 2 ulp: 2 atanh(s) with s = x / (2 + x) <= 1/3, as a series.
DFLASH_INLINE Vec<float> log1p_fraction(Vec<float> x) {
  const Vec<float> s = x / (x + 2.0f), t = s * s;
  Vec<float> p = t * (1.0f / 15) + 1.0f / 13;
  p = p * t + 1.0f / 11;
  p = p * t + 1.0f / 9;
  p = p * t + 1.0f / 7;
  p = p * t + 1.0f / 5;
  p = p * t + 1.0f / 3;
  return (p * t * s + s) * 2.0f;
}

DFLASH_INLINE Vec<double> log1p_fraction(Vec<double> x) {
  Vec<double> y = {};
  for (int64_t i = 0; i < kLanes<double>; ++i) y[i] = std::log1p(x[i]);
  return y;
}

template <typename T>
DFLASH_INLINE Vec<T> tanh_vec(Vec<T> x) {
  const Vec<T> size = x < T(0) ? -x : x;
  const Vec<T> e = exp_nonpositive(size * T(-2));
  const Vec<T> t = (T(1) - e) / (T(1) + e);
  return x < T(0) ? -t : t;
}
