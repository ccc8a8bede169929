// One tile of logits in the registers of a warp, its weights, and sums over a warp.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/ptx.cuh"
#include "common/warp.cuh"
#include "sample/sampling.h"

namespace jspec {

// A position's distribution as the workspace holds it.
struct Position {
  const void* logits;  // [vocabulary]
  Cell* cells;         // [tiles]
  uint32_t threshold;  // the key of the smallest logit that the filters keep
  float rate;
  bool bfloat16;
  int32_t vocabulary;
  int32_t tiles;

  __device__ __forceinline__ Position(const Sampling& sampling, const Source& source, int64_t batch,
                                      int32_t position)
      : threshold(0),
        rate(sampling.settings.rate[batch]),
        bfloat16(source.bfloat16),
        vocabulary(sampling.vocabulary),
        tiles(sampling.tiles) {
    const Workspace& workspace = sampling.workspace;
    const int64_t kept = batch * workspace.positions + source.first + position;
    const int64_t begin = (batch * source.positions + position) * int64_t(vocabulary);
    logits = static_cast<const char*>(source.logits) + begin * (bfloat16 ? 2 : 4);
    cells = workspace.cells + kept * tiles;
    if (sampling.filtered) threshold = workspace.thresholds[kept];
  }

  __device__ bool greedy() const { return rate == 0; }

  // Whether the filters keep a logit.
  __device__ bool keeps(float x) const { return key_of(x) >= threshold; }
};

// A weight of `Weigher::quick`: mantissa * 2^(31 - distance), or 0 from a distance of 32 on.
struct Weight {
  uint32_t mantissa;
  uint32_t place;  // distance + kNear

  static constexpr uint32_t kNear = 0x4A400000;  // the bits of 3145728.f

  __device__ __forceinline__ uint64_t value() const {
    return uint64_t(mantissa) * shifted_right(0x80000000u, place - kNear);
  }
};

// The weights of a tile's tokens.
struct Weigher {
  float rate;
  int32_t exponent;

  // Whether `quick` may serve, which it may but for a temperature near 0.
  __device__ __forceinline__ bool near() const { return abs(exponent) <= 1 << 20; }

  // As below, where `near`: the bits of `weight_of` from float32 products that are fused, and so
  // exact until they are rounded down, or towards zero. NaN and infinities have no weight.
  __device__ __forceinline__ Weight quick(float x) const {
    constexpr float kQuarters = 3145728;  // a float32 of its size counts quarters
    const float quarter = rate / 4, offset = kQuarters + static_cast<float>(exponent) / 4;
    const float below = __fmaf_ru(x, -quarter, offset);
    // (1 + fraction) / 4, in [1/4, 1/2).
    const float v = __fmaf_rz(x, quarter, __fsub_rn(below, offset - 0.25f));
    // Up to 2^-125, the bits of float32 are whole numbers of 2^-149.
    float p = __fmul_rz(kPower5 * 0x1p-149f, v);
    p = __fmaf_rz(p, v, kPower3 * 0x1p-149f);
    p = __fmaf_rz(p, v, kPower2 * 0x1p-149f);
    p = __fmaf_rz(p, v, kPower1 * 0x1p-149f);
    p = __fmaf_rz(p, v, kPower0 * 0x1p-149f);
    // `below` counts whole powers from the tile's exponent down; its bits are larger than those of
    // any weight for NaN and infinities.
    return {__float_as_uint(p), __float_as_uint(below)};
  }

  __device__ uint64_t operator()(float x) const {
    return near() ? quick(x).value() : weight_of(x, rate, exponent);
  }
};

// The sum over a warp, modulo 2^64: in parts of 27 bits, 32 of which fit 32 bits.
__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
  constexpr uint32_t kPart = (1 << 27) - 1;
  const uint32_t low = __reduce_add_sync(kAllLanes, uint32_t(x) & kPart);
  const uint32_t middle = __reduce_add_sync(kAllLanes, uint32_t(x >> 27) & kPart);
  const uint32_t high = __reduce_add_sync(kAllLanes, uint32_t(x >> 54));
  return (uint64_t(high) << 54) + (uint64_t(middle) << 27) + low;
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

// The logits of one tile in the registers of a warp, as they lie in memory.
template <typename Logit>
struct Tile {
  static constexpr int kEach = kTile / 32;
  static constexpr int kRun = 8;  // neighbours of a lane; the next ones are the next lane's
  uint32_t words[kEach * sizeof(Logit) / 4];

  // Where in the tile this lane's logit `i` lies.
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
      const uint32_t bits = place(i) < left ? raw_bits(logits[place(i)]) : 0xFF800000u;
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
    if (i % 2) return float_of(words[i / 2] & 0xFFFF0000u);
    // Not a multiplication, which is what the kernel does most.
    return float_of(low_half_to_high(words[i / 2]));
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
      for (uint32_t word : words) most = max_of_halves(most, word);
      return warp_max(fmaxf(float_of(most << 16), float_of(most & 0xFFFF0000u)));
    }
  }

  // The first token of the lane, counted from the tile's first, whose logit is `top`, which none is
  // above but plus infinity, or kNone.
  __device__ uint32_t first(float top) const {
    uint32_t found = kNone;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      if (cleaned((*this)[i]) == top) found = place(i);
    }
    return found;
  }
};

// The sum of a lane's weights of the tile at `logits`, where not `near`. Not inlined: it rarely runs,
// and its code would lie between what always does.
template <typename Logit>
__device__ __noinline__ uint64_t sum_far(const Logit* logits, int left, Weigher weigher) {
  uint64_t sum = 0;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < min(left, kTile); i += 32) {
    sum += weigher(logit_of(logits[i]));
  }
  return sum;
}

// The exponent of a tile. Not inlined, as above: a float32 product, rounded down, has the floor of
// the exact one where it is small.
__device__ __noinline__ int32_t exponent_far(float top, float rate) {
  return exponent_of(top, rate);
}

__device__ __forceinline__ int32_t tile_exponent(float top, float rate) {
  const float power = __fmul_rd(top, rate);
  return fabsf(power) <= 0x1p20f ? __float2int_rd(power) : exponent_far(top, rate);
}

// What is kept of tile `x`, which is read from `logits`, by a warp.
template <typename Logit>
__device__ __forceinline__ Cell cell_of(const Tile<Logit>& x, const Logit* logits, int left,
                                        float rate) {
  const float largest = x.largest();
  const float top = fmaxf(fminf(largest, FLT_MAX), -FLT_MAX);
  if (rate == 0) return {__reduce_min_sync(kAllLanes, x.first(top)), top, 0};
  const Weigher weigher{rate, tile_exponent(top, rate)};
  uint64_t sum = 0, other = 0;  // two chains of sums, which wait for each other less
  if (weigher.near()) {
#pragma unroll
    for (int i = 0; i < x.kEach; i += 2) {
      sum += weigher.quick(x[i]).value();
      other += weigher.quick(x[i + 1]).value();
    }
  } else if (largest > -INFINITY) {
    sum = sum_far(logits, left, weigher);
  }
  return {warp_sum(sum + other), top, weigher.exponent};
}

constexpr int32_t kLowest = -(1 << 30);  // exponent of all

// The cells of 128 tiles from tile `begin` on, 4 neighbours a lane; without mass behind the end.
struct Cells {
  Cell cell[4];
  int first;

  __device__ __forceinline__ Cells(const Position& from, int begin)
      : first(begin + threadIdx.x % 32 * 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 words = load_now(from.cells + min(first + i, from.tiles - 1));
      memcpy(&cell[i], &words, sizeof words);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i >= from.tiles) cell[i] = {0, -INFINITY, kLowest};
    }
  }
};

// Calls `visit` with all cells of a position, 128 at a time, while it says so; `first` are the first.
template <typename Visit>
__device__ __forceinline__ void for_cells(const Position& from, const Cells& first, Visit visit) {
  if (!visit(first)) return;
#pragma unroll 1
  for (int begin = 128; begin < from.tiles && visit(Cells(from, begin)); begin += 128) {
  }
}

// The scale of a position from its tiles, by a warp; `first` are the first of its cells.
__device__ __forceinline__ Scale warp_scale(const Position& from, const Cells& first) {
  float largest = -FLT_MAX;
  int32_t exponent = kLowest;
  for_cells(from, first, [&](const Cells& here) {
#pragma unroll
    for (const Cell& cell : here.cell) {
      largest = fmaxf(largest, cell.top);
      exponent = max(exponent, cell.exponent);
    }
    return true;
  });
  if (from.greedy()) {
    largest = warp_max(largest);
    uint32_t best = kNone;
    for_cells(from, first, [&](const Cells& here) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Cell& cell = here.cell[i];
        const bool is_best = cell.top == largest && cell.sum < kTile;
        if (is_best) best = min(best, (here.first + i) * kTile + uint32_t(cell.sum));
      }
      return true;
    });
    best = __reduce_min_sync(kAllLanes, best);
    return {0, 0, 0, best == kNone ? 0 : best};
  }
  exponent = __reduce_max_sync(kAllLanes, exponent);
  const uint32_t guard = guard_bits(from.tiles);
  uint64_t total = 0;
  for_cells(from, first, [&](const Cells& here) {
#pragma unroll
    for (const Cell& cell : here.cell) {
      total += shifted(cell.sum, mass_shift(exponent, cell.exponent, guard));
    }
    return true;
  });
  return scale_of(exponent, warp_sum(total));
}

// The largest logit of a position, by a warp.
__device__ __forceinline__ float warp_largest(const Position& from, const Cells& first) {
  float largest = -FLT_MAX;
  for_cells(from, first, [&](const Cells& here) {
#pragma unroll
    for (const Cell& cell : here.cell) largest = fmaxf(largest, cell.top);
    return true;
  });
  return warp_max(largest);
}

}  // namespace jspec
