// Tiles in shared memory of rows of 128 bytes, as Hopper's copies and matmuls have them with a swizzle
// of 128 bytes: unit u of 16 bytes of row r is stored as unit u ^ r % 8.
#pragma once

#include "common/ptx_hopper.cuh"

namespace jspec {

constexpr int kSwizzledRowBytes = 128;

// A tile as the second factor of a matmul.
__device__ __forceinline__ uint64_t descriptor(const char* tile) {
  constexpr uint64_t kEightRows = 8 * kSwizzledRowBytes / 16, kSwizzle128 = 1;
  return kSwizzle128 << 62 | kEightRows << 32 | kEightRows << 16 |
         (shared_address(tile) & 0x3ffff) >> 4;
}

}  // namespace jspec
