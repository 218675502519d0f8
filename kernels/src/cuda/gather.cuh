// Rows from pages to the raw ring, and from the raw ring to bf16 keys.
#pragma once
#include "dequant.cuh"
#include "shared.cuh"
#include "slots.cuh"

// The first Tokens threads look one row up each.
template <int Tokens, class Shared>
KVB_DEVICE void locate_rows(Shared& shared, const DecodeArguments& call, const TileSource& source, int query,
                            int slot_stage) {
  const CacheArguments& cache = call.cache[source.cache];
  const int token = static_cast<int>(thread_index());
  if (token >= Tokens) return;
  RowAddress address = {nullptr, nullptr};
  if (token < source.count) {
    const long long row = table_row(call, cache, query, cache.slots_per_sequence);
    const long long position = row * cache.slots_stride + source.first + token;
    address = row_address(cache, load_index(cache.slots, position, cache.slots_are_64_bit));
  }
  shared.data[slot_stage * Tokens + token] = address.data;
  shared.scales[slot_stage * Tokens + token] = address.scales;
}

// Issues the copies of one run of every row; a dead row's bytes become zeros, its source is the cache's base, unread.
template <int Piece>
KVB_DEVICE void copy_run(unsigned char* raw, int raw_pitch, int tokens, const unsigned char* const* rows, int bytes,
                         const unsigned char* safe) {
  const int pieces = bytes / Piece;
  for (int index = static_cast<int>(thread_index()); index < tokens * pieces; index += kThreads) {
    const int token = index / pieces, offset = index % pieces * Piece;
    const unsigned char* row = rows[token];
    copy_async<Piece>(raw + token * raw_pitch + offset, row ? row + offset : safe, row != nullptr);
  }
}

template <class Layout, int Tokens, class Shared>
KVB_DEVICE void copy_rows(Shared& shared, const CacheArguments& cache, int stage, int slot_stage) {
  unsigned char* raw = shared.raw + stage * Tokens * Layout::raw_pitch;
  const unsigned char* const* data = shared.data + slot_stage * Tokens;
  const unsigned char* const* scales = shared.scales + slot_stage * Tokens;
  if (cache.piece_bytes == 16)
    copy_run<16>(raw, Layout::raw_pitch, Tokens, data, cache.data_bytes, cache.base);
  else
    copy_run<8>(raw, Layout::raw_pitch, Tokens, data, cache.data_bytes, cache.base);
  if (cache.scales_bytes)
    copy_run<8>(raw + cache.data_bytes, Layout::raw_pitch, Tokens, scales, cache.scales_bytes, cache.base);
}

// 16 values of one row to shared bf16.
KVB_DEVICE void store_values(uint16_t* target, const uint32_t (&pairs)[8]) {
  store_vector(target, uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
  store_vector(target + 8, uint4{pairs[4], pairs[5], pairs[6], pairs[7]});
}

// Values [16 * chunk, 16 * chunk + 16) of one raw row.
template <int Format> KVB_DEVICE void decode_chunk(const unsigned char* raw, int chunk, uint32_t (&out)[8]) {
  using Traits = RecordTraits<Format>;
  const int value = chunk * 16;
  if (value >= Traits::codes) {  // bf16, behind the codes; dsa has its scales in between
    constexpr int code_bytes = Format == kFormatDsa ? 528 : Traits::codes;
    const uint4 low = load_vector(raw + code_bytes + (value - Traits::codes) * 2);
    const uint4 high = load_vector(raw + code_bytes + (value - Traits::codes) * 2 + 16);
    out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
    out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
  } else if constexpr (Format == kFormatV4) {
    decode_e4m3_ue8m0(load_vector(raw + value), raw[576 + value / Traits::group], out);
  } else if constexpr (Format == kFormatV41) {
    decode_e4m3_ue8m0(load_vector(raw + value), raw[512 + value / Traits::group], out);
  } else if constexpr (Format == kFormatV41Fp4) {
    decode_e2m1_e4m3(*reinterpret_cast<const uint2*>(raw + value / 2), raw[256 + value / Traits::group], out);
  } else if constexpr (Format == kFormatDsa) {
    decode_e4m3_fp32(load_vector(raw + value), reinterpret_cast<const float*>(raw + 512)[value / Traits::group], out);
  }
}

template <int Format, class Layout, int Tokens, class Shared>
KVB_DEVICE void decode_tile_as(Shared& shared, int stage, int slot_stage) {
  constexpr int chunks = RecordTraits<Format>::d_qk / 16;
  const unsigned char* raw = shared.raw + stage * Tokens * Layout::raw_pitch;
  for (int index = static_cast<int>(thread_index()); index < Tokens * chunks; index += kThreads) {
    const int token = index / chunks, chunk = index % chunks;
    uint32_t values[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (shared.data[slot_stage * Tokens + token]) decode_chunk<Format>(raw + token * Layout::raw_pitch, chunk, values);
    store_values(shared.keys + token * Layout::key_pitch + chunk * 16, values);
  }
}

// The format is the same for a whole tile; only the formats the kernel was built for are compiled.
template <int Formats, class Layout, int Tokens, class Shared>
KVB_DEVICE void decode_tile(Shared& shared, int format, int stage, int slot_stage) {
  if constexpr (Formats >> kFormatV4 & 1)
    if (format == kFormatV4) decode_tile_as<kFormatV4, Layout, Tokens>(shared, stage, slot_stage);
  if constexpr (Formats >> kFormatV41 & 1)
    if (format == kFormatV41) decode_tile_as<kFormatV41, Layout, Tokens>(shared, stage, slot_stage);
  if constexpr (Formats >> kFormatV41Fp4 & 1)
    if (format == kFormatV41Fp4) decode_tile_as<kFormatV41Fp4, Layout, Tokens>(shared, stage, slot_stage);
  if constexpr (Formats >> kFormatDsa & 1)
    if (format == kFormatDsa) decode_tile_as<kFormatDsa, Layout, Tokens>(shared, stage, slot_stage);
  if constexpr (Formats >> kFormatBf16 & 1)
    if (format == kFormatBf16) decode_tile_as<kFormatBf16, Layout, Tokens>(shared, stage, slot_stage);
  if constexpr (Formats >> kFormatMlaBf16 & 1)
    if (format == kFormatMlaBf16) decode_tile_as<kFormatMlaBf16, Layout, Tokens>(shared, stage, slot_stage);
}
