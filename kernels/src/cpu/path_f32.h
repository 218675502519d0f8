// The fp32 path: AVX-512 without bf16, AVX2 and portable code from one text; LANES, TILE_ROWS, TILE_VECTORS are set by
// the translation unit.
//
//   block of 64 live rows -> K fp32 [64][d_qk + 16]            dequantised once for all heads
//   scores^T [64][heads]  =  K . Q^T, Q packed once            heads lie in lanes: softmax needs no horizontal sums
//   sums [512/L][heads][L] = sums * correction + P^T . K[:, :512]
#pragma once
#include "finish.h"
#if LANES == 16
#include "transpose.h"
#endif

namespace {

constexpr int32_t BLOCK_ROWS = 64;
constexpr int32_t SINGLE_ROWS =
    TILE_ROWS * TILE_VECTORS < 12 ? TILE_ROWS * TILE_VECTORS : 12;  // more streams of rows run slower
constexpr int32_t KEY_PAD = 16;                                     // keeps rows off a power-of-two distance

struct Buffers {
  float *queries, *keys, *scores, *corrections;
  State state;
};

inline int64_t buffer_floats(const kvb_call* call, int32_t padded) {
  return static_cast<int64_t>(padded) * call->d_qk + BLOCK_ROWS * (call->d_qk + KEY_PAD) + BLOCK_ROWS * padded +
         padded + partial_floats(padded);
}

int64_t scratch_bytes(const kvb_call* call, int32_t padded) { return 4 * buffer_floats(call, padded); }

// [heads][d_qk] bf16 to [heads / LANES][d_qk][LANES] fp32, in squares of LANES values.
inline void pack_queries(const kvb_call* call, const Item* item, float* packed) {
  const uint16_t* q = static_cast<const uint16_t*>(call->q) + item->query * call->q_query_stride;
  for (int32_t h = 0; h < item->padded; h += LANES)
    for (int32_t d = 0; d < call->d_qk; d += LANES) {
      vfloat rows[LANES];
      for (int32_t i = 0; i < LANES; i++)
        rows[i] = h + i < item->heads ? load_bf16(q + (item->head0 + h + i) * call->q_head_stride + d) : vfloat{};
      float* out = packed + static_cast<int64_t>(h) * call->d_qk + d * LANES;
#if LANES == 16
      transpose(reinterpret_cast<__m512i*>(rows));
      for (int32_t i = 0; i < LANES; i++) store(out + i * LANES, rows[i]);
#else
      for (int32_t j = 0; j < LANES; j++)
        for (int32_t i = 0; i < LANES; i++) out[j * LANES + i] = rows[i][j];
#endif
    }
}

template <int rows, int vectors>
inline void score_tile(const float* keys, int64_t key_stride, const float* queries, int32_t depth, float* scores,
                       int64_t padded) {
  vfloat sum[rows][vectors] = {};
  for (int32_t d = 0; d < depth; d++) {
    vfloat q[vectors];
    for (int v = 0; v < vectors; v++) q[v] = load(queries + (static_cast<int64_t>(v) * depth + d) * LANES);
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < vectors; v++) sum[r][v] += q[v] * keys[r * key_stride + d];
  }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vectors; v++) store(scores + r * padded + v * LANES, sum[r][v]);
}

template <int rows, int vectors>
inline void score_strip(const Buffers& b, int32_t count, int32_t depth, int64_t padded, int32_t head, Ahead& ahead,
                        int32_t share) {
  const int64_t stride = depth + KEY_PAD;
  const float* queries = b.queries + static_cast<int64_t>(head) * depth;
  int32_t n = 0;
  for (; n + rows <= count; n += rows) {
    ahead.fetch(share);
    score_tile<rows, vectors>(b.keys + n * stride, stride, queries, depth, b.scores + n * padded + head, padded);
  }
  for (; n + 4 <= count; n += 4)
    score_tile<4, vectors>(b.keys + n * stride, stride, queries, depth, b.scores + n * padded + head, padded);
  for (; n < count; n++)
    score_tile<1, vectors>(b.keys + n * stride, stride, queries, depth, b.scores + n * padded + head, padded);
}

inline void score_block(const Buffers& b, int32_t rows, int32_t depth, int32_t padded, Ahead& ahead) {
  const int32_t strips = (padded + TILE_VECTORS * LANES - 1) / (TILE_VECTORS * LANES),
                share = ahead.count * TILE_ROWS / (2 * rows * strips) + 1;
  int32_t h = 0;
  for (; h + TILE_VECTORS * LANES <= padded; h += TILE_VECTORS * LANES)
    score_strip<TILE_ROWS, TILE_VECTORS>(b, rows, depth, padded, h, ahead, share);
  for (; h < padded; h += LANES)
    score_strip<SINGLE_ROWS, 1>(b, rows, depth, padded, h, ahead, share * SINGLE_ROWS / TILE_ROWS);
}

// Turns scores into weights, column by column, and says by how much older sums shrink.
inline void soften(const Buffers& b, int32_t rows, int32_t padded, float scale2, bool first) {
  for (int32_t h = 0; h < padded; h += LANES) {
    const vfloat old = load(b.state.maxima + h);
    vfloat top = old;
    for (int32_t n = 0; n < rows; n++) top = larger(top, load(b.scores + n * padded + h) * scale2);
    const vfloat base = top == -INFINITY ? vfloat{} : top;
    const vfloat correction = first ? vfloat{} : exp2_lanes(old - base);
    vfloat sum = first ? vfloat{} : load(b.state.exact + h) * correction;
    for (int32_t n = 0; n < rows; n++) {
      const vfloat weight = exp2_lanes(load(b.scores + n * padded + h) * scale2 - base);
      store(b.scores + n * padded + h, weight);
      sum += weight;
    }
    store(b.state.maxima + h, top);
    store(b.state.exact + h, sum);
    store(b.state.rounded + h, sum);
    store(b.corrections + h, correction);
  }
}

template <int heads, int vectors>
inline void value_tile(const float* keys, int64_t key_stride, const float* weights, int64_t padded, int32_t rows,
                       float* sums, const float* corrections, bool first) {
  vfloat sum[heads][vectors];
  for (int h = 0; h < heads; h++)
    for (int v = 0; v < vectors; v++)
      sum[h][v] = first ? vfloat{} : load(sums + (v * padded + h) * LANES) * corrections[h];
  for (int32_t n = 0; n < rows; n++) {
    vfloat k[vectors];
    for (int v = 0; v < vectors; v++) k[v] = load(keys + n * key_stride + v * LANES);
    for (int h = 0; h < heads; h++)
      for (int v = 0; v < vectors; v++) sum[h][v] += k[v] * weights[n * padded + h];
  }
  for (int h = 0; h < heads; h++)
    for (int v = 0; v < vectors; v++) store(sums + (v * padded + h) * LANES, sum[h][v]);
}

// The last `left` heads, fewer than a full tile.
template <int heads>
inline void value_rest(const Buffers& b, int32_t rows, int64_t stride, int32_t d, const Item* item, int32_t left,
                       bool first) {
  if (left == heads) {
    const int32_t h = item->heads - left;
    value_tile<heads, TILE_VECTORS>(b.keys + d, stride, b.scores + h, item->padded, rows,
                                    b.state.sums + static_cast<int64_t>(d) * item->padded + h * LANES,
                                    b.corrections + h, first);
  } else if constexpr (heads > 1) {
    value_rest<heads - 1>(b, rows, stride, d, item, left, first);
  }
}

inline void value_block(const Buffers& b, int32_t rows, int32_t depth, const Item* item, bool first, Ahead& ahead) {
  const int64_t padded = item->padded, stride = depth + KEY_PAD;
  const int32_t share = ahead.count * TILE_VECTORS * LANES / KVB_DV + 1;
  for (int32_t d = 0; d < KVB_DV; d += TILE_VECTORS * LANES) {
    ahead.fetch(share);
    float* sums = b.state.sums + d * padded;
    int32_t h = 0;
    for (; h + TILE_ROWS <= item->heads; h += TILE_ROWS)
      value_tile<TILE_ROWS, TILE_VECTORS>(b.keys + d, stride, b.scores + h, padded, rows, sums + h * LANES,
                                          b.corrections + h, first);
    value_rest<TILE_ROWS - 1>(b, rows, stride, d, item, item->heads - h, first);
  }
}

void run_item(const kvb_call* call, const Item* item, void* scratch) {
  const int32_t padded = item->padded, depth = call->d_qk;
  float* at = static_cast<float*>(scratch);
  Buffers b;
  b.queries = at;
  at += static_cast<int64_t>(padded) * depth;
  b.keys = at;
  at += BLOCK_ROWS * (depth + KEY_PAD);
  b.scores = at;
  at += BLOCK_ROWS * padded;
  b.corrections = at;
  at += padded;
  b.state = state_at(item->partial ? item->partial : at, padded);
  reset(b.state, padded);
  Walk walk = walk_query(call, item);
  Row rows[2][BLOCK_ROWS];
  const float scale2 = call->scale * LOG2_E;
  int32_t count = walk.next(rows[0], BLOCK_ROWS), count_next = 0;
  if (count > 0) {
    Ahead first_rows = {rows[0], count, 0};
    first_rows.fetch(count);
    pack_queries(call, item, b.queries);
  }
  for (int32_t block = 0; count > 0; block++) {
    for (int32_t i = 0; i < count; i++) decode_row_f32(rows[block & 1][i], b.keys + i * (depth + KEY_PAD));
    Row* coming = rows[(block + 1) & 1];
    count_next = walk.next(coming, BLOCK_ROWS);
    Ahead ahead = {coming, count_next, 0};
    if (count_next == 0) ahead.count = first_rows_of(call, item->next, coming, BLOCK_ROWS);
    score_block(b, count, depth, padded, ahead);
    soften(b, count, padded, scale2, block == 0);
    value_block(b, count, depth, item, block == 0, ahead);
    count = count_next;
  }
  if (!item->partial) finish(call, item, b.state, 0, item->heads);
}

}  // namespace
