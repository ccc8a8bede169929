// A product of a few rows with weights of 8 bits on a GPU: a block for 16 columns of the result.
//
// Reading the weights is what takes the time, so that every multiprocessor has to have many reads
// on their way, and few instructions for each weight. The warps of a block take turns at the
// inputs. A column's inputs lie together: four lanes read 64 of them, each 16, straight into the
// registers that the matrix units take them from, whose order of the inputs is free.
#include "linear/fragments.cuh"

namespace jspec {
namespace {

constexpr int kWarps = 8;               // of a block
constexpr int kPiece = 4 * kInt8Group;  // inputs of a column that four lanes read at once

// Weights are read once: they need no place in the L1. The rest of their line is read next.
__device__ uint4 stream(const int8_t* global, bool reads) {
  uint4 found{};
  if (reads) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
                 : "l"(global));
  }
  return found;
}

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

// A warp has `pieces` pieces of the inputs on their way; `tiles` tiles of 8 rows.
template <int pieces, int tiles, bool gated>
__global__ void __launch_bounds__(32 * kWarps, 2) int8_linear_kernel(const Linear linear) {
  constexpr int sides = gated ? 2 : 1;
  __shared__ float parts[kWarps * tiles * 8 * (sides * kWidth + 1)];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int eighth = lane / 4, quarter = lane % 4;
  const int column = blockIdx.x * kWidth;
  const int inputs = linear.inputs, outputs = linear.outputs;
  const auto* kernel = static_cast<const int8_t*>(linear.kernel);

  float sums[sides][tiles][4] = {}, squares[tiles] = {};
  for (int first = warp * pieces * kPiece; first < inputs; first += kWarps * pieces * kPiece) {
    uint4 weights[pieces][sides][2], rows[pieces][tiles][2], scales[pieces][2];
#pragma unroll
    for (int piece = 0; piece < pieces; ++piece) {
      const int mine = first + piece * kPiece + quarter * kInt8Group;
#pragma unroll
      for (int side = 0; side < sides; ++side) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = column + half * 8 + eighth;
          const int8_t* from = kernel + (int64_t(side) * outputs + at) * inputs + mine;
          weights[piece][side][half] = stream(from, mine < inputs && at < outputs);
        }
      }
    }
#pragma unroll
    for (int piece = 0; piece < pieces; ++piece) {
      const int mine = first + piece * kPiece + quarter * kInt8Group;
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
          const int row = tile * 8 + eighth;
          const uint16_t* from = linear.x + int64_t(row) * inputs + mine + eight * 8;
          rows[piece][tile][eight] = load(from, mine < inputs && row < linear.rows);
        }
        if (linear.scale) {
          scales[piece][eight] = load(linear.scale + mine + eight * 8, mine < inputs);
        }
      }
    }
#pragma unroll
    for (int piece = 0; piece < pieces; ++piece) {
      if (linear.scale) {
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
          for (int eight = 0; eight < 2; ++eight) {
            uint4& x = rows[piece][tile][eight];
            const uint4 by = scales[piece][eight];
            x = {scaled(x.x, by.x, squares[tile]), scaled(x.y, by.y, squares[tile]),
                 scaled(x.z, by.z, squares[tile]), scaled(x.w, by.w, squares[tile])};
          }
        }
      }
      // A multiplication takes 4 of a lane's inputs.
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int side = 0; side < sides; ++side) {
          uint32_t a[4];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t four = component(weights[piece][side][half], step);
            a[half] = widened(__byte_perm(four, 0, 0x4140));
            a[half + 2] = widened(__byte_perm(four, 0, 0x4342));
          }
#pragma unroll
          for (int tile = 0; tile < tiles; ++tile) {
            const uint4 x = rows[piece][tile][step / 2];
            multiply(sums[side][tile], a, component(x, step % 2 * 2),
                     component(x, step % 2 * 2 + 1));
          }
        }
      }
    }
  }
  if (linear.scale) {
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      squares[tile] += __shfl_xor_sync(kAllLanes, squares[tile], 1);
      squares[tile] += __shfl_xor_sync(kAllLanes, squares[tile], 2);
    }
  }
  const int row = threadIdx.x / kWidth, own = column + threadIdx.x % kWidth;
  const bool kept = row < linear.rows && own < outputs;
  float added = 0, shifts[sides] = {}, factors[sides] = {};
  if (linear.add && kept) added = wide(linear.add[int64_t(row) * outputs + own]);
#pragma unroll
  for (int side = 0; side < sides; ++side) {
    if (kept) factors[side] = linear.column_scale[side * outputs + own];
    if (linear.bias && kept) shifts[side] = wide(linear.bias[side * outputs + own]);
  }
  finish<sides, tiles>(linear, parts, sums, squares, factors, shifts, added);
}

template <int pieces, int tiles, bool gated>
const char* launch(const Linear& linear, Stream stream) {
  const int blocks = (linear.outputs + kWidth - 1) / kWidth;
  int8_linear_kernel<pieces, tiles, gated><<<blocks, 32 * kWarps, 0, stream>>>(linear);
  return launch_error();
}

}  // namespace

const char* linear_int8(const Linear& linear, Stream stream) {
  if (linear.rows > 8) {
    return linear.gated ? launch<1, 2, true>(linear, stream) : launch<2, 2, false>(linear, stream);
  }
  return linear.gated ? launch<2, 1, true>(linear, stream) : launch<4, 1, false>(linear, stream);
}

}  // namespace jspec
