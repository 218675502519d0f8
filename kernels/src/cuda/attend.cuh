// One tile of tokens against one tile of heads: scores, online softmax, values. Tokens lie on the MMA's M axis and heads on
// its N axis, so that 8 heads fill a tile of 8 and none is padded to 64.
//
//   scores^T [tokens, heads] = keys [tokens, d_qk] . query^T     A from keys, B from query, both plain ldmatrix
//   out^T    [512, heads]   += values^T [512, tokens] . weights^T   A from keys, transposed; B from weights
#pragma once
#include "prim.cuh"
#include "shared.cuh"

template <class Layout, class Shared> KVB_DEVICE void compute_scores(Shared& shared) {
  const int lane = static_cast<int>(thread_index()) % 32, warp = static_cast<int>(thread_index()) / 32;
  const int part = warp % Layout::parts, index = warp / Layout::parts;
  const int token = index % Layout::token_tiles * 16, head = index / Layout::token_tiles * Layout::heads_each * 8;
  float sums[Layout::heads_each][4] = {};
  const uint16_t* keys = shared.keys + (token + lane % 16) * Layout::key_pitch + lane / 16 * 8;
  const uint16_t* query = shared.query + (head + lane % 8) * Layout::key_pitch + lane / 8 % 2 * 8;
  for (int step = 0; step < Layout::steps; ++step) {
    const int column = (part * Layout::steps + step) * 16;
    uint32_t a[4];
    load_matrix_x4(a, keys + column);
KVB_UNROLL
    for (int tile = 0; tile < Layout::heads_each; ++tile) {
      uint32_t b[2];
      load_matrix_x2(b, query + tile * 8 * Layout::key_pitch + column);
      multiply_add(sums[tile], a, b);
    }
  }
  constexpr int heads = Layout::head_tiles * 8;
KVB_UNROLL
  for (int tile = 0; tile < Layout::heads_each; ++tile)
KVB_UNROLL
    for (int element = 0; element < 4; ++element) {
      const int row = token + lane / 4 + element / 2 * 8, column = head + tile * 8 + lane % 4 * 2 + element % 2;
      shared.scores[(part * heads + column) * Layout::score_pitch + row] = sums[tile][element];
    }
}

KVB_DEVICE float negative_infinity() { return as_float(0xff800000u); }

// A warp takes a head at a time, a lane a token. Weights are rounded to bf16; both sums are kept: the rounded one
// normalises the output, the exact one gives the LSE.
template <class Layout, int Tokens, class Shared>
KVB_DEVICE void update_softmax(Shared& shared, const unsigned char* const* rows, float scale_log2) {
  const int lane = static_cast<int>(thread_index()) % 32, warp = static_cast<int>(thread_index()) / 32;
  constexpr int heads = Layout::head_tiles * 8;
  for (int head = warp; head < heads; head += kWarps) {
    float scores[Tokens / 32], highest = negative_infinity();
    for (int part = 0; part < Tokens / 32; ++part) {
      const int token = part * 32 + lane;
      float sum = 0;
      for (int piece = 0; piece < Layout::parts; ++piece)
        sum += shared.scores[(piece * heads + head) * Layout::score_pitch + token];
      scores[part] = rows[token] ? sum * scale_log2 : negative_infinity();
      highest = maximum(highest, scores[part]);
    }
    for (int mask = 16; mask; mask >>= 1) highest = maximum(highest, shuffle_xor(highest, mask));
    const float before = shared.highest[head], now = maximum(before, highest);
    const bool empty = now == negative_infinity();
    float rounded = 0, exact = 0;
    for (int part = 0; part < Tokens / 32; ++part) {
      const int token = part * 32 + lane;
      const float weight = rows[token] && (!empty || scores[part] != scores[part]) ? exp2_approximate(scores[part] - now) : 0;
      const uint32_t bits = pack_bf16x2(weight, 0);
      shared.weights[head * Layout::weight_pitch + token] = static_cast<uint16_t>(bits);
      rounded += as_float(bits << 16);
      exact += weight;
    }
    for (int mask = 16; mask; mask >>= 1) {
      rounded += shuffle_xor(rounded, mask);
      exact += shuffle_xor(exact, mask);
    }
    if (lane == 0) {
      const float correction = empty ? 1 : exp2_approximate(before - now);
      shared.correction[head] = correction;
      shared.highest[head] = now;
      shared.rounded_sum[head] = shared.rounded_sum[head] * correction + rounded;
      shared.exact_sum[head] = shared.exact_sum[head] * correction + exact;
    }
  }
}

template <class Layout> using Accumulator = float[Layout::value_tiles][Layout::head_tiles][4];

template <class Layout, int Tokens, class Shared> KVB_DEVICE void add_values(Shared& shared, Accumulator<Layout>& sums) {
  const int lane = static_cast<int>(thread_index()) % 32, warp = static_cast<int>(thread_index()) / 32;
KVB_UNROLL
  for (int tile = 0; tile < Layout::head_tiles; ++tile) {
    const float even = shared.correction[tile * 8 + lane % 4 * 2], odd = shared.correction[tile * 8 + lane % 4 * 2 + 1];
KVB_UNROLL
    for (int value = 0; value < Layout::value_tiles; ++value) {
      sums[value][tile][0] *= even, sums[value][tile][1] *= odd;
      sums[value][tile][2] *= even, sums[value][tile][3] *= odd;
    }
  }
  // Matrices of the transposed A: (tokens 0-7, values 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
  const uint16_t* keys = shared.keys + (lane % 8 + lane / 16 * 8) * Layout::key_pitch + warp * Layout::value_tiles * 16 +
                         lane / 8 % 2 * 8;
  const uint16_t* weights = shared.weights + lane % 8 * Layout::weight_pitch + lane / 8 % 2 * 8;
  for (int token = 0; token < Tokens; token += 16) {
    uint32_t a[Layout::value_tiles][4];
KVB_UNROLL
    for (int value = 0; value < Layout::value_tiles; ++value)
      load_matrix_x4_transposed(a[value], keys + token * Layout::key_pitch + value * 16);
KVB_UNROLL
    for (int tile = 0; tile < Layout::head_tiles; ++tile) {
      uint32_t b[2];
      load_matrix_x2(b, weights + tile * 8 * Layout::weight_pitch + token);
KVB_UNROLL
      for (int value = 0; value < Layout::value_tiles; ++value) multiply_add(sums[value][tile], a[value], b);
    }
  }
}
