// Brings rows into keys and values two at a time. The common records, e4m3 with power-of-two scales, are decoded,
// stored and interleaved in one pass over registers; every other pair goes row by row through memory. With few heads
// the scores of a pair are summed at once, so that its keys never leave the first cache.
#pragma once

namespace {

// The next 32 values of both rows: to keys and to values.
inline void place(__m512i a, __m512i b, int32_t i, bf16* keys, bf16* values) {
  constexpr int64_t slab = BLOCK_ROWS / 2 * 32;
  _mm512_store_si512(keys + i * KEY_CHUNK, a);
  _mm512_store_si512(keys + i * KEY_CHUNK + 32, b);
  interleave(a, b, values + 2 * i * slab, slab);
}

// False when a scale or code needs the slow way; then what was written is to be written again.
template <int per_64>
inline bool decode_pair(const Row& a, const Row& b, bf16* keys, bf16* values) {
  const kvb_record& r = *a.record;
  bool good = true;
  for (int32_t i = 0; i < r.values / 64; i++) {
    const uint8_t *s = a.scales + per_64 * i, *t = b.scales + per_64 * i;
    good = good & plain_scale(s[0]) & plain_scale(t[0]) & plain_scale(s[per_64 - 1]) & plain_scale(t[per_64 - 1]);
    __m512i x0, x1, y0, y1;
    good = scale_codes(a.codes + 64 * i, s[0], s[per_64 - 1], x0, x1) &
           scale_codes(b.codes + 64 * i, t[0], t[per_64 - 1], y0, y1) & good;
    place(x0, y0, 2 * i, keys, values);
    place(x1, y1, 2 * i + 1, keys, values);
  }
  for (int32_t i = 0; i < r.tail_values / 32; i++) {
    const int32_t at = r.tail_offset_bytes + 64 * i;
    place(_mm512_loadu_si512(a.codes + at), _mm512_loadu_si512(b.codes + at), r.values / 32 + i, keys, values);
  }
  return good;
}

inline bool decode_common_pair(const Row& a, const Row& b, bf16* keys, bf16* values) {
  const kvb_record& r = *a.record;
  if (a.record != b.record || r.scale != KVB_SCALE_UE8M0 || r.values + r.tail_values != KVB_DV) return false;
  return r.group == 32 ? decode_pair<2>(a, b, keys, values) : decode_pair<1>(a, b, keys, values);
}

// Fills rows 0..padded_rows-1 of a block: `count` live rows, then zeros.
inline void load_block(const Buffers& b, const Row* rows, int32_t count, int32_t padded_rows, int32_t depth,
                       int64_t padded) {
  for (int32_t n = 0; n < padded_rows; n += 2) {
    bf16 *keys = b.few ? b.keys : b.keys + n * 32, *values = b.values + n / 2 * 32;
    if (n + 1 >= count || !decode_common_pair(rows[n], rows[n + 1], keys, values)) {
      decode_pair_slowly(rows + n, count - n, depth, keys, 32, KEY_CHUNK);
      interleave_rows(keys, 32, KEY_CHUNK, values, BLOCK_ROWS / 2 * 32);
    }
    if (b.few) score_few(keys, b.queries, depth, b.scores + n * padded);
  }
}

}  // namespace
