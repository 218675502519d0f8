// Codes to bf16 by moving exponent bits, shared by both halves: no conversion instruction, no table.
//
//   e4m3  s eeee mmm          bf16  s 0000eeee mmm0000   = value * 2^-120, subnormal codes included
//   e2m1  s ee m              bf16  s 000000ee m000000   = value * 2^-126
//
// A UE8M0 byte b means 2^(b-127). One product with 2^(b-7) is exact for b in 3..134; outside it the product is taken in two
// steps, exact where bf16 can hold the result, else rounded once. Codes 0x7F and 0xFF come out as +-480, as declared.
#pragma once
#include "prim.cuh"

constexpr uint32_t kTwoTo120 = 0x7b807b80u;  // bf16x2
constexpr uint32_t kTwoTo126 = 0x7e807e80u;

KVB_DEVICE uint32_t both_halves(uint32_t bf16) { return bf16 | bf16 << 16; }

// Four e4m3 codes to two bf16x2 in order, still 2^-120 too small.
KVB_DEVICE void shift_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
  const uint32_t odd = (codes & 0x80008000u) | (codes & 0x7f007f00u) >> 4;           // bytes 1 and 3
  const uint32_t even = (codes << 8 & 0x80008000u) | (codes & 0x007f007fu) << 4;     // bytes 0 and 2
  low = permute_bytes(even, odd, 0x5410);
  high = permute_bytes(even, odd, 0x7632);
}

// Eight e2m1 codes (even value in the low nibble) to four bf16x2 in order, still 2^-126 too small.
KVB_DEVICE void shift_e2m1(uint32_t codes, uint32_t (&out)[4]) {
  const uint32_t n0 = codes << 12, n1 = codes << 8, n2 = codes << 4, n3 = codes;  // nibble i of each half at bits 12..15
  const uint32_t values[4] = {n0, n1, n2, n3};
  uint32_t shifted[4];
  for (int nibble = 0; nibble < 4; ++nibble)
    shifted[nibble] = (values[nibble] & 0x80008000u) | (values[nibble] & 0x70007000u) >> 6;
  // The two halves hold nibbles i and i + 4.
  out[0] = permute_bytes(shifted[0], shifted[1], 0x5410);
  out[1] = permute_bytes(shifted[2], shifted[3], 0x5410);
  out[2] = permute_bytes(shifted[0], shifted[1], 0x7632);
  out[3] = permute_bytes(shifted[2], shifted[3], 0x7632);
}

// The factors of a UE8M0 byte: value = shifted * first * second; second is 1.0 where one product is exact.
KVB_DEVICE void ue8m0_factors(uint32_t byte, uint32_t& first, uint32_t& second) {
  if (byte >= 3 && byte <= 134) {
    first = both_halves((byte + 120) << 7);
    second = 0x3f803f80u;
  } else {
    first = kTwoTo120;
    second = both_halves(byte == 255 ? 0x7fc0u : byte == 0 ? 0x0040u : byte << 7);
  }
}

// 16 raw e4m3 bytes and one UE8M0 byte to 16 bf16.
KVB_DEVICE void decode_e4m3_ue8m0(uint4 codes, uint32_t scale, uint32_t (&out)[8]) {
  uint32_t first, second;
  ue8m0_factors(scale, first, second);
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  for (int word = 0; word < 4; ++word) {
    shift_e4m3(words[word], out[2 * word], out[2 * word + 1]);
    out[2 * word] = multiply_bf16x2(out[2 * word], first);
    out[2 * word + 1] = multiply_bf16x2(out[2 * word + 1], first);
  }
  if (second != 0x3f803f80u)
    for (int pair = 0; pair < 8; ++pair) out[pair] = multiply_bf16x2(out[pair], second);
}

// 16 raw e4m3 bytes and an fp32 scale to 16 bf16: the product is rounded once.
KVB_DEVICE void decode_e4m3_fp32(uint4 codes, float scale, uint32_t (&out)[8]) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  for (int word = 0; word < 4; ++word) {
    uint32_t pairs[2];
    shift_e4m3(words[word], pairs[0], pairs[1]);
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t exact = multiply_bf16x2(pairs[pair], kTwoTo120);
      out[2 * word + pair] = pack_bf16x2(as_float(exact << 16) * scale, as_float(exact & 0xffff0000u) * scale);
    }
  }
}

// 8 raw bytes of e2m1 and one e4m3 scale to 16 bf16; every product is exact.
KVB_DEVICE void decode_e2m1_e4m3(uint2 codes, uint32_t scale, uint32_t (&out)[8]) {
  const uint32_t factor =
      multiply_bf16x2(both_halves((scale & 0x80u) << 8 | (scale & 0x7fu) << 4), kTwoTo120);
  const uint32_t words[2] = {codes.x, codes.y};
  for (int word = 0; word < 2; ++word) {
    uint32_t shifted[4];
    shift_e2m1(words[word], shifted);
    for (int pair = 0; pair < 4; ++pair)
      out[4 * word + pair] = multiply_bf16x2(multiply_bf16x2(shifted[pair], kTwoTo126), factor);
  }
}
