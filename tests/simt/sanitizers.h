// Hooks that tell AddressSanitizer and ThreadSanitizer about fibers. Without a sanitizer every function is empty.
//
// For ThreadSanitizer each CUDA thread is a fiber and switching does not synchronise: only barriers, warp operations and
// fences order CUDA threads, so an unordered pair of accesses is reported as the race it is on a GPU.
#pragma once
#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_bottom, size_t* old_size);
void __asan_unpoison_memory_region(const volatile void* address, size_t size);
}
#endif
#if defined(__SANITIZE_THREAD__)
#define KVB_NO_THREAD_SANITIZER __attribute__((no_sanitize_thread, noinline))
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#else
#define KVB_NO_THREAD_SANITIZER
#endif

namespace sanitizers {

#if defined(__SANITIZE_ADDRESS__)
inline const void* scheduler_stack = nullptr;
inline size_t scheduler_stack_bytes = 0;
inline void* fake_stack = nullptr;
#endif

inline void before_switch(bool leaving, bool to_scheduler, const void* stack, size_t bytes, void* fiber) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(leaving ? nullptr : &fake_stack, to_scheduler ? scheduler_stack : stack,
                                 to_scheduler ? scheduler_stack_bytes : bytes);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(fiber, 1);
#endif
  (void)leaving, (void)to_scheduler, (void)stack, (void)bytes, (void)fiber;
}
inline void after_switch() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}
inline void enter_fiber() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
}
// A fresh mapping may lie where a stack once was.
inline void unpoison(void* memory, size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(memory, bytes);
#endif
  (void)memory, (void)bytes;
}
inline void reset_fiber(void*& fiber, char* stack, size_t bytes) {
  unpoison(stack, bytes);
#if defined(__SANITIZE_THREAD__)
  if (fiber) __tsan_destroy_fiber(fiber);
  fiber = __tsan_create_fiber(0);
#endif
  (void)fiber;
}
inline void destroy_fiber(void* fiber) {
#if defined(__SANITIZE_THREAD__)
  if (fiber) __tsan_destroy_fiber(fiber);
#endif
  (void)fiber;
}
inline void* current_fiber() {
#if defined(__SANITIZE_THREAD__)
  return __tsan_get_current_fiber();
#else
  return nullptr;
#endif
}
inline void acquire(void* tag) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(tag);
#endif
  (void)tag;
}
inline void release(void* tag) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(tag);
#endif
  (void)tag;
}

// The emulator's own bookkeeping is no part of the kernel's memory accesses.
struct Ignore {
#if defined(__SANITIZE_THREAD__)
  Ignore() {
    AnnotateIgnoreReadsBegin("", 0);
    AnnotateIgnoreWritesBegin("", 0);
  }
  ~Ignore() {
    AnnotateIgnoreWritesEnd("", 0);
    AnnotateIgnoreReadsEnd("", 0);
  }
#else
  Ignore() {}
#endif
};

}  // namespace sanitizers
