// The kernel of encoding: the signs of products in float32, without tensor cores.
#pragma once

#include "codes/codes.h"
#include "common/warp.cuh"

namespace jspec {

constexpr int kEncoders = 256, kEncoderWarps = kEncoders / 32;
constexpr int kVectors = 2 * kEncoderWarps;  // of a block: a warp encodes two at a time

__device__ __forceinline__ float load_float(const float* x) { return __ldg(x); }
__device__ __forceinline__ float load_float(const uint16_t* x) {
  return __uint_as_float(uint32_t(__ldg(x)) << 16);
}

// A block makes a word of the codes of some vectors of a head, vector `tile * kVectors` on. The
// vectors of a token are its queries, then its key. A lane has a bit.
template <typename X, typename W>
__global__ void __launch_bounds__(kEncoders, 4)
    encode_kernel(const __grid_constant__ Encoding encoding, int tiles) {
  extern __shared__ __align__(16) char memory[];
  const int size = encoding.size, words = encoding.words, group = encoding.group;
  float *w = reinterpret_cast<float*>(memory), *x = w + size * 32;  // [size, 32], [kVectors, size]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int word = blockIdx.x % words, tile = blockIdx.x / words % tiles;
  const int head = blockIdx.x / words / tiles;
  const int each = group + (encoding.k != nullptr);
  const int64_t vectors = encoding.tokens * each;
  const W* from = static_cast<const W*>(encoding.w) + (int64_t(head) * size * words + word) * 32;
#pragma unroll 8
  for (int c = warp; c < size; c += kEncoderWarps) {
    w[c * 32 + lane] = load_float(from + int64_t(c) * words * 32 + lane);
  }
  uint32_t* codes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t vector = int64_t(tile) * kVectors + 2 * warp + i;
    const int64_t row = vector / each * encoding.heads + head, which = vector % each;
    const bool is_key = which == group;
    const int64_t at = is_key ? row : row * group + which;
    const X* source = static_cast<const X*>(is_key ? encoding.k : encoding.q) + at * size;
    codes[i] = vector < vectors ? (is_key ? encoding.k_codes : encoding.q_codes) + at * words + word
                                : nullptr;
    for (int c = lane; c < size; c += 32) {
      x[(2 * warp + i) * size + c] = codes[i] ? load_float(source + c) : 0;
    }
  }
  __syncthreads();
  const float *one = x + 2 * warp * size, *two = one + size;
  float first = 0, second = 0;  // the sums of a bit each
#pragma unroll 8
  for (int c = 0; c < size; c += 4) {
    const float4 a = *reinterpret_cast<const float4*>(one + c);
    const float4 b = *reinterpret_cast<const float4*>(two + c);
    const float rows[] = {w[c * 32 + lane], w[c * 32 + 32 + lane], w[c * 32 + 64 + lane],
                          w[c * 32 + 96 + lane]};
    first = fmaf(a.w, rows[3], fmaf(a.z, rows[2], fmaf(a.y, rows[1], fmaf(a.x, rows[0], first))));
    second = fmaf(b.w, rows[3], fmaf(b.z, rows[2], fmaf(b.y, rows[1], fmaf(b.x, rows[0], second))));
  }
  const uint32_t bits[] = {__ballot_sync(kAllLanes, first > 0),
                           __ballot_sync(kAllLanes, second > 0)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (lane == 0 && codes[i] != nullptr) *codes[i] = bits[i];
  }
}

}  // namespace jspec
