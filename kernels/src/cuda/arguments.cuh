// The layout struct of the kernel: one POD, passed by value in the launch's parameter buffer; mirrored field by field in
// kernels/cuda.py and checked there by size and offsets.
#pragma once

constexpr int kMaxCaches = 3;

// One KV source. A row's bytes are one or two runs in its page; each lands at its place in the raw row:
//   page = base + slot / page_rows * page_stride_bytes, row = slot % page_rows
//   data   page + row * row_stride_bytes                            data_bytes   -> raw[0 ..]
//   scales page + scales_offset_bytes + row * scales_stride_bytes   scales_bytes -> raw[data_bytes ..]   (0: none)
struct CacheArguments {
  const unsigned char* base;
  long long page_stride_bytes;
  long long capacity;  // num_pages * page_rows: a slot at or beyond it is dead
  long long scales_offset_bytes;
  const void* slots;    // [rows, width]
  const void* lengths;  // [rows], or null: all of width
  long long slots_stride, lengths_stride;  // elements
  int page_rows;
  int row_stride_bytes;
  int data_bytes;
  int scales_bytes;
  int scales_stride_bytes;
  int format;  // RecordFormat
  int width;
  int piece_bytes;  // 16, or 8 where a base or stride is 8 modulo 16
  int slots_are_64_bit;
  int lengths_are_64_bit;
  int slots_per_sequence;    // rows of slots are sequences, not queries
  int lengths_per_sequence;  // likewise
  int sequences;             // rows of what is per sequence; a query of no such sequence has no live slot
};

enum DecodeFlags {
  kOutFp32 = 1,
  kLseBase2 = 2,
  kLseWithSink = 4,
  kLseEmptyPositive = 8,
  kFusedMerge = 16,      // the last block of a (query, head tile) merges; otherwise merge_kernel does
  kPlainPipeline = 32,   // copy, wait, compute: no tile is in flight while another is used
  kQueryVectors = 64,    // q rows may be read 16 bytes at a time
};

struct DecodeArguments {
  CacheArguments cache[kMaxCaches];
  const unsigned short* q;  // bf16 [queries, heads, d_qk]
  void* out;                // bf16 or fp32 [queries, heads, 512]
  float* lse;               // fp32 [queries, heads], or null
  const float* sink;        // fp32 [heads], natural log, or null
  const void* sequence_of_query;  // [queries], or null
  float* partial_out;       // fp32 [queries, head tiles, splits, tile heads, 512]
  float* partial_state;     // fp32 [queries, head tiles, splits, tile heads, 3]: maximum, rounded sum, exact sum
  unsigned* counters;       // [queries, head tiles], zero before the first launch; wrap to zero by themselves
  long long q_query_stride, q_head_stride;      // elements
  long long out_query_stride, out_head_stride;  // elements
  long long lse_query_stride, lse_head_stride;  // elements
  float scale_log2;  // softmax scale * log2(e)
  int queries;
  int heads;
  int caches;
  int splits;
  int sequences_are_64_bit;
  int flags;
  int merge_blocks;  // blocks that share the heads of a tile in merge_kernel; the fused merge does not look at it
};
