// The C ABI of the CPU backend: sparse MLA decode over one to three paged caches.
//
//   slots[query]  ->  page = slot / page_rows, row = slot % page_rows
//
//   base + page * page_stride_bytes
//     |-- row * row_stride_bytes ------------->|codes ........|bf16 tail|
//     |-- scales_offset + row * scales_stride ->|scales|
//
// One structure is filled once when tensors are bound; a run patches pointers and counts in it and calls
// kvb_cpu_run. The library keeps no pointer after the call returns, allocates only per-thread scratch (once per
// thread), links no torch, and throws nothing.
//
// Rules for the sources: every path is one translation unit compiled with its own instruction set, so shared
// headers hold their code in an unnamed namespace and use no standard-library template: an inline function merged
// by the linker could otherwise bring AVX-512 code into the portable path.
#pragma once
#include <stdint.h>

#define KVB_CPU_ABI 2
#define KVB_CPU_MAX_CACHES 3
#define KVB_CPU_MAX_HEADS 128

#ifdef __cplusplus
extern "C" {
#endif

enum { KVB_CODE_NONE = 0, KVB_CODE_E4M3 = 1, KVB_CODE_E2M1 = 2 };
enum { KVB_SCALE_NONE = 0, KVB_SCALE_UE8M0 = 1, KVB_SCALE_E4M3 = 2, KVB_SCALE_FP32 = 3 };
enum { KVB_OUT_BF16 = 0, KVB_OUT_FP32 = 1 };
enum {
  KVB_PATH_AUTO = 0,
  KVB_PATH_PORTABLE,
  KVB_PATH_AVX2,
  KVB_PATH_AVX512,
  KVB_PATH_AVX512_BF16,
  KVB_PATH_AMX,
  KVB_PATH_AMX_EMULATED,
  KVB_PATHS
};

enum {
  KVB_LSE_BASE2 = 1,           // LSE in base 2 instead of natural
  KVB_LSE_WITH_SINK = 2,       // the sink joins the LSE; an empty query then has LSE = sink
  KVB_LSE_EMPTY_POSITIVE = 4,  // an empty query has LSE +inf instead of -inf
  KVB_BATCH_INVARIANT = 8,     // never split one query's slots over threads
  KVB_OWN_THREADS = 16,        // ignore `parallel` and use this library's own threads
};

enum {
  KVB_OK = 0,
  KVB_ERROR_ABI,
  KVB_ERROR_PATH,
  KVB_ERROR_HEADS,
  KVB_ERROR_QUERIES,
  KVB_ERROR_WIDTHS,
  KVB_ERROR_CACHES,
  KVB_ERROR_RECORD,
  KVB_ERROR_PAGES,
  KVB_ERROR_SLOTS,
  KVB_ERROR_POINTER,
  KVB_ERROR_MEMORY,
  KVB_ERRORS
};

// Where the parts of one record lie. A row is `values` codes, one scale per `group` of them, then `tail_values` bf16.
typedef struct kvb_record {
  int32_t code;                 // KVB_CODE_*
  int32_t scale;                // KVB_SCALE_*
  int32_t values;               // quantised values a row: a multiple of 64
  int32_t group;                // values per scale
  int32_t tail_values;          // bf16 values a row, a multiple of 64
  int32_t tail_offset_bytes;    // from the row's first byte
  int64_t row_stride_bytes;     // between two rows of a page
  int64_t scales_offset_bytes;  // from the page's first byte to row 0's scales
  int64_t scales_stride_bytes;  // between the scales of two rows
  float external_scale;         // multiplies E4M3 codes whose scale is KVB_SCALE_NONE
  int32_t reserved;
} kvb_record;

typedef struct kvb_cache {
  const void* base;  // first byte of page 0
  int64_t num_pages;
  int64_t page_rows;
  int64_t page_stride_bytes;
  kvb_record record;
  const void* slots;         // [rows, width], int32 or int64
  int64_t slots_stride;      // elements between two rows of slots
  const void* lengths;       // [rows], int32 or int64, or null: every row has `width` positions
  const void* row_of_query;  // [queries], int32 or int64, or null: row = query
  int64_t rows;              // rows of what the map selects; a row_of_query outside 0..rows-1 gives no slot
  int64_t width;             // slots a row
  int32_t slots_bits;        // 32 or 64
  int32_t lengths_bits;
  int32_t row_of_query_bits;
  int32_t mapped;  // what row_of_query selects rows of: 0 slots and lengths, 1 slots only, 2 lengths only
} kvb_cache;

typedef struct kvb_call {
  int32_t abi;      // KVB_CPU_ABI
  int32_t bytes;    // sizeof(kvb_call)
  int32_t path;     // KVB_PATH_*; AUTO takes the best
  int32_t threads;  // at least 1; results depend on it only when slots are split (see KVB_BATCH_INVARIANT)
  int32_t flags;
  int32_t heads;     // 1..128
  int32_t d_qk;      // 512 or 576: every record's values + tail_values
  int32_t d_v;       // 512
  int32_t caches;    // 1..3
  int32_t out_type;  // KVB_OUT_*
  float scale;
  int32_t reserved;
  int64_t queries;
  const void* q;           // bf16 [queries, heads, d_qk], last axis dense
  int64_t q_query_stride;  // elements
  int64_t q_head_stride;
  void* out;                 // [queries, heads, d_v], last axis dense
  int64_t out_query_stride;  // elements
  int64_t out_head_stride;
  float* lse;                // fp32 [queries, heads] or null
  int64_t lse_query_stride;  // elements
  int64_t lse_head_stride;
  const float* sink;  // fp32 [heads], natural logarithm, or null
  void* workspace;    // for split slots; null or too small: no split
  int64_t workspace_bytes;
  void* parallel;  // GOMP_parallel of the process's OpenMP runtime, or null: own threads
  kvb_cache cache[KVB_CPU_MAX_CACHES];
} kvb_call;

typedef struct kvb_info {
  int32_t abi;
  int32_t call_bytes;
  int32_t cache_bytes;
  int32_t record_bytes;
  uint32_t compiled;  // bit KVB_PATH_x: the path is in this library
  uint32_t usable;    // bit KVB_PATH_x: and this machine can run it
  int32_t best;       // what KVB_PATH_AUTO takes
  int32_t reserved;
} kvb_info;

#define KVB_EXPORT __attribute__((visibility("default")))

// 0 or KVB_ERROR_*. Checks what it can without reading a tensor; dead slots are skipped, never an error.
KVB_EXPORT int kvb_cpu_run(const kvb_call* call);
// The workspace that suffices for every call with these heads and threads, whatever its queries and widths.
KVB_EXPORT int64_t kvb_cpu_workspace_bytes(int32_t heads, int32_t threads, int32_t flags);
KVB_EXPORT void kvb_cpu_info(kvb_info* info);
KVB_EXPORT const char* kvb_cpu_path_name(int32_t path);
KVB_EXPORT const char* kvb_cpu_error(int32_t code);
// How a call would be cut: head groups and slot splits of each query.
KVB_EXPORT void kvb_cpu_cut(const kvb_call* call, int32_t* head_groups, int32_t* slot_splits);

#ifdef __cplusplus
}
#endif
