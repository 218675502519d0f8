// Both matrix products with AMX bf16 tiles. Decoding already put every operand into runs of 1 KiB that are one tile:
//
//   keys    A [16 rows][32 values]       queries B [16 pairs of d][16 heads][2]
//   weights A [16 heads][32 rows]        values  B [16 pairs of rows][16 values][2]
//
// Four accumulator tiles, two of A, two of B: one load for each product. KVB_AMX_EMULATE replaces the instructions.
#pragma once
#include "finish.h"
#include "decode_bf16.h"
#ifdef KVB_AMX_EMULATE
#include "amx_emulated.h"
#endif

namespace {

constexpr int32_t BLOCK_ROWS = 256;
constexpr int64_t KEY_CHUNK =
    (BLOCK_ROWS + 16) * 32;  // not a multiple of 4 KiB: a tile column must not fall into few cache sets
inline int32_t row_step(int32_t padded) { return padded % 32 ? 64 : 32; }  // rows a score step takes
constexpr int32_t EXTRA_WEIGHTS = 2;
constexpr int32_t FEW_HEADS = 0;
constexpr int64_t TILE = 512;  // bf16 values

struct Buffers {
  bf16 *queries, *keys, *values, *weights;
  float *scores, *corrections;
  State state;
  bool few;
};

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The compiler does not know what a tile load reads: all earlier stores must be done before it.
inline void stores_are_done() { __asm__ volatile("" ::: "memory"); }

// The calling thread's own tile shapes come back afterwards: torch's matrix library keeps some configured. No initial
// values here: the compiler knows only the first 8 bytes as read and written by the two instructions.
struct alignas(64) Shapes {
  uint8_t bytes[64];
};

inline void products_begin(Shapes& saved) {
  static const TileShapes shapes;
  _tile_storeconfig(saved.bytes);
  _tile_loadconfig(&shapes);
  __asm__ volatile("" ::"r"(&saved) : "memory");
}

inline void products_end(const Shapes& saved) {
  __asm__ volatile("" ::"r"(&saved) : "memory");
  if (saved.bytes[0] == 0) _tile_release();
  else _tile_loadconfig(saved.bytes);
}

inline void score_few(const bf16*, const bf16*, int32_t, float*) {}  // tiles serve few heads as well as many

inline void multiply_tiles(const bf16* a0, const bf16* a1, const bf16* b0, const bf16* b1, int32_t steps,
                           int64_t a_step, int64_t b_step) {
  for (int32_t i = 0; i < steps; i++, a0 += a_step, a1 += a_step, b0 += b_step, b1 += b_step) {
    _tile_loadd(4, a0, 64);
    _tile_loadd(6, b0, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b1, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a1, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Four tiles of A, `across` apart, against one of B: the last 16 heads. Four sums, since the latency of a product is
// that of four.
inline void multiply_column(const bf16* a, int64_t across, const bf16* b, int32_t steps, int64_t a_step,
                            int64_t b_step) {
  for (int32_t i = 0; i < steps; i++, a += a_step, b += b_step) {
    _tile_loadd(6, b, 64);
    _tile_loadd(4, a, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a + across, 64);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(4, a + 2 * across, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(5, a + 3 * across, 64);
    _tile_dpbf16ps(3, 5, 6);
  }
}

// One tile of A against four of B.
inline void multiply_row(const bf16* a, const bf16* b, int64_t across, int32_t steps, int64_t a_step, int64_t b_step) {
  for (int32_t i = 0; i < steps; i++, a += a_step, b += b_step) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + across, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, b + 2 * across, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, b + 3 * across, 64);
    _tile_dpbf16ps(3, 4, 7);
  }
}

inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// The four sums lie `right`, `down` and `right + down` floats from the first.
inline void load_sums(float* at, int64_t right, int64_t down) {
  _tile_loadd(0, at, 64);
  _tile_loadd(1, at + right, 64);
  _tile_loadd(2, at + down, 64);
  _tile_loadd(3, at + down + right, 64);
}

inline void store_sums(float* at, int64_t right, int64_t down, int64_t line) {
  _tile_stored(0, at, line);
  _tile_stored(1, at + right, line);
  _tile_stored(2, at + down, line);
  _tile_stored(3, at + down + right, line);
}

inline void score_block(const Buffers& b, int32_t rows, int32_t depth, int32_t padded, Ahead& ahead) {
  const int32_t steps = rows / 32 * (padded / 32) + rows / 64 * (padded / 16 % 2),
                share = ahead.count / (3 * steps) + 1;
  const int64_t line = 4 * static_cast<int64_t>(padded), column = 16 * static_cast<int64_t>(depth);
  stores_are_done();
  for (int32_t n = 0; n < rows; n += 32)
    for (int32_t h = 0; h + 32 <= padded; h += 32) {
      const bf16 *keys = b.keys + n * 32, *queries = b.queries + static_cast<int64_t>(h) * depth;
      ahead.fetch(share);
      clear_sums();
      multiply_tiles(keys, keys + TILE, queries, queries + column, depth / 32, KEY_CHUNK, TILE);
      store_sums(b.scores + static_cast<int64_t>(n) * padded + h, 16, 16 * padded, line);
    }
  if (padded % 32)
    for (int32_t n = 0; n < rows; n += 64) {
      ahead.fetch(share);
      clear_sums();
      multiply_column(b.keys + n * 32, TILE, b.queries + (padded - 16) * static_cast<int64_t>(depth), depth / 32,
                      KEY_CHUNK, TILE);
      store_sums(b.scores + static_cast<int64_t>(n) * padded + padded - 16, 16 * padded, 32 * padded, line);
    }
  stores_are_done();
}

// Pairs of rows with heads in lanes become tiles of 16 heads with 32 rows.
inline void turn_weights(const Buffers& b, int32_t rows, int64_t padded, bf16* tiles) {
  const int32_t pairs = (rows + 1) / 2, blocks = (rows + 31) / 32;
  for (int64_t h = 0; h < padded; h += 16)
    for (int32_t k = 0; k < blocks; k++, tiles += TILE) {
      __m512i lines[16];
      for (int32_t i = 0; i < 16; i++)
        lines[i] = 16 * k + i < pairs ? _mm512_load_si512(b.weights + ((16 * k + i) * padded + h) * 2)
                                      : _mm512_setzero_si512();
      transpose(lines);
      for (int32_t i = 0; i < 16; i++) _mm512_store_si512(tiles + 32 * i, lines[i]);
    }
}

// Tiles cannot be scaled: heads whose maximum grew have their sums shrunk in memory.
inline void shrink_sums(const Buffers& b, int32_t heads, int64_t padded) {
  for (int32_t h = 0; h < heads; h++) {
    if (b.corrections[h] == 1.0f) continue;
    const __m512 factor = _mm512_set1_ps(b.corrections[h]);
    for (int64_t d = 0; d < KVB_DV / 16; d++) {
      float* at = b.state.sums + (d * padded + h) * 16;
      _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), factor));
    }
  }
}

inline void value_block(const Buffers& b, int32_t rows, const Item* item, bool first, Ahead& ahead) {
  const int64_t padded = item->padded, slab = BLOCK_ROWS / 2 * 32, across = padded * 16;
  const int32_t blocks = (rows + 31) / 32,
                steps = KVB_DV / 32 * static_cast<int32_t>(padded / 32) +
                        KVB_DV / 64 * static_cast<int32_t>(padded / 16 % 2),
                share = ahead.count / steps + 1;
  bf16* tiles = b.weights + BLOCK_ROWS * padded;
  turn_weights(b, rows, padded, tiles);
  if (!first) shrink_sums(b, item->heads, padded);
  stores_are_done();
  for (int64_t d = 0; d < KVB_DV / 16; d += 2)
    for (int64_t h = 0; h + 32 <= padded; h += 32) {
      const bf16* weights = tiles + h / 16 * blocks * TILE;
      float* at = b.state.sums + d * across + h * 16;
      ahead.fetch(share);
      if (first) clear_sums();
      else load_sums(at, across, 256);
      multiply_tiles(weights, weights + blocks * TILE, b.values + d * slab, b.values + (d + 1) * slab, blocks, TILE,
                     TILE);
      store_sums(at, across, 256, 64);
    }
  if (padded % 32)
    for (int64_t d = 0; d < KVB_DV / 16; d += 4) {
      float* at = b.state.sums + d * across + (padded - 16) * 16;
      ahead.fetch(share);
      if (first) clear_sums();
      else load_sums(at, across, 2 * across);
      multiply_row(tiles + (padded / 16 - 1) * blocks * TILE, b.values + d * slab, slab, blocks, TILE, TILE);
      store_sums(at, across, 2 * across, 64);
    }
  stores_are_done();
}

}  // namespace
