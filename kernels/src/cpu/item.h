// What the dispatcher and the paths share: one item of work, the table of a path, per-thread scratch.
//
// An item is (query, group of heads, share of the query's live slots). It leaves either a finished output, or a
// partial result in the workspace that merge_item joins:
//
//   partial of one (query, split): sums [d_v / lanes][padded heads][lanes] fp32, then maxima, rounded and exact sums
#pragma once
#include "kvbridge_cpu.h"

#define KVB_DV 512
#define KVB_HIDDEN __attribute__((visibility("hidden")))

struct Item {
  int64_t query;
  int32_t head0, heads;   // this group's heads
  int32_t padded;         // heads rounded up to a multiple of 16
  int32_t split, splits;  // which share of the live slots
  float* partial;         // null: write the output; else where the partial result goes
  const Item* next;       // what this thread does afterwards, if known: its rows are fetched meanwhile
  bool resumed;           // the item that this thread did before named this one as its next
};

struct Path {
  int32_t id;
  float decode_cost;  // dequantising a row, where its products with 16 heads cost 2
  float merge_cost;   // joining the shares of 16 heads' slots, in the same measure
  int64_t (*scratch_bytes)(const kvb_call* call, int32_t padded);
  void (*run_item)(const kvb_call* call, const Item* item, void* scratch);
  // Joins `splits` partials of heads head0..head0+heads-1 of one query; partials lie partial_floats(padded) apart.
  void (*merge_item)(const kvb_call* call, const Item* item, int32_t first, int32_t count);
};

static inline int64_t partial_floats(int64_t padded) { return padded * (KVB_DV + 3); }

KVB_HIDDEN extern const Path* const kvb_paths[KVB_PATHS];
// Aligned to 64 bytes, kept by the thread, grown when needed; null when memory is exhausted.
KVB_HIDDEN void* kvb_scratch(int64_t bytes);
// Runs body(context) in up to `threads` threads, the caller among them; returns when all have left it.
KVB_HIDDEN void kvb_parallel(const kvb_call* call, int32_t threads, void (*body)(void*), void* context);
