// One tile of logits in the registers of a warp, its weights, and sums over a warp.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "ballot.cuh"
#include "sampling.h"

namespace jspec {

// The weights of a tile's tokens.
struct Weigher {
  float rate;
  float exponent;

  // Whether `quick` may serve, which it may but for a temperature near 0.
  __device__ bool near() const { return fabsf(exponent) <= 0x1p21f; }

  // As below, where `near`: float32 sums and products round here as the integers of `exp2_of` do:
  // down, or towards zero, and fused. NaN has no weight.
  __device__ __forceinline__ uint32_t quick(float x) const {
    constexpr float kLeast = 12582912;  // from it on, the last bits hold a float32's whole part
    const float offset = kLeast + 30 - exponent;
    const float power = __fmul_rn(x, rate);
    const float whole = fmaxf(__fadd_rd(power, offset), kLeast);
    const float u = __fadd_rz(power, __fsub_rn(offset + 1, whole));  // in [1, 2)
    float p = __fmaf_rz(15506256 * 0x1p-33f, u, 635475 * 0x1p-32f);
    p = __fmaf_rz(p, u, 9936488 * 0x1p-28f);
    p = __fmaf_rz(p, u, 7397238 * 0x1p-26f);
    p = __fmaf_rz(p, u, 5905978 * 0x1p-24f);
    p = __fmaf_rz(p, u, 4184066 * 0x1p-23f);
    // p is in [1, 2): shifted by 8, its last exponent bit leads its mantissa.
    return __funnelshift_l(__float_as_uint(p) << 8, 0, __float_as_uint(whole));
  }

  __device__ uint32_t operator()(float x) const {
    return near() ? quick(x) : weight_of(power_of(x, rate), exponent);
  }
};

// The sum over a warp, of numbers below 2^51.
__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
  const uint32_t low = __reduce_add_sync(kAllLanes, uint32_t(x) & 0xFFFFFF);
  const uint32_t high = __reduce_add_sync(kAllLanes, uint32_t(x >> 24));
  return (uint64_t(high) << 24) + low;
}

// The largest over a warp; NaN counts as minus infinity.
__device__ __forceinline__ float warp_max(float x) {
  const auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); };
  const int key = ordered(__float_as_int(fmaxf(x, -INFINITY)));
  return __int_as_float(ordered(__reduce_max_sync(kAllLanes, key)));
}

// The sum over the lanes up to this one.
template <typename Number>
__device__ __forceinline__ Number warp_reached(Number x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const Number other = __shfl_up_sync(kAllLanes, x, by);
    if (lane >= by) x += other;
  }
  return x;
}

__device__ __forceinline__ bool is_aligned(const void* logits) {
  return reinterpret_cast<uintptr_t>(logits) % 16 == 0;
}

// The logits of one tile, 32 neighbours a lane, as they stand in memory.
template <typename Logit>
struct Tile {
  static constexpr int kEach = kTile / 32;
  static constexpr int kVector = 16 / sizeof(Logit);
  uint32_t words[kEach * sizeof(Logit) / 4];

  // Loads the tile that begins at `logits`; minus infinity behind the `left` tokens that are left.
  __device__ __forceinline__ Tile(const Logit* logits, int left) {
    logits += threadIdx.x % 32 * kEach;
    left -= threadIdx.x % 32 * kEach;
    if (is_aligned(logits) && left >= kEach) {
#pragma unroll
      for (int i = 0; i < kEach / kVector; ++i) {
        const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(logits) + i);
        words[4 * i] = loaded.x;
        words[4 * i + 1] = loaded.y;
        words[4 * i + 2] = loaded.z;
        words[4 * i + 3] = loaded.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t bits = bits_of(i < left ? logit_of(logits[i]) : -INFINITY);
      if constexpr (std::is_same_v<Logit, float>) {
        words[i] = bits;
      } else if (i % 2) {
        words[i / 2] |= bits & 0xFFFF0000u;
      } else {
        words[i / 2] = bits >> 16;
      }
    }
  }

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (std::is_same_v<Logit, float>) return float_of(words[i]);
    return float_of(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16);
  }

  // The largest of the tile; minus infinity where there is none.
  __device__ __forceinline__ float largest() const {
    if constexpr (std::is_same_v<Logit, float>) {
      float most = -INFINITY;
#pragma unroll
      for (uint32_t word : words) most = fmaxf(most, float_of(word));
      return warp_max(most);
    } else {
      uint32_t most = words[0];
#pragma unroll
      for (uint32_t word : words) asm("max.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(word));
      return warp_max(fmaxf(float_of(most << 16), float_of(most & 0xFFFF0000u)));
    }
  }

  // The first token of the lane, counted from the tile's first, whose logit is `top`, or kNone.
  __device__ uint32_t first(float top) const {
    uint32_t found = kNone;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      if (fminf((*this)[i], FLT_MAX) == top) found = threadIdx.x % 32 * kEach + i;
    }
    return found;
  }
};

// The sum of a lane's weights, and the largest logit and the exponent of the tile; for rate 0 the
// lane's first token with that logit, or kNone. Its code is no part of its callers, so that what
// sums all tiles is at hand when one is drawn from.
struct Lane {
  uint64_t sum;
  float top;
  float exponent;
};

template <typename Logit>
__device__ __noinline__ Lane sum_lane(const Logit* logits, int left, float rate) {
  const Tile<Logit> x(logits, left);
  const float largest = x.largest();
  const float top = fmaxf(fminf(largest, FLT_MAX), -FLT_MAX);
  if (rate == 0) return {x.first(top), top, 0};
  const Weigher weigher{rate, exponent_of(top, rate)};
  uint64_t sum = 0;
  if (weigher.near()) {
#pragma unroll
    for (int i = 0; i < x.kEach; i += 4) {
      uint32_t four = 0;  // each is below 2^30
#pragma unroll
      for (int j = i; j < i + 4; ++j) four += weigher.quick(x[j]);
      sum += four;
    }
  } else if (largest > -INFINITY) {
    const int begin = threadIdx.x % 32 * x.kEach;
#pragma unroll 1
    for (int i = begin; i < min(left, begin + x.kEach); ++i) sum += weigher(logit_of(logits[i]));
  }
  return {sum, top, weigher.exponent};
}

// The cells of 128 tiles from tile `begin` on, 4 neighbours a lane; without mass behind the end.
struct Cells {
  Cell cell[4];
  int first;

  __device__ __forceinline__ Cells(const Row& row, int begin)
      : first(begin + threadIdx.x % 32 * 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4 words;  // volatile: not to be put off until they are needed
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "l"(row.cells + min(first + i, row.tiles - 1)));
      memcpy(&cell[i], &words, sizeof words);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i >= row.tiles) cell[i] = {0, -INFINITY, -FLT_MAX};
    }
  }
};

// Calls `visit` with all cells of a row, 128 at a time, while it says so; `first` are the first.
template <typename Visit>
__device__ __forceinline__ void for_cells(const Row& row, const Cells& first, Visit visit) {
  if (!visit(first)) return;
#pragma unroll 1
  for (int begin = 128; begin < row.tiles && visit(Cells(row, begin)); begin += 128) {
  }
}

// The norm of a position from its tiles, by a warp; `first` are the first of its cells.
__device__ __forceinline__ Norm warp_norm(const Row& row, const Cells& first) {
  float largest = -FLT_MAX, exponent = -FLT_MAX;
  for_cells(row, first, [&](const Cells& here) {
#pragma unroll
    for (const Cell& cell : here.cell) {
      largest = fmaxf(largest, cell.top);
      exponent = fmaxf(exponent, cell.exponent);
    }
    return true;
  });
  largest = warp_max(largest);
  exponent = warp_max(exponent);
  uint64_t sum = 0;
  uint32_t best = kNone;
  for_cells(row, first, [&](const Cells& here) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Cell& cell = here.cell[i];
      sum += mass_in_row(cell.sum, cell.exponent, exponent);
      const bool is_best = row.greedy() && cell.top == largest && cell.sum < kTile;
      if (is_best) best = min(best, (here.first + i) * kTile + uint32_t(cell.sum));
    }
    return true;
  });
  Norm norm = norm_of(largest, exponent, warp_sum(sum));
  norm.best = __reduce_min_sync(kAllLanes, best);
  return norm;
}

}  // namespace jspec
