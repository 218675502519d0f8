// The AMX path. A thread's items become one stream of chunks of 32 rows:
//
//   chunk c + 2    its rows are fetched from memory
//   chunk c + 1    is decoded, between the tile instructions of
//   chunk c        scores = keys . queries
//
// A block is up to 192 live rows of one item. When all its scores are there they become weights, and
//
//   column d       sums = sums * correction + weights . values, between whose tile instructions
//   column d + 1   32 values of each row are interleaved, from keys to values
//
// Where an item's successor is known the stream runs on into it. Which rows form a block depends on the item alone, so
// a query's bits do not depend on its neighbours.
//
//   queries [heads / 16][d_qk / 2][16][2]          scores [heads / 16][BLOCK_ROWS][16] fp32
//   weights [heads / 16][BLOCK_ROWS / 32] tiles    sums   [d_v / 16][heads][16] fp32
//
// What costs most is lines that have to enter the first cache, above all those that are written. So a row is decoded
// once, to keys, and only one column of values exists at a time. Calls of up to 8 heads do without any
// (products_amx.h); their weights are
//
//   weights [BLOCK_ROWS / 32][even rows, odd rows][8 heads w 0 w 0 ..., 8 heads 0 w 0 w ...]
#pragma once
#include "products_amx.h"

namespace {

constexpr int32_t BLOCK_CHUNKS = BLOCK_ROWS / CHUNK_ROWS, COLUMNS = KVB_DV / 32;

struct Stream {
  const kvb_call* call;
  bf16 *queries, *blocks[2], *values, *weights;
  float *scores, *corrections, *factors, *own_state;
  Chunk chunks[3];  // chunks[at] is scored next
  int32_t at, at_block;
  bool running;  // the chunks continue where the item before ended
  bool decoded;  // chunks[at] is
  Walk walk;
  const Item* source;  // whose rows the walk delivers
  Fetches fetches;
  const Item* fetching;  // whose queries are fetched
  bool streams;          // outputs pass by the caches

  Chunk& chunk(int32_t ahead) { return chunks[(at + ahead) % 3]; }
};

// How many values the buffers of a call hold.
struct Sizes {
  int64_t queries, block, values, weights, scores, heads;

  explicit Sizes(const kvb_call* call) {
    heads = (call->heads + 15) / 16 * 16;
    queries = heads * call->d_qk;
    block = BLOCK_ROWS * call->d_qk;
    values = BLOCK_ROWS * 32;
    weights = BLOCK_ROWS * (stacked(call) ? 32 : heads);
    scores = BLOCK_ROWS * heads;
  }
};

int64_t scratch_bytes(const kvb_call* call, int32_t) {
  const Sizes of(call);
  return static_cast<int64_t>(sizeof(Stream) + 63) / 64 * 64 +
         2 * (of.queries + 2 * of.block + of.values + of.weights) +
         4 * (of.scores + 2 * of.heads + partial_floats(of.heads));
}

// More outputs than a core's caches keep are better not read into them before they are written.
inline bool streams_outputs(const kvb_call* call) {
  constexpr int64_t kept_bytes = 4 << 20;
  const int64_t apart = 2 * (call->out_query_stride | call->out_head_stride);
  return call->out_type == KVB_OUT_BF16 && call->queries * call->heads * KVB_DV * 2 > kept_bytes &&
         (reinterpret_cast<intptr_t>(call->out) | apart) % 64 == 0;
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
  for (bf16*& block : s.blocks) block = take(of.block);
  s.values = take(of.values);
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
  s.at = 0;
  s.decoded = false;
  feed(s, item, s.chunk(0));
  feed(s, item, s.chunk(1));
  Ahead rows = {s.chunk(0).rows, s.chunk(0).count, 0};
  rows.fetch(CHUNK_ROWS);
}

// What is decoded with each of `groups` groups of tile instructions, so that all is done at their end.
inline uint32_t share(const Decoding& d, int32_t groups) {
  return static_cast<uint32_t>((d.units() + groups - 1) / groups);
}

// The scores of a block's chunk `index`: first those of its 16 even rows, then those of the odd ones.
KVB_INLINE void score_chunk(Stream& s, int32_t padded, int32_t index, const bf16* keys, Filler& filler,
                            uint32_t units) {
  const int64_t size = s.call->d_qk / 32 * TILE;
  const bf16* odd = keys + size;
  for (int32_t h = 0; h < padded; h += 32) {
    const bf16* q = s.queries + h / 16 * size;
    float* scores = s.scores + (h * BLOCK_ROWS + index * CHUNK_ROWS * 16);
    clear_sums();
    if (h + 16 < padded) {
      for (int64_t i = 0; i < size; i += TILE) square(keys + i, odd + i, q + i, q + size + i, filler, units);
      store_square(scores, 256, BLOCK_ROWS * 16);
    } else {
      for (int64_t i = 0; i < size; i += TILE) column(keys + i, odd + i, q + i, filler, units);
      store_sums(scores, 256);
    }
  }
  clear_sums();
}

// A block whose weights are ready.
struct Weighted {
  const Item* item;
  State state;
  const bf16* keys;
  int32_t chunks;
  bool first;   // of its item: there are no sums yet
  bool writes;  // the last: what comes out are outputs
};

// What the two accumulators are: columns of so many heads, and how many floats apart they lie among sums `width` heads
// wide.
struct Group {
  int32_t columns, heads;
  int64_t apart;
};

inline Group group_of(const kvb_call* call, int64_t width) {
  if (stacked(call)) return {2, 8, 256};
  return {1, 16, 16 * width};
}

// Final sums of a group on their way from tiles to the output: like an item's sums, but of these heads only.
struct alignas(64) Leaving {
  float sums[2 * 256];
  int32_t head, heads, column;
};

inline void write_outputs(const Stream& s, const Item* item, const Group& group, const Leaving& from) {
  for (int32_t c = 0; c < group.columns; c++)
    for (int32_t i = 0; i < from.heads; i++) {
      const float* at = from.sums + (2 * c * group.heads + i) * 16;
      const vfloat factor = splat(s.factors[from.head + i]);
      store_values(s.call, item, from.head + i, 32 * (from.column + c), load(at) * factor,
                   load(at + group.heads * 16) * factor, s.streams);
    }
}

inline Interleaving interleaving(const Stream& s, const Weighted& block, int32_t column, int32_t chunk) {
  const int64_t odd_rows = s.call->d_qk / 32 * TILE;
  return {block.keys + 2 * chunk * odd_rows + column * TILE, odd_rows, s.values + chunk * TILE, PAIRS};
}

// Weights of 16 heads times a column of values. With the last heads the next column's values take the place of this
// one's, a chunk behind.
inline void multiply_column(const Stream& s, const Weighted& block, int32_t h, int32_t column) {
  const bool last = h + 16 >= block.item->padded && column + 1 < COLUMNS;
  const bf16 *w = s.weights + h * BLOCK_ROWS, *v = s.values;
  Interleaving next = {};
  for (int32_t i = 0; i < block.chunks; i++, w += TILE, v += TILE) {
    row(w, v, v + BLOCK_CHUNKS * TILE, next, PAIRS);
    stores_are_done();
    if (last) next = interleaving(s, block, column + 1, i);
  }
  next(PAIRS);
  stores_are_done();
}

// Weights times values of a block. Where no values are interleaved meanwhile, rows are decoded.
inline void multiply_values(const Stream& s, const Weighted& block, Filler& filler) {
  const Item* item = block.item;
  const int64_t width = sums_width(s.call, item), keys = s.call->d_qk / 32 * TILE;
  const Group in_sums = group_of(s.call, width), in_leaving = group_of(s.call, in_sums.heads);
  Leaving leaving[2];  // outputs are written one group later: tile stores take long to become readable
  int32_t groups = 0;
  const uint32_t units = share(filler.d, COLUMNS / in_sums.columns * 2 * block.chunks);
  for (int32_t i = 0; !stacked(s.call) && i < block.chunks; i++) interleaving(s, block, 0, i)(PAIRS);
  stores_are_done();
  for (int32_t column = 0; column < COLUMNS; column += in_sums.columns)
    for (int32_t h = 0; h < item->padded; h += 16) {
      float* sums = block.state.sums + (2 * column * width + h) * 16;
      if (block.first) clear_sums();
      else load_sums(sums, in_sums.apart);
      if (!stacked(s.call)) multiply_column(s, block, h, column);
      else
        for (int32_t i = 0; i < 2 * block.chunks; i++) {
          const bf16* v = block.keys + i * keys + column * TILE;
          row(s.weights + i * TILE, v, v + TILE, filler, units);
        }
      if (!block.writes) {
        store_sums(sums, in_sums.apart);
        continue;
      }
      Leaving& now = leaving[groups & 1];
      store_sums(now.sums, in_leaving.apart);
      now.head = h;
      now.heads = item->heads - h < in_sums.heads ? item->heads - h : in_sums.heads;
      now.column = column;
      if (groups++ > 0) write_outputs(s, item, in_leaving, leaving[groups & 1]);
    }
  stores_are_done();
  if (groups > 0) write_outputs(s, item, in_leaving, leaving[~groups & 1]);
}

// 32 rows' weights of 16 heads, a head in each line, into the tiles that their product takes.
inline void store_weights(const kvb_call* call, const __m512i* lines, bf16* tile) {
  if (!stacked(call)) {
    for (int32_t i = 0; i < 16; i++) _mm512_store_si512(tile + 32 * i, lines[i]);
    return;
  }
  const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int32_t i = 0; i < 8; i++, tile += 32) {
    _mm512_store_si512(tile, _mm512_andnot_si512(odd, lines[i]));
    _mm512_store_si512(tile + 8 * 32, _mm512_slli_epi32(lines[i], 16));
    _mm512_store_si512(tile + TILE, _mm512_srli_epi32(lines[i], 16));
    _mm512_store_si512(tile + TILE + 8 * 32, _mm512_and_si512(odd, lines[i]));
  }
}

// Scores of 16 heads become weights, tile by tile: pairs of rows with heads in lanes turn into heads with 32 rows.
inline void soften(Stream& s, const Item* item, const State& state, int32_t rows, bool first) {
  const float scale2 = s.call->scale * LOG2_E;
  for (int32_t h = 0; h < item->padded; h += 16) {
    const float* scores = s.scores + h * BLOCK_ROWS;
    bf16* tile = s.weights + h * BLOCK_ROWS;
    const auto score = [=](int32_t n) {
      const float* at = scores + (n / 32 * 32 + n % 2 * 16 + n % 32 / 2) * 16;
      if (n >= rows) return splat(-INFINITY);
      return load(at) * scale2;
    };
    Softmax softmax = begin_weights(state, h, rows, first, score);
    for (int32_t n = 0; n < rows; n += CHUNK_ROWS, tile += stacked(s.call) ? 2 * TILE : TILE) {
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

// The next item's queries, as soon as it is its rows that are fetched.
inline void fetch_queries(Stream& s, const Item* next) {
  if (s.fetching == next) return;
  s.fetching = next;
  const kvb_call* call = s.call;
  const int64_t at = next->query * call->q_query_stride + next->head0 * call->q_head_stride;
  s.fetches.queries = {static_cast<const char*>(call->q) + 2 * at, 2 * call->q_head_stride, next->heads, 2 * call->d_qk,
                       (next->heads + PAIRS - 1) / PAIRS};
}

// The next block of the item: its scores, their weights, and what they add to the sums.
inline void run_block(Stream& s, const Item* item, const State& state, bool first) {
  const int32_t depth = s.call->d_qk, groups = (item->padded + 31) / 32 * (depth / 32);
  bf16 *block = s.blocks[s.at_block], *next_block = s.blocks[!s.at_block];
  int32_t rows = 0, chunks = 0;
  bool more;
  Decoding d;
  do {
    Chunk &now = s.chunk(0), &next = s.chunk(1), &after = s.chunk(2);
    feed(s, item, after);
    if (item->next && s.source == item->next) fetch_queries(s, item->next);
    bf16* keys = block + chunks * CHUNK_ROWS * depth;
    if (!s.decoded) {
      begin_decoding(d, now, keys, depth, nullptr);
      decode_rest(d);
    }
    more = next.count > 0 && next.item == item && chunks + 1 < BLOCK_CHUNKS;
    begin_decoding(d, next, more ? keys + CHUNK_ROWS * depth : next_block, depth, &s.fetches);
    s.fetches.rows = {after.rows, after.count, 0};
    stores_are_done();
    Filler filler(d);
    const bool decodes = more || !stacked(s.call);  // or else with the values
    score_chunk(s, item->padded, chunks, keys, filler, decodes ? share(d, groups) : 0);
    if (decodes) filler(d.units());
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
  const bool last = next.count == 0 || next.item != item, writes = last && !item->partial;
  for (int32_t h = 0; writes && h < item->padded; h += 16) finish_heads(s.call, item, state, h, s.factors + h);
  stores_are_done();
  Filler filler(d);
  multiply_values(s, {item, state, block, chunks, first, writes}, filler);
  filler(d.units());
  s.at_block = !s.at_block;
}

void run_item(const kvb_call* call, const Item* item, void* scratch) {
  Stream& s = stream_at(call, scratch);
  Shapes shapes;
  products_begin(shapes);
  if (!item->resumed) {
    s.at_block = 0;
    s.running = false;
    s.fetches = {};
    s.fetching = nullptr;
  }
  s.streams = streams_outputs(call);
  if (!s.running) start(s, item);
  s.running = true;
  const State state = state_at(item->partial ? item->partial : s.own_state, item->padded);
  if (s.chunk(0).count > 0 && s.chunk(0).item == item) {
    pack_queries(call, item, s.queries);
    bool first = true;
    for (; s.chunk(0).count > 0 && s.chunk(0).item == item; first = false) run_block(s, item, state, first);
  } else {  // no live slot
    reset(state, item->padded);
    if (!item->partial) finish(call, item, state, 0, item->heads);
  }
  if (s.chunk(0).count == 0) s.running = false;
  if (s.streams) _mm_sfence();
  products_end(shapes);
}

}  // namespace
