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

// Joins the splits of one (query, head tile); every thread takes whole columns, so nothing is shared.
template <int Heads> KVB_DEVICE void merge_splits(const DecodeArguments& call, int query, int head_tile, int head_tiles) {
  const long long unit = (static_cast<long long>(query) * head_tiles + head_tile) * call.splits;
  for (int index = static_cast<int>(thread_index()); index < Heads * kValueDims; index += kThreads) {
    const int local = index / kValueDims, dim = index % kValueDims, head = head_tile * Heads + local;
    if (head >= call.heads) return;
    HeadState merged = {negative_infinity(), 0, 0};
    for (int split = 0; split < call.splits; ++split)
      merged.highest = maximum(merged.highest, load_fresh(call.partial_state + ((unit + split) * Heads + local) * 3));
    float sum = 0;
    for (int split = 0; split < call.splits; ++split) {
      const float* state = call.partial_state + ((unit + split) * Heads + local) * 3;
      const float highest = load_fresh(state), rounded = load_fresh(state + 1), exact = load_fresh(state + 2);
      if (rounded == 0 && exact == 0) continue;  // an empty split wrote no values
      const float factor = merged.highest == negative_infinity() ? 1 : exp2_approximate(highest - merged.highest);
      merged.rounded_sum += rounded * factor;
      merged.exact_sum += exact * factor;
      sum += load_fresh(call.partial_out + ((unit + split) * Heads + local) * kValueDims + dim) * factor;
    }
    const float factor = output_factor(merged, sink_of(call, head));
    store_output(call, query, head, dim, factor == 0 ? 0 : sum * factor);
    if (dim == 0) store_log_sum(call, query, head, merged);
  }
}
