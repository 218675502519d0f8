// The kernel's sources under g++, as a library: one entry per compiled tile, chosen by the test's -D options.
#include "decode.cuh"

#define KVB_EXPORT extern "C" __attribute__((visibility("default")))
#ifndef KVB_FORMATS
#error "define KVB_FORMATS, KVB_HEADS, KVB_TOKENS and KVB_STAGES"
#endif
using Layout = Tile<KVB_FORMATS, KVB_HEADS, KVB_TOKENS, KVB_STAGES>;

KVB_EXPORT int kvb_arguments_bytes() { return sizeof(DecodeArguments); }
KVB_EXPORT int kvb_shared_bytes() { return sizeof(Layout::Shared); }
KVB_EXPORT const char* kvb_decode(const DecodeArguments* call, int head_tiles, const simt::Options* options,
                                  simt::Counters* counters) {
  const uint3 grid{static_cast<uint32_t>(call->queries), static_cast<uint32_t>(head_tiles), static_cast<uint32_t>(call->splits)};
  const char* error = simt::launch(grid, kThreads, sizeof(Layout::Shared), *options, [&] {
    decode_kernel<KVB_FORMATS, KVB_HEADS, KVB_TOKENS, KVB_STAGES>(*call);
  });
  if (counters) *counters = simt::counters;
  return error;
}
KVB_EXPORT const char* kvb_merge(const DecodeArguments* call, int head_tiles, const simt::Options* options) {
  const uint3 grid{static_cast<uint32_t>(call->queries), static_cast<uint32_t>(head_tiles),
                   static_cast<uint32_t>(call->merge_blocks)};
  return simt::launch(grid, kThreads, sizeof(HeadState) * kMergeStates, *options, [&] { merge_kernel<KVB_HEADS>(*call); });
}
