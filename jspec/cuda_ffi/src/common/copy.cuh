// Copying bytes with the widest accesses that their alignment allows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jspec {

// Sixteen-byte accesses of a thread that are in flight together.
constexpr int kInFlight = 4;

// Bytes of the widest access, 1 to 16, at which rows of this size stay aligned wherever they go.
inline int access_bytes(const void* from, const void* to, int64_t row_bytes) {
  const uint64_t bits = reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to) |
                        static_cast<uint64_t>(row_bytes) | 16;
  return static_cast<int>(bits & -bits);
}

template <typename Access>
__device__ void copy_as(const char* from, char* to, int64_t bytes, int thread, int threads) {
  const Access* source = reinterpret_cast<const Access*>(from);
  Access* target = reinterpret_cast<Access*>(to);
  const int64_t count = bytes / static_cast<int64_t>(sizeof(Access));  // 0 for less than none
  for (int64_t at = thread; at < count; at += kInFlight * threads) {
    Access held[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (at + i * threads < count) held[i] = source[at + i * threads];
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (at + i * threads < count) target[at + i * threads] = held[i];
    }
  }
}

// Copies `bytes`, a multiple of `access`, shared out over `threads` of which this is one.
__device__ inline void copy(const char* from, char* to, int64_t bytes, int access, int thread,
                            int threads) {
  switch (access) {
    case 16: return copy_as<uint4>(from, to, bytes, thread, threads);
    case 8: return copy_as<uint2>(from, to, bytes, thread, threads);
    case 4: return copy_as<uint32_t>(from, to, bytes, thread, threads);
    case 2: return copy_as<uint16_t>(from, to, bytes, thread, threads);
    default: return copy_as<uint8_t>(from, to, bytes, thread, threads);
  }
}

// A block's piece of what may be copied, held in registers between loading and storing.
class Piece {
 public:
  // Bytes that a block of this many threads takes.
  __host__ __device__ static int64_t bytes(int threads) {
    return int64_t(threads) * kInFlight * 16;
  }

  // The first `bytes` that are there, all if there are more.
  __device__ void load(const char* from, int64_t bytes) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int at = i * blockDim.x + threadIdx.x;
      if (at * 16 < bytes) held_[i] = reinterpret_cast<const uint4*>(from)[at];
    }
  }

  __device__ void store(char* to, int64_t bytes) const {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int at = i * blockDim.x + threadIdx.x;
      if (at * 16 < bytes) reinterpret_cast<uint4*>(to)[at] = held_[i];
    }
  }

 private:
  uint4 held_[kInFlight];
};

}  // namespace jspec
