// Shared memory of one block, and its budget.
//
//   query  [heads][d_qk + 8] bf16     once per block
//   keys   [tokens][d_qk + 8] bf16    the tile being used; V is its first 512 columns
//   raw    [stages][tokens][raw]      tiles in flight, as they lie in the pages
//   scores [parts][heads][tokens + 4] fp32, weights [heads][tokens + 8] bf16
//
// Row pitches are odd multiples of 16 bytes, so that the eight rows of an ldmatrix hit different banks.
#pragma once
#include "records.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

template <int Formats, int Heads, int Tokens, int Stages> struct Tile {
  static constexpr int d_qk = d_qk_of(Formats);
  static constexpr int raw_pitch = raw_bytes_of(Formats);
  static constexpr int key_pitch = d_qk + 8;
  static constexpr int score_pitch = Tokens + 4;
  static constexpr int weight_pitch = Tokens + 8;
  static constexpr int token_tiles = Tokens / 16;
  static constexpr int head_tiles = Heads / 8;
  static constexpr int pairs = token_tiles * head_tiles;
  static constexpr int parts = pairs >= kWarps ? 1 : kWarps / pairs;  // warps that share one score tile along d_qk
  static constexpr int heads_each = pairs > kWarps ? pairs / kWarps : 1;  // head tiles of one warp
  static constexpr int steps = d_qk / 16 / parts;
  static constexpr int value_tiles = kValueDims / 16 / kWarps;

  static_assert(Heads % 8 == 0 && Heads <= 64, "a tile has 8 to 64 heads");
  static_assert(Tokens % 32 == 0, "a warp handles 32 tokens of a head at a time");
  static_assert(d_qk / 16 % parts == 0, "score parts must be equal");
  static_assert(token_tiles * (head_tiles / heads_each) * parts == kWarps, "every warp has one score tile");

  struct Shared {
    uint16_t query[Heads * key_pitch];
    uint16_t keys[Tokens * key_pitch];
    unsigned char raw[Stages * Tokens * raw_pitch];
    uint16_t weights[Heads * weight_pitch];
    float scores[parts * Heads * score_pitch];
    float highest[Heads], rounded_sum[Heads], exact_sum[Heads], correction[Heads];
    const unsigned char* data[(Stages + 1) * Tokens];  // null: dead
    const unsigned char* scales[(Stages + 1) * Tokens];
    int last_block;
  };
  static_assert(sizeof(Shared::query) % 16 == 0 && sizeof(Shared::keys) % 16 == 0 && sizeof(Shared::raw) % 16 == 0 &&
                    sizeof(Shared::weights) % 16 == 0,
                "ldmatrix rows must be 16-byte aligned");
  static_assert(sizeof(uint16_t) * 8 * (kValueDims + 8) * 2 <= sizeof(Shared::keys), "keys stage eight heads of output");
};

// Bytes a block may use, opted in.
constexpr int shared_limit(int arch) { return arch == 80 ? 166912 : arch == 86 || arch == 89 || arch == 120 ? 101376 : 232448; }
