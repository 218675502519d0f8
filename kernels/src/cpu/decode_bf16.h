// Dequantises rows to bf16 in blocks that both products read without another copy.
//
//   keys    [d_qk / 32][BLOCK_ROWS][32]        32 values of a row lie in one 64-byte line; neighbouring rows follow
//   values  [d_v / 16][BLOCK_ROWS / 2][16][2]  the same rows, two at a time, interleaved value by value
//
// Interleaving keeps to 128-bit lanes, so 32 values come in the order 0-3, 8-11, 16-19, 24-27 | 4-7, 12-15, ...; the
// output is put in order once per query (finish.h). e4m3 codes become bf16 through two byte tables; a power-of-two
// scale is an addition to the exponent, exact for scale bytes 10..246. Other bytes and NaN codes take the slow way.
#pragma once
#include "decode_f32.h"
#include "transpose.h"

namespace {

typedef uint16_t bf16;

constexpr uint16_t e4m3_bits(int code) {
  const int magnitude = code & 127;
  const float value = magnitude < 8
                          ? static_cast<float>(magnitude) / 512
                          : static_cast<float>(8 + (magnitude & 7)) * static_cast<float>(1 << (magnitude >> 3)) / 1024;
  const uint32_t bits = magnitude == 127 ? 0x7fc00000u : __builtin_bit_cast(uint32_t, value);
  return static_cast<uint16_t>(bits >> 16 | (code & 128 ? 0x8000u : 0u));
}

// Low and high bytes of the bf16 of every e4m3 magnitude; products of every e4m3 scale with every e2m1 code.
struct Tables {
  alignas(64) uint8_t low[128] = {}, high[128] = {};
  alignas(64) uint16_t pairs[256][16] = {};
  constexpr Tables() {
    constexpr float e2m1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (int i = 0; i < 128; i++) {
      low[i] = static_cast<uint8_t>(e4m3_bits(i));
      high[i] = static_cast<uint8_t>(e4m3_bits(i) >> 8);
    }
    for (int s = 0; s < 256; s++)
      for (int c = 0; c < 16; c++) {
        const uint16_t scale = e4m3_bits(s);
        uint32_t bits =
            (scale & 0x7fff) >= 0x7f80
                ? 0x7fc00000u
                : __builtin_bit_cast(
                      uint32_t, __builtin_bit_cast(float, static_cast<uint32_t>(scale & 0x7fff) << 16) * e2m1[c & 7]);
        pairs[s][c] = static_cast<uint16_t>(bits >> 16 ^ (scale & 0x8000) ^ (c & 8 ? 0x8000 : 0));
      }
  }
};

constexpr Tables TABLES;

// 64 e4m3 codes to 64 unscaled bf16, in order.
inline void widen(__m512i codes, __m512i& first, __m512i& second) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i x = _mm512_permutexvar_epi64(order, codes);
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(TABLES.low), x, _mm512_load_si512(TABLES.low + 64));
  __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(TABLES.high), x, _mm512_load_si512(TABLES.high + 64));
  high = _mm512_ternarylogic_epi64(high, x, _mm512_set1_epi8(static_cast<char>(0x80)), 0xF8);
  first = _mm512_unpacklo_epi8(low, high);
  second = _mm512_unpackhi_epi8(low, high);
}

// Zeros and NaN codes: those whose exponent must not be added to.
inline bool has_special_code(__m512i codes) {
  const __m512i from_one = _mm512_sub_epi8(_mm512_and_si512(codes, _mm512_set1_epi8(0x7f)), _mm512_set1_epi8(1));
  return _mm512_cmpgt_epu8_mask(from_one, _mm512_set1_epi8(125)) != 0;
}

inline bool has_nan_code(__m512i codes) {
  return _mm512_cmpeq_epi8_mask(_mm512_add_epi8(codes, codes), _mm512_set1_epi8(static_cast<char>(0xFE))) != 0;
}

inline __m512i keep_zeros(__m512i scaled, __m512i values) {
  return _mm512_mask_mov_epi16(scaled, _mm512_testn_epi16_mask(values, _mm512_set1_epi16(0x7fff)), values);
}

// 64 codes, in order, under one power of two for each half; false where a NaN code needs the slow way.
inline bool scale_codes(const uint8_t* codes, uint8_t left, uint8_t right, __m512i& first, __m512i& second) {
  const __m512i x = _mm512_loadu_si512(codes);
  __m512i a, b;
  widen(x, a, b);
  first = _mm512_add_epi16(a, _mm512_set1_epi16(static_cast<short>((left - 127) * 128)));
  second = _mm512_add_epi16(b, _mm512_set1_epi16(static_cast<short>((right - 127) * 128)));
  if (__builtin_expect(has_special_code(x), 0)) {
    first = keep_zeros(first, a);
    second = keep_zeros(second, b);
    return !has_nan_code(x);
  }
  return true;
}

__attribute__((noinline)) void decode_slowly(const uint8_t* codes, float scale, bool rounds, bf16* out) {
  float values[32];
  expand_group<3, 7, true>(codes, 32, scale, rounds, values);
  for (int i = 0; i < 32; i += 16) store_bf16(out + i, reinterpret_cast<vint>(load(values + i)));
}

inline bool plain_scale(uint8_t scale) { return static_cast<uint8_t>(scale - 10) <= 236; }

// Codes under power-of-two scales, `per_64` of them for 64 codes. A row with a rare scale or a NaN code is done again.
template <int per_64>
inline void decode_ue8m0(const uint8_t* codes, const uint8_t* scales, int32_t count, bf16* out, int64_t chunk) {
  bool good = true;
  for (int32_t i = 0; i < count / 64; i++) {
    const uint8_t left = scales[per_64 * i], right = scales[per_64 * i + per_64 - 1];
    __m512i a, b;
    good = scale_codes(codes + 64 * i, left, right, a, b) & plain_scale(left) & plain_scale(right) & good;
    _mm512_store_si512(out + 2 * i * chunk, a);
    _mm512_store_si512(out + (2 * i + 1) * chunk, b);
  }
  if (__builtin_expect(!good, 0))
    for (int32_t i = 0; i < count / 32; i++)
      decode_slowly(codes + 32 * i, ue8m0(scales[i * per_64 / 2]), false, out + i * chunk);
}

// 32 bf16 times an fp32 scale, rounded once to bf16; false when a product needs the slow way.
inline bool multiply(__m512i values, float scale, __m512i& out) {
  const __m512i top = _mm512_set1_epi32(static_cast<int>(0xffff0000u)), half = _mm512_set1_epi32(0x7fff),
                one = _mm512_set1_epi32(1), tie = _mm512_set1_epi32(0x8000);
  const __m512 s = _mm512_set1_ps(scale);
  const __m512i even = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(values, 16)), s));
  const __m512i odd = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(values, top)), s));
  const __mmask16 middle = _mm512_cmpeq_epi32_mask(_mm512_andnot_si512(top, even), tie) |
                           _mm512_cmpeq_epi32_mask(_mm512_andnot_si512(top, odd), tie);
  const __m512i even_up =
      _mm512_add_epi32(_mm512_add_epi32(even, half), _mm512_and_si512(_mm512_srli_epi32(even, 16), one));
  const __m512i odd_up =
      _mm512_add_epi32(_mm512_add_epi32(odd, half), _mm512_and_si512(_mm512_srli_epi32(odd, 16), one));
  out = _mm512_or_si512(_mm512_srli_epi32(even_up, 16), _mm512_and_si512(odd_up, top));
  return middle == 0;
}

// 64 codes under one fp32 scale.
inline void decode_fp32_scale(const uint8_t* codes, float scale, bf16* out, int64_t chunk) {
  const __m512i x = _mm512_loadu_si512(codes);
  const uint32_t exponent = (float_to_bits(scale) >> 23) & 255;
  __m512i a, b;
  widen(x, a, b);
  const bool usual = exponent > 24 && exponent < 240 && !has_nan_code(x);
  if (__builtin_expect(usual && multiply(a, scale, a), 1)) _mm512_store_si512(out, a);
  else decode_slowly(codes, scale, true, out);
  if (__builtin_expect(usual && multiply(b, scale, b), 1)) _mm512_store_si512(out + chunk, b);
  else decode_slowly(codes + 32, scale, true, out + chunk);
}

// 32 e2m1 codes in 16 bytes, two e4m3 scales: one look-up in both scales' products.
inline void decode_e2m1(const uint8_t* codes, const uint8_t* scales, bf16* out) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m512i nibbles =
      _mm512_ternarylogic_epi32(bytes, _mm512_slli_epi32(bytes, 12), _mm512_set1_epi32(0x000f000f), 0xA8);
  const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  const __m256i first = _mm256_load_si256(reinterpret_cast<const __m256i*>(TABLES.pairs[scales[0]])),
                second = _mm256_load_si256(reinterpret_cast<const __m256i*>(TABLES.pairs[scales[1]]));
  const __m512i table = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  _mm512_store_si512(out, _mm512_permutexvar_epi16(_mm512_or_si512(nibbles, upper), table));
}

// One row into keys; `out` is the row's place in the first chunk, `chunk` the distance to the next 32 values.
inline void decode_row_bf16(const Row& row, bf16* out, int64_t chunk) {
  const kvb_record& r = *row.record;
  if (r.code == KVB_CODE_E2M1) {
    for (int32_t i = 0; i < r.values / 32; i++) decode_e2m1(row.codes + 16 * i, row.scales + 2 * i, out + i * chunk);
  } else if (r.code == KVB_CODE_E4M3 && r.scale == KVB_SCALE_UE8M0) {
    if (r.group == 32) decode_ue8m0<2>(row.codes, row.scales, r.values, out, chunk);
    else decode_ue8m0<1>(row.codes, row.scales, r.values, out, chunk);
  } else if (r.code == KVB_CODE_E4M3) {
    for (int32_t i = 0; i < r.values / 64; i++) {
      float scale = r.external_scale;
      if (r.scale == KVB_SCALE_FP32) memcpy(&scale, row.scales + 4 * (64 * i / r.group), 4);
      decode_fp32_scale(row.codes + 64 * i, scale, out + 2 * i * chunk, chunk);
    }
  }
  bf16* tail = out + r.values / 32 * chunk;
  for (int32_t i = 0; i < r.tail_values / 32; i++)
    _mm512_store_si512(tail + i * chunk, _mm512_loadu_si512(row.codes + r.tail_offset_bytes + 64 * i));
}

// 32 values of two rows, side by side, into two slabs of values.
inline void interleave(__m512i a, __m512i b, bf16* out, int64_t slab) {
  _mm512_store_si512(out, _mm512_unpacklo_epi16(a, b));
  _mm512_store_si512(out + slab, _mm512_unpackhi_epi16(a, b));
}

// Two decoded rows, the second `next` values behind the first, into values.
inline void interleave_rows(const bf16* keys, int64_t next, int64_t chunk, bf16* out, int64_t slab) {
  for (int32_t i = 0; i < KVB_DV / 32; i++, keys += chunk)
    interleave(_mm512_load_si512(keys), _mm512_load_si512(keys + next), out + 2 * i * slab, slab);
}

// Two rows of any record into keys; only `live` of them exist, the others become zeros.
inline void decode_pair_slowly(const Row* rows, int32_t live, int32_t depth, bf16* keys, int64_t next, int64_t chunk) {
  for (int32_t i = 0; i < 2; i++) {
    bf16* out = keys + i * next;
    if (i < live) {
      decode_row_bf16(rows[i], out, chunk);
    } else {
      for (int32_t c = 0; c < depth / 32; c++) _mm512_store_si512(out + c * chunk, _mm512_setzero_si512());
    }
  }
}

}  // namespace
