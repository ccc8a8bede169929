// What the kernels of products of a few rows share: bfloat16, one multiplication, and what follows
// the sums of the warps.
#pragma once

#include <cuda_bf16.h>

#include "common/warp.cuh"
#include "linear/linear.h"

namespace jspec {
namespace {

constexpr int kWidth = 16;  // columns of a block

__device__ float wide(uint16_t value) { return __uint_as_float(uint32_t(value) << 16); }
__device__ uint16_t narrow(float value) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
__device__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ uint4 load(const uint16_t* global, bool reads) {
  return reads ? *reinterpret_cast<const uint4*>(global) : uint4{};
}

__device__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Scales a pair of inputs, rounds them, and adds the squares of what they were.
__device__ uint32_t scaled(uint32_t pair, uint32_t scale, float& squares) {
  squares = fmaf(low(pair), low(pair), fmaf(high(pair), high(pair), squares));
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair),
                                         *reinterpret_cast<const __nv_bfloat162*>(&scale));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// The results of a block, from the sums that each warp has of its share of the inputs. `parts`:
// shared memory for warps * tiles * 8 * (sides * kWidth + 1) numbers. `factors`, `shifts` of the
// columns and `added`: of the value that this thread gives, where it is kept.
template <int sides, int tiles>
__device__ void finish(const Linear& linear, float* parts, const float (&sums)[sides][tiles][4],
                       const float (&squares)[tiles], const float (&factors)[sides],
                       const float (&shifts)[sides], float added) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int eighth = lane / 4, quarter = lane % 4;
  const int row = threadIdx.x / kWidth, own = blockIdx.x * kWidth + threadIdx.x % kWidth;
  constexpr int size = tiles * 8 * kWidth;  // of what a warp leaves of each side
  float* norms = parts + warps * sides * size;
#pragma unroll
  for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
    for (int side = 0; side < sides; ++side) {
      float* part =
          parts + (warp * sides + side) * size + (tile * 8 + quarter * 2) * kWidth + eighth;
      part[0] = sums[side][tile][0];
      part[kWidth] = sums[side][tile][1];
      part[8] = sums[side][tile][2];
      part[kWidth + 8] = sums[side][tile][3];
    }
    if (quarter == 0) norms[warp * tiles * 8 + tile * 8 + eighth] = squares[tile];
  }
  __syncthreads();
  if (row >= linear.rows || own >= linear.outputs) return;
  float totals[sides] = {}, norm = 0;
  for (int other = 0; other < warps; ++other) {
#pragma unroll
    for (int side = 0; side < sides; ++side) {
      totals[side] += parts[(other * sides + side) * size + threadIdx.x];
    }
    norm += norms[other * tiles * 8 + row];
  }
  // The norm is a factor of the whole row, so that it can wait for the sum of the squares. Rounded
  // where a model rounds: after the product, its bias, its activation and the sum.
  const float root = linear.scale ? rsqrtf(norm / linear.inputs + linear.eps) : 1.0f;
  const auto rounded = [&](float value) { return linear.wide ? value : wide(narrow(value)); };
#pragma unroll
  for (int side = 0; side < sides; ++side) {
    totals[side] = rounded(rounded(totals[side] * root * factors[side]) + shifts[side]);
  }
  float value = totals[sides - 1];
  if constexpr (sides == 2) value = rounded(rounded(totals[0] / (1 + expf(-totals[0]))) * value);
  if (linear.add) value = rounded(added + value);
  const int64_t place = int64_t(row) * linear.outputs + own;
  if (linear.wide) {
    static_cast<float*>(linear.out)[place] = value;
  } else {
    static_cast<uint16_t*>(linear.out)[place] = narrow(value);
  }
}

}  // namespace
}  // namespace jspec
