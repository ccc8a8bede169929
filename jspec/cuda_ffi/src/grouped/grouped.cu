// Products of rows in groups on a GPU: a block for each tile of columns of each tile of rows.
//
// A tile of rows is of one group. The next tile of a group finds its weights in the L2.
#include <algorithm>

#include "common/dependent.cuh"
#include "grouped/grouped.h"
#include "linear/stream.cuh"

namespace jspec {
namespace {

__device__ int within(int number, int last) { return min(max(number, 0), last); }

// What a block multiplies: rows of a group from `first` on; the group's end with `end`. It lies in
// shared memory, as there is no register for it while the weights are read.
struct Share {
  int group, first, end;
};

// Finds tile `number` of `most` rows of one group, or none, where first is not before end. For a
// whole warp.
__device__ void find_share(volatile Share& share, const Groups& groups, int rows, int number,
                           int most) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) share.first = share.end = 0;
  __syncwarp();
  int before = 0;
#pragma unroll 4
  for (int start = 0; start < groups.count; start += 32) {
    const int group = min(start + lane, groups.count - 1);
    const int first = within(groups.starts[group], rows);
    const int end = within(groups.starts[group + 1], rows);
    const int tiles = start + lane == group ? (max(end - first, 0) + most - 1) / most : 0;
    const int up_to = before + prefix_sum(tiles), own = number - (up_to - tiles);
    if (own >= 0 && own < tiles) {
      share.group = group;
      share.first = first + own * most;
      share.end = end;
    }
    before = __shfl_sync(kAllLanes, up_to, 31);
  }
}

// SwiGLU, or as ClampedSwiGLU in jspec/parts.py says. A NaN stays one.
__device__ float activated(const Groups& groups, float gate, float up) {
  if (!groups.clamped) return gate / (1 + expf(-gate)) * up;
  const float limit = groups.limit;
  if (gate > limit) gate = limit;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return (up + 1) * (gate / (1 + expf(-groups.alpha * gate)));
}

// As Results, but all that follows the product is float32.
template <int width, int sides, int values>
struct Placed {
  using Thread = Results<width, sides, values>;
  const Groups& groups;
  const volatile Share& share;
  int column;

  template <int units, int tiles>
  __device__ void write(const Linear& linear, float* shared, int stride,
                        const float (&sums)[sides][units][tiles][4],
                        const float (&squares)[tiles]) const {
    const Parts<width, sides, tiles> parts{shared, stride};
    parts.leave(sums, squares);
    if (threadIdx.x >= Thread::apart() || column >= linear.outputs) return;
#pragma unroll
    for (int i = 0; i < values; ++i) {
      const int row = share.first + Thread::row(i);
      if (row >= share.end || Thread::row(i) >= tiles * 8) return;
      float totals[sides] = {}, norm = 0;
      parts.add_up(totals, norm, i * Thread::apart() + threadIdx.x, Thread::row(i));
      const float root = linear.scale ? rsqrtf(norm / linear.inputs + linear.eps) : 1.0f;
#pragma unroll
      for (int side = 0; side < sides; ++side) {
        totals[side] *= root;
        const int64_t at = (int64_t(share.group) * sides + side) * linear.outputs + column;
        if (linear.bias) totals[side] += wide(linear.bias[at]);
      }
      float value = totals[0];
      if constexpr (sides == 2) value = activated(groups, totals[0], totals[1]);
      const int goal = groups.put ? within(groups.put[row], linear.rows - 1) : row;
      if (groups.weights) value *= groups.weights[goal];
      const int64_t place = int64_t(goal) * linear.outputs + column;
      if (linear.wide) {
        static_cast<float*>(linear.out)[place] = value;
      } else {
        static_cast<uint16_t*>(linear.out)[place] = narrow(value);
      }
    }
  }
};

// Rows of a share.
template <int tiles>
struct Taken {
  const Groups& groups;
  const volatile Share& share;
  int rows[tiles];  // of x, that a lane reads; those beyond the last are copies of it

  __device__ Taken(const Linear& linear, const Groups& groups, const volatile Share& share)
      : groups(groups), share(share) {
#pragma unroll
    for (int i = 0; i < tiles; ++i) {
      const int row = min(share.first + i * 8 + int(threadIdx.x % 32 / 4), share.end - 1);
      const int times = linear.rows / groups.sources;
      rows[i] = groups.taken ? within(groups.taken[row], linear.rows - 1) / times : row;
    }
  }

  __device__ static void wait() {}
  __device__ int row(const Linear&, int tile) const { return rows[tile]; }

  template <int width, int sides, int values>
  __device__ Placed<width, sides, values> results(const Linear&, int first) const {
    return {groups, share, first + int(threadIdx.x % width)};
  }
};

template <class Weights, int tiles, int warps>
__global__ void __launch_bounds__(32 * warps, least_blocks<Weights, tiles, warps>())
    grouped_linear_kernel(const Linear linear, const Groups groups) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Share share;
  if (threadIdx.x < 32) find_share(share, groups, linear.rows, blockIdx.y, tiles * 8);
  __syncthreads();
  if (share.first >= share.end) return;
  const int column = blockIdx.x * Weights::units * kWidth;
  Weights weights(linear, column);
  const int64_t blocks = int64_t(linear.outputs) * Weights::sides * (linear.inputs / kBlock);
  weights.kernel += share.group * blocks * (kBlock / 2);
  weights.scales += share.group * blocks;
  const Taken<tiles> taken(linear, groups, share);
  stream_columns<tiles, warps>(linear, taken, weights, column, shared);
}

template <class Weights, int tiles, int warps>
const char* launch(const Linear& linear, const Groups& groups, dim3 blocks, Stream stream) {
  constexpr int bytes = ring_bytes<Weights, warps>();
  const auto kernel = grouped_linear_kernel<Weights, tiles, warps>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  kernel<<<blocks, 32 * warps, bytes, stream>>>(linear, groups);
  return launch_error();
}

// A warp for as many steps as keep it busy, and more where blocks are too few for the GPU.
template <class Weights, int tiles>
const char* launch_warps(const Linear& linear, const Groups& groups, Stream stream) {
  constexpr int width = Weights::units * kWidth;
  // No more groups than rows can have rows, and each at most one tile that is not whole.
  const int filled = std::min(groups.count, linear.rows);
  const dim3 blocks((linear.outputs + width - 1) / width,
                    filled + (linear.rows - filled) / (tiles * 8));
  const int steps = linear.inputs * Weights::sides / (4 * Weights::group);
  const int64_t enough = int64_t(10) * multiprocessors(), all = int64_t(blocks.x) * blocks.y;
  if (steps <= 8 && all >= enough) return launch<Weights, tiles, 1>(linear, groups, blocks, stream);
  if (steps <= 32 && 2 * all >= enough) {
    return launch<Weights, tiles, 2>(linear, groups, blocks, stream);
  }
  return launch<Weights, tiles, 4>(linear, groups, blocks, stream);
}

// A tile is for the rows that a group has in the mean.
template <class Weights>
const char* launch_tiles(const Linear& linear, const Groups& groups, Stream stream) {
  const int each = (linear.rows + groups.count - 1) / groups.count;
  if (each <= 8) return launch_warps<Weights, 1>(linear, groups, stream);
  return each <= 12 ? launch_warps<Weights, 2>(linear, groups, stream)
                    : launch_warps<Weights, 3>(linear, groups, stream);
}

}  // namespace

const char* grouped_linear(const Linear& linear, const Groups& groups, Stream stream) {
  return linear.gated ? launch_tiles<Four<true, 2>>(linear, groups, stream)
                      : launch_tiles<Four<false, 2>>(linear, groups, stream);
}

}  // namespace jspec
