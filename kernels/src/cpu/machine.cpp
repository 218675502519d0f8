// Which paths this library holds and which of them this machine can run: CPUID, XGETBV, and for AMX the kernel's leave.
#include "machine.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define DECLARE(name) extern const Path kvb_path_##name;
KVB_HIDDEN DECLARE(portable)
#ifdef KVB_HAVE_AVX2
KVB_HIDDEN DECLARE(avx2)
#define AVX2 &kvb_path_avx2
#else
#define AVX2 nullptr
#endif
#ifdef KVB_HAVE_AVX512
KVB_HIDDEN DECLARE(avx512)
#define AVX512 &kvb_path_avx512
#else
#define AVX512 nullptr
#endif
#ifdef KVB_HAVE_AVX512_BF16
KVB_HIDDEN DECLARE(avx512_bf16)
#define AVX512_BF16 &kvb_path_avx512_bf16
#else
#define AVX512_BF16 nullptr
#endif
#ifdef KVB_HAVE_AMX
KVB_HIDDEN DECLARE(amx)
#define AMX &kvb_path_amx
#else
#define AMX nullptr
#endif
#ifdef KVB_HAVE_AMX_EMULATED
KVB_HIDDEN DECLARE(amx_emulated)
#define AMX_EMULATED &kvb_path_amx_emulated
#else
#define AMX_EMULATED nullptr
#endif

KVB_HIDDEN const Path* const kvb_paths[KVB_PATHS] = {nullptr, &kvb_path_portable, AVX2, AVX512, AVX512_BF16,
                                                     AMX,     AMX_EMULATED};

namespace {

#if defined(__x86_64__)
bool bit(unsigned value, int at) { return (value >> at) & 1; }

bool allowed_tiles() {
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

uint32_t machine_paths() {
  unsigned a, b, c, d, leaf1_c, ext_b, ext_c, ext_d, sub1_a = 0;
  uint32_t paths = 1u << KVB_PATH_PORTABLE;
  if (!__get_cpuid(1, &a, &b, &leaf1_c, &d) || !__get_cpuid_count(7, 0, &a, &ext_b, &ext_c, &ext_d)) return paths;
  if (a >= 1) __get_cpuid_count(7, 1, &sub1_a, &b, &c, &d);
  if (!bit(leaf1_c, 27)) return paths;  // the system does not save extended registers
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 6) != 6 || !bit(leaf1_c, 12) || !bit(ext_b, 5)) return paths;
  paths |= 1u << KVB_PATH_AVX2;
  if ((low & 0xe6) != 0xe6 || !bit(ext_b, 16) || !bit(ext_b, 17) || !bit(ext_b, 30) || !bit(ext_b, 31)) return paths;
  paths |= 1u << KVB_PATH_AVX512;
  if (!bit(ext_c, 1) || !bit(sub1_a, 5)) return paths;  // byte permutes, and bf16 products
  paths |= 1u << KVB_PATH_AVX512_BF16 | 1u << KVB_PATH_AMX_EMULATED;
  if ((low & 0x60000) == 0x60000 && bit(ext_d, 22) && bit(ext_d, 24) && allowed_tiles()) paths |= 1u << KVB_PATH_AMX;
  return paths;
}
#else
uint32_t machine_paths() { return 1u << KVB_PATH_PORTABLE; }
#endif

struct Machine {
  uint32_t compiled = 0, usable = 0;
  int32_t best = KVB_PATH_PORTABLE;
  Machine() {
    for (int32_t p = 1; p < KVB_PATHS; p++)
      if (kvb_paths[p]) compiled |= 1u << p;
    usable = compiled & machine_paths();
    for (int32_t p = KVB_PATH_PORTABLE; p <= KVB_PATH_AMX; p++)
      if (usable >> p & 1) best = p;
  }
};

const Machine machine;

}  // namespace

KVB_HIDDEN const Path* kvb_choose(int32_t path) {
  if (path == KVB_PATH_AUTO) path = machine.best;
  return path > 0 && path < KVB_PATHS && (machine.usable >> path & 1) ? kvb_paths[path] : nullptr;
}

extern "C" void kvb_cpu_info(kvb_info* info) {
  *info = {KVB_CPU_ABI,
           static_cast<int32_t>(sizeof(kvb_call)),
           static_cast<int32_t>(sizeof(kvb_cache)),
           static_cast<int32_t>(sizeof(kvb_record)),
           machine.compiled,
           machine.usable,
           machine.best,
           0};
}

extern "C" const char* kvb_cpu_path_name(int32_t path) {
  static const char* const names[KVB_PATHS] = {"auto",        "portable", "avx2",        "avx512",
                                               "avx512_bf16", "amx",      "amx_emulated"};
  return path >= 0 && path < KVB_PATHS ? names[path] : "unknown";
}
