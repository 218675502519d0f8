// A vector of LANES fp32, written with the compilers' vector extension so that one text serves SSE2, NEON, AVX2 and
// AVX-512. LANES is set by the translation unit: 4, 8 or 16.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

typedef float vfloat __attribute__((vector_size(4 * LANES)));
typedef int32_t vint __attribute__((vector_size(4 * LANES)));
typedef float vfloat_loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vint_loose __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

inline vfloat load(const float* p) { return *reinterpret_cast<const vfloat_loose*>(p); }
inline void store(float* p, vfloat v) { *reinterpret_cast<vfloat_loose*>(p) = v; }
inline vfloat splat(float f) { return vfloat{} + f; }
inline vint splat_int(int32_t i) { return vint{} + i; }
inline vfloat larger(vfloat a, vfloat b) { return b > a ? b : a; }  // keeps a when b is NaN

#if LANES == 16
inline vint load_bytes(const uint8_t* p) {
  return reinterpret_cast<vint>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline vfloat load_bf16(const void* p) {
  return reinterpret_cast<vfloat>(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))), 16));
}
inline void store_bf16(void* p, vint bits) {
  _mm256_storeu_si256(static_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(reinterpret_cast<__m512i>(bits), 16)));
}
#elif LANES == 8
inline vint load_bytes(const uint8_t* p) {
  return reinterpret_cast<vint>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline vfloat load_bf16(const void* p) {
  return reinterpret_cast<vfloat>(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))), 16));
}
inline void store_bf16(void* p, vint bits) {
  const __m256i high = _mm256_srli_epi32(reinterpret_cast<__m256i>(bits), 16);
  _mm_storeu_si128(static_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}
#else
inline vint load_bytes(const uint8_t* p) { return vint{p[0], p[1], p[2], p[3]}; }
inline vfloat load_bf16(const void* p) {
  uint16_t h[4];
  memcpy(h, p, 8);
  return reinterpret_cast<vfloat>(vint{h[0] << 16, h[1] << 16, h[2] << 16, h[3] << 16});
}
inline void store_bf16(void* p, vint bits) {
  uint16_t h[4];
  for (int i = 0; i < 4; i++) h[i] = static_cast<uint16_t>(static_cast<uint32_t>(bits[i]) >> 16);
  memcpy(p, h, 8);
}
#endif

// 8 bytes of pairs to 16 codes, the low nibble first.
inline void spread_nibbles(const uint8_t* packed, uint8_t* codes) {
#ifdef __SSE2__
  const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed)), mask = _mm_set1_epi8(15);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes),
                   _mm_unpacklo_epi8(_mm_and_si128(pairs, mask), _mm_and_si128(_mm_srli_epi16(pairs, 4), mask)));
#else
  for (int i = 0; i < 8; i++) {
    codes[2 * i] = packed[i] & 15;
    codes[2 * i + 1] = packed[i] >> 4;
  }
#endif
}

// 2^x for x <= 0 (and small positive x) to about 1e-7; below -126 exactly 0; NaN stays NaN.
inline vfloat exp2_lanes(vfloat x) {
  const vint zero = x < -126.0f;
  const vfloat shifted = x + 12582912.0f;  // 1.5 * 2^23: the integer part lands in the low bits
  const vfloat f = x - (shifted - 12582912.0f);
  const vint power = (reinterpret_cast<vint>(shifted) << 23) + 0x3f800000;
  vfloat p = splat(1.5403530e-4f);
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  return reinterpret_cast<vfloat>(reinterpret_cast<vint>(p * reinterpret_cast<vfloat>(power)) & ~zero);
}

}  // namespace
