// What each instruction of prim.cuh does, lane by lane. Fragment layouts follow the PTX ISA.
#pragma once

namespace simt {

inline float bf16_value(uint32_t bits) { return std::bit_cast<float>(bits << 16); }
inline uint32_t bf16_round(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void land(const Copy& copy) {
  if (copy.live)
    memcpy(copy.target, copy.source, copy.bytes);
  else
    memset(copy.target, 0, copy.bytes);
}
// From issue to wait the destination belongs to the copy: it holds NaN patterns, and ThreadSanitizer sees a write of the
// issuing thread at either end.
inline void mark(const Copy& copy) {
  for (unsigned byte = 0; byte < copy.bytes; byte += 8) static_cast<volatile uint64_t*>(copy.target)[byte / 8] = ~0ull;
}
inline void count_copy(const Copy& copy) {
  ++counters.copies;
  if (!copy.live) return;
  counters.copied_bytes += copy.bytes;
  Warp& warp = current->block->warps[current->index / kLanes];
  const uint64_t ordinal = current->copies++;
  if (warp.sectors.size() <= ordinal) warp.sectors.resize(ordinal + 1);
  for (unsigned byte = 0; byte < copy.bytes; byte += 8)
    warp.sectors[ordinal].insert((reinterpret_cast<uintptr_t>(copy.source) + byte) / 32);
}

template <int Matrices, bool Transposed> struct MatrixLoad {
  struct Result { uint32_t registers[Matrices]; };
  static Result run(const char* name, const void* row) {
#if defined(__SANITIZE_THREAD__)
    for (int element = 0; element < 8; ++element) (void)static_cast<const volatile uint16_t*>(row)[element];
#endif
    return collective<const void*, Result>(name, row, [](const void* const* rows, Result* results) {
      if (options.count) count(rows);
      for (int matrix = 0; matrix < Matrices; ++matrix) {
        for (int line = 0; line < 8; ++line)
          if (reinterpret_cast<uintptr_t>(rows[matrix * 8 + line]) % 16) fail("ldmatrix: row is not 16-byte aligned");
        for (int lane = 0; lane < kLanes; ++lane) {
          uint32_t value = 0;
          for (int half = 0; half < 2; ++half) {
            const int major = lane / 4, minor = lane % 4 * 2 + half;
            const int line = Transposed ? minor : major, column = Transposed ? major : minor;
            value |= static_cast<uint32_t>(static_cast<const uint16_t*>(rows[matrix * 8 + line])[column]) << 16 * half;
          }
          results[lane].registers[matrix] = value;
        }
      }
    });
  }
  // Eight rows of 16 bytes are one phase; it is free of conflicts if they fall into eight different bank groups.
  static void count(const void* const* rows) {
    ++counters.matrix_loads;
    for (int matrix = 0; matrix < Matrices; ++matrix) {
      std::set<uintptr_t> groups, lines;
      for (int line = 0; line < 8; ++line) {
        groups.insert(reinterpret_cast<uintptr_t>(rows[matrix * 8 + line]) / 16 % 8);
        lines.insert(reinterpret_cast<uintptr_t>(rows[matrix * 8 + line]));
      }
      counters.bank_conflicts += lines.size() - groups.size();
    }
  }
};

inline float accumulate(float sum, float term) {
  if (!options.truncate) return sum + term;
  const double exact = static_cast<double>(sum) + term;
  float rounded = static_cast<float>(exact);
  if (std::isfinite(rounded) && std::abs(static_cast<double>(rounded)) > std::abs(exact)) rounded = std::nextafter(rounded, 0.f);
  return rounded;
}

}  // namespace simt

template <int Bytes> void copy_async(void* target, const void* source, bool live) {
  if (reinterpret_cast<uintptr_t>(target) % Bytes) simt::fail("cp.async: target %p is misaligned", target);
  if (reinterpret_cast<uintptr_t>(source) % Bytes) simt::fail("cp.async: source %p is misaligned", source);
  const simt::Copy copy{target, source, Bytes, live};
  simt::mark(copy);
  sanitizers::Ignore ignore;
  if (simt::options.count) simt::count_copy(copy);
  if (simt::options.copies_at_issue) simt::land(copy);
  simt::current->open.push_back(copy);
}
inline void copy_commit() {
  sanitizers::Ignore ignore;
  simt::current->groups.push_back(std::move(simt::current->open));
  simt::current->open.clear();
}
template <int Pending> void copy_wait() {
  auto& groups = simt::current->groups;
  while (true) {
    std::vector<simt::Copy> group;
    {
      sanitizers::Ignore ignore;
      if (groups.size() <= static_cast<size_t>(Pending)) return;
      group = std::move(groups.front());
      groups.erase(groups.begin());
    }
#if !defined(__SANITIZE_THREAD__)
    if (simt::options.copies_at_issue) continue;
#endif
    for (const auto& copy : group) simt::mark(copy);
    sanitizers::Ignore ignore;
    for (const auto& copy : group) simt::land(copy);
  }
}

inline void load_matrix_x4(uint32_t (&r)[4], const void* row) {
  const auto loaded = simt::MatrixLoad<4, false>::run("ldmatrix.x4", row);
  memcpy(r, loaded.registers, sizeof r);
}
inline void load_matrix_x4_transposed(uint32_t (&r)[4], const void* row) {
  const auto loaded = simt::MatrixLoad<4, true>::run("ldmatrix.x4.trans", row);
  memcpy(r, loaded.registers, sizeof r);
}
inline void load_matrix_x2(uint32_t (&r)[2], const void* row) {
  const auto loaded = simt::MatrixLoad<2, false>::run("ldmatrix.x2", row);
  memcpy(r, loaded.registers, sizeof r);
}

inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Operands { uint32_t a[4], b[2]; float c[4]; };
  struct Sums { float d[4]; };
  Operands operands;
  memcpy(operands.a, a, sizeof a);
  memcpy(operands.b, b, sizeof b);
  memcpy(operands.c, d, sizeof d);
  const Sums sums = simt::collective<Operands, Sums>("mma.m16n8k16", operands, [](const Operands* lanes, Sums* out) {
    ++simt::counters.multiplies;
    float left[16][16], right[16][8], total[16][8];
    for (int lane = 0; lane < simt::kLanes; ++lane) {
      const int group = lane / 4, pair = lane % 4 * 2;
      for (int half = 0; half < 2; ++half) {
        const auto value = [&](uint32_t packed) { return simt::bf16_value(packed >> 16 * half & 0xffff); };
        left[group][pair + half] = value(lanes[lane].a[0]);
        left[group + 8][pair + half] = value(lanes[lane].a[1]);
        left[group][pair + 8 + half] = value(lanes[lane].a[2]);
        left[group + 8][pair + 8 + half] = value(lanes[lane].a[3]);
        right[pair + half][group] = value(lanes[lane].b[0]);
        right[pair + 8 + half][group] = value(lanes[lane].b[1]);
        total[group][pair + half] = lanes[lane].c[half];
        total[group + 8][pair + half] = lanes[lane].c[2 + half];
      }
    }
    if (simt::options.truncate) {
      for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 8; ++j)
          for (int k = 0; k < 16; ++k) total[i][j] = simt::accumulate(total[i][j], left[i][k] * right[k][j]);
    } else {
      for (int i = 0; i < 16; ++i)
        for (int k = 0; k < 16; ++k)
          for (int j = 0; j < 8; ++j) total[i][j] += left[i][k] * right[k][j];
    }
    for (int lane = 0; lane < simt::kLanes; ++lane)
      for (int half = 0; half < 2; ++half) {
        out[lane].d[half] = total[lane / 4][lane % 4 * 2 + half];
        out[lane].d[2 + half] = total[lane / 4 + 8][lane % 4 * 2 + half];
      }
  });
  memcpy(d, sums.d, sizeof d);
}

inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  const float low = simt::bf16_value(a & 0xffff) * simt::bf16_value(b & 0xffff);
  const float high = simt::bf16_value(a >> 16) * simt::bf16_value(b >> 16);
  return simt::bf16_round(low) | simt::bf16_round(high) << 16;
}
inline uint32_t pack_bf16x2(float low, float high) { return simt::bf16_round(low) | simt::bf16_round(high) << 16; }
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
inline float as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t as_bits(float value) { return std::bit_cast<uint32_t>(value); }
inline float exp2_approximate(float x) { return exp2f(x); }
inline float log2_of(float x) { return log2f(x); }
inline float maximum(float a, float b) { return fmaxf(a, b); }
inline float shuffle_xor(float value, int mask) {
  struct Argument { float value; int mask; };
  return simt::collective<Argument, float>("shfl.bfly", {value, mask}, [](const Argument* lanes, float* out) {
    for (int lane = 0; lane < simt::kLanes; ++lane) out[lane] = lanes[lane ^ lanes[lane].mask].value;
  });
}
inline void barrier() { simt::block_barrier(); }
// Between blocks only fences order memory: the counter is a relaxed atomic.
inline void fence() {
  sanitizers::Ignore ignore;
  sanitizers::release(&simt::fence_tag);
  sanitizers::acquire(&simt::fence_tag);
}
inline unsigned count_and_wrap(unsigned* counter, unsigned last) {
  sanitizers::Ignore ignore;
  const unsigned before = *counter;
  *counter = before >= last ? 0 : before + 1;
  return before;
}
inline float load_fresh(const float* pointer) { return *pointer; }
inline float4 load_fresh_vector(const float* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % 16) simt::fail("16-byte load from %p is misaligned", pointer);
  return {pointer[0], pointer[1], pointer[2], pointer[3]};
}
inline uint4 load_vector(const void* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % 16) simt::fail("16-byte load from %p is misaligned", pointer);
  return *static_cast<const uint4*>(pointer);
}
inline void store_vector(void* pointer, uint4 value) {
  if (reinterpret_cast<uintptr_t>(pointer) % 16) simt::fail("16-byte store to %p is misaligned", pointer);
  *static_cast<uint4*>(pointer) = value;
}
inline unsigned thread_index() { return simt::own_index(); }
inline uint3 block_index() { return simt::own_block(); }
