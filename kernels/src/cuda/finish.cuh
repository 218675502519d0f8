// From sums to outputs: normalise, sink, LSE, bf16. Splits are merged in the order of their number, whoever merges.
//
//   out = sum(rounded weights * V) / (sum(rounded weights) + exp(sink)),  LSE = log(sum(exact weights) [+ exp(sink)])
#pragma once
#include "arguments.cuh"
#include "attend.cuh"

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// What one (query, head) has summed so far; `highest` is in log2 units.
struct HeadState {
  float highest, rounded_sum, exact_sum;
};

// The factor for the value sums, from state and sink. A sink of +inf takes everything: output 0.
KVB_DEVICE float output_factor(const HeadState& state, float sink) {
  if (state.highest == negative_infinity() && state.rounded_sum == 0) return 0;
  const float sink_log2 = sink * kLog2E;
  if (sink == as_float(0x7f800000u)) return 0;
  const float top = maximum(state.highest, sink_log2);
  const float own = exp2_approximate(state.highest - top);
  return own / (state.rounded_sum * own + (sink == negative_infinity() ? 0 : exp2_approximate(sink_log2 - top)));
}

// Natural or base 2. An empty query gives -inf, or the sink where that is inside, or +inf where that mark was asked for.
KVB_DEVICE float log_sum(const HeadState& state, float sink, int flags) {
  const bool empty = state.highest == negative_infinity() && state.exact_sum == 0;
  if (empty && (flags & kLseEmptyPositive)) return as_float(0x7f800000u);
  float result = empty ? negative_infinity() : state.highest + log2_of(state.exact_sum);
  if ((flags & kLseWithSink) && sink != negative_infinity()) {
    const float sink_log2 = sink * kLog2E, top = maximum(result, sink_log2);
    result = top == as_float(0x7f800000u)
                 ? top
                 : top + log2_of(exp2_approximate(result - top) + exp2_approximate(sink_log2 - top));
  }
  return flags & kLseBase2 ? result : result * kLn2;
}

KVB_DEVICE float sink_of(const DecodeArguments& call, int head) {
  return call.sink ? call.sink[head] : negative_infinity();
}

KVB_DEVICE void store_output(const DecodeArguments& call, int query, int head, int dim, float value) {
  const long long index = query * call.out_query_stride + head * call.out_head_stride + dim;
  if (call.flags & kOutFp32)
    static_cast<float*>(call.out)[index] = value;
  else
    static_cast<uint16_t*>(call.out)[index] = static_cast<uint16_t>(pack_bf16x2(value, 0));
}

KVB_DEVICE void store_log_sum(const DecodeArguments& call, int query, int head, const HeadState& state) {
  if (call.lse)
    call.lse[query * call.lse_query_stride + head * call.lse_head_stride] =
        log_sum(state, sink_of(call, head), call.flags);
}

// Joins the splits of heads [first, last) of one (query, head tile), as many heads at a time as have room for the states of
// their splits in shared memory. A thread takes four columns of a head and adds splits in order: the bits do not depend on
// how many blocks share the heads.
constexpr int kMergeStates = 1024;  // never fewer than there are splits

template <int Heads>
KVB_DEVICE void merge_splits(const DecodeArguments& call, HeadState* states, int query, int head_tile, int first, int last) {
  const int splits = call.splits, tile_start = head_tile * Heads, group = kMergeStates / splits;
  const long long head_tiles = (call.heads + Heads - 1) / Heads;
  const long long unit = (query * head_tiles + head_tile) * splits;
  const int end = last < call.heads - tile_start ? last : call.heads - tile_start;
  for (int start = first; start < end; start += group) {
    const int heads = group < end - start ? group : end - start;
    barrier();  // the states of the group before are no longer read
    for (int index = static_cast<int>(thread_index()); index < heads * splits; index += kThreads) {
      const int local = start + index / splits, split = index % splits;
      const float* state = call.partial_state + ((unit + split) * Heads + local) * 3;
      states[index] = {load_fresh(state), load_fresh(state + 1), load_fresh(state + 2)};
    }
    barrier();
    constexpr int vectors = kValueDims / 4;
    for (int index = static_cast<int>(thread_index()); index < heads * vectors; index += kThreads) {
      const int local = start + index / vectors, dim = index % vectors * 4, head = tile_start + local;
      const HeadState* own = states + index / vectors * splits;
      HeadState merged = {negative_infinity(), 0, 0};
      for (int split = 0; split < splits; ++split) merged.highest = maximum(merged.highest, own[split].highest);
      float4 sum = {0, 0, 0, 0};
      auto add = [&](int split, float4 values) {
        const HeadState state = own[split];
        const bool empty = state.rounded_sum == 0 && state.exact_sum == 0;
        const float factor =
            empty ? 0 : merged.highest == negative_infinity() ? 1 : exp2_approximate(state.highest - merged.highest);
        merged.rounded_sum += state.rounded_sum * factor;
        merged.exact_sum += state.exact_sum * factor;
        sum.x += values.x * factor, sum.y += values.y * factor, sum.z += values.z * factor, sum.w += values.w * factor;
      };
      const float* values = call.partial_out + (unit * Heads + local) * kValueDims + dim;
      constexpr long long stride = Heads * kValueDims;
      int split = 0;
      for (; split + 4 <= splits; split += 4) {  // four loads in flight
        const float4 a = load_fresh_vector(values + split * stride), b = load_fresh_vector(values + (split + 1) * stride);
        const float4 c = load_fresh_vector(values + (split + 2) * stride), d = load_fresh_vector(values + (split + 3) * stride);
        add(split, a), add(split + 1, b), add(split + 2, c), add(split + 3, d);
      }
      for (; split < splits; ++split) add(split, load_fresh_vector(values + split * stride));
      const float factor = output_factor(merged, sink_of(call, head));
      store_output(call, query, head, dim, factor == 0 ? 0 : sum.x * factor);
      store_output(call, query, head, dim + 1, factor == 0 ? 0 : sum.y * factor);
      store_output(call, query, head, dim + 2, factor == 0 ? 0 : sum.z * factor);
      store_output(call, query, head, dim + 3, factor == 0 ? 0 : sum.w * factor);
      if (dim == 0) store_log_sum(call, query, head, merged);
    }
  }
}
