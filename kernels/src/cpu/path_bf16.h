// The bf16 path: blocks of dequantised rows, softmax, bookkeeping. The two matrix products come from the header that
// the translation unit includes first (products_avx512.h or products_amx.h).
//
//   queries [heads / 16][d_qk / 2][16][2]   packed once: heads in lanes, two values of d side by side
//   scores  [BLOCK_ROWS][heads] fp32         = keys . queries
//   weights [BLOCK_ROWS / 2][heads][2] bf16  two rows side by side
//   sums    [d_v / 16][heads][16] fp32       = sums * correction + weights^T . values
#pragma once
#include "pairs.h"

namespace {

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

inline void pack_few_queries(const kvb_call* call, const Item* item, bf16* packed) {
  const bf16* q = static_cast<const bf16*>(call->q) + item->query * call->q_query_stride;
  for (int32_t d = 0; d < call->d_qk; d += 32)
    for (int32_t h = 0; h < FEW_HEADS; h++, packed += 32)
      _mm512_store_si512(packed, h < item->heads ? _mm512_loadu_si512(q + (item->head0 + h) * call->q_head_stride + d)
                                                 : _mm512_setzero_si512());
}

// Turns scores into weights, column by column, and says by how much older sums shrink. Weights are rounded to bf16;
// their own sum normalises the output, the fp32 sum gives the LSE.
inline void soften(const Buffers& b, int32_t rows, int32_t padded, float scale2, bool first) {
  const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512bh ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
  for (int32_t h = 0; h < padded; h += 16) {
    const float* scores = b.scores + h;
    const vfloat old = load(b.state.maxima + h);
    vfloat top = old, other = old;
    int32_t n = 0;
    for (; n + 1 < rows; n += 2) {
      top = larger(top, load(scores + n * padded) * scale2);
      other = larger(other, load(scores + (n + 1) * padded) * scale2);
    }
    if (n < rows) top = larger(top, load(scores + n * padded) * scale2);
    top = larger(top, other);
    const vfloat base = top == -INFINITY ? vfloat{} : top;
    const vfloat correction = first ? vfloat{} : exp2_lanes(old - base);
    vfloat exact = first ? vfloat{} : load(b.state.exact + h) * correction;
    __m512 rounded = reinterpret_cast<__m512>(first ? vfloat{} : load(b.state.rounded + h) * correction);
    for (n = 0; n < rows; n += 2) {
      const vfloat even = exp2_lanes(load(scores + n * padded) * scale2 - base);
      const vfloat odd = n + 1 < rows ? exp2_lanes(load(scores + (n + 1) * padded) * scale2 - base) : vfloat{};
      exact += even + odd;
      const __m512i both =
          reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(odd), reinterpret_cast<__m512>(even)));
      const __m512i packed = _mm512_permutexvar_epi16(pairs, both);
      rounded = _mm512_dpbf16_ps(rounded, ones, reinterpret_cast<__m512bh>(packed));
      _mm512_store_si512(b.weights + (static_cast<int64_t>(n / 2) * padded + h) * 2, packed);
    }
    store(b.state.maxima + h, top);
    store(b.state.exact + h, exact);
    store(b.state.rounded + h, reinterpret_cast<vfloat>(rounded));
    store(b.corrections + h, correction);
  }
}

inline int64_t buffer_bytes(int64_t padded, int64_t depth) {
  return 2 * (padded * depth + KEY_CHUNK / 32 * depth + BLOCK_ROWS * KVB_DV) + 4 * BLOCK_ROWS * padded +
         2 * EXTRA_WEIGHTS * BLOCK_ROWS * padded + 64 + 4 * padded + 4 * partial_floats(padded);
}

int64_t scratch_bytes(const kvb_call* call, int32_t padded) { return buffer_bytes(padded, call->d_qk); }

void run_item(const kvb_call* call, const Item* item, void* scratch) {
  const int64_t padded = item->padded, depth = call->d_qk;
  bf16* at = static_cast<bf16*>(scratch);
  Buffers b;
  b.queries = at;
  at += padded * depth;
  b.keys = at;
  at += KEY_CHUNK / 32 * depth;
  b.values = at;
  at += BLOCK_ROWS * KVB_DV;
  b.weights = at;
  at += EXTRA_WEIGHTS * BLOCK_ROWS * padded;
  float* wide = reinterpret_cast<float*>(at);
  b.scores = wide;
  wide += BLOCK_ROWS * padded;
  b.corrections = wide;
  wide += padded;
  b.state = state_at(item->partial ? item->partial : wide, padded);
  reset(b.state, item->padded);
  Walk walk = walk_query(call, item);
  Row rows[2][BLOCK_ROWS];
  int32_t count = walk.next(rows[0], BLOCK_ROWS);
  if (count > 0) {
    Ahead first_rows = {rows[0], count, 0};
    first_rows.fetch(count);
    b.few = call->heads <= FEW_HEADS;
    if (b.few) pack_few_queries(call, item, b.queries);
    else pack_queries(call, item, b.queries);
    Shapes shapes;
    products_begin(shapes);
    const float scale2 = call->scale * LOG2_E;
    const int32_t step = row_step(item->padded);
    for (int32_t block = 0; count > 0; block++) {
      const Row* now = rows[block & 1];
      const int32_t padded_rows = (count + step - 1) / step * step;
      load_block(b, now, count, padded_rows, call->d_qk, padded);
      Row* coming = rows[(block + 1) & 1];
      const int32_t count_next = walk.next(coming, BLOCK_ROWS);
      Ahead ahead = {coming, count_next, 0};
      if (count_next == 0) ahead.count = first_rows_of(call, item->next, coming, BLOCK_ROWS);
      score_block(b, padded_rows, call->d_qk, item->padded, ahead);
      soften(b, count, item->padded, scale2, block == 0);
      value_block(b, count, item, block == 0, ahead);
      count = count_next;
    }
    products_end(shapes);
  }
  if (!item->partial) finish(call, item, b.state, 0, item->heads);
}

}  // namespace
