// The AVX-512 path with bf16 products: blocks of dequantised rows, softmax, bookkeeping (products: products_avx512.h).
//
//   queries [heads / 16][d_qk / 2][16][2]   packed once: heads in lanes, two values of d side by side
//   scores  [BLOCK_ROWS][heads] fp32         = keys . queries
//   weights [BLOCK_ROWS / 2][heads][2] bf16  two rows side by side
//   sums    [d_v / 16][heads][16] fp32       = sums * correction + weights^T . values
#pragma once
#include "products_avx512.h"
#include "pairs.h"

namespace {

inline void pack_few_queries(const kvb_call* call, const Item* item, bf16* packed) {
  const bf16* q = static_cast<const bf16*>(call->q) + item->query * call->q_query_stride;
  for (int32_t d = 0; d < call->d_qk; d += 32)
    for (int32_t h = 0; h < FEW_HEADS; h++, packed += 32)
      _mm512_store_si512(packed, h < item->heads ? _mm512_loadu_si512(q + (item->head0 + h) * call->q_head_stride + d)
                                                 : _mm512_setzero_si512());
}

// Turns scores into weights, column by column, and says by how much older sums shrink.
inline void soften(const Buffers& b, int32_t rows, int32_t padded, float scale2, bool first) {
  for (int32_t h = 0; h < padded; h += 16) {
    const float* scores = b.scores + h;
    const auto score = [=](int32_t n) { return n < rows ? load(scores + n * padded) * scale2 : splat(-INFINITY); };
    Softmax softmax = begin_weights(b.state, h, rows, first, score);
    for (int32_t n = 0; n < rows; n += 2)
      _mm512_store_si512(b.weights + (static_cast<int64_t>(n / 2) * padded + h) * 2,
                         weigh(softmax, score(n), score(n + 1)));
    end_weights(b.state, h, softmax, b.corrections);
  }
}

inline int64_t buffer_bytes(int64_t padded, int64_t depth) {
  return 2 * (padded * depth + KEY_CHUNK / 32 * depth + BLOCK_ROWS * KVB_DV) + 4 * BLOCK_ROWS * padded +
         2 * BLOCK_ROWS * padded + 64 + 4 * padded + 4 * partial_floats(padded);
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
  at += BLOCK_ROWS * padded;
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
    const float scale2 = call->scale * LOG2_E;
    for (int32_t block = 0; count > 0; block++) {
      const Row* now = rows[block & 1];
      const int32_t padded_rows = (count + ROW_STEP - 1) / ROW_STEP * ROW_STEP;
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
  }
  if (!item->partial) finish(call, item, b.state, 0, item->heads);
}

}  // namespace
