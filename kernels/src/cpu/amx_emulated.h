// The AMX instructions this backend uses, computed with AVX-512: lets any AVX-512 machine run the AMX path's text.
//
// TDPBF16PS as Intel's manual gives it: even and odd products are summed apart in fp32 (fused, round to nearest even,
// denormals are zero), the two sums are added, then the accumulator. Tiles are 16 rows of 64 bytes.
#pragma once
#include <immintrin.h>
#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps

namespace {

struct alignas(64) EmulatedTile {
  __m512i rows[16];
};

thread_local EmulatedTile emulated[8];

inline void emulated_load(int tile, const void* from, int64_t stride) {
  for (int i = 0; i < 16; i++) emulated[tile].rows[i] = _mm512_loadu_si512(static_cast<const char*>(from) + i * stride);
}

inline void emulated_store(int tile, void* to, int64_t stride) {
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(static_cast<char*>(to) + i * stride, emulated[tile].rows[i]);
}

inline __m512 emulated_flush(__m512 x) {  // denormals to signed zero
  const __mmask16 tiny = _mm512_testn_epi32_mask(_mm512_castps_si512(x), _mm512_set1_epi32(0x7f800000));
  return _mm512_castsi512_ps(_mm512_mask_and_epi32(_mm512_castps_si512(x), tiny, _mm512_castps_si512(x),
                                                   _mm512_set1_epi32(static_cast<int>(0x80000000u))));
}

inline __m512 emulated_low(__m512i pairs) { return emulated_flush(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))); }
inline __m512 emulated_high(__m512i pairs) {
  return emulated_flush(_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))));
}

inline void emulated_product(int sum, int a, int b) {
  for (int m = 0; m < 16; m++) {
    alignas(64) int32_t pairs[16];
    _mm512_store_si512(pairs, emulated[a].rows[m]);
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < 16; k++) {
      const __m512i left = _mm512_set1_epi32(pairs[k]), right = emulated[b].rows[k];
      even = emulated_flush(_mm512_fmadd_ps(emulated_low(left), emulated_low(right), even));
      odd = emulated_flush(_mm512_fmadd_ps(emulated_high(left), emulated_high(right), odd));
    }
    const __m512 both = emulated_flush(_mm512_add_ps(even, odd));
    emulated[sum].rows[m] =
        _mm512_castps_si512(emulated_flush(_mm512_add_ps(_mm512_castsi512_ps(emulated[sum].rows[m]), both)));
  }
}

inline void emulated_zero(int tile) {
  for (int i = 0; i < 16; i++) emulated[tile].rows[i] = _mm512_setzero_si512();
}

}  // namespace

#define _tile_loadconfig(shapes) static_cast<void>(shapes)
#define _tile_storeconfig(shapes) static_cast<void>(*(shapes) = 0)
#define _tile_release() static_cast<void>(0)
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_store(tile, to, stride)
#define _tile_zero(tile) emulated_zero(tile)
#define _tile_dpbf16ps(sum, a, b) emulated_product(sum, a, b)
