// A product of a few rows with large weights on a GPU: a block for each tile of columns.
//
// Reading the weights is what takes the time, so that every multiprocessor has to have many reads
// on their way at all times, and few instructions for each weight. The warps of a block take turns
// at the inputs. Each has a ring of steps in shared memory, where no other warp looks: while it
// multiplies one step, the next is on its way. The rows lie in the L1 and L2.
#include "linear/fragments.cuh"

namespace jspec {
namespace {

constexpr int kUnits = 2;    // of 16 columns, that a block has of each side
constexpr int kAtOnce = 16;  // warps of a multiprocessor that share its registers
constexpr int kDepth = 2;    // steps of a ring; more would take the room that the L1 has for rows

// (bits & mask) | others, as one instruction.
__device__ uint32_t masked(uint32_t bits, uint32_t mask, uint32_t others) {
  uint32_t found;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(found) : "r"(bits), "r"(mask), "r"(others));
  return found;
}

// Numbers of 8 bits, each in the lower half of 16, as bfloat16: its lower seven bits are the
// fraction of a number from 128 on, of which 128 is taken, or 256 where the eighth bit is the sign.
__device__ uint32_t widened(uint32_t pair) {
  const uint32_t above = masked(pair, 0x007f007fu, 0x43004300u);  // 128 and the seven bits
  const uint32_t less = masked(pair, 0x00800080u, 0xc300c300u);   // -128, or -256
  const __nv_bfloat162 sum = __hadd2(*reinterpret_cast<const __nv_bfloat162*>(&above),
                                     *reinterpret_cast<const __nv_bfloat162*>(&less));
  return *reinterpret_cast<const uint32_t*>(&sum);
}

__device__ uint32_t component(const uint4& four, int index) {
  return index == 0 ? four.x : index == 1 ? four.y : index == 2 ? four.z : four.w;
}

// Weights of 8 bits, [columns, inputs]. Four lanes copy 64 inputs of a column, each the 16 that it
// multiplies itself; a multiplication takes 4 of them, those with even places first.
template <bool gated>
struct Eight {
  static constexpr int sides = gated ? 2 : 1;
  static constexpr int group = 16;                   // inputs of a lane in a step
  static constexpr int copies = sides * kUnits * 2;  // of 16 bytes, of a lane in a step
  const char* kernel;
  int inputs;
  uint32_t places[copies];  // in 16 bytes of the weights

  // Columns beyond the last are copies of it, of which there is no result.
  __device__ Eight(const Linear& linear, int column)
      : kernel(static_cast<const char*>(linear.kernel)), inputs(linear.inputs) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      const int side = i / (2 * kUnits), unit = i / 2 % kUnits;
      const int at = min(column + unit * kWidth + i % 2 * 8 + lane / 4, linear.outputs - 1);
      places[i] = uint32_t(side * linear.outputs + at) * uint32_t(inputs / 16) + lane % 4;
    }
  }

  // Copies a step whose inputs begin with `first`.
  __device__ void read(char* step, int first) const {
    const int lane = threadIdx.x % 32;
    const bool reads = first + lane % 4 * group < inputs;
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      copy(step + i * 512 + lane * 16, kernel + first + uint64_t(places[i]) * 16, reads);
    }
  }

  __device__ static uint4 ordered(const uint4& x) {
    return {__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632),
            __byte_perm(x.z, x.w, 0x5410), __byte_perm(x.z, x.w, 0x7632)};
  }

  __device__ static void fragments(uint32_t (&a)[group / 4][4], const char* step, int side,
                                   int unit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = (side * kUnits + unit) * 2 + half;
      const uint4 found =
          *reinterpret_cast<const uint4*>(step + i * 512 + threadIdx.x % 32 * 16);
#pragma unroll
      for (int k = 0; k < group / 4; ++k) {
        const uint32_t four = component(found, k);
        a[k][half] = widened(four);
        a[k][half + 2] = widened(four >> 8);
      }
    }
  }
};

// Weights of bfloat16, [inputs, columns]: a step is 32 inputs of the columns, in such an order that
// neither copies nor loads of 8 rows share a bank.
template <bool gated>
struct Sixteen {
  static constexpr int sides = gated ? 2 : 1;
  static constexpr int group = 8;
  static constexpr int copies = sides * kUnits * 2;
  static constexpr int across = 2 * kUnits;  // copies for the columns of an input
  const uint16_t* kernel;
  int inputs;
  int64_t columns;
  uint32_t places[copies];  // in 8 columns of the weights

  __device__ Sixteen(const Linear& linear, int column)
      : kernel(static_cast<const uint16_t*>(linear.kernel)),
        inputs(linear.inputs),
        columns(int64_t(linear.outputs) * sides) {
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      const int side = i / across, lane = threadIdx.x % 32;
      const int at = min(column + lane % across * 8, linear.outputs - 8);
      places[i] = (uint32_t(input(i)) * uint32_t(columns) + side * linear.outputs + at) / 8;
    }
  }

  // Of a step, that a lane's copy reads.
  __device__ static int input(int i) {
    return i % across * (32 / across) + threadIdx.x % 32 / across;
  }

  // Where 8 columns of an input of a step lie.
  __device__ static int place(int side, int input, int eight) {
    return ((side * 32 + input) * across + (eight ^ input / 8)) * 16;
  }

  __device__ void read(char* step, int first) const {
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      copy(step + place(i / across, input(i), threadIdx.x % across),
           kernel + first * columns + uint64_t(places[i]) * 8, first < inputs);
    }
  }

  __device__ static uint4 ordered(const uint4& x) { return x; }

  __device__ static void fragments(uint32_t (&a)[group / 4][4], const char* step, int side,
                                   int unit) {
    const int matrix = threadIdx.x % 32 / 8, row = threadIdx.x % 8;
#pragma unroll
    for (int k = 0; k < group / 4; ++k) {
      const int input = row / 2 * 8 + k * 4 + matrix / 2 * 2 + row % 2;
      load_transposed(a[k], step + place(side, input, unit * 2 + matrix % 2));
    }
  }
};

// A lane's share of the rows of a step, and of the norm's scale.
template <class Weights, int tiles>
struct Rows {
  static constexpr int eights = Weights::group / 8;
  uint4 x[tiles][eights], by[eights];

  // `mine`: the first of the lane's inputs.
  __device__ void read(const Linear& linear, int mine) {
    const bool there = mine < linear.inputs;
#pragma unroll
    for (int eight = 0; eight < eights; ++eight) {
#pragma unroll
      for (int i = 0; i < tiles; ++i) {
        const int row = i * 8 + threadIdx.x % 32 / 4;
        x[i][eight] = load(linear.x + int64_t(row) * linear.inputs + mine + eight * 8,
                           there && row < linear.rows);
      }
      by[eight] = load(linear.scale + mine + eight * 8, there && linear.scale);
    }
  }

  // As a step multiplies them; adds the squares of what they were.
  __device__ void scale(const Linear& linear, float (&squares)[tiles]) {
#pragma unroll
    for (int i = 0; i < tiles; ++i) {
#pragma unroll
      for (int eight = 0; eight < eights; ++eight) {
        if (linear.scale) {
          squares[i] += squared(x[i][eight]);
          x[i][eight] = scaled(x[i][eight], by[eight]);
        }
        x[i][eight] = Weights::ordered(x[i][eight]);
      }
    }
  }
};

// A block of `warps` warps, for `tiles` tiles of 8 rows.
template <class Weights, int tiles, int warps>
__global__ void __launch_bounds__(32 * warps, tiles > 1 ? 1 : kAtOnce / warps)
    stream_kernel(const Linear linear) {
  constexpr int sides = Weights::sides, width = kUnits * kWidth;
  constexpr int group = Weights::group;
  constexpr int bytes = Weights::copies * 512;  // of a step
  constexpr bool early = tiles <= 2;  // whether there are registers for the rows of two steps
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32, quarter = threadIdx.x % 4;
  const int column = blockIdx.x * width;
  const Weights weights(linear, column);
  char* own = shared + warp * kDepth * bytes;
  const auto first = [&](int step) { return (step * warps + warp) * 4 * group; };
  for (int step = 0; step < kDepth; ++step) {
    weights.read(own + step * bytes, first(step));
    asm volatile("cp.async.commit_group;");
  }
  Rows<Weights, tiles> next;
  if (early) next.read(linear, first(0) + quarter * group);
  constexpr int threads = 32 * warps, size = tiles * 8 * width;
  const Results<width, sides, (size + threads - 1) / threads> results(linear, column);

  float sums[sides][kUnits][tiles][4] = {}, squares[tiles] = {};
  char* here = own;
  for (int step = 0; first(step) < linear.inputs; ++step) {
    if (!early) next.read(linear, first(step) + quarter * group);
    Rows<Weights, tiles> rows = next;
    if (early) next.read(linear, first(step + 1) + quarter * group);
    rows.scale(linear, squares);
    asm volatile("cp.async.wait_group %0;" ::"n"(kDepth - 1) : "memory");
    __syncwarp();
#pragma unroll
    for (int side = 0; side < sides; ++side) {
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        uint32_t a[group / 4][4];
        weights.fragments(a, here, side, unit);
#pragma unroll
        for (int k = 0; k < group / 4; ++k) {
#pragma unroll
          for (int i = 0; i < tiles; ++i) {
            const uint4 x = rows.x[i][k / 2];
            multiply(sums[side][unit][i], a[k], component(x, k % 2 * 2),
                     component(x, k % 2 * 2 + 1));
          }
        }
      }
    }
    __syncwarp();
    weights.read(here, first(step + kDepth));
    asm volatile("cp.async.commit_group;");
    here = here + bytes == own + kDepth * bytes ? own : here + bytes;
  }
#pragma unroll
  for (int i = 0; i < tiles; ++i) {
    squares[i] += __shfl_xor_sync(kAllLanes, squares[i], 1);
    squares[i] += __shfl_xor_sync(kAllLanes, squares[i], 2);
  }
  // The sums take the place of the ring, into which no copy is on its way any more.
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
  static_assert(tiles * 8 * (sides * width + 1) * 4 <= kDepth * bytes);
  results.write(linear, reinterpret_cast<float*>(shared), kDepth * bytes / 4, sums, squares);
}

template <class Weights, int tiles, int warps>
const char* launch(const Linear& linear, int blocks, Stream stream) {
  constexpr int bytes = warps * kDepth * Weights::copies * 512;
  const auto kernel = stream_kernel<Weights, tiles, warps>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  kernel<<<blocks, 32 * warps, bytes, stream>>>(linear);
  return launch_error();
}

// As many warps as keep a multiprocessor busy with the blocks that it has at once.
template <class Weights, int tiles>
const char* launch_warps(const Linear& linear, Stream stream) {
  constexpr int width = kUnits * kWidth;
  const int blocks = (linear.outputs + width - 1) / width;
  int device, processors;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (blocks <= processors) return launch<Weights, tiles, 16>(linear, blocks, stream);
  if (blocks <= 2 * processors) return launch<Weights, tiles, 8>(linear, blocks, stream);
  return launch<Weights, tiles, 4>(linear, blocks, stream);
}

template <class Weights>
const char* launch_tiles(const Linear& linear, Stream stream) {
  if (linear.rows <= 8) return launch_warps<Weights, 1>(linear, stream);
  return linear.rows <= 16 ? launch_warps<Weights, 2>(linear, stream)
                           : launch_warps<Weights, 3>(linear, stream);
}

}  // namespace

const char* linear_stream(const Linear& linear, Stream stream) {
  if (linear.column_scale) {
    return linear.gated ? launch_tiles<Eight<true>>(linear, stream)
                        : launch_tiles<Eight<false>>(linear, stream);
  }
  return linear.gated ? launch_tiles<Sixteen<true>>(linear, stream)
                      : launch_tiles<Sixteen<false>>(linear, stream);
}

}  // namespace jspec
