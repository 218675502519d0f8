// From a position in a query's slots to the address of a row. Dead slots give null and are never dereferenced.
//
//   tiles of a query:  [cache 0: ceil(length / tokens)] [cache 1: ...] [cache 2: ...]     a tile never spans two caches
//   split s of n takes tiles [s * total / n, (s + 1) * total / n)
#pragma once
#include "arguments.cuh"
#include "prim.cuh"

KVB_DEVICE long long load_index(const void* indices, long long position, int is_64_bit) {
  return is_64_bit ? static_cast<const long long*>(indices)[position] : static_cast<const int*>(indices)[position];
}

// The row of a table that is per query or per sequence; -1 for a query of no known sequence.
KVB_DEVICE long long table_row(const DecodeArguments& call, const CacheArguments& cache, int query, int per_sequence) {
  if (!per_sequence) return query;
  const long long sequence = load_index(call.sequence_of_query, query, call.sequences_are_64_bit);
  return sequence >= 0 && sequence < cache.sequences ? sequence : -1;
}

// Positions that may be live: min(length, width), never negative.
KVB_DEVICE int live_positions(const DecodeArguments& call, const CacheArguments& cache, int query) {
  if (table_row(call, cache, query, cache.slots_per_sequence) < 0) return 0;
  if (!cache.lengths) return cache.width;
  const long long row = table_row(call, cache, query, cache.lengths_per_sequence);
  if (row < 0) return 0;
  const long long length = load_index(cache.lengths, row * cache.lengths_stride, cache.lengths_are_64_bit);
  return length < 0 ? 0 : length < cache.width ? static_cast<int>(length) : cache.width;
}

struct RowAddress {
  const unsigned char* data;
  const unsigned char* scales;
};

// The slot is compared in 64 bits before any narrowing: 2^32 + 5 is dead.
KVB_DEVICE RowAddress row_address(const CacheArguments& cache, long long slot) {
  if (slot < 0 || slot >= cache.capacity) return {nullptr, nullptr};
  long long page;
  int row;
  if (slot <= 0xffffffffll) {
    const uint32_t narrow = static_cast<uint32_t>(slot), rows = static_cast<uint32_t>(cache.page_rows);
    page = narrow / rows;
    row = static_cast<int>(narrow % rows);
  } else {
    page = slot / cache.page_rows;
    row = static_cast<int>(slot % cache.page_rows);
  }
  const unsigned char* start = cache.base + page * cache.page_stride_bytes;
  return {start + static_cast<long long>(row) * cache.row_stride_bytes,
          start + cache.scales_offset_bytes + static_cast<long long>(row) * cache.scales_stride_bytes};
}

// Which cache, and which tile of it, a query's tile number means.
struct TileSource {
  int cache;
  int first;  // position in the cache's slots
  int count;  // positions that may be live
};

template <int Tokens> KVB_DEVICE TileSource tile_source(int first, int second, int third, int tile) {
  const int first_tiles = (first + Tokens - 1) / Tokens, second_tiles = (second + Tokens - 1) / Tokens;
  int cache = 0, positions = first;
  if (tile >= first_tiles) {
    tile -= first_tiles;
    cache = 1, positions = second;
    if (tile >= second_tiles) {
      tile -= second_tiles;
      cache = 2, positions = third;
    }
  }
  const int start = tile * Tokens, left = positions - start;
  return {cache, start, left < Tokens ? left : Tokens};
}
