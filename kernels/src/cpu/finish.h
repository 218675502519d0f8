// From running sums to outputs: sink, normalisation, LSE, joining of partial results. Shared by every path.
//
//   state of one head group:  sums [d_v / LANES][padded heads][LANES] | maxima | rounded sums | exact sums
//
// Maxima are in base 2 (score * scale * log2 e) and may lag behind by up to 8. `rounded` is the sum of the weights as
// they were multiplied into V, `exact` the fp32 sum for the LSE; exact = -1 marks a group that met no live slot.
#pragma once
#include "decode_f32.h"

namespace {

constexpr float LOG2_E = 1.44269504088896340736f;
constexpr double LN_2 = 0.693147180559945309417;

struct State {
  float *sums, *maxima, *rounded, *exact;
};

inline State state_at(float* base, int64_t padded) {
  float* tail = base + padded * KVB_DV;
  return {base, tail, tail + padded, tail + 2 * padded};
}

inline void reset(const State& state, int32_t padded) {
  for (int32_t h = 0; h < padded; h++) {
    state.maxima[h] = -INFINITY;
    state.rounded[h] = 0;
    state.exact[h] = -1;
  }
}

// The factor that turns sums into outputs, for LANES heads: 1 / (sum + exp(sink - max)), scaled against overflow.
inline vfloat normaliser(vfloat maximum, vfloat sum, vfloat sink) {
  const vfloat sink2 = sink * LOG2_E;
  vfloat top = larger(maximum, sink2);
  top = top == -INFINITY ? vfloat{} : top;
  const vfloat weight = exp2_lanes(maximum - top);
  const vfloat factor = weight / (sum * weight + exp2_lanes(sink2 - top));
  return sink2 == INFINITY ? vfloat{} : factor;
}

inline float log_sum(const kvb_call* call, float maximum, float exact, float sink) {
  const bool included = call->flags & KVB_LSE_WITH_SINK;
  double lse = -static_cast<double>(INFINITY);
  if (exact >= 0 || exact != exact) {
    lse = static_cast<double>(maximum) * LN_2 + log(static_cast<double>(exact));
  } else if (call->flags & KVB_LSE_EMPTY_POSITIVE) {
    return INFINITY;
  }
  if (included && sink > -INFINITY) {
    const double high = lse > sink ? lse : sink, low = lse > sink ? sink : lse;
    lse = high == static_cast<double>(INFINITY) || low == -static_cast<double>(INFINITY)
              ? high
              : high + log1p(exp(low - high));
  }
  return static_cast<float>(call->flags & KVB_LSE_BASE2 ? lse / LN_2 : lse);
}

// In calls of up to so many heads, a tile of sums is of 8 heads' even values, then of their odd ones (products_amx.h):
// [d_v / 32][even, odd][8 heads][16]. The call's heads decide, not a group's: how heads are grouped must not change
// bits.
#ifndef KVB_STACKED_HEADS
#define KVB_STACKED_HEADS 0
#endif

inline bool stacked(const kvb_call* call) { return call->heads <= KVB_STACKED_HEADS; }

// So many heads' lines of sums further lie a head's next LANES values.
inline int64_t sums_width(const kvb_call* call, const Item* item) { return stacked(call) ? 8 : item->padded; }

// Where line d / LANES of a head's sums begins.
inline int64_t sums_line(const kvb_call* call, const Item* item, int32_t head, int64_t line) {
  return (line * sums_width(call, item) + head) * LANES;
}

#ifdef KVB_INTERLEAVED
// Two lines of sums are 32 values: even and odd ones, or, where V was interleaved inside 128-bit lanes, values
// 8j..8j+3 and 8j+4..8j+7.
inline void put_in_order(vfloat& a, vfloat& b, bool parity) {
  alignas(64) static const int32_t orders[2][16] = {{0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23},
                                                    {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}};
  const __m512i first = _mm512_load_si512(orders[parity]);
  const __m512 x = reinterpret_cast<__m512>(a), y = reinterpret_cast<__m512>(b);
  a = reinterpret_cast<vfloat>(_mm512_permutex2var_ps(x, first, y));
  b = reinterpret_cast<vfloat>(_mm512_permutex2var_ps(x, _mm512_add_epi32(first, _mm512_set1_epi32(8)), y));
}
#else
inline void put_in_order(vfloat&, vfloat&, bool) {}
#endif

// Values d..d+2*LANES-1 of one of the item's heads; streamed past the caches only where that is said to be possible.
inline void store_values(const kvb_call* call, const Item* item, int32_t head, int32_t d, vfloat a, vfloat b,
                         bool streams = false) {
  const int64_t at = item->query * call->out_query_stride + (item->head0 + head) * call->out_head_stride + d;
  put_in_order(a, b, stacked(call));
  if (call->out_type == KVB_OUT_FP32) {
    store(static_cast<float*>(call->out) + at, a);
    store(static_cast<float*>(call->out) + at + LANES, b);
  } else {
#ifdef __AVX512BF16__
    const __m512bh both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(a));
    uint16_t* to = static_cast<uint16_t*>(call->out) + at;
    if (streams) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), reinterpret_cast<__m512i>(both));
    else _mm512_storeu_si512(to, reinterpret_cast<__m512i>(both));
#else
    store_bf16(static_cast<uint16_t*>(call->out) + at, round_to_bf16_bits(reinterpret_cast<vint>(a)));
    store_bf16(static_cast<uint16_t*>(call->out) + at + LANES, round_to_bf16_bits(reinterpret_cast<vint>(b)));
#endif
  }
}

inline void store_head(const kvb_call* call, const Item* item, int32_t head, const float* sums, float factor,
                       bool empty) {
  for (int32_t d = 0; d < KVB_DV; d += 2 * LANES) {
    const float *a = sums + sums_line(call, item, head, d / LANES),
                *b = sums + sums_line(call, item, head, d / LANES + 1);
    store_values(call, item, head, d, empty ? vfloat{} : load(a) * factor, empty ? vfloat{} : load(b) * factor);
  }
}

// What turns the sums of LANES heads from h0 on into outputs; writes their LSE where it is asked for.
inline void finish_heads(const kvb_call* call, const Item* item, const State& state, int32_t h0, float* factors) {
  float sinks[LANES];
  for (int32_t i = 0; i < LANES; i++)
    sinks[i] = call->sink && h0 + i < item->heads ? call->sink[item->head0 + h0 + i] : -INFINITY;
  store(factors, normaliser(load(state.maxima + h0), load(state.rounded + h0), load(sinks)));
  if (!call->lse) return;
  float* lse = call->lse + item->query * call->lse_query_stride + (item->head0 + h0) * call->lse_head_stride;
  for (int32_t i = 0; i < LANES && h0 + i < item->heads; i++)
    lse[i * call->lse_head_stride] = log_sum(call, state.maxima[h0 + i], state.exact[h0 + i], sinks[i]);
}

// Writes outputs and LSE of heads first..first+count-1 of a group; first is a multiple of LANES.
inline void finish(const kvb_call* call, const Item* item, const State& state, int32_t first, int32_t count) {
  for (int32_t h0 = first; h0 < first + count; h0 += LANES) {
    float factors[LANES];
    finish_heads(call, item, state, h0, factors);
    for (int32_t h = h0; h < h0 + LANES && h < item->heads; h++)
      store_head(call, item, h, state.sums, factors[h - h0], state.exact[h] == -1.0f);
  }
}

// Joins the partial results of one query in order of their splits, into the first of them, and finishes these heads.
inline void merge_item(const kvb_call* call, const Item* item, int32_t first, int32_t count) {
  const int64_t floats = partial_floats(item->padded);
  const State to = state_at(item->partial, item->padded);
  for (int32_t h = first; h < first + count; h++) {
    float top = -INFINITY;
    for (int32_t s = 0; s < item->splits; s++) {
      const float m = state_at(item->partial + s * floats, item->padded).maxima[h];
      top = m > top ? m : top;
    }
    float rounded = 0, exact = -1;
    bool started = false;
    for (int32_t s = 0; s < item->splits; s++) {
      const State from = state_at(item->partial + s * floats, item->padded);
      if (from.exact[h] == -1.0f) continue;
      const float weight = top == -INFINITY ? 1.0f : exp2_lanes(splat(from.maxima[h] - top))[0];
      rounded = (started ? rounded : 0) + weight * from.rounded[h];
      exact = (started ? exact : 0) + weight * from.exact[h];
      for (int64_t d = 0; d < KVB_DV / LANES; d++) {
        const int64_t at = sums_line(call, item, h, d);
        const vfloat part = load(from.sums + at) * weight;
        store(to.sums + at, started ? load(to.sums + at) + part : part);
      }
      started = true;
    }
    to.maxima[h] = top;
    to.rounded[h] = rounded;
    to.exact[h] = exact;
  }
  finish(call, item, to, first, count);
}

}  // namespace
