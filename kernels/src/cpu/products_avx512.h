// Both matrix products with vdpbf16ps: 24 accumulators, every operand read once from where decoding put it.
#pragma once
#include "pack_bf16.h"

namespace {

constexpr int32_t BLOCK_ROWS = 96;
constexpr int64_t KEY_CHUNK = BLOCK_ROWS * 32;
constexpr int32_t ROW_STEP = 4;
constexpr int32_t FEW_HEADS = 8;

struct Buffers {
  bf16 *queries, *keys, *values, *weights;
  float *scores, *corrections;
  State state;
  bool few;  // at most 8 heads: queries are [d_qk / 32][8][32]
};

inline __m512bh pair_of(const bf16* p) {
  int32_t word;
  memcpy(&word, p, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(word));
}

inline __m512bh line_of(const bf16* p) { return reinterpret_cast<__m512bh>(_mm512_load_si512(p)); }

template <int rows, int vectors>
inline void score_tile(const bf16* keys, const bf16* queries, int32_t depth, float* scores, int64_t padded) {
  __m512 sum[rows][vectors];
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vectors; v++) sum[r][v] = _mm512_setzero_ps();
  for (int32_t d = 0; d < depth; d += 32, keys += KEY_CHUNK, queries += 16 * 32) {
#pragma GCC unroll 1
    for (int j = 0; j < 16; j++) {
      __m512bh q[vectors];
      for (int v = 0; v < vectors; v++) q[v] = line_of(queries + v * 16 * static_cast<int64_t>(depth) + j * 32);
      for (int r = 0; r < rows; r++) {
        const __m512bh k = pair_of(keys + r * 32 + 2 * j);
        for (int v = 0; v < vectors; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], q[v], k);
      }
    }
  }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vectors; v++) _mm512_store_ps(scores + r * padded + v * 16, sum[r][v]);
}

template <int heads, int vectors>
inline void value_tile(const bf16* values, const bf16* weights, int64_t padded, int32_t pairs, float* sums,
                       const float* corrections, bool first) {
  constexpr int64_t slab = BLOCK_ROWS / 2 * 32;
  __m512 sum[heads][vectors];
  for (int h = 0; h < heads; h++)
    for (int v = 0; v < vectors; v++)
      sum[h][v] = first ? _mm512_setzero_ps()
                        : _mm512_mul_ps(_mm512_load_ps(sums + (v * padded + h) * 16), _mm512_set1_ps(corrections[h]));
  for (int32_t n = 0; n < pairs; n++, values += 32, weights += 2 * padded) {
    __m512bh line[vectors];
    for (int v = 0; v < vectors; v++) line[v] = line_of(values + v * slab);
    for (int h = 0; h < heads; h++) {
      const __m512bh weight = pair_of(weights + 2 * h);
      for (int v = 0; v < vectors; v++) sum[h][v] = _mm512_dpbf16_ps(sum[h][v], line[v], weight);
    }
  }
  for (int h = 0; h < heads; h++)
    for (int v = 0; v < vectors; v++) _mm512_store_ps(sums + (v * padded + h) * 16, sum[h][v]);
}

template <int rows, int vectors>
inline void score_strip(const Buffers& b, int32_t count, int32_t depth, int32_t padded, int32_t head, Ahead& ahead,
                        int32_t share) {
  const bf16* queries = b.queries + static_cast<int64_t>(head) * depth;
  int32_t n = 0;
  for (; n + rows <= count; n += rows) {
    ahead.fetch(share);
    score_tile<rows, vectors>(b.keys + n * 32, queries, depth, b.scores + n * padded + head, padded);
  }
  for (; n < count; n += ROW_STEP)
    score_tile<ROW_STEP, vectors>(b.keys + n * 32, queries, depth, b.scores + n * padded + head, padded);
}

// Up to 8 heads: lanes hold parts of one dot product instead of heads, so that no lane is idle; 16 sums (2 rows of 8
// heads) are then added across lanes together.
__attribute__((always_inline)) inline void store_few(__m512* sum, float* scores) {
  for (int i = 0; i < 8; i++)
    sum[i] =
        _mm512_add_ps(_mm512_unpacklo_ps(sum[2 * i], sum[2 * i + 1]), _mm512_unpackhi_ps(sum[2 * i], sum[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    const __m512d a = _mm512_castps_pd(sum[2 * i]), b = _mm512_castps_pd(sum[2 * i + 1]);
    sum[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  for (int n = 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++)
      sum[i] = _mm512_add_ps(_mm512_shuffle_f32x4(sum[2 * i], sum[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(sum[2 * i], sum[2 * i + 1], 0xdd));
  _mm512_store_ps(scores, _mm512_zextps256_ps512(_mm512_castps512_ps256(sum[0])));
  _mm512_store_ps(scores + 16, _mm512_zextps256_ps512(_mm512_extractf32x8_ps(sum[0], 1)));
}

inline void score_few(const bf16* keys, const bf16* queries, int32_t depth, float* scores) {
  __m512 sum[16] = {};
  for (int32_t d = 0; d < depth; d += 32, keys += KEY_CHUNK, queries += FEW_HEADS * 32)
    for (int h = 0; h < FEW_HEADS; h++) {
      const __m512bh q = line_of(queries + h * 32);
      sum[h] = _mm512_dpbf16_ps(sum[h], q, line_of(keys));
      sum[FEW_HEADS + h] = _mm512_dpbf16_ps(sum[FEW_HEADS + h], q, line_of(keys + 32));
    }
  store_few(sum, scores);
}

inline void score_block(const Buffers& b, int32_t rows, int32_t depth, int32_t padded, Ahead& ahead) {
  const int32_t strips = (padded + 31) / 32, share = ahead.count * 6 / (rows * strips) + 1;
  int32_t h = 0;
  if (b.few) h = padded;  // done while the rows were loaded
  for (; h + 32 <= padded; h += 32) score_strip<12, 2>(b, rows, depth, padded, h, ahead, share);
  for (; h < padded; h += 16) score_strip<12, 1>(b, rows, depth, padded, h, ahead, share);
}

template <int vectors, int heads>
inline void value_rest(const Buffers& b, int32_t h, int32_t left, int64_t padded, int32_t pairs, const bf16* values,
                       float* sums, bool first) {
  if (left == heads) {
    value_tile<heads, vectors>(values, b.weights + 2 * h, padded, pairs, sums + h * 16, b.corrections + h, first);
  } else if constexpr (heads > 1) {
    value_rest<vectors, heads - 1>(b, h, left, padded, pairs, values, sums, first);
  }
}

template <int heads, int vectors>
inline void value_strips(const Buffers& b, int32_t rows, const Item* item, bool first, Ahead& ahead) {
  const int32_t pairs = (rows + 1) / 2, share = ahead.count * vectors * 16 / KVB_DV + 1;
  for (int32_t d = 0; d < KVB_DV / 16; d += vectors) {
    ahead.fetch(share);
    const bf16* values = b.values + static_cast<int64_t>(d) * (BLOCK_ROWS / 2) * 32;
    float* sums = b.state.sums + static_cast<int64_t>(d) * item->padded * 16;
    int32_t h = 0;
    for (; h + heads <= item->heads; h += heads)
      value_tile<heads, vectors>(values, b.weights + 2 * h, item->padded, pairs, sums + h * 16, b.corrections + h,
                                 first);
    if (h < item->heads)
      value_rest<vectors, heads - 1>(b, h, item->heads - h, item->padded, pairs, values, sums, first);
  }
}

inline void value_block(const Buffers& b, int32_t rows, const Item* item, bool first, Ahead& ahead) {
  if (item->heads == 8) value_strips<8, 2>(b, rows, item, first, ahead);
  else value_strips<6, 4>(b, rows, item, first, ahead);
}

}  // namespace
