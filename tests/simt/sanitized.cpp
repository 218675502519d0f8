// A small call as a program of its own, for AddressSanitizer, UndefinedBehaviourSanitizer and ThreadSanitizer.
//
// Pages lie in one heap block at a stride with a gap behind each payload; gaps are poisoned. Every schedule and switch must
// give the same bits. Exit status 0 only then.
#include <cinttypes>

#include "decode.cuh"

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __asan_poison_memory_region(const volatile void* address, size_t size);
#endif

using Layout = Tile<KVB_FORMATS, KVB_HEADS, KVB_TOKENS, KVB_STAGES>;

namespace {

constexpr int kQueries = 2, kWidth = 150, kPages = 5, kRows = 16, kSplits = 3;
constexpr int kCallHeads = KVB_HEADS + 3;  // the second head tile is not full
constexpr int kHeadTiles = 2;

constexpr int first_format() {
  int format = 0;
  while (!(KVB_FORMATS >> format & 1)) ++format;
  return format;
}
using Traits = RecordTraits<first_format()>;

struct Pages {
  std::vector<unsigned char> bytes;
  long long stride;
  Pages() : stride((Traits::raw_bytes * kRows + 63) / 16 * 16 + 16) {
    bytes.resize(stride * kPages);
    std::mt19937 random(7);
    for (auto& byte : bytes) byte = 0x38 + random() % 8;  // finite as e4m3, e2m1, UE8M0, bf16 and fp32
#if defined(__SANITIZE_ADDRESS__)
    for (int page = 0; page < kPages; ++page)
      __asan_poison_memory_region(bytes.data() + page * stride + Traits::raw_bytes * kRows, stride - Traits::raw_bytes * kRows);
#endif
  }
};

struct Buffers {
  std::vector<uint16_t> q;
  std::vector<float> out, lse, sink, partial_out, partial_state;
  std::vector<int> slots, lengths;
  std::vector<unsigned> counters;
  Buffers()
      : q(kQueries * kCallHeads * Layout::d_qk, 0x3c00), out(kQueries * kCallHeads * kValueDims),
        lse(kQueries * kCallHeads), sink(kCallHeads, 0.5f),
        partial_out(size_t{kQueries} * kHeadTiles * kSplits * KVB_HEADS * kValueDims),
        partial_state(size_t{kQueries} * kHeadTiles * kSplits * KVB_HEADS * 3), slots(kQueries * kWidth),
        lengths{kWidth, kWidth - 40}, counters(kQueries * kHeadTiles) {
    for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<uint16_t>(0x3c00 + i * 37 % 64);
    for (size_t i = 0; i < slots.size(); ++i) slots[i] = i % 11 == 3 ? -1 : static_cast<int>(i * 7 % (kPages * kRows));
  }
};

DecodeArguments arguments(const Pages& pages, Buffers& buffers, int splits, int flags) {
  DecodeArguments call{};
  CacheArguments& cache = call.cache[0];
  const bool split_page = first_format() == kFormatV4;
  cache.base = pages.bytes.data();
  cache.page_stride_bytes = pages.stride;
  cache.capacity = kPages * kRows;
  cache.page_rows = kRows;
  cache.data_bytes = cache.row_stride_bytes = split_page ? 576 : Traits::raw_bytes;
  cache.scales_bytes = cache.scales_stride_bytes = split_page ? 8 : 0;
  cache.scales_offset_bytes = split_page ? 576 * kRows : 0;
  cache.slots = buffers.slots.data();
  cache.lengths = buffers.lengths.data();
  cache.slots_stride = kWidth;
  cache.lengths_stride = 1;
  cache.width = kWidth;
  cache.format = first_format();
  cache.piece_bytes = 16;
  call.q = buffers.q.data();
  call.out = buffers.out.data();
  call.lse = buffers.lse.data();
  call.sink = buffers.sink.data();
  call.partial_out = buffers.partial_out.data();
  call.partial_state = buffers.partial_state.data();
  call.counters = buffers.counters.data();
  call.q_query_stride = kCallHeads * Layout::d_qk;
  call.q_head_stride = Layout::d_qk;
  call.out_query_stride = kCallHeads * kValueDims;
  call.out_head_stride = kValueDims;
  call.lse_query_stride = kCallHeads;
  call.lse_head_stride = 1;
  call.scale_log2 = 0.06f;
  call.queries = kQueries;
  call.heads = kCallHeads;
  call.caches = 1;
  call.splits = splits;
  call.merge_blocks = 2;
  call.flags = flags | kOutFp32 | kQueryVectors;
  return call;
}

const char* run(const DecodeArguments& call, const simt::Options& options) {
  const uint3 grid{kQueries, kHeadTiles, static_cast<uint32_t>(call.splits)};
  const char* error = simt::launch(grid, kThreads, sizeof(Layout::Shared), options,
                                   [&] { decode_kernel<KVB_FORMATS, KVB_HEADS, KVB_TOKENS, KVB_STAGES>(call); });
  if (error || call.splits == 1 || (call.flags & kFusedMerge)) return error;
  return simt::launch({kQueries, kHeadTiles, 2}, kThreads, sizeof(HeadState) * kMergeStates, options, [&] { merge_kernel<KVB_HEADS>(call); });
}

}  // namespace

int main() {
  const Pages pages;
  int failures = 0;
  for (int splits : {1, kSplits}) {
    std::vector<float> expected;
    for (int flags : {0, static_cast<int>(kPlainPipeline), static_cast<int>(kFusedMerge)})
      for (uint32_t seed : {0u, 3u}) {
#if defined(__SANITIZE_THREAD__)
        if (seed == 0) continue;  // interleaved blocks show every race that ordered ones do
#endif
        Buffers buffers;
        std::fill(buffers.partial_out.begin(), buffers.partial_out.end(), NAN);
        std::fill(buffers.partial_state.begin(), buffers.partial_state.end(), NAN);
        simt::Options options;
        options.seed = seed;
        options.blocks_alive = seed ? 3 : 1;
        options.copies_at_issue = seed == 3;
        const char* error = run(arguments(pages, buffers, splits, flags), options);
        if (error) {
          printf("splits %d flags %d seed %u: %s\n", splits, flags, seed, error);
          ++failures;
          continue;
        }
        if (expected.empty()) expected = buffers.out;
        bool finite = true, same = true;
        for (size_t i = 0; i < expected.size(); ++i) {
          finite &= std::isfinite(buffers.out[i]);
          same &= std::bit_cast<uint32_t>(expected[i]) == std::bit_cast<uint32_t>(buffers.out[i]);
        }
        if (!finite || !same) {
          printf("splits %d flags %d seed %u: %s\n", splits, flags, seed, finite ? "other bits" : "not finite");
          ++failures;
        }
      }
  }
  printf("%d failures\n", failures);
  return failures != 0;
}
