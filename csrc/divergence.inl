// The terms of a divergence, for the kernels of every device. Included inside a namespace, behind
// DFLASH_INLINE and the functions that it calls: exp_nonpositive(x), and log1p_fraction(x) =
// log(1 + x) for 0 <= x <= 1.

template <typename V>
struct DivergenceTerm {
  V value, slope;
};

// f(p, q) of one id and g = df / dq up to a constant, from d = log q - log p. The divergence is the
// sum of f; for q = softmax(z) its gradient is q_v (g_v - sum of q g), where a constant drops out.
//   reverse  f = q log(q / p)                        g = log(q / p)
//   js       f = (p log(p / m) + q log(q / m)) / 2   g = log(q / m) / 2   with m = (p + q) / 2
//   tv       f = |q - p| / 2                         g = sign(q - p) / 2
// T is the type of one number, V that or a vector of it.
template <Divergence kKind, typename T, typename V>
DFLASH_INLINE DivergenceTerm<V> divergence_term(V p, V q, V d) {
  const V zero = {};
  if constexpr (kKind == Divergence::kReverse) {
    return {q * d, d};
  } else if constexpr (kKind == Divergence::kJs) {
    const V above = d > T(0) ? d : zero, below = d - above, size = above - below;
    // log m = max(log p, log q) + log(1 + e^-size) - log 2
    const V common = T(0.693147180559945309) - log1p_fraction(exp_nonpositive(-size));
    const V log_p_m = common - above, log_q_m = common + below;
    return {(p * log_p_m + q * log_q_m) * T(0.5), log_q_m * T(0.5)};
  } else {
    const V half = zero + T(0.5), difference = (q - p) * T(0.5);
    const V slope = difference > T(0) ? half : difference < T(0) ? -half : zero;
    return {difference > T(0) ? difference : -difference, slope};
  }
}
