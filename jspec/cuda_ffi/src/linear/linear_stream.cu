// A product of a few rows with large weights on a GPU: a block for each tile of columns.
#include <algorithm>

#include "common/dependent.cuh"
#include "linear/stream.cuh"

namespace jspec {
namespace {

// Bytes of the following product's weights that are brought into the L2.
constexpr int64_t kAhead = 8 << 20;

// Memory in pieces of so many bytes, each `apart` from the one before.
struct Pieces {
  const char* first;
  int64_t apart;
  int32_t bytes, count;
};

// Of a kernel in its call: whether it may start early, and what it brings into the L2.
struct Place {
  bool early;
  Pieces following;
};

// Of the weights of a product, those that its blocks read first. Their steps go over the inputs:
// bfloat16 has all columns of an input side by side, and the others all inputs of a column.
Pieces first_read(const Linear& linear) {
  const auto* kernel = static_cast<const char*>(linear.kernel);
  const int64_t inputs = linear.inputs, columns = int64_t(linear.outputs) * (linear.gated ? 2 : 1);
  if (!linear.transposed) {
    constexpr int32_t bytes = 2048;
    return {kernel, bytes, bytes, int32_t(std::min(kAhead, inputs * columns * 2) / bytes)};
  }
  const int64_t apart = linear.block_scale ? inputs / 2 : inputs;
  const int64_t lines = (kAhead / columns + 127) / 128;
  return {kernel, apart, int32_t(std::min(apart, lines * 128)), int32_t(columns)};
}

// Rows beyond the last are copies of it, of which there is no result.
struct Plain {
  const Pieces& following;

  __device__ static void wait() { wait_for_kernels_ahead(); }

  // Memory would idle from here on until the next kernel reads. The thread's number is read here:
  // a compiler would keep what follows from it over the steps.
  __device__ void end() const {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const int turn = thread % 32 * (blockDim.x / 32) + thread / 32;  // warps take turns
    for (int i = turn * gridDim.x + blockIdx.x; i < following.count; i += blockDim.x * gridDim.x) {
      bring_into_l2(following.first + i * following.apart, following.bytes);
    }
  }

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
    stream_kernel(const Linear linear, const Pieces following) {
  extern __shared__ __align__(128) char shared[];
  let_next_start();
  const int column = blockIdx.x * Weights::units * kWidth;
  Weights weights(linear, column);
  stream_columns<tiles, warps>(linear, Plain{following}, weights, column, shared);
}

// Shared memory of a block that needs `bytes`, so that a multiprocessor has no more of `blocks`
// than its share. Blocks that start early go where there is room: some multiprocessors would have
// too many, and others none.
template <typename Kernel>
int evened_bytes(Kernel kernel, int blocks, int threads, int bytes) {
  int device, fit = 0, all, reserved;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
  allow_shared_memory(kernel, bytes);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernel, threads, bytes);
  const int processors = multiprocessors(), share = (blocks + processors - 1) / processors;
  return fit > share ? std::max(all / (share + 1) + 128 - reserved, bytes) : bytes;
}

template <class Weights, int tiles, int warps>
const char* launch(const Linear& linear, const Place& place, int blocks, Stream stream) {
  constexpr int threads = 32 * warps, ring = ring_bytes<Weights, warps>();
  const auto kernel = stream_kernel<Weights, tiles, warps>;
  const int bytes = place.early ? evened_bytes(kernel, blocks, threads, ring) : ring;
  return launch_behind(kernel, blocks, threads, bytes, place.early, stream, linear,
                       place.following);
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
const char* launch_warps(const Linear& linear, const Place& place, Stream stream) {
  const int blocks = blocks_of(linear, Weights::units), processors = multiprocessors();
  if (blocks <= processors) return launch<Weights, tiles, 16>(linear, place, blocks, stream);
  if (blocks <= 2 * processors) return launch<Weights, tiles, 8>(linear, place, blocks, stream);
  return launch<Weights, tiles, 4>(linear, place, blocks, stream);
}

template <class Weights>
const char* launch_tiles(const Linear& linear, const Place& place, Stream stream) {
  if (linear.rows <= 8) return launch_warps<Weights, 1>(linear, place, stream);
  return linear.rows <= 16 ? launch_warps<Weights, 2>(linear, place, stream)
                           : launch_warps<Weights, 3>(linear, place, stream);
}

}  // namespace

const char* linear_stream(const Linear& linear, const Linear* following, bool early,
                          Stream stream) {
  const Place place{early, following ? first_read(*following) : Pieces{}};
  if (linear.block_scale) {
    if (linear.gated) return launch_tiles<Four<true, 2>>(linear, place, stream);
    return most_units(linear, 3) < most_units(linear, 2)
               ? launch_tiles<Four<false, 3>>(linear, place, stream)
               : launch_tiles<Four<false, 2>>(linear, place, stream);
  }
  if (linear.column_scale) {
    return linear.gated ? launch_tiles<Eight<true>>(linear, place, stream)
                        : launch_tiles<Eight<false>>(linear, place, stream);
  }
  return linear.gated ? launch_tiles<Sixteen<true>>(linear, place, stream)
                      : launch_tiles<Sixteen<false>>(linear, place, stream);
}

}  // namespace jspec
