// The instructions of jspec/cuda_ffi/src/common/ptx.cuh on a CPU.
#pragma once

#include "common/bfloat16_cpu.h"
#include "cuda_runtime.h"

namespace jspec {

inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

inline float exp2_fast(float x) { return std::exp2(x); }

inline uint32_t packed(float low, float high) { return uint32_t(narrow(high)) << 16 | narrow(low); }

inline uint32_t shifted_right(uint32_t x, uint32_t count) { return count < 32 ? x >> count : 0; }
inline uint32_t low_half_to_high(uint32_t word) { return word << 16; }

inline uint32_t max_of_halves(uint32_t a, uint32_t b) {
  const auto larger = [&](int half) {
    const float x = wide(uint16_t(a >> half)), y = wide(uint16_t(b >> half));
    return uint32_t(narrow(std::fmax(x, y))) << half;
  };
  return larger(16) | larger(0);
}

inline uint4 load_now(const void* global) {
  if (reinterpret_cast<uintptr_t>(global) % 16) emulator::fail("a load that is not aligned");
  return *static_cast<const uint4*>(global);
}

inline uint32_t add_release(uint32_t* counter, uint32_t more) { return atomicAdd(counter, more); }
inline void acquire() {}

// float16 by the type of the compiler.
inline uint16_t float16(float value) {
  const _Float16 rounded = value;
  uint16_t bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}
inline float wide_float16(uint16_t bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return value;
}
inline uint32_t packed_float16(float low, float high) {
  return uint32_t(float16(high)) << 16 | float16(low);
}

inline uint32_t transposed(uint32_t pair) {
  const auto all = emulator::warp_values(pair);
  const int row = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
  const auto at = [&](int i, int j) { return all[4 * i + j / 2] >> 16 * (j % 2) & 0xffff; };
  return at(column + 1, row) << 16 | at(column, row);
}

// A copy that was started. Until it is awaited its target is NaN: hardware writes at any moment
// between.
struct StartedCopy {
  void* to;
  const void* from;
  bool there;
};

// The groups of each thread, of which the last is open.
inline std::vector<std::vector<StartedCopy>> copies[emulator::kMostThreads];

inline const bool has_copies = [] {
  emulator::resets.push_back([] {
    for (auto& groups : copies) groups.assign(1, {});
  });
  return true;
}();

inline void copy_async(void* to, const void* from, bool there) {
  if (shared_address(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) {
    emulator::fail("a copy that is not aligned");
  }
  std::memset(to, 0xff, 16);
  copies[emulator::current].back().push_back({to, from, there});
}

inline void commit_copies() { copies[emulator::current].emplace_back(); }

inline void await_copies(int pending) {
  auto& groups = copies[emulator::current];
  while (int(groups.size()) - 1 > pending) {
    for (const StartedCopy& x : groups.front()) {
      if (x.there) std::memcpy(x.to, x.from, 16);
      if (!x.there) std::memset(x.to, 0, 16);
    }
    groups.erase(groups.begin());
  }
}

template <int kThreads>
void barrier_of(int number) {
  emulator::blocks[emulator::rank].named[number].meet(kThreads);
}

template <bool kTransposed>
void load_matrices(uint32_t (&to)[4], const void* row) {
  const auto rows = emulator::warp_values(row);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    int banks = 0;
    for (int j = 0; j < 8; ++j) banks |= 1 << shared_address(rows[8 * i + j]) / 16 % 8;
    if (banks != 0xff) emulator::fail("rows of a matrix share banks");
    uint16_t values[2];
    for (int j = 0; j < 2; ++j) {
      const int outer = lane / 4, inner = 2 * (lane % 4) + j;
      const int number = kTransposed ? inner : outer, column = kTransposed ? outer : inner;
      const void* from = rows[8 * i + number];
      if (shared_address(from) % 16) emulator::fail("a row of a matrix that is not aligned");
      std::memcpy(&values[j], static_cast<const uint16_t*>(from) + column, 2);
    }
    to[i] = uint32_t(values[1]) << 16 | values[0];
  }
}

inline void multiply_add(float* sum, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto all = emulator::warp_values(std::array<uint32_t, 6>{a[0], a[1], a[2], a[3], b0, b1});
  const int eighth = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
  const auto half_of = [](uint32_t both, int i) { return wide(uint16_t(both >> 16 * i)); };
  for (int i = 0; i < 2; ++i) {    // row eighth + 8 i
    for (int j = 0; j < 2; ++j) {  // column 2 quarter + j
      for (int inner = 0; inner < 16; ++inner) {
        const int of = inner % 8 / 2, high = inner / 8;
        sum[2 * i + j] += half_of(all[4 * eighth + of][2 * high + i], inner % 2) *
                          half_of(all[4 * (2 * quarter + j) + of][4 + high], inner % 2);
      }
    }
  }
}

}  // namespace jspec
