// Executes a CUDA C++ kernel on the CPU: the CPU half of kernels/src/cuda/prim.cuh.
//
//   OS thread: scheduler -> block A: fiber per CUDA thread, in warps of 32    a warp-wide operation is a rendezvous: the
//                        -> block B: ...                                      last lane to arrive computes it for all
//
// One OS thread runs everything, so the state below is global.
//
// Several blocks are alive at once and take turns in a seeded order, so that merges between blocks are really interleaved.
// Shared memory ends at a guard page and starts as NaN patterns. Reads outside a mapping become an error text.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "sanitizers.h"

#define __global__
#define __launch_bounds__(...)
#define KVB_DEVICE inline __attribute__((always_inline))
#define KVB_DYNAMIC_SHARED(name) unsigned char* name = simt::shared_memory()
#define KVB_UNROLL

struct uint2 { uint32_t x, y; };
struct uint3 { uint32_t x, y, z; };
struct float4 { float x, y, z, w; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };

namespace simt {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 128 << 10, kPage = 4096;

// How the run is to behave; the same kernel must give the same bits whatever is chosen here but `truncate`.
struct Options {
  uint32_t seed = 0;        // 0: lanes, warps and blocks in order
  int blocks_alive = 1;     // blocks that take turns
  int copies_at_issue = 0;  // asynchronous copies land when issued, instead of when waited for
  int truncate = 0;         // the MMA's sums are truncated, not rounded
  int count = 0;            // fill in the counters below
};

struct Counters {
  uint64_t copies = 0, copied_bytes = 0, sectors = 0, matrix_loads = 0, bank_conflicts = 0, multiplies = 0, switches = 0;
};

struct Copy { void* target; const void* source; unsigned bytes; bool live; };
enum class State : uint8_t { kReady, kBarrier, kWarp, kDone };

struct Block;
struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  Block* block = nullptr;
  unsigned index = 0;
  State state = State::kReady;
  uint64_t generation = 0;
  const char* waits_in = "";
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
  uint64_t copies = 0;
  void* sanitizer = nullptr;
};

struct Warp {
  int arrived = 0;
  uint64_t generation = 0;
  const char* operation = "";
  alignas(16) unsigned char arguments[kLanes][64];
  unsigned char results[kLanes][64];
  char tags[2];
  std::vector<std::set<uintptr_t>> sectors;  // by ordinal of the copy
};

struct Block {
  uint3 index{};
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  unsigned char* mapping = nullptr;
  unsigned char* shared = nullptr;
  unsigned live = 0, at_barrier = 0;
  uint64_t barrier_generation = 0;
  char tags[2], end_tag;
};

inline Fiber* current = nullptr;
inline Fiber scheduler;
inline const std::function<void()>* body = nullptr;
inline Options options;
inline Counters counters;
inline sigjmp_buf escape;
inline volatile sig_atomic_t armed = 0;
inline char message[512];
inline char launch_tag, fence_tag;

// What a CUDA thread knows of itself; the emulator's state is no memory of the kernel, so race checks leave it out.
KVB_NO_THREAD_SANITIZER inline unsigned char* shared_memory() { return current->block->shared; }
KVB_NO_THREAD_SANITIZER inline unsigned own_index() { return current->index; }
KVB_NO_THREAD_SANITIZER inline char* own_block_tag() { return &current->block->end_tag; }
KVB_NO_THREAD_SANITIZER inline uint3 own_block() { return current->block->index; }

[[noreturn]] inline void fail(const char* format, const void* detail = nullptr) {
  char text[256];
  snprintf(text, sizeof text, format, detail);
  const uint3 block = current->block->index;
  snprintf(message, sizeof message, "%s, block (%u, %u, %u) thread %u", text, block.x, block.y, block.z, current->index);
#if defined(__SANITIZE_THREAD__)
  fprintf(stderr, "%s\n", message);  // the race checker cannot follow a jump out of a fiber
  _exit(1);
#else
  siglongjmp(escape, 1);
#endif
}

extern "C" void simt_switch(void** save, void* load);
asm(R"(
.text
.weak simt_switch
.type simt_switch, @function
simt_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  pop %rcx
  jmp *%rcx
.size simt_switch, . - simt_switch
)");

KVB_NO_THREAD_SANITIZER inline void switch_to(Fiber* from, Fiber* to) {
  ++counters.switches;
  sanitizers::before_switch(from->state == State::kDone, to == &scheduler, to->stack, kStackBytes, to->sanitizer);
  simt_switch(&from->stack_pointer, to->stack_pointer);
  sanitizers::after_switch();
}
inline void yield() {
  Fiber* self = current;
  switch_to(self, &scheduler);
}

inline void fiber_main() {
  sanitizers::enter_fiber();
  // The launch comes before all threads, and a block's memory passes to the next block in its place.
  sanitizers::acquire(&launch_tag);
  sanitizers::acquire(own_block_tag());
  (*body)();
  {
    sanitizers::Ignore ignore;
    sanitizers::release(own_block_tag());
    current->state = State::kDone;
  }
  yield();
  abort();
}

inline void block_barrier() {
  sanitizers::Ignore ignore;
  Fiber* self = current;
  Block& block = *self->block;
  char* tag = &block.tags[block.barrier_generation & 1];
  sanitizers::release(tag);
  if (++block.at_barrier == block.live) {
    block.at_barrier = 0;
    ++block.barrier_generation;
  } else {
    self->state = State::kBarrier;
    self->generation = block.barrier_generation;
    self->waits_in = "barrier";
    yield();
  }
  sanitizers::acquire(tag);
}

// Rendezvous of one warp: `compute(arguments of all lanes, results of all lanes)` runs once, in the last lane.
template <class Argument, class Result, class Compute>
Result collective(const char* name, const Argument& argument, Compute&& compute) {
  static_assert(sizeof(Argument) <= 64 && sizeof(Result) <= 64);
  sanitizers::Ignore ignore;
  Fiber* self = current;
  Warp& warp = self->block->warps[self->index / kLanes];
  const unsigned lane = self->index % kLanes;
  char* tag = &warp.tags[warp.generation & 1];
  sanitizers::release(tag);
  if (warp.arrived == 0) warp.operation = name;
  if (strcmp(warp.operation, name)) fail("lanes of one warp reached different operations");
  memcpy(warp.arguments[lane], &argument, sizeof argument);
  if (++warp.arrived == kLanes) {
    Argument arguments[kLanes];
    Result results[kLanes];
    for (int i = 0; i < kLanes; ++i) memcpy(&arguments[i], warp.arguments[i], sizeof(Argument));
    compute(arguments, results);
    for (int i = 0; i < kLanes; ++i) memcpy(warp.results[i], &results[i], sizeof(Result));
    warp.arrived = 0;
    ++warp.generation;
  } else {
    self->state = State::kWarp;
    self->generation = warp.generation;
    self->waits_in = name;
    yield();
  }
  sanitizers::acquire(tag);
  Result result;
  memcpy(&result, warp.results[lane], sizeof result);
  return result;
}

inline bool ready(const Fiber& fiber) {
  switch (fiber.state) {
    case State::kReady: return true;
    case State::kBarrier: return fiber.generation != fiber.block->barrier_generation;
    case State::kWarp: return fiber.generation != fiber.block->warps[fiber.index / kLanes].generation;
    case State::kDone: return false;
  }
  return false;
}

inline void on_fault(int signal_number, siginfo_t* information, void*) {
  if (armed) fail("invalid access at %p", information->si_addr);
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

// Blocks of one launch; owns stacks and shared memory.
class Launch {
 public:
  Launch(uint3 grid, unsigned threads, size_t shared_bytes) : grid_(grid), threads_(threads), shared_bytes_(shared_bytes) {
    const uint64_t total = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
    order_.resize(total);
    for (uint64_t i = 0; i < total; ++i) order_[i] = i;
    if (options.seed) std::shuffle(order_.begin(), order_.end(), random_);
    blocks_.resize(std::min<uint64_t>(std::max(options.blocks_alive, 1), total));
    for (auto& block : blocks_) allocate(block);
  }
  ~Launch() {
    for (auto& block : blocks_) {
      munmap(block.mapping, mapped_bytes());
      for (auto& fiber : block.fibers) {
        sanitizers::destroy_fiber(fiber.sanitizer);
        munmap(fiber.stack - kPage, kStackBytes + kPage);
      }
    }
  }

  void run() {
    for (auto& block : blocks_) start_next(block);
    for (bool running = true; running;) {
      running = false;
      bool moved = false;
      std::vector<size_t> turns(blocks_.size());
      for (size_t i = 0; i < turns.size(); ++i) turns[i] = i;
      if (options.seed) std::shuffle(turns.begin(), turns.end(), random_);
      for (size_t turn : turns) {
        Block& block = blocks_[turn];
        if (!block.live) continue;
        running = true;
        moved |= advance(block);
        if (!block.live) start_next(block);
      }
      if (running && !moved) report_deadlock();
    }
    for (auto& block : blocks_) sanitizers::acquire(&block.end_tag);
  }

 private:
  size_t capacity() const { return (shared_bytes_ + kPage - 1) / kPage * kPage; }
  size_t mapped_bytes() const { return capacity() + 2 * kPage; }

  void allocate(Block& block) {
    void* mapping = mmap(nullptr, mapped_bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    block.mapping = static_cast<unsigned char*>(mapping);
    sanitizers::unpoison(mapping, mapped_bytes());
    mprotect(block.mapping + kPage, capacity(), PROT_READ | PROT_WRITE);
    block.shared = block.mapping + kPage + (capacity() - shared_bytes_) / 128 * 128;
    block.fibers.resize(threads_);
    for (unsigned i = 0; i < threads_; ++i) {
      void* stack = mmap(nullptr, kStackBytes + kPage, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      mprotect(stack, kPage, PROT_NONE);
      block.fibers[i].stack = static_cast<char*>(stack) + kPage;
      block.fibers[i].index = i;
      block.fibers[i].block = &block;
    }
    block.live = 0;
  }

  void start_next(Block& block) {
    if (next_ == order_.size()) return;
    const uint64_t number = order_[next_++];
    block.index = {static_cast<uint32_t>(number % grid_.x), static_cast<uint32_t>(number / grid_.x % grid_.y),
                   static_cast<uint32_t>(number / grid_.x / grid_.y)};
    block.warps.assign(threads_ / kLanes, Warp{});
    block.at_barrier = 0;
    block.live = threads_;
    memset(block.shared, 0xff, shared_bytes_);
    for (auto& fiber : block.fibers) {
      fiber.state = State::kReady;
      fiber.groups.clear();
      fiber.open.clear();
      fiber.copies = 0;
      sanitizers::reset_fiber(fiber.sanitizer, fiber.stack, kStackBytes);
      // Stacks are staggered over the cache sets.
      void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes - fiber.index * 1088 % 16384 / 64 * 64);
      *--top = nullptr;
      *--top = reinterpret_cast<void*>(fiber_main);
      for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
      fiber.stack_pointer = top;
    }
  }

  // Runs each warp until it blocks; gives whether any lane moved.
  bool advance(Block& block) {
    std::vector<unsigned> warps(threads_ / kLanes);
    for (unsigned i = 0; i < warps.size(); ++i) warps[i] = i;
    if (options.seed) std::shuffle(warps.begin(), warps.end(), random_);
    unsigned lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = i;
    if (options.seed) std::shuffle(lanes, lanes + kLanes, random_);
    bool moved = false;
    for (unsigned warp : warps)
      for (bool again = true; again;) {
        again = false;
        for (unsigned lane : lanes) {
          Fiber& fiber = block.fibers[warp * kLanes + lane];
          if (!ready(fiber)) continue;
          fiber.state = State::kReady;
          current = &fiber;
          switch_to(&scheduler, &fiber);
          moved = again = true;
          if (fiber.state == State::kDone) leave(block);
        }
      }
    if (options.count) count_sectors(block);
    return moved;
  }

  static void leave(Block& block) {
    if (--block.live && block.at_barrier == block.live) {
      block.at_barrier = 0;
      ++block.barrier_generation;
    }
  }

  static void count_sectors(Block& block) {
    if (block.live) return;
    for (auto& warp : block.warps)
      for (auto& sectors : warp.sectors) counters.sectors += sectors.size();
  }

  [[noreturn]] void report_deadlock() {
    for (auto& block : blocks_)
      for (auto& fiber : block.fibers)
        if (block.live && fiber.state != State::kDone) {
          current = &fiber;
          char text[128];
          snprintf(text, sizeof text, "deadlock: divergent barrier or warp operation (%u threads wait, one in %s)",
                   block.live, fiber.waits_in);
          fail(text);
        }
    abort();
  }

  uint3 grid_;
  unsigned threads_;
  size_t shared_bytes_;
  std::mt19937 random_{options.seed};
  std::vector<uint64_t> order_;
  size_t next_ = 0;
  std::vector<Block> blocks_;
};

// Runs a grid. Gives null, or what went wrong and where.
inline const char* launch(uint3 grid, unsigned threads, size_t shared_bytes, const Options& chosen,
                          const std::function<void()>& kernel) {
  options = chosen;
  counters = {};
  body = &kernel;
  struct sigaction action {}, segv{}, bus{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &segv);
  sigaction(SIGBUS, &action, &bus);
  sanitizers::Ignore ignore;
  auto run = std::make_unique<Launch>(grid, threads, shared_bytes);
  scheduler.sanitizer = sanitizers::current_fiber();
  const bool failed = sigsetjmp(escape, 1);
  if (!failed) {
    armed = 1;
    sanitizers::release(&launch_tag);
    run->run();
  }
  armed = 0;
  sigaction(SIGSEGV, &segv, nullptr);
  sigaction(SIGBUS, &bus, nullptr);
  return failed ? message : nullptr;
}

}  // namespace simt

#include "instructions.h"
