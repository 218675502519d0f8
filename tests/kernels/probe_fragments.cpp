// The fragment kernels of benchmarks/gpu_probe.cuh in the emulator, so that the probe is tried before a GPU is there and its
// answers can be compared with the emulator's.
#include "gpu_probe.cuh"

#include <cstring>

extern "C" __attribute__((visibility("default"))) const char* run_fragment(const char* name, const ProbeArguments* call,
                                                                           unsigned blocks, unsigned threads,
                                                                           unsigned shared_bytes) {
  const simt::Options options;
  const auto launch = [&](auto kernel) {
    return simt::launch(uint3{blocks, 1, 1}, threads, shared_bytes ? shared_bytes : 16, options, [&] { kernel(*call); });
  };
  if (!strcmp(name, "ldmatrix_probe")) return launch(ldmatrix_probe);
  if (!strcmp(name, "mma_probe")) return launch(mma_probe);
  if (!strcmp(name, "copy_probe")) return launch(copy_probe);
  if (!strcmp(name, "bf16x2_probe")) return launch(bf16x2_probe);
  if (!strcmp(name, "scalar_probe")) return launch(scalar_probe);
  return "no such probe";
}
