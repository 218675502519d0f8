// Decoding as a filler: one chunk of rows is turned into operands, a piece at a time, between the tile products of
// another chunk. A tile instruction keeps its own unit busy for many cycles; the vector units work meanwhile.
//
//   unit   64 values of two rows -> 2 lines of keys for each row, 4 lines of values
//   piece  an eighth of a unit, laid behind one tile instruction
//
//   keys    A [2][d_qk / 32][16 rows][32 values]        values  B [d_v / 16][pairs of rows][16 values][2]
//
// The common records, e4m3 with power-of-two scales, go through units. A pair of rows of other records, of different
// records, or with a rare scale is decoded at once when its turn comes.
#pragma once
#include "decode_bf16.h"

namespace {

constexpr int32_t CHUNK_ROWS = 32, PAIRS = CHUNK_ROWS / 2, PIECES = 8;
constexpr int32_t BLOCK_ROWS = 192;
constexpr int64_t TILE = 512;                          // bf16 values
constexpr int64_t SLAB = BLOCK_ROWS / 32 * TILE + 64;  // not a multiple of 4 KiB: lines must not share a cache set

struct Chunk {
  Row rows[CHUNK_ROWS];
  int32_t count;     // 0: there is none
  const Item* item;  // whose rows these are
};

// What the pieces behind one group of tile instructions are: nothing, units of codes, or units whose last is bf16.
enum Filling { NOTHING, CODES, TAIL };

// Rows of a tensor that is read soon after: a few at a time come into the cache.
struct Lines {
  const char* at;
  int64_t stride_bytes;
  int32_t rows, row_bytes, at_once;

  void fetch() {
    for (int32_t some = at_once; some > 0 && rows > 0; some--, rows--, at += stride_bytes)
      for (int32_t i = 0; i < row_bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
  }
};

// What comes from memory while a chunk is decoded.
struct Fetches {
  Ahead rows;
  Lines queries;  // of the next item

  void for_pair() {
    rows.fetch(2);
    queries.fetch();
  }
};

struct Decoding {
  const Row* rows;    // of the chunk's next pair
  int32_t rows_left;  // live ones; fewer than 2 for pairs left: the others become zeros
  int32_t pairs_left, units_left, depth;
  bool tail, spoiled;        // of this pair: its last unit is bf16, and one of its units held a NaN code
  const uint8_t *a, *b;      // where the next unit of this pair is read
  const int32_t* exponents;  // 16 for a, 16 for b
  bf16 *keys, *values;       // and written
  int32_t pair;
  bf16 *chunk_keys, *chunk_values;
  Fetches* fetches;
  alignas(64) int32_t scales[2][16];

  int32_t left() const { return pairs_left * (depth / 64) + units_left; }
};

// `keys` and `values` take the chunk's rows.
inline void begin_decoding(Decoding& d, const Chunk& chunk, bf16* keys, bf16* values, int32_t depth, Fetches* fetches) {
  d.rows = chunk.rows;
  d.rows_left = chunk.count;
  d.pairs_left = chunk.count > 0 ? PAIRS : 0;
  d.units_left = d.pair = 0;
  d.depth = depth;
  d.chunk_keys = keys;
  d.chunk_values = values;
  d.fetches = fetches;
}

// exponents[i]: 128 * (scale - 7) of the 32 values i, twice in a word. False where a scale is out of the plain range.
inline bool read_scales(const uint8_t* scales, int32_t groups, bool halves, int32_t* exponents) {
  const __mmask16 used = static_cast<__mmask16>((1u << groups) - 1);
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(used, scales));
  const __m512i words = _mm512_slli_epi32(_mm512_sub_epi32(bytes, _mm512_set1_epi32(7)), 7);
  const __m512i both =
      _mm512_or_si512(_mm512_slli_epi32(words, 16), _mm512_and_si512(words, _mm512_set1_epi32(0xffff)));
  const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  _mm512_store_si512(exponents, halves ? both : _mm512_permutexvar_epi32(twice, both));
  const __m512i from_10 = _mm512_sub_epi32(bytes, _mm512_set1_epi32(10));
  return _mm512_mask_cmpgt_epu32_mask(used, from_10, _mm512_set1_epi32(236)) == 0;
}

inline bool is_common_pair(Decoding& d) {
  if (d.rows_left < 2 || d.depth != KVB_DV) return false;
  const Row &a = d.rows[0], &b = d.rows[1];
  const kvb_record& r = *a.record;
  if (a.record != b.record || r.scale != KVB_SCALE_UE8M0 || r.tail_values > 64 ||
      (r.tail_values && r.tail_offset_bytes != r.values))
    return false;
  const int32_t groups = r.values / r.group;
  const bool halves = r.group == 32;
  return read_scales(a.scales, groups, halves, d.scales[0]) & read_scales(b.scales, groups, halves, d.scales[1]);
}

inline void end_pair(Decoding& d) {
  d.rows += 2;
  d.rows_left -= 2;
  d.pairs_left--;
  d.pair++;
}

inline bf16* pair_keys(const Decoding& d) {
  return d.chunk_keys + (d.pair >> 3) * (d.depth / 32) * TILE + (d.pair & 7) * 64;
}
inline bf16* pair_values(const Decoding& d) { return d.chunk_values + d.pair * 32; }

__attribute__((noinline)) void decode_whole_pair(const Decoding& d) {
  decode_pair_slowly(d.rows, d.rows_left, d.depth, pair_keys(d), TILE, pair_values(d), SLAB);
}

// True when the next pair goes through units; else it is done, if there was one.
__attribute__((noinline)) bool begin_pair(Decoding& d) {
  if (d.pairs_left == 0) return false;
  if (d.fetches) d.fetches->for_pair();
  if (!is_common_pair(d)) {
    decode_whole_pair(d);
    end_pair(d);
    return false;
  }
  d.units_left = KVB_DV / 64;
  d.spoiled = false;
  d.tail = d.rows[0].record->tail_values > 0;
  d.a = d.rows[0].codes;
  d.b = d.rows[1].codes;
  d.exponents = d.scales[0];
  d.keys = pair_keys(d);
  d.values = pair_values(d);
  return true;
}

#define KVB_INLINE __attribute__((always_inline)) inline

template <int units>
KVB_INLINE Filling begin_units(Decoding& d) {
  if (units == 0 || (d.units_left == 0 && !begin_pair(d))) return NOTHING;
  return d.units_left == units && d.tail ? TAIL : CODES;
}

KVB_INLINE void end_units(Decoding& d, int32_t units) {
  d.a += 64 * units;
  d.b += 64 * units;
  d.exponents += 2 * units;
  d.keys += 2 * units * TILE;
  d.values += 4 * units * SLAB;
  d.units_left -= units;
  if (d.units_left > 0) return;
  if (__builtin_expect(d.spoiled, 0)) decode_whole_pair(d);
  end_pair(d);
}

// What one unit holds between its pieces, and constants that are to stay in registers.
struct Unit {
  __m512i a0, a1, b0, b1;
  __m512i magnitude, lowest, highest, kept;

  KVB_INLINE Unit() {
    magnitude = _mm512_set1_epi8(0x7f);
    lowest = _mm512_set1_epi8(8);
    highest = _mm512_set1_epi8(0x7e - 8);
    kept = _mm512_set1_epi16(static_cast<short>(0x87f0));
    __asm__("" : "+v"(magnitude), "+v"(lowest), "+v"(highest), "+v"(kept));
  }

  // 32 codes times a power of two, given as 128 * (scale byte - 7): sign, exponent and mantissa move into place
  // together. Right for normal codes, which almost all are.
  KVB_INLINE __m512i shifted(const uint8_t* codes, const int32_t* exponent) const {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    __m512i both;  // as memory operand: through a register it would cost a shuffle
    __asm__("vpbroadcastd %1, %0" : "=v"(both) : "m"(*exponent));
    return _mm512_add_epi16(_mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 4), kept), both);
  }

  KVB_INLINE __m512i above_subnormal(const uint8_t* codes) const {
    return _mm512_sub_epi8(_mm512_and_si512(_mm512_loadu_si512(codes), magnitude), lowest);
  }

  // Is a code subnormal, zero or NaN?
  KVB_INLINE bool is_rare(const uint8_t* a, const uint8_t* b) const {
    return _mm512_cmpgt_epu8_mask(_mm512_max_epu8(above_subnormal(a), above_subnormal(b)), highest) != 0;
  }
};

// A unit with a rare code: by table.
__attribute__((noinline)) void decode_rare_unit(Decoding& d, int32_t unit, __m512i* out) {
  for (int32_t i = 0; i < 2; i++) {
    const int32_t* e = d.exponents + 2 * unit + 16 * i;
    const uint8_t left = static_cast<uint8_t>((e[0] >> 23) + 7), right = static_cast<uint8_t>((e[1] >> 23) + 7);
    if (!scale_codes((i ? d.b : d.a) + 64 * unit, left, right, out[2 * i], out[2 * i + 1])) d.spoiled = true;
  }
}

// In the common records with a bf16 tail it begins right behind the codes.
template <int piece, int unit, bool tail>
KVB_INLINE void decode_piece(Decoding& d, Unit& u) {
  const uint8_t *a = d.a + 64 * unit, *b = d.b + 64 * unit;
  const int32_t* exponents = d.exponents + 2 * unit;
  bf16 *keys = d.keys + 2 * unit * TILE, *values = d.values + 4 * unit * SLAB;
  if constexpr (piece == 0) {
    u.a0 = tail ? _mm512_loadu_si512(a) : u.shifted(a, exponents);
    u.a1 = tail ? _mm512_loadu_si512(a + 64) : u.shifted(a + 32, exponents + 1);
  } else if constexpr (piece == 1) {
    u.b0 = tail ? _mm512_loadu_si512(b) : u.shifted(b, exponents + 16);
    u.b1 = tail ? _mm512_loadu_si512(b + 64) : u.shifted(b + 32, exponents + 17);
  } else if constexpr (piece == 2) {
    if constexpr (!tail) {
      if (__builtin_expect(u.is_rare(a, b), 0)) {
        __m512i out[4];
        decode_rare_unit(d, unit, out);
        u.a0 = out[0];
        u.a1 = out[1];
        u.b0 = out[2];
        u.b1 = out[3];
      }
    }
  } else if constexpr (piece == 3) {
    _mm512_store_si512(keys, u.a0);
    _mm512_store_si512(keys + 32, u.b0);
  } else if constexpr (piece == 4) {
    _mm512_store_si512(values, _mm512_unpacklo_epi16(u.a0, u.b0));
    _mm512_store_si512(values + SLAB, _mm512_unpackhi_epi16(u.a0, u.b0));
  } else if constexpr (piece == 5) {
    _mm512_store_si512(keys + TILE, u.a1);
    _mm512_store_si512(keys + TILE + 32, u.b1);
  } else if constexpr (piece == 6) {
    _mm512_store_si512(values + 2 * SLAB, _mm512_unpacklo_epi16(u.a1, u.b1));
    _mm512_store_si512(values + 3 * SLAB, _mm512_unpackhi_epi16(u.a1, u.b1));
  }
}

// Pieces first..first+count-1 of `units` units.
template <Filling filling, int units, int first, int count>
KVB_INLINE void decode_pieces(Decoding& d, Unit& u) {
  if constexpr (filling != NOTHING && count > 0) {
    constexpr int unit = first / PIECES;
    decode_piece<first % PIECES, unit, filling == TAIL && unit == units - 1>(d, u);
    decode_pieces<filling, units, first + 1, count - 1>(d, u);
  }
}

template <auto constant>
struct Is {
  static constexpr auto value = constant;
};

// Calls `work` with what the next `units` units are; it decodes them.
template <int units, class Work>
KVB_INLINE void filled(Decoding& d, const Work& work) {
  const Filling filling = begin_units<units>(d);
  if (filling == CODES) work(Is<CODES>());
  else if (filling == TAIL) work(Is<TAIL>());
  else work(Is<NOTHING>());
  if (filling != NOTHING) end_units(d, units);
}

inline void decode_unit(Decoding& d, Unit& u) {
  filled<1>(d, [&](auto is) __attribute__((always_inline)) { decode_pieces<is.value, 1, 0, PIECES>(d, u); });
}

// Several units at a time begin with a whole pair.
inline void end_pair_in_hand(Decoding& d) {
  Unit u;
  while (d.units_left > 0) decode_unit(d, u);
}

// What the products left undone.
inline void decode_rest(Decoding& d) {
  Unit u;
  while (d.left() > 0) decode_unit(d, u);
}

}  // namespace
