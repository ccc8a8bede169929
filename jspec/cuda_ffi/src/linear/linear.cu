// A matmul of a few rows on a GPU: a block for each 16 columns of the result.
//
// The weights of such a matmul take a fraction of a microsecond to read; what counts is that they
// are waited for once, and that few instructions come before and behind. The warps of a block share
// its inputs, 32 at a time. Each copies its weights into its own shared memory, where no other warp
// looks: one barrier is left, before the sums of the warps are added up, in one order.
#include <algorithm>

#include "common/dependent.cuh"
#include "linear/chain.h"
#include "linear/fragments.cuh"

namespace jspec {
namespace {

constexpr int kMostWarps = 16;          // of a block
constexpr int kTile = kGroup * kWidth;  // weights of a group
constexpr int kMostUntiled = 640;  // inputs of over 8 rows in a chain; with more, tiles are faster

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
  const auto* kernel = static_cast<const uint16_t*>(linear.kernel);
  uint16_t* weights = shared + warp * groups * sides * kTile;

  // All loads are on their way before the first is waited for, those of the weights first: no
  // kernel ahead writes them.
  let_next_start();
  uint4 rows[groups][tiles], scales[groups], across[groups][2];
#pragma unroll
  for (int i = 0; i < groups; ++i) {
    const int first = (warp + i * warps) * kGroup;
    const int mine = first + quarter * 8;
    const bool there = first < inputs;
    if constexpr (transposed) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = column + half * 8 + eighth;
        across[i][half] = load(kernel + int64_t(at) * inputs + mine, there && at < outputs);
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
             kernel + int64_t(first + eight * 8 + input) * (sides * outputs) +
                 side * outputs + at,
             there && at < outputs);
      }
    }
  }
  wait_for_kernels_ahead();
#pragma unroll
  for (int i = 0; i < groups; ++i) {
    const int mine = (warp + i * warps) * kGroup + quarter * 8;
    const bool there = mine < inputs;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int row = tile * 8 + eighth;
      rows[i][tile] = load(linear.x + row * inputs + mine, there && row < linear.rows);
    }
    if (linear.scale) scales[i] = load(linear.scale + mine, there);
  }
  const Results<kWidth, sides, 1> results(linear, column);

  float squares[tiles] = {};
  if (linear.scale) {
#pragma unroll
    for (int i = 0; i < groups; ++i) {
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        squares[tile] += squared(rows[i][tile]);
        rows[i][tile] = scaled(rows[i][tile], scales[i]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      squares[tile] += __shfl_xor_sync(kAllLanes, squares[tile], 1);
      squares[tile] += __shfl_xor_sync(kAllLanes, squares[tile], 2);
    }
  }
  float sums[sides][1][tiles][4] = {};
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
          multiply(sums[side][0][tile], a, step ? x.z : x.x, step ? x.w : x.y);
        }
      }
    }
  }

  float* parts =
      reinterpret_cast<float*>(shared + (transposed ? 0 : warps * groups * sides * kTile));
  results.write(linear, parts, tiles * 8 * (sides * kWidth + 1), sums, squares);
}

template <int groups, int tiles, bool gated, bool transposed>
const char* launch(const Linear& linear, int warps, bool early, Stream stream) {
  constexpr int sides = gated ? 2 : 1;
  const int blocks = (linear.outputs + kWidth - 1) / kWidth;
  const int bytes = warps * ((transposed ? 0 : groups * sides * kTile * 2) +
                             tiles * 8 * (sides * kWidth + 1) * 4);
  return launch_behind(linear_kernel<groups, tiles, gated, transposed>, blocks, warps * 32, bytes,
                       early, stream, linear);
}

template <int groups, int tiles>
const char* launch_kind(const Linear& linear, int warps, bool early, Stream stream) {
  if (linear.gated) return launch<groups, tiles, true, false>(linear, warps, early, stream);
  return linear.transposed ? launch<groups, tiles, false, true>(linear, warps, early, stream)
                           : launch<groups, tiles, false, false>(linear, warps, early, stream);
}

template <int groups>
const char* launch_tiles(const Linear& linear, bool early, Stream stream) {
  // Also enough threads for each value of a block to have its own.
  const int needed = (linear.inputs / kGroup + groups - 1) / groups;
  const int warps = std::max(needed, (linear.rows + 1) / 2);
  return linear.rows > 8 ? launch_kind<groups, 2>(linear, warps, early, stream)
                         : launch_kind<groups, 1>(linear, warps, early, stream);
}

bool is_quantized(const Linear& linear) { return linear.column_scale || linear.block_scale; }

bool suits_tiles(const Linear& linear) {
  const int64_t columns = int64_t(linear.outputs) * (linear.gated ? 2 : 1);
  return !is_quantized(linear) && !linear.transposed && linear.inputs <= kTileInputs &&
         columns * linear.inputs * 2 <= kTileBytes && is_hopper();
}

bool is_small(const Linear& linear) {
  return !is_quantized(linear) && linear.inputs <= kSmallInputs && linear.rows <= kSmallRows;
}

// Of more than 8 rows a small matmul multiplies each weight twice. With many inputs tiles are faster
// in a chain, where they begin early, but not alone.
bool is_in_tiles(const Linear& linear, bool in_chain) {
  if (linear.exact || linear.rows > kMostRows) return true;
  const bool is_twice = in_chain && linear.rows > 8 && linear.inputs > kMostUntiled;
  return (is_twice || !is_small(linear)) && suits_tiles(linear);
}

const char* launch_small(const Linear& linear, bool early, Stream stream) {
  constexpr int most = kSmallInputs / kGroup / kMostWarps;
  return linear.inputs <= kMostWarps * kGroup ? launch_tiles<1>(linear, early, stream)
                                              : launch_tiles<most>(linear, early, stream);
}

const char* launch_any(const Linear& linear, bool in_chain, bool early, Stream stream) {
  if (is_in_tiles(linear, in_chain)) return linear_hopper(linear, early, stream);
  return is_small(linear) ? launch_small(linear, early, stream)
                          : linear_stream(linear, early, stream);
}

}  // namespace

const char* linear(const Linear& linear, Stream stream) {
  return launch_any(linear, false, false, stream);
}

const char* linear_chain(const std::vector<Link>& links, const ScaledRows& memory, Stream stream) {
  return launch_links(
      links, memory, stream, [](const Linear& matmul) { return is_in_tiles(matmul, true); },
      [&](const Linear& matmul, bool early) { return launch_any(matmul, true, early, stream); });
}

}  // namespace jspec
