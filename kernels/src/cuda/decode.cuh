// The shared MLA decode kernel: one block per (query, head tile, split).
//
//   for each tile of tokens:   wait for its raw rows -> bf16 keys -> scores -> softmax -> value sums
//                              meanwhile the raw rows of the next tiles are on their way
//
// No metadata kernel, no host synchronisation: a block finds its tiles from the lengths it reads itself, so captured graphs
// replay with other lengths, slots and pages. Reads of page bytes go through copy_async alone.
#pragma once
#include "finish.cuh"
#include "gather.cuh"

template <class Layout, int Heads, class Shared>
KVB_DEVICE void load_query(Shared& shared, const DecodeArguments& call, int query, int first_head) {
  constexpr int vectors = Layout::d_qk / 8;
  for (int index = static_cast<int>(thread_index()); index < Heads * vectors; index += kThreads) {
    const int local = index / vectors, column = index % vectors * 8, head = first_head + local;
    uint4 value = {0, 0, 0, 0};
    if (head < call.heads) {
      const uint16_t* source = call.q + query * call.q_query_stride + head * call.q_head_stride + column;
      if (call.flags & kQueryVectors)
        value = load_vector(source);
      else
        value = uint4{source[0] | static_cast<uint32_t>(source[1]) << 16, source[2] | static_cast<uint32_t>(source[3]) << 16,
                      source[4] | static_cast<uint32_t>(source[5]) << 16, source[6] | static_cast<uint32_t>(source[7]) << 16};
    }
    store_vector(shared.query + local * Layout::key_pitch + column, value);
  }
}

// Writes the sums of a block: finished outputs, or the partial sums of a split. Eight heads at a time pass through the
// keys' memory, so that stores run along the value axis.
template <class Layout, int Heads, class Shared>
KVB_DEVICE void write_sums(Shared& shared, const DecodeArguments& call, const Accumulator<Layout>& sums, int query,
                           int head_tile, int split) {
  constexpr int pitch = kValueDims + 4;
  float* staged = reinterpret_cast<float*>(shared.keys);
  const int lane = static_cast<int>(thread_index()) % 32, warp = static_cast<int>(thread_index()) / 32;
  const long long head_tiles = (call.heads + Heads - 1) / Heads;
  const long long unit = (query * head_tiles + head_tile) * call.splits + split;
KVB_UNROLL
  for (int tile = 0; tile < Layout::head_tiles; ++tile) {
    barrier();
KVB_UNROLL
    for (int value = 0; value < Layout::value_tiles; ++value)
KVB_UNROLL
      for (int element = 0; element < 4; ++element) {
        const int dim = (warp * Layout::value_tiles + value) * 16 + lane / 4 + element / 2 * 8;
        staged[(lane % 4 * 2 + element % 2) * pitch + dim] = sums[value][tile][element];
      }
    barrier();
    for (int index = static_cast<int>(thread_index()); index < 8 * kValueDims; index += kThreads) {
      const int local = tile * 8 + index / kValueDims, dim = index % kValueDims, head = head_tile * Heads + local;
      if (head >= call.heads) continue;
      const float sum = staged[index / kValueDims * pitch + dim];
      const HeadState state = {shared.highest[local], shared.rounded_sum[local], shared.exact_sum[local]};
      if (call.splits > 1) {
        call.partial_out[(unit * Heads + local) * kValueDims + dim] = sum;
        if (dim < 3)
          call.partial_state[(unit * Heads + local) * 3 + dim] =
              dim == 0 ? state.highest : dim == 1 ? state.rounded_sum : state.exact_sum;
      } else {
        const float factor = output_factor(state, sink_of(call, head));
        store_output(call, query, head, dim, factor == 0 ? 0 : sum * factor);
        if (dim == 0) store_log_sum(call, query, head, state);
      }
    }
  }
}

template <int Formats, int Heads, int Tokens, int Stages>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const DecodeArguments call) {
  using Layout = Tile<Formats, Heads, Tokens, Stages>;
  using Shared = typename Layout::Shared;
  KVB_DYNAMIC_SHARED(memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int query = static_cast<int>(block_index().x), head_tile = static_cast<int>(block_index().y);
  const int split = static_cast<int>(block_index().z);

  load_query<Layout, Heads>(shared, call, query, head_tile * Heads);
  for (int head = static_cast<int>(thread_index()); head < Heads; head += kThreads) {
    shared.highest[head] = negative_infinity();
    shared.rounded_sum[head] = shared.exact_sum[head] = 0;
  }
  // Three scalars, not an array: indexed registers would live on the stack.
  const int positions0 = live_positions(call, call.cache[0], query);
  const int positions1 = call.caches > 1 ? live_positions(call, call.cache[1], query) : 0;
  const int positions2 = call.caches > 2 ? live_positions(call, call.cache[2], query) : 0;
  const auto source_of = [&](int tile) { return tile_source<Tokens>(positions0, positions1, positions2, tile); };
  const int tiles = (positions0 + Tokens - 1) / Tokens + (positions1 + Tokens - 1) / Tokens + (positions2 + Tokens - 1) / Tokens;
  const int first = static_cast<int>(static_cast<long long>(tiles) * split / call.splits);
  const int last = static_cast<int>(static_cast<long long>(tiles) * (split + 1) / call.splits);
  const bool plain = call.flags & kPlainPipeline;

  // Tile t lies in raw stage t % Stages and in slot stage t % (Stages + 1): its addresses outlive its raw rows.
  auto locate = [&](int tile) {
    if (tile >= last) return;
    const TileSource source = source_of(tile);
    locate_rows<Tokens>(shared, call, source, query, tile % (Stages + 1));
  };
  auto issue = [&](int tile) {
    if (tile < last) {
      const TileSource source = source_of(tile);
      copy_rows<Layout, Tokens>(shared, call.cache[source.cache], tile % Stages, tile % (Stages + 1));
    }
    copy_commit();  // an empty group keeps the count of groups equal to the count of tiles
  };

  Accumulator<Layout> sums = {};
  if (!plain) {
    for (int stage = 0; stage < Stages; ++stage) locate(first + stage);
    barrier();
    for (int stage = 0; stage < Stages; ++stage) issue(first + stage);
  }
  for (int tile = first; tile < last; ++tile) {
    if (plain) {
      locate(tile);
      barrier();
      issue(tile);
      copy_wait<0>();
    } else {
      copy_wait<Stages - 1>();
    }
    barrier();  // the rows of every thread have arrived; the last tile's keys and weights are no longer read
    decode_tile<Formats, Layout, Tokens>(shared, call.cache[source_of(tile).cache].format,
                                         tile % Stages, tile % (Stages + 1));
    if (!plain) locate(tile + Stages);
    barrier();  // keys are complete, the raw stage is free, the next addresses are known
    if (!plain) issue(tile + Stages);
    compute_scores<Layout>(shared);
    barrier();
    update_softmax<Layout, Tokens>(shared, shared.data + tile % (Stages + 1) * Tokens, call.scale_log2);
    barrier();
    add_values<Layout, Tokens>(shared, sums);
  }
  copy_wait<0>();
  write_sums<Layout, Heads>(shared, call, sums, query, head_tile, split);

  if (call.splits == 1 || !(call.flags & kFusedMerge)) return;
  const int head_tiles = (call.heads + Heads - 1) / Heads;
  fence();  // this thread's partial sums are visible before the count says so
  barrier();
  if (thread_index() == 0)
    shared.last_block = count_and_wrap(call.counters + static_cast<long long>(query) * head_tiles + head_tile,
                                       static_cast<unsigned>(call.splits - 1)) == static_cast<unsigned>(call.splits - 1);
  barrier();
  if (!shared.last_block) return;
  fence();
  static_assert(sizeof(HeadState) * kMergeStates <= sizeof(shared.keys), "the states of a merge take the keys' memory");
  merge_splits<Heads>(call, reinterpret_cast<HeadState*>(shared.keys), query, head_tile, 0, Heads);
}

// The merge as a launch of its own, one block for every (query, head tile, share of its heads); bit for bit what the fused
// one gives.
template <int Heads> __global__ void __launch_bounds__(kThreads, 4) merge_kernel(const DecodeArguments call) {
  KVB_DYNAMIC_SHARED(memory);
  const int each = (Heads + call.merge_blocks - 1) / call.merge_blocks;
  const int first = static_cast<int>(block_index().z) * each, last = first + each < Heads ? first + each : Heads;
  merge_splits<Heads>(call, reinterpret_cast<HeadState*>(memory), static_cast<int>(block_index().x),
                      static_cast<int>(block_index().y), first, last);
}
