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

template <int Count> KVB_DEVICE void highest_of_pair(float (&highest)[Count], int mask) {
KVB_UNROLL
  for (int index = 0; index < Count; ++index) highest[index] = maximum(highest[index], shuffle_xor(highest[index], mask));
}
template <int Count> KVB_DEVICE void sum_of_pair(float (&sums)[Count], int mask) {
KVB_UNROLL
  for (int index = 0; index < Count; ++index) sums[index] += shuffle_xor(sums[index], mask);
}

// A lane takes a token; a warp takes up to four heads at a time, so that their shuffles overlap. Weights are rounded to bf16;
// both sums are kept: the rounded one normalises the output, the exact one gives the LSE.
template <class Layout, int Tokens, class Shared>
KVB_DEVICE void update_softmax(Shared& shared, const unsigned char* const* rows, float scale_log2) {
  const int lane = static_cast<int>(thread_index()) % 32, warp = static_cast<int>(thread_index()) / 32;
  constexpr int heads = Layout::head_tiles * 8, pieces = Tokens / 32;
  constexpr int together = heads / kWarps < 4 ? heads / kWarps : 4;  // heads of a warp side by side
  bool live[pieces];
KVB_UNROLL
  for (int piece = 0; piece < pieces; ++piece) live[piece] = rows[piece * 32 + lane] != nullptr;
  for (int start = warp; start < heads; start += kWarps * together) {
    float scores[together][pieces], highest[together], before[together];
KVB_UNROLL
    for (int index = 0; index < together; ++index) {
      const int head = start + index * kWarps;
      highest[index] = negative_infinity();
KVB_UNROLL
      for (int piece = 0; piece < pieces; ++piece) {
        float sum = 0;
        for (int part = 0; part < Layout::parts; ++part)
          sum += shared.scores[(part * heads + head) * Layout::score_pitch + piece * 32 + lane];
        scores[index][piece] = live[piece] ? sum * scale_log2 : negative_infinity();
        highest[index] = maximum(highest[index], scores[index][piece]);
      }
      before[index] = shared.highest[head];
    }
    for (int mask = 16; mask; mask >>= 1) highest_of_pair(highest, mask);
    float rounded[together], exact[together], now[together];
KVB_UNROLL
    for (int index = 0; index < together; ++index) {
      const int head = start + index * kWarps;
      now[index] = maximum(before[index], highest[index]);
      rounded[index] = exact[index] = 0;
      const bool empty = now[index] == negative_infinity();
KVB_UNROLL
      for (int piece = 0; piece < pieces; ++piece) {
        const float score = scores[index][piece];
        const float weight = live[piece] && (!empty || score != score) ? exp2_approximate(score - now[index]) : 0;
        const uint32_t bits = pack_bf16x2(weight, 0);
        shared.weights[head * Layout::weight_pitch + piece * 32 + lane] = static_cast<uint16_t>(bits);
        rounded[index] += as_float(bits << 16);
        exact[index] += weight;
      }
    }
    for (int mask = 16; mask; mask >>= 1) {
      sum_of_pair(rounded, mask);
      sum_of_pair(exact, mask);
    }
    if (lane == 0)
KVB_UNROLL
      for (int index = 0; index < together; ++index) {
        const int head = start + index * kWarps;
        const float correction = now[index] == negative_infinity() ? 1 : exp2_approximate(before[index] - now[index]);
        shared.correction[head] = correction;
        shared.highest[head] = now[index];
        shared.rounded_sum[head] = shared.rounded_sum[head] * correction + rounded[index];
        shared.exact_sum[head] = shared.exact_sum[head] * correction + exact[index];
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
