// The only file with PTX. A CUDA compiler (nvcc or NVRTC, no headers) gets the device half; a plain C++ compiler gets the
// CPU half in simt.h, which emulates what the hardware instruction does and nothing more. Integer tricks are shared.
#pragma once

#ifdef __CUDACC__

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

#define KVB_DEVICE __device__ __forceinline__
#define KVB_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define KVB_UNROLL _Pragma("unroll")

KVB_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies Bytes (16 or 8) from global to shared memory; where `live` is false, writes zeros and reads nothing.
template <int Bytes> KVB_DEVICE void copy_async(void* target, const void* source, bool live) {
  static_assert(Bytes == 16 || Bytes == 8, "cp.async moves 16 or 8 bytes here");
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source),
                 "r"(live ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(target)), "l"(source),
                 "r"(live ? 8 : 0)
                 : "memory");
}
KVB_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending> KVB_DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory"); }

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
KVB_DEVICE void load_matrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
KVB_DEVICE void load_matrix_x4_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
KVB_DEVICE void load_matrix_x2(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}

// d[16x8] += a[16x16] * b[16x8], bf16 in, fp32 out.
KVB_DEVICE void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two bf16 products, each rounded once. sm_80 has no mul.bf16x2; adding -0 keeps the sign of a zero product.
KVB_DEVICE uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}
KVB_DEVICE uint32_t pack_bf16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
KVB_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }
KVB_DEVICE float as_float(uint32_t bits) { return __uint_as_float(bits); }
KVB_DEVICE uint32_t as_bits(float value) { return __float_as_uint(value); }
KVB_DEVICE float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KVB_DEVICE float log2_of(float x) { return log2f(x); }
KVB_DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
KVB_DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
KVB_DEVICE void barrier() { __syncthreads(); }
KVB_DEVICE void fence() { __threadfence(); }

// Counts up to `last`, then wraps to zero; gives the value before.
KVB_DEVICE unsigned count_and_wrap(unsigned* counter, unsigned last) { return atomicInc(counter, last); }

// A load that sees other blocks' stores: at L2, never the read-only path.
KVB_DEVICE float load_fresh(const float* pointer) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(pointer) : "memory");
  return value;
}
KVB_DEVICE float4 load_fresh_vector(const float* pointer) {
  float4 value;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(pointer)
               : "memory");
  return value;
}
KVB_DEVICE uint4 load_vector(const void* pointer) { return *static_cast<const uint4*>(pointer); }
KVB_DEVICE void store_vector(void* pointer, uint4 value) { *static_cast<uint4*>(pointer) = value; }
KVB_DEVICE unsigned thread_index() { return threadIdx.x; }
KVB_DEVICE uint3 block_index() { return blockIdx; }

#else
#include "simt.h"
#endif
