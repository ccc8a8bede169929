// The weights that a matmul on a GPU reads in steps, by their bits: how a warp copies the columns
// of a step into shared memory, and makes operands of a multiplication of them.
#pragma once

#include "linear/fragments.cuh"

namespace jspec {
namespace {

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

// Weights without scales of blocks.
struct Unscaled {
  static constexpr int units = 2;  // of 16 columns, that a block has of each side
  static constexpr bool twice = false;
  __device__ void read_scales(int) {}
  __device__ void turn() {}

  // Adds the squares of a lane's share of a row.
  template <int eights>
  __device__ static void add_squares(float& sum, const uint4 (&x)[eights]) {
#pragma unroll
    for (int eight = 0; eight < eights; ++eight) sum += squared(x[eight]);
  }
};

// Weights of 8 bits, [columns, inputs]. Four lanes copy 64 inputs of a column, each the 16 that it
// multiplies itself; a multiplication takes 4 of them, those with even places first.
template <bool gated>
struct Eight : Unscaled {
  static constexpr int sides = gated ? 2 : 1;
  static constexpr int group = 16;                   // inputs of a lane in a step
  static constexpr int copies = sides * units * 2;  // of 16 bytes, of a lane in a step
  const char* kernel;
  int inputs;
  uint32_t places[copies];  // in 16 bytes of the weights

  // Columns beyond the last are copies of it, of which there is no result.
  __device__ Eight(const Linear& linear, int column)
      : kernel(static_cast<const char*>(linear.kernel)), inputs(linear.inputs) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      const int side = i / (2 * units), unit = i / 2 % units;
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
                                   int unit, bool) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = (side * units + unit) * 2 + half;
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

// Weights of 4 bits, [columns, inputs], with a scale for each block of inputs of a column. Four
// lanes copy 128 inputs of a column, each the block that it multiplies itself. 8 weights lie in 32
// bits; those 16 bits apart become a pair, the first and the fifth, and so on.
template <bool gated, int count>
struct Four {
  static constexpr int units = count;
  static constexpr int sides = gated ? 2 : 1;
  static constexpr int group = kBlock;
  static constexpr int copies = sides * units * 2;
  const uint8_t *kernel, *scales;
  int inputs;
  uint32_t places[copies];  // in blocks, of which each is 16 bytes and a scale
  uint32_t factors[copies], next[copies] = {};  // of a step, and the scales of the one behind it
  bool twice;  // whether a scale of the step is 2 or more: its factor is beyond bfloat16

  __device__ Four(const Linear& linear, int column)
      : kernel(static_cast<const uint8_t*>(linear.kernel)),
        scales(linear.block_scale),
        inputs(linear.inputs) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      const int side = i / (2 * units), unit = i / 2 % units;
      const int at = min(column + unit * kWidth + i % 2 * 8 + lane / 4, linear.outputs - 1);
      places[i] = uint32_t(side * linear.outputs + at) * uint32_t(inputs / group) + lane % 4;
    }
  }

  __device__ bool reads(int first) const { return first + threadIdx.x % 4 * group < inputs; }

  __device__ void read(char* step, int first) const {
    const uint8_t* blocks = kernel + uint32_t(first) / 2;
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      copy(step + i * 512 + threadIdx.x % 32 * 16, apart<4>(blocks, places[i]), reads(first));
    }
  }

  // Beyond the inputs, where weights are zeros, any scale will do.
  __device__ void read_scales(int first) {
    const uint8_t* blocks = scales + uint32_t(first) / group;
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      if (reads(first)) next[i] = load_byte(apart<0>(blocks, places[i]));
    }
  }

  // To the scales of the next step, which have arrived. A factor, 2 ** (scale - 1) by its exponent,
  // undoes that of `placed` too.
  __device__ void turn() {
    uint32_t every = 0;
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      every |= next[i];
      factors[i] = next[i] * 0x00800080u + 0x3f003f00u;
    }
    twice = __any_sync(kAllLanes, every > 127);
  }

  // As multiplications of rows with themselves, in a quarter of the instructions: what a row has
  // with itself is half of a diagonal, which one lane of four gets.
  __device__ static void add_squares(float& sum, const uint4 (&x)[group / 8]) {
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int eight = 0; eight < group / 8; ++eight) {
      multiply(even, x[eight].x, x[eight].y, x[eight].x);
      multiply(odd, x[eight].x, x[eight].y, x[eight].y);
      multiply(even, x[eight].z, x[eight].w, x[eight].z);
      multiply(odd, x[eight].z, x[eight].w, x[eight].w);
    }
    const int row = threadIdx.x % 32 / 4;
    const float found = row % 2 ? even[1] + odd[3] : even[0] + odd[2];
    if (threadIdx.x % 4 == row / 2) sum += found;
  }

  __device__ static uint4 ordered(const uint4& x) {
    return {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
            __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632)};
  }

  __device__ void fragments(uint32_t (&a)[group / 4][4], const char* step, int side, int unit,
                            bool twice) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = (side * units + unit) * 2 + half;
      const uint4 found =
          *reinterpret_cast<const uint4*>(step + i * 512 + threadIdx.x % 32 * 16);
      // Up to the largest factor there is, and what is left, which is NaN for a scale that is.
      const uint32_t factor = twice ? min(factors[i], 0x7f007f00u) : factors[i];
      const uint32_t left = max(factors[i], 0x7f007f00u) - 0x3f803f80u;
      const uint32_t rest = factors[i] == kNanFactor ? 0x7fff7fffu : left;
#pragma unroll
      for (int k = 0; k < group / 4; ++k) {
        const uint32_t eight = component(found, k / 2) >> k % 2 * 8;
        a[k][half] = scaled(placed(eight & 0x000f000fu, 6), factor);
        a[k][half + 2] = scaled(placed(eight & 0x00f000f0u, 2), factor);
        if (twice) a[k][half] = scaled(a[k][half], rest);
        if (twice) a[k][half + 2] = scaled(a[k][half + 2], rest);
      }
    }
  }

 private:
  static constexpr uint32_t kNanFactor = 255 * 0x00800080u + 0x3f003f00u;

  // Two numbers of 4 bits as bfloat16, times 2 ** -126: exponent and mantissa of E2M1 become the
  // lowest bits of the exponent and the highest of the mantissa; 0 and 0.5 are subnormal in both.
  // One multiplication brings them `up` by as much, and the sign by 6 more.
  __device__ static uint32_t placed(uint32_t pair, int up) {
    return pair * ((1u << up) + (64u << up)) & 0x81c081c0u;
  }
};

// Weights of bfloat16, [inputs, columns]: a step is 32 inputs of the columns, in such an order that
// neither copies nor loads of 8 rows share a bank.
template <bool gated>
struct Sixteen : Unscaled {
  static constexpr int sides = gated ? 2 : 1;
  static constexpr int group = 8;
  static constexpr int copies = sides * units * 2;
  static constexpr int across = 2 * units;  // copies for the columns of an input
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
                                   int unit, bool) {
    const int matrix = threadIdx.x % 32 / 8, row = threadIdx.x % 8;
#pragma unroll
    for (int k = 0; k < group / 4; ++k) {
      const int input = row / 2 * 8 + k * 4 + matrix / 2 * 2 + row % 2;
      load_transposed(a[k], step + place(side, input, unit * 2 + matrix % 2));
    }
  }
};

}  // namespace
}  // namespace jspec
