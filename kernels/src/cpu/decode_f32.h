// Dequantises one row to fp32: exact for codes with power-of-two or e4m3 scales, rounded once to bf16 for fp32 scales.
//
//   codes | e4m3 448..512 or e2m1 pairs (even value = low nibble) |   scales | one a group |   tail | bf16 |
//
// A small float of M mantissa bits becomes fp32 by moving its bits into place: normals directly, subnormals by
// setting an implicit one and subtracting it again, so no subnormal fp32 arises and flush-to-zero modes do not matter.
#pragma once
#include <string.h>
#include "lanes.h"
#include "slots.h"

namespace {

inline float bits_to_float(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return bits;
}

// 2^(byte - 127); byte 0 is the subnormal 2^-127, byte 255 means NaN.
inline float ue8m0(uint8_t byte) {
  return bits_to_float(byte == 255 ? 0x7fc00000u : byte ? static_cast<uint32_t>(byte) << 23 : 0x00400000u);
}

template <int mantissa, int bias, bool has_nan>
inline vfloat expand(vint code) {
  constexpr int sign_at = has_nan ? 7 : 3;
  const vint magnitude = code & ((1 << sign_at) - 1);
  const vint sign = (code >> sign_at) << 31;
  const vint small = magnitude < (1 << mantissa);  // -1 in lanes that hold a subnormal code
  vint bits = (magnitude << (23 - mantissa)) + ((127 - bias) << 23);
  bits += small & (1 << 23);
  const vint implicit = small & ((128 - bias) << 23);
  bits = reinterpret_cast<vint>(reinterpret_cast<vfloat>(bits) - reinterpret_cast<vfloat>(implicit)) | sign;
  if (has_nan) bits |= (magnitude == ((1 << sign_at) - 1)) & 0x7fc00000;
  return reinterpret_cast<vfloat>(bits);
}

inline float e4m3_scalar(uint8_t code) { return expand<3, 7, true>(splat_int(code))[0]; }

inline vint round_to_bf16_bits(vint bits) {
  const vint rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & static_cast<int32_t>(0xffff0000u);
  const vint nan = (bits & 0x7fffffff) > 0x7f800000;
  return (rounded & ~nan) | ((bits | 0x00400000) & static_cast<int32_t>(0xffff0000u) & nan);
}

// code * scale rounded to bf16 once. The fp32 product may itself have been rounded onto the middle between two bf16
// values; what it lost then says to which side the exact product lies.
inline vfloat product_to_bf16(vfloat code, float scale) {
  const uint32_t exponent = (float_to_bits(scale) >> 23) & 255;
  const vfloat high = code * bits_to_float(float_to_bits(scale) & 0xfffff000u);
  vint bits;
  if (exponent > 24 && exponent < 240) {
    const vfloat low = code * (scale - bits_to_float(float_to_bits(scale) & 0xfffff000u));
    const vfloat sum = high + low;
    const vint lost = reinterpret_cast<vint>(low - (sum - high));
    bits = reinterpret_cast<vint>(sum);
    const vint inexact = ((bits & 0xffff) == 0x8000) & ((lost & 0x7fffffff) != 0);
    bits += inexact & (((bits ^ lost) >> 31) | 1);
  } else {
    bits = reinterpret_cast<vint>(code * scale);
  }
  return reinterpret_cast<vfloat>(round_to_bf16_bits(bits));
}

template <int mantissa, int bias, bool has_nan>
inline void expand_group(const uint8_t* codes, int32_t count, float scale, bool rounds, float* out) {
  for (int32_t i = 0; i < count; i += LANES) {
    const vfloat value = expand<mantissa, bias, has_nan>(load_bytes(codes + i));
    store(out + i, rounds ? product_to_bf16(value, scale) : value * scale);
  }
}

inline void decode_tail_f32(const uint8_t* tail, int32_t count, float* out) {
  for (int32_t i = 0; i < count; i += LANES) store(out + i, load_bf16(tail + 2 * i));
}

inline void decode_row_f32(const Row& row, float* out) {
  const kvb_record& r = *row.record;
  if (r.code == KVB_CODE_E2M1) {
    for (int32_t i = 0; i < r.values; i += 16) {
      uint8_t nibbles[16];
      spread_nibbles(row.codes + i / 2, nibbles);
      expand_group<1, 1, false>(nibbles, 16, e4m3_scalar(row.scales[i / 16]), false, out + i);
    }
  } else if (r.code == KVB_CODE_E4M3) {
    const int32_t group = r.scale == KVB_SCALE_NONE ? r.values : r.group;
    for (int32_t i = 0, g = 0; i < r.values; i += group, g++) {
      float scale = r.external_scale;
      if (r.scale == KVB_SCALE_UE8M0) scale = ue8m0(row.scales[g]);
      if (r.scale == KVB_SCALE_FP32) memcpy(&scale, row.scales + 4 * g, 4);
      expand_group<3, 7, true>(row.codes + i, group, scale, r.scale != KVB_SCALE_UE8M0, out + i);
    }
  }
  decode_tail_f32(row.codes + r.tail_offset_bytes, r.tail_values, out + r.values);
}

}  // namespace
