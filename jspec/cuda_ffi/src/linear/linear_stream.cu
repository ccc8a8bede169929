// A matmul of a few rows with large weights on a GPU: a block for each tile of columns.
#include <algorithm>

#include "common/dependent.cuh"
#include "linear/stream.cuh"

namespace jspec {
namespace {

// Rows beyond the last are copies of it, of which there is no result.
struct Plain {
  __device__ static void wait() { wait_for_kernels_ahead(); }

  __device__ static int row(const Linear& linear, int tile) {
    return min(int(threadIdx.x % 32 / 4) + tile * 8, linear.rows - 1);
  }

  template <int width, int sides, int values>
  __device__ static Results<width, sides, values> results(const Linear& linear, int column) {
    return {linear, column};
  }
};

// A block for each tile of columns.
template <class Weights, int tiles, int warps>
__global__ void __launch_bounds__(32 * warps, least_blocks<Weights, tiles, warps>())
    stream_kernel(const Linear linear) {
  extern __shared__ __align__(128) char shared[];
  let_next_start();
  const int column = blockIdx.x * Weights::units * kWidth;
  Weights weights(linear, column);
  stream_columns<tiles, warps>(linear, Plain(), weights, column, shared);
}

// Shared memory of a block that needs `bytes`, so that a multiprocessor has no more of `blocks` than
// its share. Blocks that start early go where there is room: some multiprocessors would have too
// many, and others none.
template <typename Kernel>
int evened_bytes(Kernel kernel, int blocks, int threads, int bytes) {
  int fit = 0;
  const int all = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  const int reserved = device_attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  allow_shared_memory(kernel, bytes);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernel, threads, bytes);
  const int processors = multiprocessors(), share = (blocks + processors - 1) / processors;
  return fit > share ? std::max(all / (share + 1) + 128 - reserved, bytes) : bytes;
}

template <class Weights, int tiles, int warps>
const char* launch(const Linear& linear, int blocks, bool early, Stream stream) {
  constexpr int threads = 32 * warps, ring = ring_bytes<Weights, warps>();
  const auto kernel = stream_kernel<Weights, tiles, warps>;
  const int bytes = early ? evened_bytes(kernel, blocks, threads, ring) : ring;
  return launch_behind(kernel, blocks, threads, bytes, early, stream, linear);
}

int blocks_of(const Linear& linear, int units) {
  return (linear.outputs + units * kWidth - 1) / (units * kWidth);
}

// Of the multiprocessor that has most to do.
int most_units(const Linear& linear, int units) {
  const int processors = multiprocessors();
  return (blocks_of(linear, units) + processors - 1) / processors * units;
}

// As many warps as keep a multiprocessor busy with the blocks that it has at once.
template <class Weights, int tiles>
const char* launch_warps(const Linear& linear, bool early, Stream stream) {
  const int blocks = blocks_of(linear, Weights::units), processors = multiprocessors();
  if (blocks <= processors) return launch<Weights, tiles, 16>(linear, blocks, early, stream);
  if (blocks <= 2 * processors) return launch<Weights, tiles, 8>(linear, blocks, early, stream);
  return launch<Weights, tiles, 4>(linear, blocks, early, stream);
}

template <class Weights>
const char* launch_tiles(const Linear& linear, bool early, Stream stream) {
  if (linear.rows <= 8) return launch_warps<Weights, 1>(linear, early, stream);
  return linear.rows <= 16 ? launch_warps<Weights, 2>(linear, early, stream)
                           : launch_warps<Weights, 3>(linear, early, stream);
}

}  // namespace

const char* linear_stream(const Linear& linear, bool early, Stream stream) {
  if (linear.block_scale) {
    if (linear.gated) return launch_tiles<Four<true, 2>>(linear, early, stream);
    return most_units(linear, 3) < most_units(linear, 2)
               ? launch_tiles<Four<false, 3>>(linear, early, stream)
               : launch_tiles<Four<false, 2>>(linear, early, stream);
  }
  if (linear.column_scale) {
    return linear.gated ? launch_tiles<Eight<true>>(linear, early, stream)
                        : launch_tiles<Eight<false>>(linear, early, stream);
  }
  return linear.gated ? launch_tiles<Sixteen<true>>(linear, early, stream)
                      : launch_tiles<Sixteen<false>>(linear, early, stream);
}

}  // namespace jspec
