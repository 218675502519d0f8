// What both bf16 paths share besides decoding: queries packed for a product, weights made from scores.
#pragma once
#include "decode_bf16.h"
#include "finish.h"

namespace {

// [heads / 16][d_qk / 2][16][2]: heads in lanes, two values of d side by side.
inline void pack_queries(const kvb_call* call, const Item* item, bf16* packed) {
  const bf16* q = static_cast<const bf16*>(call->q) + item->query * call->q_query_stride;
  for (int32_t h0 = 0; h0 < item->padded; h0 += 16)
    for (int32_t d = 0; d < call->d_qk; d += 32) {
      __m512i rows[16];
      for (int32_t i = 0; i < 16; i++)
        rows[i] = h0 + i < item->heads ? _mm512_loadu_si512(q + (item->head0 + h0 + i) * call->q_head_stride + d)
                                       : _mm512_setzero_si512();
      transpose(rows);
      bf16* out = packed + static_cast<int64_t>(h0) * call->d_qk + d * 16;
      for (int32_t i = 0; i < 16; i++) _mm512_store_si512(out + 32 * i, rows[i]);
    }
}

// 2^x for scores: to 2e-7, NaN stays NaN, -inf gives 0.
inline vfloat exp2_scores(vfloat x) {
  const __m512 score = reinterpret_cast<__m512>(x);
  const vfloat f = reinterpret_cast<vfloat>(_mm512_reduce_ps(score, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  vfloat p = splat(1.8775767e-3f);
  p = p * f + 8.9893397e-3f;
  p = p * f + 5.5826318e-2f;
  p = p * f + 2.4015361e-1f;
  p = p * f + 6.9315308e-1f;
  p = p * f + 9.9999994e-1f;
  return reinterpret_cast<vfloat>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), score));
}

// The weights of 16 heads: their running maximum and sums, and what is needed to turn a score into a weight.
struct Softmax {
  vfloat top, base, correction, exact;
  __m512 rounded;
};

// `score` gives a row's scores in base 2, and -inf for the row behind an odd last one.
template <class Score>
inline Softmax begin_weights(const State& state, int32_t h, int32_t rows, bool first, const Score& score) {
  const vfloat old = load(state.maxima + h);
  vfloat top = old, other = old;
  for (int32_t n = 0; n < rows; n += 2) {
    top = larger(top, score(n));
    other = larger(other, score(n + 1));
  }
  top = larger(top, other);
  // A maximum that grew a little stays as it was, head by head: weights up to 2^8 lose nothing, and sums need not
  // shrink.
  if (!first) top = top > old + 8.0f ? top : old;
  const vfloat base = top == -INFINITY ? vfloat{} : top;
  const vfloat correction = first ? vfloat{} : exp2_lanes(old - base);
  return {top, base, correction, first ? vfloat{} : load(state.exact + h) * correction,
          reinterpret_cast<__m512>(first ? vfloat{} : load(state.rounded + h) * correction)};
}

// Two rows' weights side by side in bf16, from scores in base 2. The rounded weights' own sum normalises the output,
// the fp32 sum gives the LSE.
inline __m512i weigh(Softmax& s, vfloat even, vfloat odd) {
  const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512bh ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
  even = exp2_scores(even - s.base);
  odd = exp2_scores(odd - s.base);
  s.exact += even + odd;
  const __m512i both =
      reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(odd), reinterpret_cast<__m512>(even)));
  const __m512i packed = _mm512_permutexvar_epi16(pairs, both);
  s.rounded = _mm512_dpbf16_ps(s.rounded, ones, reinterpret_cast<__m512bh>(packed));
  return packed;
}

inline void end_weights(const State& state, int32_t h, const Softmax& s, float* corrections) {
  store(state.maxima + h, s.top);
  store(state.exact + h, s.exact);
  store(state.rounded + h, reinterpret_cast<vfloat>(s.rounded));
  store(corrections + h, s.correction);
}

}  // namespace
