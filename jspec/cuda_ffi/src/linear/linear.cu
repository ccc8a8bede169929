// A product of a few rows on a GPU: a block for each 16 columns of the result.
//
// The weights of such a product take a fraction of a microsecond to read; what counts is that they
// are waited for once, and that few instructions come before and behind. The warps of a block share
// its inputs, 32 at a time. Each copies its weights into its own shared memory, where no other warp
// looks: one barrier is left, before the sums of the warps are added up, in one order.
#include <cuda_bf16.h>

#include <algorithm>

#include "common/warp.cuh"
#include "linear/linear.h"

namespace jspec {
namespace {

constexpr int kWidth = 16;              // columns of a block
constexpr int kMostWarps = 16;          // of a block
constexpr int kTile = kGroup * kWidth;  // weights of a group

__device__ float wide(uint16_t value) { return __uint_as_float(uint32_t(value) << 16); }
__device__ uint16_t narrow(float value) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
__device__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Sixteen bytes on their way into shared memory, zeros where there is nothing to read. What lies
// beside them goes to L2: a block near by reads it at the same time.
__device__ void copy(uint16_t* shared, const uint16_t* global, bool reads) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
               "r"(reads ? 16 : 0));
}

__device__ uint4 load(const uint16_t* global, bool reads) {
  return reads ? *reinterpret_cast<const uint4*>(global) : uint4{};
}

// Four 8 x 8 matrices, transposed; each lane has the address of a row of 8.
__device__ void load_transposed(uint32_t (&a)[4], const uint16_t* shared) {
  const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(from));
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
  const __nv_bfloat162 product =
      __floats2bfloat162_rn(low(pair) * low(scale), high(pair) * high(scale));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// A warp takes `groups` groups of inputs; `tiles` tiles of 8 rows. A multiplication of 16 columns,
// 16 inputs and 8 rows takes the inputs in any order that weights and rows agree on: a lane has 8
// that follow each other, for two multiplications.
template <int groups, int tiles, bool gated, bool transposed>
__global__ void __launch_bounds__(32 * kMostWarps) linear_kernel(const Linear linear) {
  constexpr int sides = gated ? 2 : 1;
  extern __shared__ __align__(128) uint16_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int eighth = lane / 4, quarter = lane % 4;
  const int column = blockIdx.x * kWidth;
  const int inputs = linear.inputs, outputs = linear.outputs;
  uint16_t* weights = shared + warp * groups * sides * kTile;

  // All loads are on their way before the first is waited for.
  uint4 rows[groups][tiles], scales[groups], across[groups][2];
#pragma unroll
  for (int i = 0; i < groups; ++i) {
    const int first = (warp + i * warps) * kGroup;
    const int mine = first + quarter * 8;
    const bool there = first < inputs;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int row = tile * 8 + eighth;
      rows[i][tile] = load(linear.x + row * inputs + mine, there && row < linear.rows);
    }
    if (linear.scale) scales[i] = load(linear.scale + mine, there);
    if constexpr (transposed) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = column + half * 8 + eighth;
        across[i][half] = load(linear.kernel + int64_t(at) * inputs + mine, there && at < outputs);
      }
    } else {
#pragma unroll
      for (int part = 0; part < 2 * sides; ++part) {
        const int side = part / 2, half = lane % 2, eight = lane / 2 % 4;
        const int input = part % 2 * 4 + lane / 8;
        // In such an order that neither copies nor loads of 8 rows share a bank.
        const int place = input / 2 * 16 + half * 8 + ((eight * 2 + input % 2) ^ half);
        const int at = column + half * 8;
        copy(weights + (i * sides + side) * kTile + place * 8,
             linear.kernel + int64_t(first + eight * 8 + input) * (sides * outputs) +
                 side * outputs + at,
             there && at < outputs);
      }
    }
  }
  const int row = threadIdx.x / kWidth, own = column + threadIdx.x % kWidth;
  const bool kept = row < linear.rows && own < outputs;
  float added = 0, shifts[sides] = {};
  if (linear.add && kept) added = wide(linear.add[row * outputs + own]);
#pragma unroll
  for (int side = 0; side < sides; ++side) {
    if (linear.bias && kept) shifts[side] = wide(linear.bias[side * outputs + own]);
  }

  float squares[tiles] = {};
  if (linear.scale) {
#pragma unroll
    for (int i = 0; i < groups; ++i) {
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        uint4& x = rows[i][tile];
        x = {scaled(x.x, scales[i].x, squares[tile]), scaled(x.y, scales[i].y, squares[tile]),
             scaled(x.z, scales[i].z, squares[tile]), scaled(x.w, scales[i].w, squares[tile])};
      }
    }
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      squares[tile] += __shfl_xor_sync(kAllLanes, squares[tile], 1);
      squares[tile] += __shfl_xor_sync(kAllLanes, squares[tile], 2);
    }
  }
  float sums[sides][tiles][4] = {};
  asm volatile("cp.async.wait_all;");
  __syncwarp();
#pragma unroll
  for (int i = 0; i < groups; ++i) {
#pragma unroll
    for (int side = 0; side < sides; ++side) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t a[4];
        if constexpr (transposed) {
          const uint4 upper = across[i][0], lower = across[i][1];
          a[0] = step ? upper.z : upper.x, a[1] = step ? lower.z : lower.x;
          a[2] = step ? upper.w : upper.y, a[3] = step ? lower.w : lower.y;
        } else {
          const int half = lane / 8 % 2, pair = step * 2 + lane / 16;
          const int place = pair * 16 + half * 8 + (lane % 8 ^ half);
          load_transposed(a, weights + (i * sides + side) * kTile + place * 8);
        }
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
          const uint4 x = rows[i][tile];
          multiply(sums[side][tile], a, step ? x.z : x.x, step ? x.w : x.y);
        }
      }
    }
  }

  constexpr int size = tiles * 8 * kWidth;  // of what a warp leaves of each side
  float* parts =
      reinterpret_cast<float*>(shared + (transposed ? 0 : warps * groups * sides * kTile));
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
  if (!kept) return;
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
  const float root = linear.scale ? rsqrtf(norm / inputs + linear.eps) : 1.0f;
  const auto rounded = [&](float value) { return linear.wide ? value : wide(narrow(value)); };
#pragma unroll
  for (int side = 0; side < sides; ++side) {
    totals[side] = rounded(rounded(totals[side] * root) + shifts[side]);
  }
  float value = totals[sides - 1];
  if constexpr (gated) value = rounded(rounded(totals[0] / (1 + expf(-totals[0]))) * value);
  if (linear.add) value = rounded(added + value);
  const int64_t place = int64_t(row) * outputs + own;
  if (linear.wide) {
    static_cast<float*>(linear.out)[place] = value;
  } else {
    static_cast<uint16_t*>(linear.out)[place] = narrow(value);
  }
}

template <int groups, int tiles, bool gated, bool transposed>
const char* launch(const Linear& linear, int warps, Stream stream) {
  constexpr int sides = gated ? 2 : 1;
  const int blocks = (linear.outputs + kWidth - 1) / kWidth;
  const int bytes = warps * ((transposed ? 0 : groups * sides * kTile * 2) +
                             tiles * 8 * (sides * kWidth + 1) * 4);
  const auto kernel = linear_kernel<groups, tiles, gated, transposed>;
  if (bytes > 48 * 1024) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  }
  kernel<<<blocks, warps * 32, bytes, stream>>>(linear);
  return launch_error();
}

template <int groups, int tiles>
const char* launch_kind(const Linear& linear, int warps, Stream stream) {
  if (linear.gated) return launch<groups, tiles, true, false>(linear, warps, stream);
  if (linear.transposed) return launch<groups, tiles, false, true>(linear, warps, stream);
  return launch<groups, tiles, false, false>(linear, warps, stream);
}

template <int groups>
const char* launch_tiles(const Linear& linear, Stream stream) {
  // Also enough threads for each value of a block to have its own.
  const int needed = (linear.inputs / kGroup + groups - 1) / groups;
  const int warps = std::max(needed, (linear.rows + 1) / 2);
  return linear.rows > 8 ? launch_kind<groups, 2>(linear, warps, stream)
                         : launch_kind<groups, 1>(linear, warps, stream);
}

}  // namespace

const char* linear(const Linear& linear, Stream stream) {
  constexpr int most = kMostInputs / kGroup / kMostWarps;
  return linear.inputs <= kMostWarps * kGroup ? launch_tiles<1>(linear, stream)
                                              : launch_tiles<most>(linear, stream);
}

}  // namespace jspec
