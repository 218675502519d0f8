// How the bytes of one gathered row become bf16 values. Equal to kvbridge/records.py by test.
//
//   raw row in shared memory     [data][scales]        whatever the page's arrangement, split or interleaved
//   v4    448 e4m3 | 64 bf16     | 7 UE8M0 + 1 unused
//   v41   512 e4m3               | 16 UE8M0
//   fp4   512 e2m1 in 256 bytes  | 32 e4m3
//   dsa   512 e4m3 | 4 fp32 | 64 bf16                  one run, scales in the middle
//   bf16  512 or 576 bf16
#pragma once

enum RecordFormat { kFormatV4 = 0, kFormatV41 = 1, kFormatV41Fp4 = 2, kFormatDsa = 3, kFormatBf16 = 4, kFormatMlaBf16 = 5 };

template <int Format> struct RecordTraits;
template <> struct RecordTraits<kFormatV4> { static constexpr int d_qk = 512, raw_bytes = 584, codes = 448, group = 64; };
template <> struct RecordTraits<kFormatV41> { static constexpr int d_qk = 512, raw_bytes = 528, codes = 512, group = 32; };
template <> struct RecordTraits<kFormatV41Fp4> { static constexpr int d_qk = 512, raw_bytes = 288, codes = 512, group = 16; };
template <> struct RecordTraits<kFormatDsa> { static constexpr int d_qk = 576, raw_bytes = 656, codes = 512, group = 128; };
template <> struct RecordTraits<kFormatBf16> { static constexpr int d_qk = 512, raw_bytes = 1024, codes = 0, group = 1; };
template <> struct RecordTraits<kFormatMlaBf16> { static constexpr int d_qk = 576, raw_bytes = 1152, codes = 0, group = 1; };

constexpr int kValueDims = 512;  // d_v of every record here

// The widest row of a set of formats, given as a bit mask: what one row of the raw ring must hold.
constexpr int raw_bytes_of(int formats) {
  const int sizes[] = {RecordTraits<0>::raw_bytes, RecordTraits<1>::raw_bytes, RecordTraits<2>::raw_bytes,
                       RecordTraits<3>::raw_bytes, RecordTraits<4>::raw_bytes, RecordTraits<5>::raw_bytes};
  int most = 0;
  for (int format = 0; format < 6; ++format)
    if ((formats >> format & 1) && sizes[format] > most) most = sizes[format];
  return (most + 15) / 16 * 16;
}
constexpr int d_qk_of(int formats) { return formats & (1 << kFormatDsa | 1 << kFormatMlaBf16) ? 576 : 512; }
