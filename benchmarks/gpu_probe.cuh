// What the emulator assumes and the cost model estimates, asked of a real GPU. Compiled by gpu_probe.py with NVRTC together
// with the kernel's own sources: the instructions probed are the functions the kernel calls.
#include "finish.cuh"
#include "gather.cuh"

struct ProbeArguments {
  const void* first;
  const void* second;
  const void* third;
  void* out;
  long long count;
  long long stride;  // bytes from row to row
  int repeats;
  int rows;          // of a block
};

constexpr int kLanes = 32;

// One warp. Shared memory holds 16-bit numbers 0, 1, 2 ...: what a lane gets says where it came from.
// out: [lane][4] of x4, [lane][4] of x4 transposed, [lane][2] of x2.
__global__ void ldmatrix_probe(const ProbeArguments call) {
  KVB_DYNAMIC_SHARED(memory);
  uint16_t* matrix = reinterpret_cast<uint16_t*>(memory);
  const int lane = static_cast<int>(thread_index());
  for (int index = lane; index < 256; index += kLanes) matrix[index] = static_cast<uint16_t>(index);
  barrier();
  uint32_t plain[4], transposed[4], two[2];
  load_matrix_x4(plain, matrix + lane * 8);
  load_matrix_x4_transposed(transposed, matrix + lane * 8);
  load_matrix_x2(two, matrix + lane % 16 * 8);
  uint32_t* out = static_cast<uint32_t*>(call.out);
  for (int index = 0; index < 4; ++index) {
    out[lane * 4 + index] = plain[index];
    out[128 + lane * 4 + index] = transposed[index];
  }
  for (int index = 0; index < 2; ++index) out[256 + lane * 2 + index] = two[index];
}

// One warp for each case. first: [case][lane][4] of A, second: [case][lane][2] of B, third: [case][lane][4] of C.
__global__ void mma_probe(const ProbeArguments call) {
  const int lane = static_cast<int>(thread_index()), at = static_cast<int>(block_index().x) * kLanes + lane;
  uint32_t a[4], b[2];
  float d[4];
  for (int index = 0; index < 4; ++index) {
    a[index] = static_cast<const uint32_t*>(call.first)[at * 4 + index];
    d[index] = static_cast<const float*>(call.third)[at * 4 + index];
  }
  for (int index = 0; index < 2; ++index) b[index] = static_cast<const uint32_t*>(call.second)[at * 2 + index];
  multiply_add(d, a, b);
  for (int index = 0; index < 4; ++index) static_cast<float*>(call.out)[at * 4 + index] = d[index];
}

// One warp. Odd lanes copy from a dead row. out: [lane][16] of 16-byte copies, [lane][8] of 8-byte copies; the target held
// 0xFF before.
__global__ void copy_probe(const ProbeArguments call) {
  KVB_DYNAMIC_SHARED(target);
  const int lane = static_cast<int>(thread_index());
  for (int index = lane; index < kLanes * 24; index += kLanes) target[index] = 0xff;
  barrier();
  const unsigned char* source = static_cast<const unsigned char*>(call.first);
  copy_async<16>(target + lane * 16, source + lane * 16, lane % 2 == 0);
  copy_async<8>(target + kLanes * 16 + lane * 8, source + lane * 8, lane % 2 == 0);
  copy_commit();
  copy_wait<0>();
  barrier();
  for (int index = lane; index < kLanes * 24; index += kLanes) static_cast<unsigned char*>(call.out)[index] = target[index];
}

// out[i] = first[i] * second[i], two bf16 each.
__global__ void bf16x2_probe(const ProbeArguments call) {
  const long long at = static_cast<long long>(block_index().x) * kThreads + thread_index();
  if (at < call.count)
    static_cast<uint32_t*>(call.out)[at] =
        multiply_bf16x2(static_cast<const uint32_t*>(call.first)[at], static_cast<const uint32_t*>(call.second)[at]);
}

// out: ex2 of first[i], log2 of first[i], first[i] rounded to bf16.
__global__ void scalar_probe(const ProbeArguments call) {
  const long long at = static_cast<long long>(block_index().x) * kThreads + thread_index();
  if (at >= call.count) return;
  const float x = static_cast<const float*>(call.first)[at];
  uint32_t* out = static_cast<uint32_t*>(call.out);
  out[at] = as_bits(exp2_approximate(x));
  out[call.count + at] = as_bits(log2_of(x));
  out[2 * call.count + at] = pack_bf16x2(x, 0);
}

#ifdef __CUDACC__  // what follows is timed; the emulator has nothing to say about time

KVB_DEVICE long long clock_now() {
  long long now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
  return now;
}

// 16 e4m3 values through the conversion instructions of sm_89 and later: what most other kernels do.
KVB_DEVICE void convert_e4m3(uint4 codes, uint32_t scale, uint32_t (&out)[8]) {
#if __CUDA_ARCH__ >= 890
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  const float factor = as_float(scale << 23);
KVB_UNROLL
  for (int word = 0; word < 4; ++word)
KVB_UNROLL
    for (int half = 0; half < 2; ++half) {
      const unsigned short pair = static_cast<unsigned short>(words[word] >> 16 * half);
      uint32_t halves;
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
      float low, high;
      asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
          : "=f"(low), "=f"(high)
          : "r"(halves));
      out[2 * word + half] = pack_bf16x2(low * factor, high * factor);
    }
#else
  for (int pair = 0; pair < 8; ++pair) out[pair] = codes.x + scale;
#endif
}

// Cycles of one block that decodes a tile of 32 rows `repeats` times. out[block]: cycles; Converted: the other way.
template <int Format, bool Converted> __global__ void __launch_bounds__(kThreads) decode_cycles(const ProbeArguments call) {
  using Layout = Tile<1 << Format, 8, 32, 1>;
  KVB_DYNAMIC_SHARED(memory);
  typename Layout::Shared& shared = *reinterpret_cast<typename Layout::Shared*>(memory);
  for (int index = static_cast<int>(thread_index()); index < 32 * Layout::raw_pitch; index += kThreads)
    shared.raw[index] = static_cast<const unsigned char*>(call.first)[index];
  if (thread_index() < 32) shared.data[thread_index()] = static_cast<const unsigned char*>(call.first);
  barrier();
  const long long start = clock_now();
  for (int repeat = 0; repeat < call.repeats; ++repeat) {
    if constexpr (Converted) {
      constexpr int chunks = Layout::d_qk / 16;
      for (int index = static_cast<int>(thread_index()); index < 32 * chunks; index += kThreads) {
        uint32_t values[8];
        const unsigned char* raw = shared.raw + index / chunks * Layout::raw_pitch;
        convert_e4m3(load_vector(raw + index % chunks * 16), raw[512 + index % chunks / 2], values);
        store_values(shared.keys + index / chunks * Layout::key_pitch + index % chunks * 16, values);
      }
    } else {
      decode_tile_as<Format, Layout, 32>(shared, 0, 0);
    }
    barrier();
  }
  const long long end = clock_now();
  if (thread_index() == 0) static_cast<long long*>(call.out)[block_index().x] = end - start;
  if (shared.keys[thread_index()] == 0x1234) static_cast<long long*>(call.out)[block_index().x] = 0;  // keeps the work
}

// Copies `rows` rows of Bytes bytes from places in first[] that second[] names (int32), Rows at a time in flight.
template <int Bytes, int Rows> __global__ void __launch_bounds__(kThreads) gather_probe(const ProbeArguments call) {
  KVB_DYNAMIC_SHARED(memory);
  const unsigned char* base = static_cast<const unsigned char*>(call.first);
  const int* slots = static_cast<const int*>(call.second) + static_cast<long long>(block_index().x) * call.rows;
  constexpr int pieces = Bytes / 16;
  auto issue = [&](int batch) {
    if (batch * Rows < call.rows)
      for (int index = static_cast<int>(thread_index()); index < Rows * pieces; index += kThreads) {
        const int row = index / pieces, offset = index % pieces * 16;
        copy_async<16>(memory + ((batch & 1) * Rows + row) * Bytes + offset,
                       base + slots[batch * Rows + row] * call.stride + offset, true);
      }
    copy_commit();
  };
  issue(0);
  for (int batch = 0; batch * Rows < call.rows; ++batch) {
    issue(batch + 1);
    copy_wait<1>();
    barrier();
  }
  copy_wait<0>();
  if (memory[thread_index()] == 0xff && memory[thread_index() + 256] == 0xfe)
    static_cast<int*>(call.out)[block_index().x] = 1;  // keeps the copies
}

#endif
