// Decoding as a filler: one chunk of rows is turned into keys, a few units at a time, between the tile instructions of
// another chunk. Those keep their own part of the core busy for many cycles; the vector units work meanwhile.
//
//   unit   64 values of two rows -> 2 lines of keys for each
//   keys   A [2][d_qk / 32][16 rows][32 values]: the chunk's even rows, then its odd ones
//
// The common records, e4m3 with power-of-two scales, go through units. A pair of rows of other records, of different
// records, or with a rare scale is decoded at once when its turn comes.
#pragma once
#include "decode_bf16.h"

#define KVB_INLINE __attribute__((always_inline)) inline

namespace {

constexpr int32_t CHUNK_ROWS = 32, PAIRS = CHUNK_ROWS / 2, UNITS = KVB_DV / 64;
constexpr int32_t BLOCK_ROWS = 192;
constexpr int64_t TILE = 512;  // bf16 values

struct Chunk {
  Row rows[CHUNK_ROWS];
  int32_t count;     // 0: there is none
  const Item* item;  // whose rows these are
};

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

  // Two rows for each pair that is decoded. A core waits for few lines at once, so a pair that goes through units
  // leaves the bulk of long rows to them, a line of each row to a unit: `lines` becomes where they begin.
  void for_pair(const uint8_t** lines) {
    const bool spread = lines && rows.at + 2 <= rows.count;
    for (int32_t i = 0; spread && i < 2; i++) {
      const Row& row = rows.rows[rows.at++];
      const bool is_long = row_bytes(*row.record) >= 64 * UNITS;
      if (is_long) lines[i] = row.codes;
      fetch_row(row, is_long ? 64 * UNITS : 0);
    }
    if (!spread) rows.fetch(2);
    queries.fetch();
  }
};

struct Decoding {
  const Row* rows;    // of the next pair
  int32_t rows_left;  // live ones; fewer than 2 for pairs left: the others become zeros
  int32_t pairs_left, pair, depth;
  bool spoiled;  // one of the pair's units held a NaN code
  bf16* keys;    // the chunk's
  Fetches* fetches;
  const uint8_t* lines[2];               // what the pair's units fetch: a line of each behind the other
  alignas(64) int32_t exponents[2][16];  // of the pair: 128 * (scale - 7) of its 32 values i, twice in a word

  int32_t units() const { return pairs_left * UNITS; }
};

inline void begin_decoding(Decoding& d, const Chunk& chunk, bf16* keys, int32_t depth, Fetches* fetches) {
  d.rows = chunk.rows;
  d.rows_left = chunk.count;
  d.pairs_left = chunk.count > 0 ? PAIRS : 0;
  d.pair = 0;
  d.depth = depth;
  d.keys = keys;
  d.fetches = fetches;
}

// False where a scale is out of the plain range.
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
  return read_scales(a.scales, groups, halves, d.exponents[0]) & read_scales(b.scales, groups, halves, d.exponents[1]);
}

inline void end_pair(Decoding& d) {
  d.rows += 2;
  d.rows_left -= 2;
  d.pairs_left--;
  d.pair++;
}

__attribute__((noinline)) void decode_whole_pair(const Decoding& d) {
  decode_pair_slowly(d.rows, d.rows_left, d.depth, d.keys + d.pair * 32, d.depth / 32 * TILE, TILE);
}

// True when the next pair goes through units; else it is done.
__attribute__((noinline)) bool begin_pair(Decoding& d) {
  const bool common = is_common_pair(d);
  if (common) {  // fetching its own lines again costs nothing
    d.spoiled = false;
    d.lines[0] = d.rows[0].codes;
    d.lines[1] = d.rows[1].codes;
  }
  if (d.fetches) d.fetches->for_pair(common ? d.lines : nullptr);
  if (common) return true;
  decode_whole_pair(d);
  end_pair(d);
  return false;
}

struct Four {
  __m512i a0, a1, b0, b1;  // 64 values of two rows
};

// A unit with a rare code: by table. False for a NaN.
__attribute__((noinline)) bool decode_rare_unit(const uint8_t* a, const uint8_t* b, const int32_t* exponents,
                                                Four* out) {
  const auto scale = [=](int32_t i) { return static_cast<uint8_t>((exponents[i] >> 23) + 7); };
  return scale_codes(a, scale(0), scale(1), out->a0, out->a1) & scale_codes(b, scale(16), scale(17), out->b0, out->b1);
}

// Decodes a chunk unit by unit. What it needs stays in registers from one call to the next.
struct Filler {
  Decoding& d;
  const uint8_t *a, *b;                // where the next unit of the pair in hand is read
  const uint8_t *coming_a, *coming_b;  // what it fetches
  const int32_t* exponents;            // 16 for a, 16 for b
  bf16* keys;                          // where it is written
  int32_t left, tail;                  // units of the pair in hand, and how many of them at its end are bf16
  __m512i magnitude, lowest, highest, kept;

  KVB_INLINE explicit Filler(Decoding& d) : d(d), left(0) {
    magnitude = _mm512_set1_epi8(0x7f);
    lowest = _mm512_set1_epi8(8);
    highest = _mm512_set1_epi8(0x7e - 8);
    kept = _mm512_set1_epi16(static_cast<short>(0x87f0));
    __asm__("" : "+v"(magnitude), "+v"(lowest), "+v"(highest), "+v"(kept));
  }

  KVB_INLINE bool begin() {
    if (!begin_pair(d)) return false;
    a = d.rows[0].codes;
    b = d.rows[1].codes;
    coming_a = d.lines[0];
    coming_b = d.lines[1];
    exponents = d.exponents[0];
    keys = d.keys + d.pair * 32;
    left = UNITS;
    tail = d.rows[0].record->tail_values > 0;
    return true;
  }

  // 32 codes times a power of two: sign, exponent and mantissa move into place together. Right for normal codes, which
  // almost all are.
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
  KVB_INLINE bool is_rare() const {
    return _mm512_cmpgt_epu8_mask(_mm512_max_epu8(above_subnormal(a), above_subnormal(b)), highest) != 0;
  }

  // In the common records with a bf16 tail it begins right behind the codes.
  KVB_INLINE Four decoded() {
    if (left <= tail)
      return {_mm512_loadu_si512(a), _mm512_loadu_si512(a + 64), _mm512_loadu_si512(b), _mm512_loadu_si512(b + 64)};
    if (__builtin_expect(is_rare(), 0)) {
      Four out;
      if (!decode_rare_unit(a, b, exponents, &out)) d.spoiled = true;
      return out;
    }
    return {shifted(a, exponents), shifted(a + 32, exponents + 1), shifted(b, exponents + 16),
            shifted(b + 32, exponents + 17)};
  }

  KVB_INLINE void unit() {
    constexpr int64_t odd_rows = KVB_DV / 32 * TILE;
    __builtin_prefetch(coming_a, 0, 2);
    __builtin_prefetch(coming_b, 0, 2);
    coming_a += 64;
    coming_b += 64;
    const Four x = decoded();
    _mm512_store_si512(keys, x.a0);
    _mm512_store_si512(keys + odd_rows, x.b0);
    _mm512_store_si512(keys + TILE, x.a1);
    _mm512_store_si512(keys + TILE + odd_rows, x.b1);
    a += 64;
    b += 64;
    exponents += 2;
    keys += 2 * TILE;
    if (--left > 0) return;
    if (__builtin_expect(d.spoiled, 0)) decode_whole_pair(d);
    end_pair(d);
  }

  KVB_INLINE void operator()(int32_t units) {
    while (units > 0 && (left > 0 || d.pairs_left > 0)) {
      if (left > 0 || begin()) {
        unit();
        units--;
      } else {
        units -= UNITS;
      }
    }
  }
};

// What the products left undone.
inline void decode_rest(Decoding& d) {
  if (d.pairs_left == 0) return;
  Filler filler(d);
  filler(d.units());
}

// Turns a column of a chunk's keys, 32 values wide, into two tiles of values, a pair of rows a step.
struct Interleaving {
  const bf16* keys;
  int64_t odd_rows;
  bf16* values;
  int32_t left;

  KVB_INLINE void operator()(int32_t steps) {
    for (; steps > 0 && left > 0; steps--, left--, keys += 32, values += 32)
      interleave(_mm512_load_si512(keys), _mm512_load_si512(keys + odd_rows), values, BLOCK_ROWS / 32 * TILE);
  }
};

}  // namespace
