// Threads and per-thread scratch.
//
// In an engine the work runs in the OpenMP runtime that torch already uses (its GOMP_parallel is handed in): those
// threads are warm, bound to their cores and counted. Elsewhere, in a forked child (whose copy of that runtime has
// lost its threads) and on request, it runs in this library's own threads. There the caller works too and waits only
// for helpers that have begun, so a helper that is scheduled late costs nothing; a second caller works alone.
//
// An OpenMP region ends with a barrier: where other processes take the cores, its threads wait for one that was put
// aside, a scheduler slice (often 8 ms) for microseconds of work. After two such stalls among eight calls the next 64
// calls use the own threads. Bits do not depend on whose threads run.
#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include "item.h"

namespace {

constexpr int32_t MAX_HELPERS = 255;
constexpr int64_t SPIN_NANOSECONDS = 20000;

struct Pool {
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
  pthread_cond_t left = PTHREAD_COND_INITIALIZER;
  int32_t helpers = 0, openings = 0, inside = 0;
  bool busy = false, forked = false;
  void (*body)(void*) = nullptr;
  void* context = nullptr;
};

Pool pool;

void after_fork_in_child() {
  pool = Pool();
  pool.forked = true;
}

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// Waits a moment for *value to become zero (or non-zero) before the caller goes to sleep.
void spin(const int32_t* value, bool until_zero) {
  const int64_t end = now() + SPIN_NANOSECONDS;
  do {
    for (int i = 0; i < 16; i++) {
      if ((__atomic_load_n(value, __ATOMIC_ACQUIRE) == 0) == until_zero) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  } while (now() < end);
}

// An engine may have bound the thread that starts helpers to one core. Helpers may use every core that any thread of
// this process may use.
void use_cores_of_process() {
#if defined(__linux__)
  constexpr size_t words = 128;
  unsigned long all[words] = {}, one[words];
  DIR* tasks = opendir("/proc/self/task");
  if (!tasks) return;
  while (const dirent* task = readdir(tasks)) {
    const int id = atoi(task->d_name);
    for (unsigned long& word : one) word = 0;
    if (id <= 0 || sched_getaffinity(id, sizeof one, reinterpret_cast<cpu_set_t*>(one)) != 0) continue;
    for (size_t i = 0; i < words; i++) all[i] |= one[i];
  }
  closedir(tasks);
  sched_setaffinity(0, sizeof all, reinterpret_cast<const cpu_set_t*>(all));
#endif
}

void* help(void*) {
  use_cores_of_process();
  for (;;) {
    spin(&pool.openings, false);
    pthread_mutex_lock(&pool.lock);
    while (pool.openings == 0) pthread_cond_wait(&pool.wake, &pool.lock);
    __atomic_store_n(&pool.openings, pool.openings - 1, __ATOMIC_RELEASE);
    __atomic_store_n(&pool.inside, pool.inside + 1, __ATOMIC_RELEASE);
    void (*body)(void*) = pool.body;
    void* context = pool.context;
    pthread_mutex_unlock(&pool.lock);
    body(context);
    pthread_mutex_lock(&pool.lock);
    __atomic_store_n(&pool.inside, pool.inside - 1, __ATOMIC_RELEASE);
    if (pool.inside == 0) pthread_cond_signal(&pool.left);
    pthread_mutex_unlock(&pool.lock);
  }
  return nullptr;
}

void start_helpers(int32_t wanted) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  while (pool.helpers < wanted && pool.helpers < MAX_HELPERS) {
    pthread_t thread;
    if (pthread_create(&thread, &attributes, help, nullptr) != 0) break;
    pool.helpers++;
  }
  pthread_attr_destroy(&attributes);
}

void run_in_pool(int32_t threads, void (*body)(void*), void* context) {
  pthread_mutex_lock(&pool.lock);
  if (pool.busy) {
    pthread_mutex_unlock(&pool.lock);
    body(context);
    return;
  }
  pool.busy = true;
  if (pool.helpers < threads - 1) start_helpers(threads - 1);
  pool.body = body;
  pool.context = context;
  const int32_t openings = threads - 1 < pool.helpers ? threads - 1 : pool.helpers;
  __atomic_store_n(&pool.openings, openings, __ATOMIC_RELEASE);
  if (openings == 1) pthread_cond_signal(&pool.wake);
  else if (openings > 1) pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.lock);
  body(context);
  pthread_mutex_lock(&pool.lock);
  __atomic_store_n(&pool.openings, 0, __ATOMIC_RELEASE);
  if (pool.inside > 0) {
    pthread_mutex_unlock(&pool.lock);
    spin(&pool.inside, true);
    pthread_mutex_lock(&pool.lock);
    while (pool.inside > 0) pthread_cond_wait(&pool.left, &pool.lock);
  }
  pool.busy = false;
  pthread_mutex_unlock(&pool.lock);
}

constexpr int64_t STALL_NANOSECONDS = 2000000;
constexpr int32_t CALLS_AWAY = 64;

int32_t calls_away = 0;      // calls that still avoid OpenMP
uint32_t recent_stalls = 0;  // one bit a call, the latest lowest

struct Region {
  void (*body)(void*);
  void* context;
  pthread_t caller;
  int64_t caller_entered, caller_left;
};

void run_region(void* context) {
  Region* region = static_cast<Region*>(context);
  const int64_t entered = now();
  region->body(region->context);
  if (!pthread_equal(pthread_self(), region->caller)) return;
  region->caller_entered = entered;
  region->caller_left = now();
}

typedef void (*Team)(void (*)(void*), void*, unsigned, unsigned);

void run_in_openmp(Team team, int32_t threads, void (*body)(void*), void* context) {
  Region region = {body, context, pthread_self(), 0, 0};
  const int64_t started = now();
  team(run_region, &region, static_cast<unsigned>(threads), 0);
  // Waiting longer than the caller itself worked is no imbalance of work: work is shared out in pieces.
  const int64_t waited = region.caller_entered - started + now() - region.caller_left;
  const bool stalled = waited > STALL_NANOSECONDS && waited > region.caller_left - region.caller_entered;
  const uint32_t recent = (__atomic_load_n(&recent_stalls, __ATOMIC_RELAXED) << 1 | (stalled ? 1u : 0u)) & 0xff;
  const bool away = __builtin_popcount(recent) >= 2;
  __atomic_store_n(&recent_stalls, away ? 1u : recent, __ATOMIC_RELAXED);
  if (away) __atomic_store_n(&calls_away, CALLS_AWAY, __ATOMIC_RELAXED);
}

// True when this call should keep away from OpenMP.
bool avoids_openmp() {
  const int32_t left = __atomic_load_n(&calls_away, __ATOMIC_RELAXED);
  if (left > 0) __atomic_store_n(&calls_away, left - 1, __ATOMIC_RELAXED);
  return left > 0;
}

struct Scratch {
  void* memory = nullptr;
  int64_t bytes = 0;
  ~Scratch() { free(memory); }
};

thread_local Scratch scratch;

__attribute__((constructor)) void watch_forks() { pthread_atfork(nullptr, nullptr, after_fork_in_child); }

}  // namespace

KVB_HIDDEN void* kvb_scratch(int64_t bytes) {
  if (bytes > scratch.bytes) {
    free(scratch.memory);
    scratch.bytes = 0;
    constexpr int64_t page = 2 << 20;
    const int64_t rounded = (bytes + page - 1) / page * page;
    scratch.memory = aligned_alloc(page, static_cast<size_t>(rounded));
#if defined(__linux__)
    if (scratch.memory) madvise(scratch.memory, static_cast<size_t>(rounded), MADV_HUGEPAGE);  // fewer address look-ups
#endif
    if (scratch.memory) scratch.bytes = rounded;
  }
  return scratch.memory;
}

KVB_HIDDEN void kvb_parallel(const kvb_call* call, int32_t threads, void (*body)(void*), void* context) {
  if (threads <= 1) {
    body(context);
  } else if (call->parallel && !(call->flags & KVB_OWN_THREADS) && !pool.forked && !avoids_openmp()) {
    // Always the full team: a smaller one would make the runtime end threads that the engine's next operation needs.
    run_in_openmp(reinterpret_cast<Team>(call->parallel), call->threads, body, context);
  } else {
    run_in_pool(threads, body, context);
  }
}
