// How a block multiplies a few rows with the weights of its columns, read in steps.
//
// Reading the weights is what takes the time, so that every multiprocessor has to have many reads
// on their way at all times, and few instructions for each weight. The warps of a block take turns
// at the inputs. Each has a ring of steps in shared memory, where no other warp looks: while it
// multiplies one step, the next is on its way. The rows lie in the L1 and L2.
#pragma once

#include "linear/weights.cuh"

namespace jspec {
namespace {

constexpr int kAtOnce = 16;  // warps of a multiprocessor that share its registers
constexpr int kDepth = 2;    // steps of a ring; more would take the room that the L1 has for rows

// A lane's share of the rows of a step, and of the norm's scale.
template <class Weights, int tiles>
struct Rows {
  static constexpr int group = Weights::group, eights = group / 8;
  uint4 x[tiles][eights], by[eights];

  // Of the step whose inputs begin with `first`; inputs beyond the last are zeros.
  template <class Source>
  __device__ void read(const Linear& linear, const Source& source, int first) {
    const int mine = first + threadIdx.x % 4 * group;
    const uint16_t* rows[tiles];
#pragma unroll
    for (int i = 0; i < tiles; ++i) {
      rows[i] = linear.x + uint32_t(source.row(linear, i) * linear.inputs + mine);
    }
    // Most steps are whole, and need no zeros.
    if (first + 4 * group <= linear.inputs) {
      read(rows, true);
    } else {
      read(rows, mine < linear.inputs);
    }
  }

  // Beyond the inputs, where rows are zeros, any scale will do.
  __device__ void read_scale(const Linear& linear, int first) {
    if (!linear.scale) return;
    const int mine = min(first + int(threadIdx.x % 4) * group, linear.inputs - group);
#pragma unroll
    for (int eight = 0; eight < eights; ++eight) {
      by[eight] = load(linear.scale + mine + eight * 8, true);
    }
  }

  // As a step multiplies them; adds the squares of what they were.
  __device__ void scaled_into(uint4 (&rows)[tiles][eights], const Linear& linear,
                              float (&squares)[tiles]) {
    if (linear.scale) {
#pragma unroll
      for (int i = 0; i < tiles; ++i) {
        Weights::add_squares(squares[i], x[i]);
#pragma unroll
        for (int eight = 0; eight < eights; ++eight) {
          x[i][eight] = scaled(x[i][eight], by[eight]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < tiles; ++i) {
#pragma unroll
      for (int eight = 0; eight < eights; ++eight) {
        rows[i][eight] = Weights::ordered(x[i][eight]);
      }
    }
  }

 private:
  __device__ void read(const uint16_t* (&rows)[tiles], bool there) {
#pragma unroll
    for (int eight = 0; eight < eights; ++eight) {
#pragma unroll
      for (int i = 0; i < tiles; ++i) x[i][eight] = load(rows[i] + eight * 8, there);
    }
  }
};

// Blocks of a multiprocessor: those that leave registers enough for the sums.
template <class Weights, int tiles, int warps>
constexpr int least_blocks() {
  return tiles * Weights::sides * Weights::units <= 4 ? kAtOnce / warps : 1;
}

// Shared memory of a block.
template <class Weights, int warps>
constexpr int ring_bytes() {
  return warps * kDepth * Weights::copies * 512;
}

// The columns from `column` on, of `weights`, by a block of `warps` warps and for `tiles` tiles of
// 8 rows. `source.wait()`: until all but the weights can be read; `source.row(linear, i)`: the row
// of x that a lane reads for tile i; `source.results` take the sums. `shared`: ring_bytes of it.
template <int tiles, int warps, class Source, class Weights>
__device__ __forceinline__ void stream_columns(const Linear& linear, const Source& source,
                                               Weights& weights, int column, char* shared) {
  constexpr int sides = Weights::sides, units = Weights::units, width = units * kWidth;
  constexpr int group = Weights::group;
  constexpr int bytes = Weights::copies * 512;  // of a step
  constexpr int stride = warps * 4 * group;     // inputs of a step of all warps
  // Whether there are registers for the rows of two steps, and for the norm's scale.
  constexpr bool early = tiles <= 2 && tiles * group <= 32, early_scale = early && group <= 16;
  const int warp = threadIdx.x / 32;
  char* own = shared + warp * kDepth * bytes;
  int first = warp * 4 * group;  // input of a step
  weights.read_scales(first);
  for (int step = 0; step < kDepth; ++step) {
    weights.read(own + step * bytes, first + step * stride);
    asm volatile("cp.async.commit_group;");
  }
  source.wait();
  Rows<Weights, tiles> next;
  if (early) next.read(linear, source, first);
  if (early_scale) next.read_scale(linear, first);
  constexpr int together = 32 * warps / width, values = (tiles * 8 + together - 1) / together;
  const auto results = source.template results<width, sides, values>(linear, column);

  float sums[sides][units][tiles][4] = {}, squares[tiles] = {};
  int slot = 0;  // of the ring, in bytes
  const auto multiply_step = [&](const uint4 (&rows)[tiles][group / 8], bool twice) {
#pragma unroll
    for (int side = 0; side < sides; ++side) {
#pragma unroll
      for (int unit = 0; unit < units; ++unit) {
        uint32_t a[group / 4][4];
        weights.fragments(a, own + slot, side, unit, twice);
#pragma unroll
        for (int k = 0; k < group / 4; ++k) {
#pragma unroll
          for (int i = 0; i < tiles; ++i) {
            const uint4 x = rows[i][k / 2];
            multiply(sums[side][unit][i], a[k], component(x, k % 2 * 2),
                     component(x, k % 2 * 2 + 1));
          }
        }
      }
    }
  };
  for (; first < linear.inputs; first += stride) {
    if (!early) next.read(linear, source, first);
    if (!early_scale) next.read_scale(linear, first);
    uint4 rows[tiles][group / 8];
    next.scaled_into(rows, linear, squares);
    if (early) next.read(linear, source, first + stride);
    if (early_scale) next.read_scale(linear, first + stride);
    weights.turn();
    weights.read_scales(first + stride);
    asm volatile("cp.async.wait_group %0;" ::"n"(kDepth - 1) : "memory");
    __syncwarp();
    if (weights.twice) {
      multiply_step(rows, true);
    } else {
      multiply_step(rows, false);
    }
    __syncwarp();
    weights.read(own + slot, first + kDepth * stride);
    asm volatile("cp.async.commit_group;");
    slot = kDepth == 2 ? slot ^ bytes : (slot + bytes) % (kDepth * bytes);
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

}  // namespace
}  // namespace jspec
