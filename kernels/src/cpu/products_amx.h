// Both matrix products on AMX tiles (16 rows of 64 bytes; one instruction multiplies 16 x 32 by 32 x 16 bf16 values).
// Decoding already put every operand into runs of 1 KiB that are one tile:
//
//   keys    A [16 rows][32 values]       queries B [16 pairs of d][16 heads][2]
//   weights A [16 heads][32 rows]        values  B [16 pairs of rows][16 values][2]
//
// With at most 8 heads the tiles of keys are values too, as B [16 rows][16 pairs of values][2]: weights in the even
// places of 8 rows of A then give the sums of even values, in the odd places of the other 8 rows those of odd values.
//
// Up to four accumulator tiles, two of A, two of B. Between a group's instructions `filler` does `steps` steps of
// decoding (decoding_amx.h).
//
// A tile is set to zero right behind its last use: that hands its register back. Where a core's other hyperthread is
// busy about ten are left to share, and an instruction that writes a tile then takes 4.3 ns with 3 live tiles, 12.3 ns
// with 8; alone on the core it makes no difference.
//
// KVB_AMX_EMULATE replaces the instructions.
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

inline void load_sums(const float* at, int64_t apart) {
  _tile_loadd(0, at, 64);
  _tile_loadd(1, at + apart, 64);
}

inline void store_sums(float* at, int64_t apart) {
  _tile_stored(0, at, 64);
  _tile_stored(1, at + apart, 64);
}

// Of a square: those of the second row `down` floats apart.
inline void store_square(float* at, int64_t apart, int64_t down) {
  store_sums(at, apart);
  _tile_stored(2, at + down, 64);
  _tile_stored(3, at + down + apart, 64);
}

// What is done in one of a product's eight places: the steps spread evenly, few of them far apart.
template <int place, class Filler>
KVB_INLINE void fill(Filler& filler, uint32_t steps) {
  constexpr uint32_t turn = (place & 1) << 2 | (place & 2) | (place & 4) >> 2;
  filler(static_cast<int32_t>((steps + 7 - turn) / 8));
}

// Two tiles of A by one of B: sums 0 and 1.
template <class Filler>
KVB_INLINE void column(const bf16* a0, const bf16* a1, const bf16* b, Filler& filler, uint32_t steps) {
  _tile_loadd(6, b, 64);
  fill<0>(filler, steps);
  fill<1>(filler, steps);
  _tile_loadd(4, a0, 64);
  fill<2>(filler, steps);
  fill<3>(filler, steps);
  _tile_dpbf16ps(0, 4, 6);
  _tile_zero(4);
  fill<4>(filler, steps);
  fill<5>(filler, steps);
  _tile_loadd(5, a1, 64);
  fill<6>(filler, steps);
  fill<7>(filler, steps);
  _tile_dpbf16ps(1, 5, 6);
  _tile_zero(5);
  _tile_zero(6);
}

// One tile of A by two of B: sums 0 and 1.
template <class Filler>
KVB_INLINE void row(const bf16* a, const bf16* b0, const bf16* b1, Filler& filler, uint32_t steps) {
  _tile_loadd(4, a, 64);
  fill<0>(filler, steps);
  fill<1>(filler, steps);
  _tile_loadd(6, b0, 64);
  fill<2>(filler, steps);
  fill<3>(filler, steps);
  _tile_dpbf16ps(0, 4, 6);
  _tile_zero(6);
  fill<4>(filler, steps);
  fill<5>(filler, steps);
  _tile_loadd(7, b1, 64);
  fill<6>(filler, steps);
  fill<7>(filler, steps);
  _tile_dpbf16ps(1, 4, 7);
  _tile_zero(4);
  _tile_zero(7);
}

// Two tiles of A by two of B: sums 0 and 1 for the first of B, 2 and 3 for the second.
template <class Filler>
KVB_INLINE void square(const bf16* a0, const bf16* a1, const bf16* b0, const bf16* b1, Filler& filler, uint32_t steps) {
  _tile_loadd(4, a0, 64);
  fill<0>(filler, steps);
  _tile_loadd(6, b0, 64);
  fill<1>(filler, steps);
  _tile_dpbf16ps(0, 4, 6);
  fill<2>(filler, steps);
  _tile_loadd(7, b1, 64);
  fill<3>(filler, steps);
  _tile_dpbf16ps(2, 4, 7);
  _tile_zero(4);
  fill<4>(filler, steps);
  _tile_loadd(5, a1, 64);
  fill<5>(filler, steps);
  _tile_dpbf16ps(1, 5, 6);
  _tile_zero(6);
  fill<6>(filler, steps);
  _tile_dpbf16ps(3, 5, 7);
  _tile_zero(5);
  _tile_zero(7);
  fill<7>(filler, steps);
}

}  // namespace
