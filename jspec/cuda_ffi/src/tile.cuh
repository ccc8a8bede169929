// One tile of logits in the registers of a warp, and sums over warps and blocks.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "ballot.cuh"
#include "sampling.h"

namespace jspec {

// The weight 2^y of `exp2_of` for y <= 0 or NaN, which gives 0. Here float32 sums and products round
// as the integers of `exp2_of` do: down, or towards zero, and fused.
__device__ __forceinline__ uint32_t weight_in_tile(float y) {
  constexpr float kShift = 12582912.0f + 31;  // adding it leaves floor(y) + 31 in the last bits
  y = fmaxf(y, -31.0f);
  const float floor = __fadd_rd(y, kShift);
  const float f = __fsub_rz(y, __fsub_rn(floor, kShift));
  float p = __fmaf_rz(16143315 * 0x1p-33f, f, 9653981 * 0x1p-30f);
  p = __fmaf_rz(p, f, 14983716 * 0x1p-28f);
  p = __fmaf_rz(p, f, 16116816 * 0x1p-26f);
  p = __fmaf_rz(p, f, 11629155 * 0x1p-24f);
  p = __fmaf_rz(p, f, 1.0f);
  // p is in [1, 2): shifted by 8, its last exponent bit leads its mantissa.
  return __funnelshift_l(__float_as_uint(p) << 8, 0, __float_as_uint(floor));
}

// Elements of one 16-byte load.
template <typename Logit>
constexpr int kVector = 16 / sizeof(Logit);

// The token within its tile of element i of a lane.
template <typename Logit>
__device__ int token_of(int i) {
  constexpr int vector = kVector<Logit>;
  return (i / vector * 32 + threadIdx.x % 32) * vector + i % vector;
}

// Loads the tile of the row that begins at `begin`, as it stands; minus infinity behind the end.
template <typename Logit, bool aligned>
__device__ __forceinline__ void load_tile(const void* logits, int64_t begin, int vocabulary, int tile,
                                          float (&x)[kTile / 32]) {
  constexpr int vector = kVector<Logit>;
  const Logit* row = static_cast<const Logit*>(logits) + begin;
  if (aligned && (tile + 1) * kTile <= vocabulary) {
    const int4* from = reinterpret_cast<const int4*>(row + tile * kTile) + threadIdx.x % 32;
    int4 loaded[kTile / 32 / vector];
#pragma unroll
    for (int i = 0; i < kTile / 32 / vector; ++i) loaded[i] = __ldg(from + i * 32);
#pragma unroll
    for (int i = 0; i < kTile / 32 / vector; ++i) {
      const uint32_t words[4] = {uint32_t(loaded[i].x), uint32_t(loaded[i].y),
                                 uint32_t(loaded[i].z), uint32_t(loaded[i].w)};
#pragma unroll
      for (int j = 0; j < vector; ++j) {
        if constexpr (std::is_same_v<Logit, float>) {
          x[i * vector + j] = __uint_as_float(words[j]);
        } else {
          const uint32_t word = words[j / 2];
          x[i * vector + j] = __uint_as_float(j % 2 ? word & 0xFFFF0000u : word << 16);
        }
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kTile / 32; ++i) {
    const int token = tile * kTile + token_of<Logit>(i);
    x[i] = token < vocabulary ? logit_of(row[token]) : -INFINITY;
  }
}

// The largest of a tile as the reference has it; cleans x where plus infinity is among it. What NaN
// is left has no weight.
__device__ __forceinline__ float top_of(float (&x)[kTile / 32]) {
  float largest = -FLT_MAX;
#pragma unroll
  for (int i = 0; i < kTile / 32; ++i) largest = fmaxf(largest, x[i]);
  const auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); };
  const int key = __reduce_max_sync(kAllLanes, ordered(__float_as_int(largest)));
  largest = __int_as_float(ordered(key));
  if (largest == INFINITY) {
    largest = FLT_MAX;
#pragma unroll
    for (int i = 0; i < kTile / 32; ++i) x[i] = logit_of(x[i]);
  }
  return largest;
}

// The first token of a tile whose logit is `top`, or kNone.
template <typename Logit>
__device__ uint32_t first_of(const float (&x)[kTile / 32], float top, int tile) {
  uint32_t first = kNone;
#pragma unroll
  for (int i = 0; i < kTile / 32; ++i) {
    if (x[i] == top) first = min(first, tile * kTile + token_of<Logit>(i));
  }
  return __reduce_min_sync(kAllLanes, first);
}

// The sum over a warp, of numbers below 2^51.
__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
  const uint32_t low = __reduce_add_sync(kAllLanes, uint32_t(x) & 0xFFFFFF);
  const uint32_t high = __reduce_add_sync(kAllLanes, uint32_t(x >> 24));
  return (uint64_t(high) << 24) + low;
}

// The sum over the threads before this one, and over all of the block in `total`.
template <int threads>
__device__ uint64_t block_before(uint64_t x, uint64_t (&sums)[threads / 32], uint64_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t reached = x;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const uint64_t other = __shfl_up_sync(kAllLanes, reached, by);
    if (lane >= by) reached += other;
  }
  __syncthreads();
  if (lane == 31) sums[warp] = reached;
  __syncthreads();
  uint64_t before = reached - x;
  *total = 0;
  for (int i = 0; i < threads / 32; ++i) {
    if (i < warp) before += sums[i];
    *total += sums[i];
  }
  return before;
}

// The norm of a row from the sums of its tiles, by a warp; of a greedy row `best` is its token.
__device__ inline Norm warp_norm(const Row& row, uint32_t* best) {
  const int lane = threadIdx.x % 32;
  float largest = -FLT_MAX;
  for (int tile = lane; tile < row.tiles; tile += 32) largest = fmaxf(largest, row.tops[tile]);
#pragma unroll
  for (int by = 16; by; by /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, by));
  uint64_t sum = 0;
  uint32_t first = kNone;
  for (int tile = lane; tile < row.tiles; tile += 32) {
    const float top = row.tops[tile];
    if (!row.greedy()) {
      sum += mass_in_row(row.sums[tile], top, largest, row.rate);
    } else if (top == largest) {
      first = min(first, uint32_t(row.sums[tile]));
    }
  }
  *best = __reduce_min_sync(kAllLanes, first);
#pragma unroll
  for (int by = 16; by; by /= 2) sum += __shfl_xor_sync(kAllLanes, sum, by);
  return norm_of(largest, sum);
}

// Whether the filters of a row keep a logit.
__device__ inline bool kept(const Row& row, const Norm& norm, float x) {
  return key_of(x) >= row.threshold &&
         (row.min_p == 0 || weight_of((x - norm.largest) * row.rate) >= row.min_p);
}

}  // namespace jspec
