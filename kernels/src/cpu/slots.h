// Walks the live slots of one query over its caches, in order, and turns each into addresses.
//
//   slots: |7|-1|2^32+5|9|3|...garbage past the length|   ->   rows: 7, 9, 3
//
// Everything is compared in 64 bits before it is used; a dead slot is never turned into an address.
#pragma once
#include "item.h"

namespace {

struct Row {
  const uint8_t* codes;
  const uint8_t* scales;
  const kvb_record* record;
};

inline int64_t read_index(const void* base, int32_t bits, int64_t at) {
  return bits == 32 ? static_cast<const int32_t*>(base)[at] : static_cast<const int64_t*>(base)[at];
}

struct Walk {
  const kvb_call* call;
  int64_t query;
  int64_t skip, left;  // live slots still to pass over, and to deliver
  int32_t cache;
  int64_t position, length, row;
  uint64_t capacity, reciprocal;

  void open() {  // prepares call->cache[cache]
    const kvb_cache& c = call->cache[cache];
    position = length = row = 0;
    int64_t r = c.row_of_query ? read_index(c.row_of_query, c.row_of_query_bits, query) : query;
    if (r < 0 || r >= c.rows) return;
    row = (c.mapped == 2 ? query : r) * c.slots_stride;
    length = c.width;
    if (c.lengths) {
      int64_t n = read_index(c.lengths, c.lengths_bits, c.mapped == 1 ? query : r);
      length = n < 0 ? 0 : n < length ? n : length;
    }
    capacity = static_cast<uint64_t>(c.num_pages) * static_cast<uint64_t>(c.page_rows);
    // floor(2^64 / page_rows) + 1 divides every slot exactly while slot * page_rows < 2^64.
    reciprocal = c.page_rows > 1 && capacity <= ~0ull / static_cast<uint64_t>(c.page_rows)
                     ? ~0ull / static_cast<uint64_t>(c.page_rows) + 1
                     : 0;
  }

  template <bool wide>
  int32_t fill(Row* rows, int32_t count, int32_t room) {
    const kvb_cache& c = call->cache[cache];
    const kvb_record* record = &c.record;
    const int32_t* narrow = static_cast<const int32_t*>(c.slots) + (wide ? 0 : row);
    const int64_t* broad = static_cast<const int64_t*>(c.slots) + (wide ? row : 0);
    const uint64_t page_rows = static_cast<uint64_t>(c.page_rows);
    for (; position < length && count < room; position++) {
      const uint64_t slot = static_cast<uint64_t>(wide ? broad[position] : static_cast<int64_t>(narrow[position]));
      if (slot >= capacity) continue;  // a negative slot is a huge one
      if (skip > 0) {
        skip--;
        continue;
      }
      const uint64_t page = page_rows == 1 ? slot
                            : reciprocal
                                ? static_cast<uint64_t>((static_cast<unsigned __int128>(slot) * reciprocal) >> 64)
                                : slot / page_rows;
      const int64_t in_page = static_cast<int64_t>(slot - page * page_rows);
      const uint8_t* start = static_cast<const uint8_t*>(c.base) + static_cast<int64_t>(page) * c.page_stride_bytes;
      if (rows) {
        rows[count].codes = start + in_page * record->row_stride_bytes;
        rows[count].scales = start + record->scales_offset_bytes + in_page * record->scales_stride_bytes;
        rows[count].record = record;
      }
      count++;
    }
    return count;
  }

  // Delivers up to `room` rows; fewer only at the end. With rows null it only counts.
  int32_t next(Row* rows, int32_t room) {
    if (room > left) room = static_cast<int32_t>(left);
    int32_t count = 0;
    while (cache < call->caches) {
      count = call->cache[cache].slots_bits == 64 ? fill<true>(rows, count, room) : fill<false>(rows, count, room);
      if (count == room) break;
      if (++cache < call->caches) open();
    }
    left -= count;
    return count;
  }
};

inline Walk walk_query(const kvb_call* call, const Item* item) {
  Walk walk = {call, item->query, 0, INT64_MAX, 0, 0, 0, 0, 0, 0};
  walk.open();
  if (item->splits > 1) {
    Walk counter = walk;
    int64_t live = 0;
    for (int32_t n; (n = counter.next(nullptr, 1 << 30)) > 0;) live += n;
    // Shares in steps of 8 rows so that pairs and tiles stay whole.
    const int64_t steps = (live + 7) / 8;
    const int64_t begin = steps * item->split / item->splits * 8, end = steps * (item->split + 1) / item->splits * 8;
    walk.skip = begin;
    walk.left = (end < live ? end : live) - begin;
    if (walk.left < 0) walk.left = 0;
  }
  return walk;
}

// The first rows of another item, or none.
inline int32_t first_rows_of(const kvb_call* call, const Item* item, Row* rows, int32_t room) {
  if (!item) return 0;
  Walk walk = walk_query(call, item);
  return walk.next(rows, room);
}

inline int32_t row_bytes(const kvb_record& r) {
  return (r.code == KVB_CODE_E2M1 ? r.values / 2 : r.values) + 2 * r.tail_values;
}

// From byte `from` on; the lines between those named here follow by themselves. The scales always.
inline void fetch_row(const Row& row, int32_t from) {
  for (int32_t b = from; b < row_bytes(*row.record); b += 256) __builtin_prefetch(row.codes + b, 0, 2);
  if (row.record->scale != KVB_SCALE_NONE) __builtin_prefetch(row.scales, 0, 2);
}

struct Ahead {  // rows of the next block or item, fetched while this block is multiplied
  const Row* rows;
  int32_t count, at;

  void fetch(int32_t some) {
    for (; some > 0 && at < count; some--, at++) fetch_row(rows[at], 0);
  }
};

}  // namespace
