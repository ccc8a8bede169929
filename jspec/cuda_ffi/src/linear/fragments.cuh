// What the kernels of matmuls of a few rows share: loads, one multiplication, and what becomes of
// the sums of the warps.
#pragma once

#include "common/warp.cuh"
#include "linear/finish.cuh"

namespace jspec {
namespace {

constexpr int kWidth = 16;  // columns of a multiplication

// first + (index << shift), in two instructions and without a register for the product, which a
// compiler would keep over a loop.
template <int shift>
__device__ const uint8_t* apart(const uint8_t* first, uint32_t index) {
  const uint8_t* found;
  asm volatile(
      "{ .reg .u64 wide; cvt.u64.u32 wide, %1; shl.b64 wide, wide, %2; add.u64 %0, wide, %3; }"
      : "=l"(found)
      : "r"(index), "n"(shift), "l"(first));
  return found;
}

__device__ uint4 load(const uint16_t* global, bool reads) {
  return reads ? *reinterpret_cast<const uint4*>(global) : uint4{};
}

// What lies beside it goes to L2, as steps to come read it.
__device__ uint32_t load_byte(const uint8_t* global) {
  uint32_t found;
  asm("ld.global.nc.L2::128B.u8 %0, [%1];" : "=r"(found) : "l"(global));
  return found;
}

// Sixteen bytes on their way into shared memory, zeros where there is nothing to read. What lies
// beside them goes to L2: a block near by reads it at the same time.
__device__ void copy(void* shared, const void* global, bool reads) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
               "r"(reads ? 16 : 0));
}

// Four 8 x 8 matrices, transposed; each lane has the address of a row of 8.
__device__ void load_transposed(uint32_t (&a)[4], const void* shared) {
  const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(from)
               : "memory");
}

__device__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Of half as many inputs.
__device__ void multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// The sum of the squares of eight inputs.
__device__ float squared(const uint4& x) {
  float sum = 0;
  for (const uint32_t pair : {x.x, x.y, x.z, x.w}) {
    sum = fmaf(low(pair), low(pair), fmaf(high(pair), high(pair), sum));
  }
  return sum;
}

// Where the warps of a block leave the sums of their shares of the inputs: `first` is shared memory
// in which each has `stride` numbers, for tiles * 8 * (sides * width + 1).
template <int width, int sides, int tiles>
struct Parts {
  static constexpr int size = tiles * 8 * width;  // of what a warp leaves of each side
  float* first;
  int stride;

  template <int units>
  __device__ void leave(const float (&sums)[sides][units][tiles][4],
                        const float (&squares)[tiles]) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int eighth = lane / 4, quarter = lane % 4;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int row = tile * 8 + quarter * 2;
#pragma unroll
      for (int side = 0; side < sides; ++side) {
#pragma unroll
        for (int unit = 0; unit < units; ++unit) {
          float* part =
              first + warp * stride + side * size + row * width + unit * kWidth + eighth;
          part[0] = sums[side][unit][tile][0];
          part[width] = sums[side][unit][tile][1];
          part[8] = sums[side][unit][tile][2];
          part[width + 8] = sums[side][unit][tile][3];
        }
      }
      if (quarter == 0) first[warp * stride + sides * size + tile * 8 + eighth] = squares[tile];
    }
    __syncthreads();
  }

  // Adds up those of value `at` of each side and the squares of its row, in one order.
  __device__ void add_up(float (&totals)[sides], float& squares, int at, int row) const {
    for (int other = 0; other < int(blockDim.x / 32); ++other) {
      const float* part = first + other * stride;
#pragma unroll
      for (int side = 0; side < sides; ++side) totals[side] += part[side * size + at];
      squares += part[sides * size + row];
    }
  }
};

// What a thread gives: `values` values of one column, as many rows apart as a block has threads
// for; threads behind the last whole row give none. Read before the sums are there, so that nothing
// is waited for behind them.
template <int width, int sides, int values>
struct Results {
  int column;
  float factors[sides], shifts[sides], added[values];

  // `first`: of the columns of the block.
  __device__ Results(const Linear& linear, int first)
      : column(threadIdx.x < apart() ? first + threadIdx.x % width : linear.outputs) {
    const bool kept = column < linear.outputs;
#pragma unroll
    for (int side = 0; side < sides; ++side) {
      const int at = side * linear.outputs + column;
      factors[side] = linear.column_scale && kept ? linear.column_scale[at] : 1;
      shifts[side] = linear.bias && kept ? wide(linear.bias[at]) : 0;
    }
#pragma unroll
    for (int i = 0; i < values; ++i) {
      const bool adds = linear.add && kept && row(i) < linear.rows;
      added[i] = adds ? wide(linear.add[int64_t(row(i)) * linear.outputs + column]) : 0;
    }
  }

  __device__ static int apart() { return blockDim.x / width * width; }
  __device__ static int row(int value) { return (threadIdx.x + value * apart()) / width; }

  // From the sums that each warp has of its share of the inputs, left in shared memory as `Parts`.
  template <int units, int tiles>
  __device__ void write(const Linear& linear, float* shared, int stride,
                        const float (&sums)[sides][units][tiles][4],
                        const float (&squares)[tiles]) const {
    const Parts<width, sides, tiles> parts{shared, stride};
    parts.leave(sums, squares);
#pragma unroll
    for (int i = 0; i < values; ++i) {
      if (row(i) >= linear.rows || column >= linear.outputs) return;
      float totals[sides] = {}, norm = 0;
      parts.add_up(totals, norm, i * apart() + threadIdx.x, row(i));
      const float root = root_of(linear, norm);
      const float value = finished(linear, totals, root, factors, shifts, added[i]);
      const int64_t place = int64_t(row(i)) * linear.outputs + column;
      if (linear.wide) {
        static_cast<float*>(linear.out)[place] = value;
      } else {
        static_cast<uint16_t*>(linear.out)[place] = narrow(value);
      }
    }
  }
};

}  // namespace
}  // namespace jspec
