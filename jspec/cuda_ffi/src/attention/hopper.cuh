// Blocks of keys and values in shared memory: their layout, copies and matmuls.
#pragma once

#include "attention/attention.h"
#include "attention/softmax.cuh"
#include "common/swizzle.cuh"

namespace jspec {
namespace {

// A block of keys is one chunk or two of 64 channels, each of kBlock rows of 128 bytes, whose units
// of 16 bytes are permuted as copies and matmuls with a swizzle of 128 bytes have it.
constexpr int kRowBytes = kChunk * 2;
static_assert(kRowBytes == kSwizzledRowBytes);
constexpr int kChunkBytes = kBlock * kRowBytes;
constexpr int kHalf = kBlock / 2, kHalfBytes = kChunkBytes / 2;  // keys, and bytes of a chunk

// Starts the copies of a block's chunks; slots past the capacity are zero.
template <int kChunks>
__device__ __forceinline__ void copy_block(char* to, const CUtensorMap& from, int row, int key,
                                           int head, uint64_t* full) {
  barrier_expect<kChunks * kChunkBytes>(full);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    copy_tile(to + chunk * kChunkBytes, from, chunk * kChunk, head, key, row, full);
  }
}

// Starts scores = q keys^T for the half block `keys`.
template <int kChannels, bool kFloat16>
__device__ __forceinline__ void multiply_keys(float (&scores)[32],
                                              const uint32_t (&q)[kChannels / 16][4],
                                              const char* keys) {
  begin_matmul();
#pragma unroll
  for (int i = 0; i < kChannels / 16; ++i) {
    const uint64_t chunk = descriptor(keys + i * 16 / kChunk * kChunkBytes);
    multiply<false, kFloat16>(scores, q[i], chunk + i % (kChunk / 16) * 32 / 16, i > 0);
  }
  end_matmul();
}

// Starts sums += weights values for the half block `values`.
template <bool kFloat16, int kChunks>
__device__ __forceinline__ void add_values(float (&sums)[kChunks][32],
                                           const uint32_t (&weights)[4][4], const char* values) {
  begin_matmul();
#pragma unroll
  for (int i = 0; i < kHalf / 16; ++i) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint64_t tile = descriptor(values + chunk * kChunkBytes);
      multiply<true, kFloat16>(sums[chunk], weights[i], tile + i * 16 * kRowBytes / 16, true);
    }
  }
  end_matmul();
}

}  // namespace
}  // namespace jspec
