// One tile of logits in the registers of a warp, its weights, and sums over a warp.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/warp.cuh"
#include "sample/sampling.h"

namespace jspec {

// The weights of a tile's tokens.
struct Weigher {
  float rate;
  float exponent;

  // Whether `quick` may serve, which it may but for a temperature near 0.
  __device__ bool near() const { return fabsf(exponent) <= 0x1p9f; }

  // As below, where `near`. NaN has no weight.
  __device__ __forceinline__ uint32_t quick(float x) const {
    return raised<float>(fmaxf(x, least()));
  }

  // A logit whose weight is 0, but not by so much that `raised` could not tell: where `near`, even
  // the nearest bfloat16 is one.
  __device__ __forceinline__ float least() const {
    float quotient;
    asm("div.approx.f32 %0, %1, %2;" : "=f"(quotient) : "f"(exponent - 28.5f), "f"(rate));
    return quotient;
  }

  // As `quick`, of a logit from `least` on. Float32 sums and products round here as the integers of
  // `exp2_of` do: down, or towards zero, and fused.
  template <typename Logit>
  __device__ __forceinline__ uint32_t raised(float x) const {
    constexpr float kHalves = 6291456;  // a float32 of its size counts halves
    const float half = rate / 2, offset = kHalves + exponent / 2;
    float below, u;  // the last bits of `below` hold the distance from the exponent; u in [1/2, 1)
    if constexpr (std::is_same_v<Logit, float>) {
      const float power = __fmul_rn(x, half);
      below = __fsub_ru(offset, power);
      u = __fadd_rz(power, __fsub_rn(below, offset - 0.5f));
    } else {
      below = __fmaf_ru(x, -half, offset);
      u = __fmaf_rz(x, half, __fsub_rn(below, offset - 0.5f));
    }
    // Up to 2^-125, the bits of float32 are whole numbers of 2^-149.
    float p = __fmul_rz(kPower5 * 0x1p-149f, u);
    p = __fmaf_rz(p, u, kPower3 * 0x1p-149f);
    p = __fmaf_rz(p, u, kPower2 * 0x1p-149f);
    p = __fmaf_rz(p, u, kPower1 * 0x1p-149f);
    p = __fmaf_rz(p, u, kPower0 * 0x1p-149f);
    const uint32_t mantissa = __float_as_uint(p);
    return __funnelshift_r(mantissa * (kWeight >> 23), 0, __float_as_uint(below));
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

// The logits of one tile in the registers of a warp, as they stand in memory.
template <typename Logit>
struct Tile {
  static constexpr int kEach = kTile / 32;
  static constexpr int kRun = 8;  // neighbours of a lane; the next ones are the next lane's
  uint32_t words[kEach * sizeof(Logit) / 4];

  // Where in the tile this lane's logit `i` stands.
  __device__ __forceinline__ static int place(int i) {
    return (i / kRun * 32 + threadIdx.x % 32) * kRun + i % kRun;
  }

  // Loads the tile that begins at `logits`; minus infinity behind the `left` tokens that are left.
  __device__ __forceinline__ void load(const Logit* logits, int left) {
    if (is_aligned(logits) && left >= kTile) {
      constexpr int kVector = 16 / sizeof(Logit);
#pragma unroll
      for (int i = 0; i < kEach / kVector; ++i) {
        const Logit* vector = logits + place(i * kVector);
        const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(vector));
        words[4 * i] = loaded.x;
        words[4 * i + 1] = loaded.y;
        words[4 * i + 2] = loaded.z;
        words[4 * i + 3] = loaded.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t bits = bits_of(place(i) < left ? logit_of(logits[place(i)]) : -INFINITY);
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

  // The largest; NaN counts as minus infinity.
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

  // Raises what is below `least`, or NaN, to it.
  __device__ __forceinline__ void raise(float least) {
    if constexpr (std::is_same_v<Logit, float>) {
#pragma unroll
      for (uint32_t& word : words) word = bits_of(fmaxf(float_of(word), least));
    } else {
      uint32_t two;
      asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(two) : "f"(least));
#pragma unroll
      for (uint32_t& word : words) asm("max.bf16x2 %0, %0, %1;" : "+r"(word) : "r"(two));
    }
  }

  // The first token of the lane, counted from the tile's first, whose logit is `top`, or kNone.
  __device__ uint32_t first(float top) const {
    uint32_t found = kNone;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      if (fminf((*this)[i], FLT_MAX) == top) found = place(i);
    }
    return found;
  }
};

// The sum of a lane's weights of the tile at `logits`, where not `near`. Its code is no part of its
// callers: what rarely runs would part what always does.
template <typename Logit>
__device__ __noinline__ uint64_t sum_far(const Logit* logits, int left, Weigher weigher) {
  uint64_t sum = 0;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < min(left, kTile); i += 32) {
    sum += weigher(logit_of(logits[i]));
  }
  return sum;
}

// What is kept of tile `x`, which stands at `logits`, by a warp.
template <typename Logit>
__device__ __forceinline__ Cell cell_of(Tile<Logit> x, const Logit* logits, int left, float rate) {
  const float largest = x.largest();
  const float top = fmaxf(fminf(largest, FLT_MAX), -FLT_MAX);
  if (rate == 0) return {__reduce_min_sync(kAllLanes, x.first(top)), top, 0};
  const Weigher weigher{rate, exponent_of(top, rate)};
  uint64_t sum = 0;
  if (weigher.near()) {
    x.raise(weigher.least());
    uint32_t weights = 0;  // each is below 2^27
#pragma unroll
    for (int i = 0; i < x.kEach; ++i) weights += weigher.template raised<Logit>(x[i]);
    sum = weights;
  } else if (largest > -INFINITY) {
    sum = sum_far(logits, left, weigher);
  }
  return {warp_sum(sum), top, weigher.exponent};
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
