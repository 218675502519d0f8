// The fp32 path: AVX-512 without bf16, AVX2 and portable code from one text; LANES, TILE_ROWS, TILE_VECTORS are set by
// the translation unit.
//
//   block of 64 live rows -> K fp32 [64][d_qk + 16]            dequantised once for all heads
//   scores^T [64][heads]  =  K . Q^T, Q packed once            heads lie in lanes: softmax needs no horizontal sums
//   sums [512/L][heads][L] = sums * correction + P^T . K[:, :512]
#pragma once
#include "finish.h"

namespace {

constexpr int32_t BLOCK_ROWS = 64;
constexpr int32_t SINGLE_ROWS = TILE_ROWS * TILE_VECTORS < 12 ? TILE_ROWS * TILE_VECTORS : 12;   // more streams of rows run slower
constexpr int32_t KEY_PAD = 16;                     // keeps rows off a power-of-two distance

struct Buffers {
  float *queries, *keys, *scores, *corrections;
  State state;
};

inline int64_t buffer_floats(const kvb_call* call, int32_t padded) {
  return static_cast<int64_t>(padded) * call->d_qk + BLOCK_ROWS * (call->d_qk + KEY_PAD) + BLOCK_ROWS * padded + padded + partial_floats(padded);
}

int64_t scratch_bytes(const kvb_call* call, int32_t padded) { return 4 * buffer_floats(call, padded); }

inline void pack_queries(const kvb_call* call, const Item* item, float* packed) {
  for (int32_t h = 0; h < item->padded; h++) {
    float* to = packed + (h / LANES) * static_cast<int64_t>(call->d_qk) * LANES + h % LANES;
    if (h >= item->heads) {
      for (int32_t d = 0; d < call->d_qk; d++) to[d * LANES] = 0;
      continue;
    }
    const uint16_t* from = static_cast<const uint16_t*>(call->q) + item->query * call->q_query_stride + (item->head0 + h) * call->q_head_stride;
    for (int32_t d = 0; d < call->d_qk; d++) to[d * LANES] = bits_to_float(static_cast<uint32_t>(from[d]) << 16);
  }
}

template <int rows, int vectors>
inline void score_tile(const float* keys, int64_t key_stride, const float* queries, int32_t depth, float* scores, int64_t padded) {
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
inline void score_strip(const Buffers& b, int32_t count, int32_t depth, int64_t padded, int32_t head) {
  const int64_t stride = depth + KEY_PAD;
  const float* queries = b.queries + static_cast<int64_t>(head) * depth;
  int32_t n = 0;
  for (; n + rows <= count; n += rows) score_tile<rows, vectors>(b.keys + n * stride, stride, queries, depth, b.scores + n * padded + head, padded);
  for (; n < count; n++) score_tile<1, vectors>(b.keys + n * stride, stride, queries, depth, b.scores + n * padded + head, padded);
}

inline void score_block(const Buffers& b, int32_t rows, int32_t depth, int32_t padded) {
  int32_t h = 0;
  for (; h + TILE_VECTORS * LANES <= padded; h += TILE_VECTORS * LANES) score_strip<TILE_ROWS, TILE_VECTORS>(b, rows, depth, padded, h);
  for (; h < padded; h += LANES) score_strip<SINGLE_ROWS, 1>(b, rows, depth, padded, h);
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
inline void value_tile(const float* keys, int64_t key_stride, const float* weights, int64_t padded, int32_t rows, float* sums, const float* corrections, bool first) {
  vfloat sum[heads][vectors];
  for (int h = 0; h < heads; h++)
    for (int v = 0; v < vectors; v++) sum[h][v] = first ? vfloat{} : load(sums + (v * padded + h) * LANES) * corrections[h];
  for (int32_t n = 0; n < rows; n++) {
    vfloat k[vectors];
    for (int v = 0; v < vectors; v++) k[v] = load(keys + n * key_stride + v * LANES);
    for (int h = 0; h < heads; h++)
      for (int v = 0; v < vectors; v++) sum[h][v] += k[v] * weights[n * padded + h];
  }
  for (int h = 0; h < heads; h++)
    for (int v = 0; v < vectors; v++) store(sums + (v * padded + h) * LANES, sum[h][v]);
}

inline void value_block(const Buffers& b, int32_t rows, int32_t depth, const Item* item, bool first) {
  const int64_t padded = item->padded, stride = depth + KEY_PAD;
  for (int32_t d = 0; d < KVB_DV; d += TILE_VECTORS * LANES) {
    float* sums = b.state.sums + d * padded;
    int32_t h = 0;
    for (; h + TILE_ROWS <= item->heads; h += TILE_ROWS)
      value_tile<TILE_ROWS, TILE_VECTORS>(b.keys + d, stride, b.scores + h, padded, rows, sums + h * LANES, b.corrections + h, first);
    for (; h < item->heads; h++) value_tile<1, TILE_VECTORS>(b.keys + d, stride, b.scores + h, padded, rows, sums + h * LANES, b.corrections + h, first);
  }
}

inline void prefetch(const Row& row) {
  const kvb_record& r = *row.record;
  const int32_t codes = r.code == KVB_CODE_E2M1 ? r.values / 2 : r.values;
  for (int32_t at = 0; at < codes + 2 * r.tail_values; at += 64) __builtin_prefetch(row.codes + at);
  if (r.scale != KVB_SCALE_NONE) __builtin_prefetch(row.scales);
}

void run_item(const kvb_call* call, const Item* item, void* scratch) {
  const int32_t padded = item->padded, depth = call->d_qk;
  float* at = static_cast<float*>(scratch);
  Buffers b;
  b.queries = at; at += static_cast<int64_t>(padded) * depth;
  b.keys = at; at += BLOCK_ROWS * (depth + KEY_PAD);
  b.scores = at; at += BLOCK_ROWS * padded;
  b.corrections = at; at += padded;
  b.state = state_at(item->partial ? item->partial : at, padded);
  reset(b.state, padded);
  Walk walk = walk_query(call, item);
  Row rows[BLOCK_ROWS];
  const float scale2 = call->scale * LOG2_E;
  bool first = true;
  for (int32_t n; (n = walk.next(rows, BLOCK_ROWS)) > 0; first = false) {
    if (first) pack_queries(call, item, b.queries);
    for (int32_t i = 0; i < n; i++) {
      if (i + 4 < n) prefetch(rows[i + 4]);
      decode_row_f32(rows[i], b.keys + i * (depth + KEY_PAD));
    }
    score_block(b, n, depth, padded);
    soften(b, n, padded, scale2, first);
    value_block(b, n, depth, item, first);
  }
  if (!item->partial) finish(call, item, b.state, 0, item->heads);
}

}  // namespace
