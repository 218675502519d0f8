// The AMX path. A thread's items become one stream of chunks of 32 rows, and neighbouring stages of it run together:
//
//   chunk c + 2    its rows are fetched from memory
//   chunk c + 1    is decoded, between the tile instructions of
//   chunk c        scores  = keys . queries
//   block before   sums    = sums * correction + weights . values, a share of it with the first chunks of this block
//
// A block is up to 192 live rows of one item. When all its scores are there they become weights; its values wait for
// the next block. Where an item's successor is known the stream runs on into it. Which rows form a block depends on
// the item alone, so a query's bits do not depend on its neighbours.
//
//   queries [heads / 16][d_qk / 2][16][2]          scores [heads / 16][BLOCK_ROWS][16] fp32
//   weights [heads / 16][BLOCK_ROWS / 32] tiles    sums   [d_v / 16][heads][16] fp32
//
// What costs most is lines that have to enter the first cache, above all those that are written. So a call of up to 16
// heads does without values of their own (products_amx.h). There the scores come in two parts, and the weights of 32
// rows in four tiles or, with up to 8 heads, two:
//
//   weights [even rows, odd rows][w 0 w 0 ..., 0 w 0 w ...][16 or 8 heads][32]
#pragma once
#include "products_amx.h"

namespace {

constexpr int32_t BLOCK_CHUNKS = BLOCK_ROWS / CHUNK_ROWS, COLUMNS = KVB_DV / 32;
constexpr int32_t COLUMNS_AT_ONCE = 4;  // at least: with each call the weights enter the first cache again

// A block whose weights are ready and whose values are multiplied a few columns, of 32 values, at a time.
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
  bf16 *queries, *keys[2], *blocks[2], *weights;
  float *scores, *corrections, *factors, *own_state;
  Chunk chunks[3];  // chunks[at] is scored next
  int32_t at, at_keys, at_block;
  bool running;  // the chunks continue where the item before ended
  bool decoded;  // chunks[at] is
  Walk walk;
  const Item* source;  // whose rows the walk delivers
  Pending pending;     // with columns_left 0: none
  Fetches fetches;
  const Item* fetching;  // whose queries are fetched

  Chunk& chunk(int32_t ahead) { return chunks[(at + ahead) % 3]; }
};

// How many values the buffers of a call hold.
struct Sizes {
  int64_t queries, keys, block, weights, scores, heads;

  explicit Sizes(const kvb_call* call) {
    const int64_t rows_of_keys = BLOCK_ROWS * call->d_qk, values = KVB_DV / 16 * SLAB;
    heads = (call->heads + 15) / 16 * 16;
    queries = heads * call->d_qk;
    keys = CHUNK_ROWS * call->d_qk;
    block = rows_of_keys > values ? rows_of_keys : values;
    weights = BLOCK_ROWS * (heads > 64 ? heads : 64);
    scores = BLOCK_ROWS * (heads > 32 ? heads : 32);
  }
};

int64_t scratch_bytes(const kvb_call* call, int32_t) {
  const Sizes of(call);
  return static_cast<int64_t>(sizeof(Stream) + 63) / 64 * 64 +
         2 * (of.queries + 2 * of.keys + 2 * of.block + of.weights) +
         4 * (of.scores + 2 * of.heads + partial_floats(of.heads));
}

// Every item of a call finds the same buffers at the same places.
inline Stream& stream_at(const kvb_call* call, void* scratch) {
  Stream& s = *static_cast<Stream*>(scratch);
  const Sizes of(call);
  bf16* at = reinterpret_cast<bf16*>(static_cast<char*>(scratch) + (sizeof(Stream) + 63) / 64 * 64);
  const auto take = [&at](int64_t values) {
    at += values;
    return at - values;
  };
  s.call = call;
  s.queries = take(of.queries);
  for (bf16*& keys : s.keys) keys = take(of.keys);
  for (bf16*& block : s.blocks) block = take(of.block);
  s.weights = take(of.weights);
  s.scores = reinterpret_cast<float*>(at);
  s.corrections = s.scores + of.scores;
  s.factors = s.corrections + of.heads;
  s.own_state = s.factors + of.heads;
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

// What is decoded with each of `groups` groups of tile instructions, so that all is done at their end.
inline uint32_t share(const Decoding& d, int32_t groups) {
  return static_cast<uint32_t>((d.steps() + groups - 1) / groups);
}

inline int32_t score_groups(const Stream& s, const Item* item) {
  const int32_t steps = s.call->d_qk / 32;
  return by_parity(s.call) ? steps / 2 : (item->padded + 31) / 32 * steps;
}

// The scores of a block's chunk `index`: first those of its 16 even rows, then those of the odd ones.
template <class Filler>
KVB_INLINE void score_chunk(Stream& s, int32_t padded, int32_t index, const bf16* keys, Filler& filler,
                            uint32_t steps) {
  const int64_t size = s.call->d_qk / 32 * TILE;
  const bf16* odd = keys + size;
  for (int32_t h = 0; h < padded; h += 32) {
    const bf16* q = s.queries + h / 16 * size;
    float* scores = s.scores + (h * BLOCK_ROWS + index * CHUNK_ROWS * 16);
    const bool pair = h + 32 <= padded, parity = by_parity(s.call);
    clear_sums();
    if (pair)
      for (int64_t i = 0; i < size; i += TILE) square(keys + i, odd + i, q + i, q + size + i, filler, steps);
    else if (parity)  // in two parts: no product waits for the one before
      for (int64_t i = 0; i < size; i += 2 * TILE) two_columns(keys + i, odd + i, q + i, filler, steps);
    else
      for (int64_t i = 0; i < size; i += TILE) column(keys + i, odd + i, q + i, filler, steps);
    store_sums(scores, 256, BLOCK_ROWS * 16, true, pair || parity);
  }
}

// What four accumulators are: columns and heads, and how many floats apart the tiles lie among sums `width` heads wide.
struct Group {
  int32_t columns, heads;
  int64_t right, down;
};

inline Group group_of(const kvb_call* call, int64_t width) {
  if (stacked(call)) return {4, 8, 32 * width, 64 * width};
  if (by_parity(call)) return {2, 16, 32 * width, 16 * width};
  return {1, 32, 16 * width, 256};
}

// Final sums of a group on their way from tiles to the output: like an item's sums, but of these heads only.
struct alignas(64) Leaving {
  float sums[4 * 256];
  int32_t head, heads, column;
};

inline void write_outputs(const Stream& s, const Leaving& from) {
  const Item* item = &s.pending.item;
  const int64_t width = group_of(s.call, 0).heads;
  for (int32_t c = 0; c < group_of(s.call, 0).columns; c++)
    for (int32_t i = 0; i < from.heads; i++) {
      const float* at = from.sums + (2 * c * width + i) * 16;
      const vfloat factor = splat(s.factors[from.head + i]);
      store_values(s.call, item, from.head + i, 32 * (from.column + c), load(at) * factor,
                   load(at + width * 16) * factor);
    }
}

// Weights times values of one group, heads from h on.
template <class Filler>
KVB_INLINE void multiply_values(const Stream& s, int32_t h, int32_t column, Filler& filler, uint32_t steps) {
  const Pending& p = s.pending;
  const int64_t keys = s.call->d_qk / 32 * TILE;
  const bf16 *w = s.weights + h * BLOCK_ROWS, *v = p.values + column * TILE, *v0 = p.values + 2 * column * SLAB;
  if (stacked(s.call)) {
    for (int32_t i = 0; i < 2 * p.chunks; i++) long_row(w + i * TILE, v + i * keys, filler, steps);
  } else if (by_parity(s.call)) {
    for (int32_t i = 0; i < 2 * p.chunks; i++, w += 2 * TILE, v += keys)
      square(w, w + TILE, v, v + TILE, filler, steps);
  } else if (h + 32 <= p.item.padded) {
    for (int32_t i = 0; i < p.chunks; i++, w += TILE, v0 += TILE)
      square(w, w + BLOCK_CHUNKS * TILE, v0, v0 + SLAB, filler, steps);
  } else {
    for (int32_t i = 0; i < p.chunks; i++, w += TILE, v0 += TILE) row(w, v0, v0 + SLAB, filler, steps);
  }
}

inline int32_t value_groups(const Stream& s, int32_t columns) {
  const int32_t groups = columns / group_of(s.call, 0).columns * s.pending.chunks;
  return by_parity(s.call) ? 2 * groups : groups * ((s.pending.item.padded + 31) / 32);
}

template <class Filler>
KVB_INLINE void value_columns(Stream& s, int32_t columns, Filler& filler, uint32_t steps) {
  Pending& p = s.pending;
  const int64_t width = sums_width(s.call, &p.item);
  const Group in_sums = group_of(s.call, width), in_leaving = group_of(s.call, in_sums.heads);
  Leaving leaving[2];  // outputs are written one group later: tile stores take long to become readable
  int32_t groups = 0;
  for (; columns > 0; columns -= in_sums.columns, p.columns_left -= in_sums.columns) {
    const int32_t column = COLUMNS - p.columns_left;
    for (int32_t h = 0; h < p.item.padded; h += 32) {
      const bool four = by_parity(s.call) || h + 32 <= p.item.padded;
      float* sums = p.state.sums + (2 * column * width + h) * 16;
      if (p.first) clear_sums();
      else load_sums(sums, in_sums.down, in_sums.right, four, true);
      multiply_values(s, h, column, filler, steps);
      if (!p.writes) {
        store_sums(sums, in_sums.down, in_sums.right, four, true);
        continue;
      }
      Leaving& now = leaving[groups & 1];
      store_sums(now.sums, in_leaving.down, in_leaving.right, four, true);
      now.head = h;
      now.heads = p.item.heads - h < in_sums.heads ? p.item.heads - h : in_sums.heads;
      now.column = column;
      if (groups++ > 0) write_outputs(s, leaving[groups & 1]);
    }
  }
  stores_are_done();
  if (groups > 0) write_outputs(s, leaving[~groups & 1]);
}

// Multiplies at most `columns` columns of the values that wait, with a share of the decoding.
inline void settle(Stream& s, int32_t columns, int32_t more_groups, Decoding& d) {
  const int32_t left = s.pending.columns_left;
  if (left == 0) return;
  columns = columns < left ? (columns + COLUMNS_AT_ONCE - 1) / COLUMNS_AT_ONCE * COLUMNS_AT_ONCE : left;
  const uint32_t steps = share(d, value_groups(s, columns) + more_groups);
  with_filler(d, [&](auto& filler) __attribute__((always_inline)) { value_columns(s, columns, filler, steps); });
}

// 32 rows' weights of 16 heads, a head in each line, into the tiles that their product takes.
inline void store_weights(const kvb_call* call, const __m512i* lines, bf16* tile) {
  if (!by_parity(call)) {
    for (int32_t i = 0; i < 16; i++) _mm512_store_si512(tile + 32 * i, lines[i]);
    return;
  }
  const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const int64_t second = stacked(call) ? 8 * 32 : TILE, odd_rows = 2 * second;
  for (int32_t i = 0; i < (stacked(call) ? 8 : 16); i++, tile += 32) {
    _mm512_store_si512(tile, _mm512_andnot_si512(odd, lines[i]));
    _mm512_store_si512(tile + second, _mm512_slli_epi32(lines[i], 16));
    _mm512_store_si512(tile + odd_rows, _mm512_srli_epi32(lines[i], 16));
    _mm512_store_si512(tile + odd_rows + second, _mm512_and_si512(odd, lines[i]));
  }
}

// Scores of 16 heads become weights, tile by tile: pairs of rows with heads in lanes turn into heads with 32 rows.
inline void soften(Stream& s, const Item* item, const State& state, int32_t rows, bool first) {
  const float scale2 = s.call->scale * LOG2_E;
  const bool parity = by_parity(s.call);
  const int64_t tiles = stacked(s.call) ? 2 : parity ? 4 : 1;
  for (int32_t h = 0; h < item->padded; h += 16) {
    const float* scores = s.scores + h * BLOCK_ROWS;
    bf16* tile = s.weights + h * BLOCK_ROWS;
    const auto score = [=](int32_t n) {
      const float* at = scores + (n / 32 * 32 + n % 2 * 16 + n % 32 / 2) * 16;
      if (n >= rows) return splat(-INFINITY);
      return (parity ? load(at) + load(at + BLOCK_ROWS * 16) : load(at)) * scale2;
    };
    Softmax softmax = begin_weights(state, h, rows, first, score);
    for (int32_t n = 0; n < rows; n += CHUNK_ROWS, tile += tiles * TILE) {
      __m512i lines[16];
      for (int32_t i = 0; i < 16; i++) lines[i] = weigh(softmax, score(n + 2 * i), score(n + 2 * i + 1));
      transpose(lines);
      store_weights(s.call, lines, tile);
    }
    end_weights(state, h, softmax, s.corrections);
  }
}

// Tiles cannot be scaled: heads whose maximum grew have their sums shrunk in memory.
inline void shrink_sums(const Stream& s, const Item* item, const State& state) {
  for (int32_t h = 0; h < item->heads; h++) {
    if (s.corrections[h] == 1.0f) continue;
    const vfloat factor = splat(s.corrections[h]);
    for (int64_t line = 0; line < KVB_DV / 16; line++) {
      float* at = state.sums + sums_line(s.call, item, h, line);
      store(at, load(at) * factor);
    }
  }
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
  s.fetches.queries = {static_cast<const char*>(call->q) + 2 * at, 2 * call->q_head_stride, next->heads, 2 * call->d_qk,
                       next->heads > 64 ? 2 : 1};
}

// Has chunk `index` of block `at` decoded: as keys that are values too, or as both.
inline void begin_chunk(Stream& s, Decoding& d, const Chunk& chunk, int32_t at, int32_t index, Fetches* fetches) {
  const int32_t depth = s.call->d_qk;
  if (by_parity(s.call)) {
    begin_decoding(d, chunk, s.blocks[at] + index * CHUNK_ROWS * depth, nullptr, depth, fetches);
  } else {
    begin_decoding(d, chunk, s.keys[s.at_keys], s.blocks[at] + index * TILE, depth, fetches);
    s.at_keys = !s.at_keys;
  }
}

// Scores the next block of the item and leaves it pending.
inline void run_block(Stream& s, const Item* item, const State& state, bool first) {
  const int32_t groups = score_groups(s, item), at = s.at_block;
  int32_t rows = 0, chunks = 0;
  bool more;
  Decoding d;
  do {
    Chunk &now = s.chunk(0), &next = s.chunk(1), &after = s.chunk(2);
    feed(s, item, after);
    if (!s.decoded) {
      begin_chunk(s, d, now, at, chunks, nullptr);
      decode_rest(d);
    }
    const bf16* keys = by_parity(s.call) ? s.blocks[at] + chunks * CHUNK_ROWS * s.call->d_qk : s.keys[!s.at_keys];
    const bool ours = next.count > 0 && next.item == item;
    more = ours && chunks + 1 < BLOCK_CHUNKS;
    const int32_t left = chunks_left(s, item), most = BLOCK_CHUNKS - chunks;
    if (item->next && left < BLOCK_CHUNKS) fetch_queries(s, item);
    if (!more) {  // the next block's values will lie where the pending ones do
      Decoding none = {};
      settle(s, COLUMNS, 0, none);
    }
    begin_chunk(s, d, next, more ? at : !at, more ? chunks + 1 : 0, &s.fetches);
    s.fetches.rows = {after.rows, after.count, 0};
    if (more) {
      const int32_t parts = left < most ? left : most;
      settle(s, (s.pending.columns_left + parts - 1) / parts, groups, d);
    }
    stores_are_done();
    const uint32_t steps = share(d, groups);
    with_filler(d, [&](auto& filler)
                       __attribute__((always_inline)) { score_chunk(s, item->padded, chunks, keys, filler, steps); });
    decode_rest(d);
    s.fetches.rows.fetch(CHUNK_ROWS);
    stores_are_done();
    rows += now.count;
    chunks++;
    s.decoded = next.count > 0;
    s.at = (s.at + 1) % 3;
  } while (more);
  if (first) reset(state, item->padded);
  soften(s, item, state, rows, first);
  if (!first) shrink_sums(s, item, state);
  const Chunk& next = s.chunk(0);
  const bool last = next.count == 0 || next.item != item;
  s.pending = {*item, state, s.blocks[at], chunks, COLUMNS, first, last && !item->partial};
  for (int32_t h = 0; s.pending.writes && h < item->padded; h += 16)
    finish_heads(s.call, item, state, h, s.factors + h);
  s.at_block = !at;
}

void run_item(const kvb_call* call, const Item* item, void* scratch) {
  Stream& s = stream_at(call, scratch);
  Shapes shapes;
  products_begin(shapes);
  if (!item->resumed) {
    s.at_block = 0;
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
