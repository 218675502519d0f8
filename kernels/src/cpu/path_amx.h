// The AMX path. A thread's items become one stream of chunks of 32 rows, and neighbouring stages of it run together:
//
//   chunk c + 2    its rows are fetched from memory
//   chunk c + 1    is decoded, between the tile instructions of
//   chunk c        scores  = keys . queries
//   block before   sums    = sums * correction + weights . values, a share of it with every chunk of this block
//
// A block is up to 192 live rows of one item. When all its scores are there they become weights; its values wait for
// the next block. Where an item's successor is known the stream runs on into it. Which rows form a block depends on
// the item alone, so a query's bits do not depend on its neighbours.
//
//   queries [heads / 16][d_qk / 2][16][2]          scores [heads / 16][BLOCK_ROWS][16] fp32
//   weights [heads / 16][BLOCK_ROWS / 32] tiles    sums   [d_v / 16][heads][16] fp32
#pragma once
#include "products_amx.h"

namespace {

constexpr int32_t BLOCK_CHUNKS = BLOCK_ROWS / CHUNK_ROWS, COLUMNS = KVB_DV / 32;

// A block whose weights are ready and whose values are multiplied a few columns at a time.
struct Pending {
  Item item;
  State state;
  const bf16* values;
  int32_t chunks, columns_left;
  bool first;   // of its item: there are no sums yet
  bool writes;  // the last: what comes out are outputs
};

struct Stream {
  const kvb_call* call;
  bf16 *queries, *keys[2], *values[2], *weights;
  float *scores, *corrections, *factors, *own_state;
  Chunk chunks[3];  // chunks[at] is scored next
  int32_t at, at_keys, at_values;
  bool running;  // the chunks continue where the item before ended
  bool decoded;  // chunks[at] is
  Walk walk;
  const Item* source;  // whose rows the walk delivers
  Pending pending;     // with columns_left 0: none
  Fetches fetches;
  const Item* fetching;  // whose queries are fetched

  Chunk& chunk(int32_t ahead) { return chunks[(at + ahead) % 3]; }
};

int64_t scratch_bytes(const kvb_call* call, int32_t) {
  const int64_t heads = (call->heads + 15) / 16 * 16, depth = call->d_qk;
  return static_cast<int64_t>(sizeof(Stream) + 63) / 64 * 64 +
         2 * (heads * depth + 2 * CHUNK_ROWS * depth + 2 * KVB_DV / 16 * SLAB + BLOCK_ROWS * heads) +
         4 * (BLOCK_ROWS * heads + 2 * heads + partial_floats(heads));
}

// Every item of a call finds the same buffers at the same places.
inline Stream& stream_at(const kvb_call* call, void* scratch) {
  Stream& s = *static_cast<Stream*>(scratch);
  const int64_t heads = (call->heads + 15) / 16 * 16, depth = call->d_qk;
  bf16* at = reinterpret_cast<bf16*>(static_cast<char*>(scratch) + (sizeof(Stream) + 63) / 64 * 64);
  const auto take = [&at](int64_t values) {
    at += values;
    return at - values;
  };
  s.call = call;
  s.queries = take(heads * depth);
  for (bf16*& keys : s.keys) keys = take(CHUNK_ROWS * depth);
  for (bf16*& values : s.values) values = take(KVB_DV / 16 * SLAB);
  s.weights = take(BLOCK_ROWS * heads);
  s.scores = reinterpret_cast<float*>(at);
  s.corrections = s.scores + BLOCK_ROWS * heads;
  s.factors = s.corrections + heads;
  s.own_state = s.factors + heads;
  return s;
}

inline void feed(Stream& s, const Item* item, Chunk& chunk) {
  chunk.count = s.walk.next(chunk.rows, CHUNK_ROWS);
  if (chunk.count == 0 && s.source == item && item->next) {
    s.source = item->next;
    s.walk = walk_query(s.call, s.source);
    chunk.count = s.walk.next(chunk.rows, CHUNK_ROWS);
  }
  chunk.item = s.source;
}

inline void start(Stream& s, const Item* item) {
  s.source = item;
  s.walk = walk_query(s.call, item);
  s.at = s.at_keys = 0;
  s.decoded = false;
  feed(s, item, s.chunk(0));
  feed(s, item, s.chunk(1));
  Ahead rows = {s.chunk(0).rows, s.chunk(0).count, 0};
  rows.fetch(CHUNK_ROWS);
}

template <int units>
inline void score_chunk(Stream& s, int32_t padded, int32_t row, Decoding& d) {
  const int64_t steps = s.call->d_qk / 32, column = steps * TILE;
  Unit u;
  for (int32_t h = 0; h < padded; h += 32) {
    const bf16 *k = s.keys[s.at_keys], *q = s.queries + h * steps * 32;
    const bool pair = h + 32 <= padded;
    clear_sums();
    for (int64_t i = 0; i < steps; i++, k += TILE, q += TILE) {
      if (pair) multiply_square<units>(k, k + column, q, q + column, d, u);
      else multiply_column<units>(k, k + column, q, d, u);
    }
    store_sums(s.scores + (static_cast<int64_t>(h) * BLOCK_ROWS + row * 16), 256, BLOCK_ROWS * 16, true, pair);
  }
}

// Final sums of 16 or 32 heads and 32 values on their way from tiles to the output.
struct alignas(64) Leaving {
  float sums[2][2][16][16];  // heads / 16, values / 16
  int32_t head, heads, column;
};

inline void write_outputs(const Stream& s, const Leaving& from) {
  for (int32_t i = 0; i < from.heads; i++) {
    const vfloat factor = splat(s.factors[from.head + i]);
    store_values(s.call, s.pending.item.query, s.pending.item.head0 + from.head + i, 32 * from.column,
                 load(from.sums[i / 16][0][i % 16]) * factor, load(from.sums[i / 16][1][i % 16]) * factor);
  }
}

template <int units>
inline void value_columns(Stream& s, int32_t columns, Decoding& d) {
  Pending& p = s.pending;
  const int64_t padded = p.item.padded, across = padded * 16;
  Unit u;
  Leaving leaving[2];  // outputs are written one group later: tile stores take long to become readable
  int32_t groups = 0;
  for (; columns > 0 && p.columns_left > 0; columns--, p.columns_left--) {
    const int32_t column = COLUMNS - p.columns_left;
    for (int32_t h = 0; h < padded; h += 32) {
      const bf16 *w = s.weights + h * BLOCK_ROWS, *v = p.values + 2 * column * SLAB;
      float* sums = p.state.sums + 2 * column * across + h * 16;
      const bool pair = h + 32 <= padded;
      if (p.first) clear_sums();
      else load_sums(sums, 256, across, pair, true);
      for (int32_t i = 0; i < p.chunks; i++, w += TILE, v += TILE) {
        if (pair) multiply_square<units>(w, w + BLOCK_CHUNKS * TILE, v, v + SLAB, d, u);
        else multiply_row<units>(w, v, v + SLAB, d, u);
      }
      if (!p.writes) {
        store_sums(sums, 256, across, pair, true);
        continue;
      }
      Leaving& now = leaving[groups & 1];
      const int32_t most = pair ? 32 : 16, left = p.item.heads - h;
      store_sums(now.sums[0][0][0], 512, 256, pair, true);
      now.head = h;
      now.heads = left < most ? left : most;
      now.column = column;
      if (groups++ > 0) write_outputs(s, leaving[groups & 1]);
    }
  }
  stores_are_done();
  if (groups > 0) write_outputs(s, leaving[~groups & 1]);
}

// Calls `products` with as many units between the products as spread the decoding over `groups` groups of tile
// instructions.
template <class Products>
inline void spread(Decoding& d, int32_t groups, const Products& products) {
  end_pair_in_hand(d);
  const int32_t units = groups > 0 ? (d.left() + groups - 1) / groups : 0;
  if (units == 0) products(Is<0>());
  else if (units == 1) products(Is<1>());
  else if (units == 2) products(Is<2>());
  else products(Is<4>());
}

// Scores of 16 heads become weights, tile by tile: pairs of rows with heads in lanes turn into heads with 32 rows.
inline void soften(Stream& s, const State& state, int32_t padded, int32_t rows, bool first) {
  const float scale2 = s.call->scale * LOG2_E;
  for (int32_t h = 0; h < padded; h += 16) {
    const float* scores = s.scores + static_cast<int64_t>(h) * BLOCK_ROWS;
    bf16* tile = s.weights + static_cast<int64_t>(h) * BLOCK_ROWS;
    const auto score = [=](int32_t n) { return n < rows ? load(scores + n * 16) * scale2 : splat(-INFINITY); };
    Softmax softmax = begin_weights(state, h, rows, first, score);
    for (int32_t n = 0; n < rows; n += CHUNK_ROWS, tile += TILE) {
      __m512i lines[16];
      for (int32_t i = 0; i < 16; i++) lines[i] = weigh(softmax, score(n + 2 * i), score(n + 2 * i + 1));
      transpose(lines);
      for (int32_t i = 0; i < 16; i++) _mm512_store_si512(tile + 32 * i, lines[i]);
    }
    end_weights(state, h, softmax, s.corrections);
  }
}

// Tiles cannot be scaled: heads whose maximum grew have their sums shrunk in memory.
inline void shrink_sums(const Stream& s, const State& state, int32_t heads, int64_t padded) {
  for (int32_t h = 0; h < heads; h++) {
    if (s.corrections[h] == 1.0f) continue;
    const vfloat factor = splat(s.corrections[h]);
    for (int64_t d = 0; d < KVB_DV / 16; d++) {
      float* at = state.sums + (d * padded + h) * 16;
      store(at, load(at) * factor);
    }
  }
}

inline int32_t value_groups(const Pending& p, int32_t columns) {
  return columns * ((p.item.padded + 31) / 32) * p.chunks;
}

// Multiplies the values that wait, at most `columns` of them.
inline void settle(Stream& s, int32_t columns, int32_t more_groups, Decoding& d) {
  Pending& p = s.pending;
  if (p.columns_left == 0) return;
  if (columns > p.columns_left) columns = p.columns_left;
  spread(d, value_groups(p, columns) + more_groups, [&](auto units) { value_columns<units.value>(s, columns, d); });
}

// An estimate, for sharing out work: dead slots are not known yet.
inline int32_t chunks_left(Stream& s, const Item* item) {
  int64_t positions = 0;
  if (s.source == item) {
    positions = s.walk.length - s.walk.position;
    for (int32_t c = s.walk.cache + 1; c < s.call->caches; c++) positions += s.call->cache[c].width;
    if (positions > s.walk.left) positions = s.walk.left;
  }
  for (int32_t i = 0; i < 3; i++)
    if (s.chunk(i).item == item) positions += s.chunk(i).count;
  return positions < BLOCK_ROWS ? static_cast<int32_t>((positions + CHUNK_ROWS - 1) / CHUNK_ROWS) : BLOCK_CHUNKS;
}

// Towards the end of an item: the next one's queries.
inline void fetch_queries(Stream& s, const Item* item) {
  const Item* next = item->next;
  if (s.fetching == next) return;
  s.fetching = next;
  const kvb_call* call = s.call;
  const int64_t at = next->query * call->q_query_stride + next->head0 * call->q_head_stride;
  s.fetches.queries = {static_cast<const char*>(call->q) + 2 * at, 2 * call->q_head_stride, next->heads,
                       2 * call->d_qk, next->heads > 64 ? 2 : 1};
}

// Scores the next block of the item and leaves it pending.
inline void run_block(Stream& s, const Item* item, const State& state, bool first) {
  bf16* values = s.values[s.at_values];
  const int32_t score_groups = (item->padded + 31) / 32 * (s.call->d_qk / 32);
  int32_t rows = 0, chunks = 0;
  bool more;
  Decoding d;
  do {
    Chunk &now = s.chunk(0), &next = s.chunk(1), &after = s.chunk(2);
    feed(s, item, after);
    if (!s.decoded) {
      begin_decoding(d, now, s.keys[s.at_keys], values + chunks * TILE, s.call->d_qk, nullptr);
      decode_rest(d);
    }
    const bool ours = next.count > 0 && next.item == item;
    more = ours && chunks + 1 < BLOCK_CHUNKS;
    begin_decoding(d, next, s.keys[!s.at_keys], more ? values + (chunks + 1) * TILE : s.values[!s.at_values],
                   s.call->d_qk, &s.fetches);
    s.fetches.rows = {after.rows, after.count, 0};
    const int32_t left = chunks_left(s, item), most = BLOCK_CHUNKS - chunks;
    if (item->next && left < BLOCK_CHUNKS) fetch_queries(s, item);
    if (more) {
      const int32_t parts = left < most ? left : most;
      settle(s, (s.pending.columns_left + parts - 1) / parts, score_groups, d);
    } else {  // the next block's values will lie where the pending ones do
      Decoding none = {};
      settle(s, COLUMNS, 0, none);
    }
    stores_are_done();
    spread(d, score_groups, [&](auto units) { score_chunk<units.value>(s, item->padded, rows, d); });
    decode_rest(d);
    s.fetches.rows.fetch(CHUNK_ROWS);
    stores_are_done();
    rows += now.count;
    chunks++;
    s.decoded = next.count > 0;
    s.at = (s.at + 1) % 3;
    s.at_keys = !s.at_keys;
  } while (more);
  if (first) reset(state, item->padded);
  soften(s, state, item->padded, rows, first);
  if (!first) shrink_sums(s, state, item->heads, item->padded);
  const Chunk& next = s.chunk(0);
  const bool last = next.count == 0 || next.item != item;
  s.pending = {*item, state, values, chunks, COLUMNS, first, last && !item->partial};
  for (int32_t h = 0; s.pending.writes && h < item->padded; h += 16)
    finish_heads(s.call, item, state, h, s.factors + h);
  s.at_values = !s.at_values;
}

void run_item(const kvb_call* call, const Item* item, void* scratch) {
  Stream& s = stream_at(call, scratch);
  Shapes shapes;
  products_begin(shapes);
  if (!item->resumed) {
    s.at_values = 0;
    s.running = false;
    s.pending.columns_left = 0;
    s.fetches = {};
    s.fetching = nullptr;
  }
  if (!s.running) start(s, item);
  s.running = true;
  const State state = state_at(item->partial ? item->partial : s.own_state, item->padded);
  Decoding none = {};
  if (s.chunk(0).count > 0 && s.chunk(0).item == item) {
    pack_queries(call, item, s.queries);
    bool first = true;
    for (; s.chunk(0).count > 0 && s.chunk(0).item == item; first = false) run_block(s, item, state, first);
  } else {  // no live slot
    settle(s, COLUMNS, 0, none);
    reset(state, item->padded);
    if (!item->partial) finish(call, item, state, 0, item->heads);
  }
  if (!item->next) settle(s, COLUMNS, 0, none);
  if (s.chunk(0).count == 0) s.running = false;
  products_end(shapes);
}

}  // namespace
