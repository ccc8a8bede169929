// What kernels of attention share: the running softmax of query rows, and the layout of parts.
//
// A thread holds two rows of a tile of scores or sums, as mma and wgmma leave them: of columns
// 8 i + 2 (lane % 4) + j, i = 0, 1, ..., j = 0 or 1, element 4 i + 2 r + j is that of row r.
#pragma once

#include "common/host_device.h"
#include "common/ptx.cuh"
#include "common/warp.cuh"

namespace jspec {
namespace {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kLowest = -1e30f;  // below all scores, and finite: differences are numbers
// How much the maximum of a row may grow, in powers of 2, before its sums are scaled.
constexpr float kSlack = 8.0f;
constexpr int kChunk = 64;  // channels whose sums are 32 numbers of a thread

// The running softmax of a thread's rows: two, or one if the other row of the tile is unused. Either
// way a row's arithmetic is the same, to the bit: no compiler may choose what is contracted.
template <int kRows>
struct Softmax {
  float top[kRows], sum[kRows], decay[kRows];
  int last[kRows];  // the last position that a row reads
  float unit;       // of scores in powers of 2

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int row = 0; row < kRows; ++row) top[row] = kLowest, sum[row] = 0;
  }

  // The weights of the keys of a tile, as the left factor of a matmul, in bfloat16 or float16.
  // `position_of(i, j)` is the position of the key in column (i, j). Returns whether `decay` must be
  // applied to earlier sums.
  template <bool kMasked, int kTiles, bool kFloat16 = false, typename PositionOf>
  __device__ __forceinline__ bool weigh(float (&scores)[4 * kTiles],
                                        uint32_t (&weights)[kTiles / 2][4],
                                        PositionOf position_of) {
    float highest_of[kRows][2];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int position = kMasked ? position_of(i, j) : 0;
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          float& score = scores[4 * i + 2 * row + j];
          if (kMasked && position > last[row]) score = -INFINITY;
          highest_of[row][j] = i ? fmaxf(highest_of[row][j], score) : score;
        }
      }
    }
    float highest[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      highest[row] = fmaxf(highest_of[row][0], highest_of[row][1]);
    }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        highest[row] = fmaxf(highest[row], __shfl_xor_sync(kAllLanes, highest[row], lanes));
      }
    }
    bool grew = false;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      highest[row] = __fmul_rn(highest[row], unit);
      const bool grows = highest[row] > top[row] + kSlack;
      const float higher = grows ? highest[row] : top[row];
      decay[row] = exp2_fast(top[row] - higher);
      grew |= grows;
      top[row] = higher;
      float sums[2] = {__fmul_rn(sum[row], decay[row]), 0};
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const float low = exp2_fast(fmaf(scores[4 * i + 2 * row], unit, -higher));
        const float high = exp2_fast(fmaf(scores[4 * i + 2 * row + 1], unit, -higher));
        sums[0] += low;
        sums[1] += high;
        weights[i / 2][i % 2 * 2 + row] = kFloat16 ? packed_float16(low, high) : packed(low, high);
      }
      sum[row] = sums[0] + sums[1];
    }
    return __any_sync(kAllLanes, grew);
  }

  __device__ __forceinline__ void apply_decay(float (&out)[32]) const {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        out[4 * i + 2 * row] *= decay[row];
        out[4 * i + 2 * row + 1] *= decay[row];
      }
    }
  }

  // The sum of each row over the four threads that share it.
  __device__ __forceinline__ void join_sums() {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      sum[row] += __shfl_xor_sync(kAllLanes, sum[row], 1);
      sum[row] += __shfl_xor_sync(kAllLanes, sum[row], 2);
    }
  }
};

// A row of a part holds the channels of a thread next to each other: this is the channel of number
// `at`. Sums of at, at + 1 are those of neighbouring channels for every even `at`.
constexpr JSPEC_HOST_DEVICE int channel_of_part(int at) {
  const int quarter = at % kChunk / 16, pair = at % 16 / 2;
  return at / kChunk * kChunk + 8 * pair + 2 * quarter + at % 2;
}

// The inverse of `channel_of_part`.
constexpr JSPEC_HOST_DEVICE int place_in_part(int channel) {
  const int pair = channel % kChunk / 8, quarter = channel % 8 / 2;
  return channel / kChunk * kChunk + 16 * quarter + 2 * pair + channel % 2;
}

// Writes a thread's sums of row `kRow` of a chunk of channels to that chunk of a part's row.
template <int kRow>
__device__ __forceinline__ void write_part(float* chunk, const float (&out)[32]) {
  float4* place = reinterpret_cast<float4*>(chunk) + 4 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* from = out + 8 * i + 2 * kRow;
    place[i] = {from[0], from[1], from[4], from[5]};
  }
}

}  // namespace
}  // namespace jspec
