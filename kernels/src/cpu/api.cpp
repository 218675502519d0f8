// The entry: checks a call, cuts it into items, hands them to threads.
//
//   queries x head groups x slot splits  ->  items, taken from one counter  ->  (split) merged per 16 heads
//
// Cutting heads never changes bits: every head's arithmetic is independent of its neighbours. Cutting slots does, so
// it depends on counts and threads alone and is left out on request.
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include "machine.h"

namespace {

struct Cut {
  int32_t groups, group_heads, splits;
};

bool good_record(const kvb_record& r, int32_t d_qk) {
  if (r.values < 0 || r.tail_values < 0 || r.values % 64 || r.tail_values % 64 || r.values + r.tail_values != d_qk)
    return false;
  if (r.values == 0) return r.code == KVB_CODE_NONE && r.scale == KVB_SCALE_NONE;
  if (r.code == KVB_CODE_E4M3 && r.scale == KVB_SCALE_NONE) return true;
  if (r.group <= 0 || r.values % r.group) return false;
  if (r.code == KVB_CODE_E4M3)
    return (r.scale == KVB_SCALE_UE8M0 && (r.group == 32 || r.group == 64)) ||
           (r.scale == KVB_SCALE_FP32 && r.group % 64 == 0);
  return r.code == KVB_CODE_E2M1 && r.scale == KVB_SCALE_E4M3 && r.group == 16;
}

int check_cache(const kvb_cache& c, int32_t d_qk) {
  if (!good_record(c.record, d_qk)) return KVB_ERROR_RECORD;
  int64_t capacity;
  if (c.num_pages < 0 || c.page_rows <= 0 || __builtin_mul_overflow(c.num_pages, c.page_rows, &capacity))
    return KVB_ERROR_PAGES;
  const bool bits = (c.slots_bits == 32 || c.slots_bits == 64) &&
                    (!c.lengths || c.lengths_bits == 32 || c.lengths_bits == 64) &&
                    (!c.row_of_query || c.row_of_query_bits == 32 || c.row_of_query_bits == 64);
  if (!bits || c.width < 0 || c.rows < 0 || c.mapped < 0 || c.mapped > 2) return KVB_ERROR_SLOTS;
  if ((!c.slots && c.width > 0 && c.rows > 0) || (!c.base && capacity > 0)) return KVB_ERROR_POINTER;
  return KVB_OK;
}

int check(const kvb_call* call) {
  if (!call || call->abi != KVB_CPU_ABI || call->bytes != static_cast<int32_t>(sizeof(kvb_call))) return KVB_ERROR_ABI;
  if (call->heads < 1 || call->heads > KVB_CPU_MAX_HEADS) return KVB_ERROR_HEADS;
  if (call->queries < 0 || call->threads < 1) return KVB_ERROR_QUERIES;
  if ((call->d_qk != 512 && call->d_qk != 576) || call->d_v != KVB_DV ||
      (call->out_type != KVB_OUT_BF16 && call->out_type != KVB_OUT_FP32))
    return KVB_ERROR_WIDTHS;
  if (call->caches < 1 || call->caches > KVB_CPU_MAX_CACHES) return KVB_ERROR_CACHES;
  if (call->queries > 0 && (!call->q || !call->out)) return KVB_ERROR_POINTER;
  for (int32_t i = 0; i < call->caches; i++)
    if (int error = check_cache(call->cache[i], call->d_qk)) return error;
  return KVB_OK;
}

int32_t ceil_div(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

Cut cut_of(int32_t units, int32_t groups, int32_t splits) {
  const int32_t group_units = ceil_div(units, groups);
  return {ceil_div(units, group_units), group_units * 16, splits};
}

// The cut with the least work on the busiest thread. A row's products with 16 heads cost 2, dequantising it and merging
// what the path says.
Cut cut(const kvb_call* call, const Path* path) {
  const int32_t units = ceil_div(call->heads, 16);
  int64_t width = 0;
  for (int32_t i = 0; i < call->caches; i++) width += call->cache[i].width < (1 << 20) ? call->cache[i].width : 1 << 20;
  const int64_t threads = call->threads, queries = call->queries;
  const bool may_split = !(call->flags & KVB_BATCH_INVARIANT) && call->workspace;
  Cut best = cut_of(units, 1, 1);
  double least = 1e300;
  for (int32_t groups = 1; groups <= units; groups++) {
    Cut c = cut_of(units, groups, 1);
    if (c.groups != groups) continue;
    const int64_t items = queries * groups;
    if (may_split && items < threads) {
      const int64_t most = width / 64 < 64 ? width / 64 : 64;
      c.splits = static_cast<int32_t>(threads / items < most ? threads / items : most);
      const int64_t bytes = 64 + 4 * items * c.splits * partial_floats(c.group_heads);
      if (c.splits < 2 || bytes > call->workspace_bytes) c.splits = 1;
    }
    const int64_t rounds = (items * c.splits + threads - 1) / threads;
    const double cost =
        static_cast<double>(rounds) * (2.0 * c.group_heads / 16 + static_cast<double>(path->decode_cost)) / c.splits +
        (c.splits > 1 ? static_cast<double>(path->merge_cost) * c.group_heads / 16 / static_cast<double>(width) : 0);
    if (cost < least - 1e-9) {
      least = cost;
      best = c;
    }
  }
  return best;
}

// Rounding to nearest and kept denormals while this thread works, whatever the engine has set for its own threads: the
// same bits on every thread.
struct PlainArithmetic {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();
  PlainArithmetic() { _mm_setcsr(0x1f80); }
  ~PlainArithmetic() { _mm_setcsr(saved); }
#else
  ~PlainArithmetic() {}
#endif
};

struct Job {
  const kvb_call* call;
  const Path* path;
  Cut cut;
  int64_t items, next;
  int32_t error;
};

float* aligned_workspace(const kvb_call* call) {
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(call->workspace) + 63) & ~static_cast<uintptr_t>(63));
}

Item item_of(const Job* job, int64_t query, int32_t group, int32_t split) {
  const Cut& c = job->cut;
  const int32_t head0 = group * c.group_heads, left = job->call->heads - head0;
  const int32_t heads = left < c.group_heads ? left : c.group_heads, padded = ceil_div(heads, 16) * 16;
  float* partial = nullptr;
  if (c.splits > 1)
    partial = aligned_workspace(job->call) + (query * c.groups + group) * c.splits * partial_floats(c.group_heads) +
              split * partial_floats(padded);
  return {query, head0, heads, padded, split, c.splits, partial, nullptr, false};
}

bool take(Job* job, Item* item) {
  const Cut& c = job->cut;
  const int64_t i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
  if (i >= job->items) return false;
  const int64_t query = i / (c.groups * c.splits), rest = i - query * c.groups * c.splits;
  *item = item_of(job, query, static_cast<int32_t>(rest / c.splits), static_cast<int32_t>(rest % c.splits));
  return true;
}

void work(void* context) {
  Job* job = static_cast<Job*>(context);
  const PlainArithmetic plain;
  void* scratch = kvb_scratch(job->path->scratch_bytes(job->call, job->cut.group_heads));
  if (!scratch) {
    __atomic_store_n(&job->error, KVB_ERROR_MEMORY, __ATOMIC_RELAXED);
    return;
  }
  // With many items to come a thread takes one ahead, to fetch its rows from memory meanwhile.
  const bool takes_ahead = job->items >= 4 * job->call->threads;
  Item items[2];
  int32_t held = 0;
  bool more = take(job, &items[0]);
  while (more) {
    Item* item = &items[held];
    Item* next = &items[held ^ 1];
    if (takes_ahead) {
      more = take(job, next);
      next->resumed = more;
      item->next = more ? next : nullptr;
      job->path->run_item(job->call, item, scratch);
    } else {
      job->path->run_item(job->call, item, scratch);
      more = take(job, next);
    }
    held ^= 1;
  }
}

void merge(void* context) {
  Job* job = static_cast<Job*>(context);
  const PlainArithmetic plain;
  const int32_t units = job->cut.group_heads / 16;
  for (int64_t i; (i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->items;) {
    const int64_t query = i / (job->cut.groups * units), rest = i - query * job->cut.groups * units;
    const Item item = item_of(job, query, static_cast<int32_t>(rest / units), 0);
    const int32_t first = static_cast<int32_t>(rest % units) * 16, left = item.heads - first;
    if (left > 0) job->path->merge_item(job->call, &item, first, left < 16 ? left : 16);
  }
}

int32_t team(const kvb_call* call, int64_t items) {
  return items < call->threads ? static_cast<int32_t>(items) : call->threads;
}

}  // namespace

extern "C" int kvb_cpu_run(const kvb_call* call) {
  if (int error = check(call)) return error;
  const Path* path = kvb_choose(call->path);
  if (!path) return KVB_ERROR_PATH;
  if (call->queries == 0) return KVB_OK;
  Job job = {call, path, cut(call, path), 0, 0, KVB_OK};
  job.items = call->queries * job.cut.groups * job.cut.splits;
  kvb_parallel(call, team(call, job.items), work, &job);
  if (job.cut.splits > 1 && job.error == KVB_OK) {
    job.next = 0;
    job.items = call->queries * job.cut.groups * (job.cut.group_heads / 16);
    kvb_parallel(call, team(call, job.items), merge, &job);
  }
  return job.error;
}

extern "C" int64_t kvb_cpu_workspace_bytes(int32_t heads, int32_t threads, int32_t flags) {
  if (threads <= 1 || flags & KVB_BATCH_INVARIANT) return 0;
  return 64 + 4 * threads * partial_floats(ceil_div(heads, 16) * 16);
}

extern "C" void kvb_cpu_cut(const kvb_call* call, int32_t* head_groups, int32_t* slot_splits) {
  const Path* path = kvb_choose(call->path);
  const Cut c = path ? cut(call, path) : Cut{0, 0, 0};
  *head_groups = c.groups;
  *slot_splits = c.splits;
}

extern "C" const char* kvb_cpu_error(int32_t code) {
  static const char* const texts[KVB_ERRORS] = {
      "ok",
      "the call structure does not match this library",
      "the requested path is not compiled in or this machine cannot run it",
      "heads must lie in 1..128",
      "queries must be at least 0 and threads at least 1",
      "d_qk must be 512 or 576, d_v 512, the output bf16 or fp32",
      "a call takes one to three caches",
      "a record has a combination of codes, scales and widths that no path decodes",
      "num_pages must be at least 0, page_rows at least 1, and their product must fit 64 bits",
      "slots, lengths and maps must be int32 or int64, width and rows at least 0",
      "a required pointer is null",
      "no memory for scratch",
  };
  return code >= 0 && code < KVB_ERRORS ? texts[code] : "unknown error";
}
