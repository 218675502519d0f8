// Both matrix products on AMX tiles (16 rows of 64 bytes; one instruction multiplies 16 x 32 by 32 x 16 bf16 values).
// Decoding already put every operand into runs of 1 KiB that are one tile:
//
//   keys    A [16 rows][32 values]       queries B [16 pairs of d][16 heads][2]
//   weights A [16 heads][32 rows]        values  B [16 pairs of rows][16 values][2]
//
// Four accumulator tiles, two of A, two of B: one load for each product. Between the instructions lie pieces of
// decoding (decoding_amx.h). KVB_AMX_EMULATE replaces the instructions.
#pragma once
#include "decoding_amx.h"
#include "pack_bf16.h"
#ifdef KVB_AMX_EMULATE
#include "amx_emulated.h"
#endif

namespace {

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

inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Four sums, `down` floats apart in rows of tiles, `right` in columns; those of the second row or column on request.
inline void load_sums(const float* at, int64_t down, int64_t right, bool two_rows, bool two_columns) {
  _tile_loadd(0, at, 64);
  if (two_columns) _tile_loadd(1, at + right, 64);
  if (two_rows) _tile_loadd(2, at + down, 64);
  if (two_rows && two_columns) _tile_loadd(3, at + down + right, 64);
}

inline void store_sums(float* at, int64_t down, int64_t right, bool two_rows, bool two_columns) {
  _tile_stored(0, at, 64);
  if (two_columns) _tile_stored(1, at + right, 64);
  if (two_rows) _tile_stored(2, at + down, 64);
  if (two_rows && two_columns) _tile_stored(3, at + down + right, 64);
}

// Two tiles of A by two of B.
template <Filling filling, int units>
KVB_INLINE void square(const bf16* a0, const bf16* a1, const bf16* b0, const bf16* b1, Decoding& d, Unit& u) {
  _tile_loadd(4, a0, 64);
  decode_pieces<filling, units, 0, units>(d, u);
  _tile_loadd(6, b0, 64);
  decode_pieces<filling, units, units, units>(d, u);
  _tile_dpbf16ps(0, 4, 6);
  decode_pieces<filling, units, 2 * units, units>(d, u);
  _tile_loadd(7, b1, 64);
  decode_pieces<filling, units, 3 * units, units>(d, u);
  _tile_dpbf16ps(1, 4, 7);
  decode_pieces<filling, units, 4 * units, units>(d, u);
  _tile_loadd(5, a1, 64);
  decode_pieces<filling, units, 5 * units, units>(d, u);
  _tile_dpbf16ps(2, 5, 6);
  decode_pieces<filling, units, 6 * units, units>(d, u);
  _tile_dpbf16ps(3, 5, 7);
  decode_pieces<filling, units, 7 * units, units>(d, u);
}

// Two tiles of A by one of B (sums 0 and 2).
template <Filling filling, int units>
KVB_INLINE void column(const bf16* a0, const bf16* a1, const bf16* b, Decoding& d, Unit& u) {
  _tile_loadd(6, b, 64);
  decode_pieces<filling, units, 0, 2 * units>(d, u);
  _tile_loadd(4, a0, 64);
  decode_pieces<filling, units, 2 * units, 2 * units>(d, u);
  _tile_dpbf16ps(0, 4, 6);
  decode_pieces<filling, units, 4 * units, 2 * units>(d, u);
  _tile_loadd(5, a1, 64);
  decode_pieces<filling, units, 6 * units, 2 * units>(d, u);
  _tile_dpbf16ps(2, 5, 6);
}

// One tile of A by two of B (sums 0 and 1).
template <Filling filling, int units>
KVB_INLINE void row(const bf16* a, const bf16* b0, const bf16* b1, Decoding& d, Unit& u) {
  _tile_loadd(4, a, 64);
  decode_pieces<filling, units, 0, 2 * units>(d, u);
  _tile_loadd(6, b0, 64);
  decode_pieces<filling, units, 2 * units, 2 * units>(d, u);
  _tile_dpbf16ps(0, 4, 6);
  decode_pieces<filling, units, 4 * units, 2 * units>(d, u);
  _tile_loadd(7, b1, 64);
  decode_pieces<filling, units, 6 * units, 2 * units>(d, u);
  _tile_dpbf16ps(1, 4, 7);
}

template <int units>
KVB_INLINE void multiply_square(const bf16* a0, const bf16* a1, const bf16* b0, const bf16* b1, Decoding& d, Unit& u) {
  filled<units>(d, [&](auto is) __attribute__((always_inline)) { square<is.value, units>(a0, a1, b0, b1, d, u); });
}

template <int units>
KVB_INLINE void multiply_column(const bf16* a0, const bf16* a1, const bf16* b, Decoding& d, Unit& u) {
  filled<units>(d, [&](auto is) __attribute__((always_inline)) { column<is.value, units>(a0, a1, b, d, u); });
}

template <int units>
KVB_INLINE void multiply_row(const bf16* a, const bf16* b0, const bf16* b1, Decoding& d, Unit& u) {
  filled<units>(d, [&](auto is) __attribute__((always_inline)) { row<is.value, units>(a, b0, b1, d, u); });
}

}  // namespace
