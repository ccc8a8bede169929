// A matmul of rows with bfloat16 weights, on the matrix units of Hopper.
//
// A block has a tile of 32, 64 or 128 rows and 64 columns of each side, or of 192 rows and 128
// columns. Two warps copy steps of 64 inputs: one the weights, which no kernel ahead writes, and
// one the rows. Weights are the first factor of the matrix instruction, from registers; rows are
// the second, from shared memory, so a thread has the sums of a column of both sides. If there is a
// norm, four more warps scale the rows where they are and add up their squares; many rows are
// scaled by a kernel of their own, or by the matmul ahead of a chain, where it writes its results.
// The blocks of a cluster split the inputs of a tile; each adds up the sums of its share of the rows,
// in one order. docs/matmuls.md says more.
#include <algorithm>

#include "common/dependent.cuh"
#include "common/swizzle.cuh"
#include "common/tensor_map.cuh"
#include "linear/finish.cuh"

namespace jspec {
namespace {

constexpr int kColumns = 64, kStep = 64;  // of a warpgroup; inputs of a step
constexpr int kRowBytes = kStep * 2;      // of a step, of weights and of rows
constexpr int kColumnBytes = kStep * kRowBytes;  // of kColumns columns of weights
static_assert(kRowBytes == kSwizzledRowBytes);
constexpr int kMostDepth = 32;    // slots of steps
constexpr int kMostCluster = 4;   // blocks
constexpr int kAlignment = 1024;  // of tiles whose units are permuted
// Of the warps of a norm, each has two units of 16 bytes of a row's step.
constexpr int kNorming = 4, kNormThreads = 32 * kNorming, kUnitBytes = 16;
constexpr int kRegisters = 1 << 16, kMultiprocessorBytes = 228 * 1024;  // of a multiprocessor
constexpr int kReservedBytes = 1024;                                    // of a block for itself
// Barriers of a block, by number.
enum { kScaleMeets = 1, kSquaresMeet, kRootsMeet, kNextSquaresMeet };

// What a kernel is compiled for: whether a matmul has a gate, the rows of a tile, and whether its
// blocks scale them for a norm.
template <bool gated, int rows, bool norms>
struct Block {
  static constexpr bool kGated = gated, kNorms = norms;
  static constexpr int kRows = rows, kEights = rows / 8;  // of rows, which a thread has two of
  // Threads with so many sums take registers from those that do not multiply.
  static constexpr bool kIsLarge = rows > 128;
  static constexpr int kTiles = gated || kIsLarge ? 2 : 1;  // of kColumns columns of weights
  static constexpr int kOutputs = gated ? kColumns : kTiles * kColumns;  // of the result
  static constexpr int kMultiplying = kTiles * kWarpgroup;               // threads
  static constexpr int kWarps = kMultiplying / 32;
  // The warps that copy follow those that multiply, then come those of a norm.
  static constexpr int kCopying = kMultiplying + 64;
  static constexpr int kThreads = kIsLarge ? kMultiplying + kWarpgroup
                                  : norms  ? kCopying + kNormThreads
                                           : kCopying;
  static constexpr int kWeightBytes = kTiles * kColumnBytes;
  static constexpr int kSlotBytes = kWeightBytes + rows * kRowBytes;
  // Blocks of a multiprocessor: two where a few registers less make room for a second.
  static constexpr int kResident = gated && rows == 64 && !norms ? 2 : 1;
  static_assert(!kIsLarge || !norms);
};

// Registers of a thread that multiplies and of another in a large block, which begins with 168 of
// each.
constexpr int kMultiplyingRegisters = 232, kOtherRegisters = 40;

// How the blocks of a cluster share the work, and where a block has what in shared memory after its
// slots; divisions are the host's. The inputs have parts, whose sums are added up in their order:
// by a cluster, a part for each block, or by a single block, one part after another.
struct Shares {
  int blocks;               // of the cluster, that share a tile
  int parts;                // of a block; 1 in a cluster
  int steps, more_steps;    // of a part; so many first parts have one more
  int eights, more_eights;  // the same of the eights of rows whose results a block gives
  int depth;                // slots
  int sums, squares;        // of the parts
  int scale, next_squares, barriers;
};

// The 16 bytes `unit` of a row of a permuted tile.
template <typename T>
__device__ __forceinline__ T* unit_of(T* tile, int row, int unit) {
  return tile + row * kRowBytes + (unit ^ row % 8) * 16;
}

__device__ __forceinline__ float squared(uint32_t pair) {
  return fmaf(low(pair), low(pair), high(pair) * high(pair));
}

// The sum of `x` of the four lanes of a row.
__device__ __forceinline__ float over_quarters(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

template <class Block>
__global__ void __launch_bounds__(Block::kThreads, Block::kResident)
    hopper_kernel(const __grid_constant__ Linear linear, const __grid_constant__ CUtensorMap xs,
                  const __grid_constant__ CUtensorMap kernel,
                  const __grid_constant__ Shares shares) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool gated = Block::kGated, norms = Block::kNorms;
  constexpr int kSides = gated ? 2 : 1, kWarps = Block::kWarps, kRows = Block::kRows;
  constexpr int kEights = Block::kEights, kMultiplying = Block::kMultiplying;
  extern __shared__ char memory[];
  char* shared = memory + (kAlignment - shared_address(memory) % kAlignment) % kAlignment;
  float4* sums_of = reinterpret_cast<float4*>(shared + shares.sums);
  float* squares_of = reinterpret_cast<float*>(shared + shares.squares);
  uint64_t* full = reinterpret_cast<uint64_t*>(shared + shares.barriers);
  uint64_t* free = full + shares.depth;
  uint64_t* scaled_rows = free + shares.depth;      // of a slot too
  uint64_t* received = scaled_rows + shares.depth;  // waits for what other blocks send
  uint64_t* all_read = received + 1;                // waits for all blocks to have read their slots
  const int lane = threadIdx.x % 32, warp = __shfl_sync(kAllLanes, int(threadIdx.x / 32), 0);
  const int eighth = lane / 4, quarter = lane % 4;
  const int outputs = linear.outputs, cluster = shares.blocks;
  const int rank = blockIdx.x, first_row = blockIdx.y * kRows;
  const int first_column = blockIdx.z * Block::kOutputs;
  const int begin = (rank * shares.steps + min(rank, shares.more_steps)) * kStep;
  const auto steps_of = [&](int part) { return shares.steps + (part < shares.more_steps); };
  const int parts = shares.parts;
  const int steps = parts > 1 ? parts * shares.steps + shares.more_steps : steps_of(rank);
  const int eights = shares.eights + (rank < shares.more_eights);
  const int most_eights = shares.eights + (shares.more_eights > 0);
  const bool copies_weights = warp == kWarps, copies_rows = warp == kWarps + 1;

  const auto copy = [&](int step, int slot) {
    char* to = shared + slot * Block::kSlotBytes;
    if (copies_weights) {
      barrier_expect<Block::kWeightBytes>(&full[slot]);
#pragma unroll
      for (int tile = 0; tile < Block::kTiles; ++tile) {
        copy_tile(to + tile * kColumnBytes, kernel,
                  first_column + tile * (gated ? outputs : kColumns), begin + step * kStep,
                  &full[slot]);
      }
    } else {
      barrier_expect<kRows * kRowBytes>(&full[slot]);
      copy_tile(to + Block::kWeightBytes, xs, begin + step * kStep, first_row, &full[slot]);
    }
  };
  // Stores `x` at the same place of a block of the cluster, which may be this one.
  const auto send = [&](auto* place, int block, const auto& x) {
    if (block == rank) {
      *place = x;
    } else {
      store_in(address_in(block, place), x, address_in(block, received));
    }
  };
  const int at_once = min(steps, shares.depth);
  let_next_start();
  if (copies_weights) {
    if (lane < shares.depth) {
      barrier_init(&full[lane], 2);
      barrier_init(&free[lane], kWarps);
      barrier_init(&scaled_rows[lane], kNorming);
    }
    if (lane == 0) {
      const int square_bytes = norms ? kNorming * 8 * 4 : 0;
      barrier_init(received, 1);
      barrier_init(all_read, kWarps * cluster);
      barrier_expect(received, (cluster - 1) * eights * (kMultiplying * 16 + square_bytes));
    }
    publish_barriers();
    __syncwarp();
    if (lane == 0) {
      for (int step = 0; step < at_once; ++step) copy(step, step);
    }
  } else if (copies_rows && lane == 0) {
    prefetch_map(xs);
  }
  if (cluster > 1) cluster_arrive_relaxed();
  __syncthreads();

  if (warp >= kWarps) {
    if constexpr (Block::kIsLarge) release_registers<kOtherRegisters>();
    if (copies_weights || copies_rows) {
      if (copies_rows) wait_for_kernels_ahead();
      if (lane == 0) {
        int slot = 0;
        uint32_t phase = 1;
        for (int step = 0; step < steps; ++step) {
          if (step >= at_once) barrier_wait(&free[slot], phase);
          if (step >= at_once || copies_rows) copy(step, slot);
          if (++slot == shares.depth) slot = 0, phase ^= 1;
        }
      }
      __syncwarp();
      if (cluster > 1) cluster_wait();
      return;
    }
    if constexpr (!norms) {
      if (cluster > 1) cluster_wait();
      return;
    }

    const int share = warp - kWarps - 2, thread = threadIdx.x - Block::kCopying;
#pragma unroll 1
    for (int at = thread * 8; at < steps * kStep; at += kNormThreads * 8) {
      const bool is_there = begin + at < linear.inputs;
      *reinterpret_cast<uint4*>(shared + shares.scale + at * 2) =
          is_there ? *reinterpret_cast<const uint4*>(linear.scale + begin + at) : uint4{};
    }
    barrier_of<kNormThreads>(kScaleMeets);
    float squares[kEights] = {};
    int slot = 0, part = rank, part_end = steps_of(rank);
    uint32_t phase = 0;
    for (int step = 0; step < steps; ++step) {
      const char* from =
          shared + shares.scale + step * kRowBytes + share * 2 * kUnitBytes + quarter * 4;
      const uint32_t scales[] = {*reinterpret_cast<const uint32_t*>(from),
                                 *reinterpret_cast<const uint32_t*>(from + kUnitBytes)};
      barrier_wait(&full[slot], phase);
      char* rows = shared + slot * Block::kSlotBytes + Block::kWeightBytes;
#pragma unroll
      for (int i = 0; i < kEights; i += 2) {
        uint32_t x[4];
        char* place = unit_of(rows, i * 8 + lane % 16, share * 2 + lane / 16);
        load_matrices<false>(x, place);
        squares[i] += squared(x[0]) + squared(x[2]);
        squares[i + 1] += squared(x[1]) + squared(x[3]);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = scaled(x[j], scales[j / 2]);
        store_matrices(place, x);
      }
      publish_stores();
      __syncwarp();
      if (lane == 0) barrier_arrive(&scaled_rows[slot]);
      if (++slot == shares.depth) slot = 0, phase ^= 1;
      if (step + 1 < part_end) continue;
      if (cluster > 1) cluster_wait();  // all blocks have begun
      int block = 0;                    // which gives the results of an eight
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        squares[i] = over_quarters(squares[i]);
        float* place = squares_of + (part * kNorming + share) * kRows + i * 8 + eighth;
        if (quarter == 0) send(place, block, squares[i]);
        if (++block == cluster) block = 0;
        squares[i] = 0;
      }
      part_end += steps_of(++part);
    }
    if (cluster > 1) barrier_wait(received, 0);
    barrier_of<kNormThreads>(kSquaresMeet);
    if (thread < eights * 8) {
      const int row = (rank + thread / 8 * cluster) * 8 + thread % 8;
      float total = 0;
#pragma unroll 4
      for (int i = 0; i < cluster * parts * kNorming; ++i) total += squares_of[i * kRows + row];
      squares_of[row] = root_of(linear, total);
    }
    barrier_of<kMultiplying + kNormThreads>(kRootsMeet);
    return;
  }

  if constexpr (Block::kIsLarge) take_registers<kMultiplyingRegisters>();
  wait_for_kernels_ahead();
  if (linear.scaled) {
    constexpr int kAtOnce = 16;  // loads on their way
#pragma unroll 1
    for (int row = threadIdx.x / 4; row < kRows; row += kMultiplying / 4) {
      const int parts = first_row + row < linear.rows ? linear.square_parts : 0;
      const float* from = linear.squares + int64_t(first_row + row) * linear.square_parts;
      float total = 0;
      for (int begin = quarter; begin < parts; begin += 4 * kAtOnce) {
        float squares[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          squares[i] = begin + 4 * i < parts ? from[begin + 4 * i] : 0;
        }
#pragma unroll
        for (const float& one : squares) total += one;
      }
      total = over_quarters(total);
      if (quarter == 0) squares_of[row] = root_of(linear, total);
    }
    barrier_of<kMultiplying>(kRootsMeet);
  }

  // The results of this thread: of the eights of rows rank, rank + cluster, ... a row each, and in
  // it a pair of columns; without a gate two pairs, 8 columns apart.
  constexpr int kPairs = gated ? 1 : 2;
  const bool is_odd = eighth % 2;
  const auto row_of = [&](int i) { return (rank + i * cluster) * 8 + quarter * 2 + is_odd; };
  const auto column_of = [&](int pair) {
    return first_column + warp * 8 * kPairs + pair * 8 + eighth - is_odd;
  };
  const auto place_of = [&](int i, int pair) {
    return int64_t(first_row + row_of(i)) * outputs + column_of(pair);
  };
  const auto is_there = [&](int i, int pair) {
    return i < eights && first_row + row_of(i) < linear.rows && column_of(pair) < outputs;
  };
  uint32_t added[kEights][kPairs] = {}, shifts[2] = {}, next_scales[kPairs] = {};
  const auto load_added = [&] {
    if (!linear.add) return;
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        if (!is_there(i, pair)) continue;
        added[i][pair] = *reinterpret_cast<const uint32_t*>(linear.add + place_of(i, pair));
      }
    }
  };
  constexpr bool kAddsLate = Block::kIsLarge || gated;  // where registers are few
  if constexpr (!kAddsLate) load_added();
  if (linear.bias) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = column_of(gated ? 0 : half);
      if (column >= outputs) continue;
      const uint16_t* bias = linear.bias + (gated ? half * outputs : 0) + column;
      shifts[half] = *reinterpret_cast<const uint32_t*>(bias);
    }
  }

  if (!gated && linear.next.scale) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      if (column_of(pair) >= outputs) continue;
      next_scales[pair] = *reinterpret_cast<const uint32_t*>(linear.next.scale + column_of(pair));
    }
  }

  float sums[kRows / 2] = {};
  uint32_t weights[2][4][4];
  int slot = 0, next_slot = 0;
  uint32_t phase = 0, next_phase = 0;
  // Waits for a step, and loads its weights: a thread has a column of both sides, or two columns.
  const auto load = [&](uint32_t (&weights)[4][4]) {
    barrier_wait(&full[next_slot], next_phase);
    const char* from = shared + next_slot * Block::kSlotBytes;
    const int half = lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int input = i * 16 + lane / 16 * 8 + lane % 8;
      load_matrices<true>(weights[i],
                          gated ? unit_of(from + half * kColumnBytes, input, warp)
                                : unit_of(from + warp / 4 * kColumnBytes, input,
                                          warp % 4 * 2 + half));
    }
    if (++next_slot == shares.depth) next_slot = 0, next_phase ^= 1;
  };
  const auto multiply_step = [&](const uint32_t (&weights)[4][4], uint32_t (&next)[4][4],
                                 int step) {
    const char* rows = shared + slot * Block::kSlotBytes + Block::kWeightBytes;
    if (norms) barrier_wait(&scaled_rows[slot], phase);
    begin_matmul();
#pragma unroll
    for (int i = 0; i < 4; ++i) add_matmul(sums, weights[i], descriptor(rows) + i * 32 / 16);
    end_matmul();
    if (step + 1 < steps) load(next);
    await_matmul(sums);
    if (lane == 0) barrier_arrive(&free[slot]);
    if (++slot == shares.depth) slot = 0, phase ^= 1;
  };
  int part = 0, part_end = steps_of(0);
  // Adds up the sums of the parts of a block without a cluster.
  const auto end_step = [&](int step) {
    if (parts == 1 || step + 1 < part_end) return;
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      float4* place = sums_of + i * kMultiplying + threadIdx.x;
      float4 total = part ? *place : float4{};
      total.x += sums[i * 4], total.y += sums[i * 4 + 1];
      total.z += sums[i * 4 + 2], total.w += sums[i * 4 + 3];
      *place = total;
    }
    for (float& sum : sums) sum = 0;
    part_end += steps_of(++part);
  };
  load(weights[0]);
  for (int step = 0; step < steps; step += 2) {
    multiply_step(weights[0], weights[1], step);
    end_step(step);
    if (step + 1 == steps) break;
    multiply_step(weights[1], weights[0], step + 1);
    end_step(step + 1);
  }

  __syncwarp();
  if constexpr (kAddsLate) load_added();
  if (parts > 1) {
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      const float4 total = sums_of[i * kMultiplying + threadIdx.x];
      sums[i * 4] = total.x, sums[i * 4 + 1] = total.y;
      sums[i * 4 + 2] = total.z, sums[i * 4 + 3] = total.w;
    }
  } else if (cluster > 1) {
    cluster_wait();  // all blocks have begun
    if constexpr (Block::kIsLarge) {
      if (lane < cluster) barrier_arrive_in(address_in(lane, all_read));
      barrier_wait(all_read, 0);
    }
    int block = 0, index = 0;  // which gives the results of an eight, and its number there
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      send(sums_of + (rank * most_eights + index) * kMultiplying + threadIdx.x, block,
           float4{sums[i * 4], sums[i * 4 + 1], sums[i * 4 + 2], sums[i * 4 + 3]});
      if (++block == cluster) block = 0, ++index;
    }
    barrier_wait(received, 0);
    for (float& sum : sums) sum = 0;
#pragma unroll 1
    for (int other = 0; other < cluster; ++other) {
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        if (i >= eights) break;
        const float4 part = sums_of[(other * most_eights + i) * kMultiplying + threadIdx.x];
        sums[i * 4] += part.x, sums[i * 4 + 1] += part.y;
        sums[i * 4 + 2] += part.z, sums[i * 4 + 3] += part.w;
      }
    }
  }
  if (norms) barrier_of<kMultiplying + kNormThreads>(kRootsMeet);

  float* next_squares = reinterpret_cast<float*>(shared + shares.next_squares);
  float factors[kSides];
#pragma unroll
  for (float& factor : factors) factor = 1;
#pragma unroll
  for (int i = 0; i < kEights; ++i) {
    if (i >= eights) break;
    const float root = linear.scale ? squares_of[row_of(i)] : 1.0f;
    // From two rows of a column to two columns of a row: lanes of neighbouring columns swap.
    float values[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float upper = sums[i * 4 + half * 2], lower = sums[i * 4 + half * 2 + 1];
      const float other = __shfl_xor_sync(kAllLanes, is_odd ? upper : lower, 4);
      values[half][0] = is_odd ? other : upper;
      values[half][1] = is_odd ? lower : other;
    }
    float squares = 0;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      float results[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const auto one_of = [&](uint32_t both) { return j ? high(both) : low(both); };
        float sides[kSides], side_shifts[kSides];
#pragma unroll
        for (int side = 0; side < kSides; ++side) {
          sides[side] = values[gated ? side : pair][j];
          side_shifts[side] = one_of(shifts[gated ? side : pair]);
        }
        results[j] = finished(linear, sides, root, factors, side_shifts, one_of(added[i][pair]));
      }
      if (!is_there(i, pair)) continue;
      if (linear.wide) {
        float* to = static_cast<float*>(linear.out) + place_of(i, pair);
        *reinterpret_cast<float2*>(to) = {results[0], results[1]};
      } else {
        const uint32_t both = packed(results[0], results[1]);
        uint16_t* to = static_cast<uint16_t*>(linear.out) + place_of(i, pair);
        *reinterpret_cast<uint32_t*>(to) = both;
        if (gated || !linear.next.scale) continue;
        uint16_t* scaled_to = linear.next.scaled + place_of(i, pair);
        *reinterpret_cast<uint32_t*>(scaled_to) = scaled(both, next_scales[pair]);
        squares += squared(both);
      }
    }
    if (!gated && linear.next.scale) {
      squares += __shfl_xor_sync(kAllLanes, squares, 8);
      squares += __shfl_xor_sync(kAllLanes, squares, 16);
      if (eighth < 2) next_squares[warp * kRows + row_of(i)] = squares;
    }
  }
  if (gated || !linear.next.scale) return;

  // The columns of a sum are those of four warps.
  constexpr int kSums = Block::kOutputs / kSquared;
  static_assert(gated || kWarps == 4 * kSums);
  barrier_of<kMultiplying>(kNextSquaresMeet);
#pragma unroll 1
  for (int at = threadIdx.x; at < eights * 8 * kSums; at += kMultiplying) {
    const int row = (rank + at / kSums / 8 * cluster) * 8 + at / kSums % 8;
    const int sum = at % kSums, place = first_column / kSquared + sum;
    const float* from = next_squares + sum * 4 * kRows + row;
    if (first_row + row < linear.rows && place < linear.next.parts) {
      linear.next.squares[int64_t(first_row + row) * linear.next.parts + place] =
          from[0] + from[kRows] + from[2 * kRows] + from[3 * kRows];
    }
  }
#endif
}

// Scales a row for its norm, and adds up its squares in the same order as hopper_kernel does: those
// of so many parts, of which `more_steps` have a step more than `steps`.
__global__ void __launch_bounds__(kNormThreads)
    norm_kernel(const __grid_constant__ Linear linear, int parts, int steps, int more_steps) {
  extern __shared__ char memory[];
  const int inputs = linear.inputs, ends = (parts * steps + more_steps) * kStep;
  float* squares_of = reinterpret_cast<float*>(memory + ends * 2);
  const int64_t first = int64_t(blockIdx.x) * inputs;
  let_next_start();
  wait_for_kernels_ahead();
#pragma unroll 4
  for (int at = threadIdx.x * 8; at < ends; at += kNormThreads * 8) {
    uint4 x{};
    if (at < inputs) {
      x = *reinterpret_cast<const uint4*>(linear.x + first + at);
      const uint4 scales = *reinterpret_cast<const uint4*>(linear.scale + at);
      *reinterpret_cast<uint4*>(linear.scaled + first + at) = scaled(x, scales);
    }
    *reinterpret_cast<uint4*>(memory + at * 2) = x;
  }
  __syncthreads();
  const int share = threadIdx.x / 4 % kNorming, part = threadIdx.x / 4 / kNorming;
  float squares = 0;
  if (part < parts) {
    const int begin = part * steps + min(part, more_steps);
    const int end = begin + steps + (part < more_steps);
    const char* from = memory + share * 2 * kUnitBytes + threadIdx.x % 4 * 4;
#pragma unroll 8
    for (int step = begin; step < end; ++step) {
      const char* units = from + step * kRowBytes;
      squares += squared(*reinterpret_cast<const uint32_t*>(units)) +
                 squared(*reinterpret_cast<const uint32_t*>(units + kUnitBytes));
    }
  }
  squares = over_quarters(squares);
  if (part < parts && threadIdx.x % 4 == 0) squares_of[part * kNorming + share] = squares;
  __syncthreads();
  if (threadIdx.x > 0) return;
  float total = 0;
  for (int i = 0; i < parts * kNorming; ++i) total += squares_of[i];
  linear.squares[blockIdx.x] = total;
}

// How copies find `box_rows` rows of 64 numbers. Returns the error's message, or null.
const char* map_of(const void* matrix, cuuint64_t columns, cuuint64_t rows, cuuint32_t box_rows,
                   CUtensorMap* map) {
  return map_tiles<2>(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, matrix, {columns, rows}, {columns * 2},
                      {kStep, box_rows}, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The multiprocessors that clusters of so many blocks fill: those of more than two leave some of
// each group of multiprocessors without a block.
int filled_by(int cluster, int processors) {
  return cluster > 2 ? processors * 7 / 8 : processors;
}

// Whether so many blocks in clusters are faster than a block for each tile.
bool is_split_faster(int tiles, int cluster, int resident, int processors) {
  const int blocks = tiles * cluster;
  if (blocks <= filled_by(cluster, processors)) return true;
  // All at once, or three halves one after another in place of two whole tiles.
  return resident > 1 ? cluster < 4 && blocks <= processors + processors / 2
                      : cluster == 2 && tiles > processors && blocks <= 3 * processors;
}

// The most parts of the inputs of each of so many tiles with which clusters are faster, or 1.
int most_parts(int tiles, int steps, int resident, int processors) {
  int most = 1;
  for (int parts = 2; parts <= std::min(steps, kMostCluster); ++parts) {
    // Whether nearly every multiprocessor has a block, and none has two.
    const int blocks = tiles * most;
    const bool is_full = blocks > filled_by(kMostCluster, processors) && blocks <= processors;
    if (!is_full && is_split_faster(tiles, parts, resident, processors)) most = parts;
  }
  return most;
}

// The blocks, two at most, for which a multiprocessor has the registers.
template <class Block>
int resident_blocks() {
  static const int registers = [] {
    cudaFuncAttributes attributes{};
    cudaFuncGetAttributes(&attributes, hopper_kernel<Block>);
    return std::max(attributes.numRegs, 1);
  }();
  return std::clamp(kRegisters / ((registers + 7) / 8 * 8 * Block::kThreads), 1, 2);
}

// How a matmul is split, and an estimate of its time.
struct Plan {
  int cluster, parts;
  bool are_shared;  // multiprocessors, by two blocks
  float nanoseconds;
};

// Nanoseconds of a step of 64 inputs and of a block besides, such that the tile of least estimated
// time is nearly the fastest of those that were measured on an H200.
struct Times {
  float step, gated_step, block;
};

// The parts of the inputs of an exact matmul, whatever its rows: those of a single tile of few.
int exact_parts(const Linear& linear) {
  constexpr int kResident = 2;
  return most_parts(ceil_div(linear.outputs, kColumns), ceil_div(linear.inputs, kStep), kResident,
                    multiprocessors());
}

template <class Block>
Plan plan_of(const Linear& linear, bool splits, const Times& times) {
  constexpr float kSharing = 1.42f;
  // Nanoseconds that a block costs the next matmul, which ends late if not all its blocks find room.
  const float crowding = linear.next.scale ? 17.5f : 0;
  const int processors = multiprocessors(), resident = resident_blocks<Block>();
  const int steps = ceil_div(linear.inputs, kStep);
  const int tiles = ceil_div(linear.outputs, Block::kOutputs) * ceil_div(linear.rows, Block::kRows);
  Plan plan;
  plan.parts = linear.exact ? exact_parts(linear)
               : splits     ? most_parts(tiles, steps, resident, processors)
                            : 1;
  plan.cluster = splits ? plan.parts : 1;
  const int blocks = tiles * plan.cluster, filled = filled_by(plan.cluster, processors);
  plan.are_shared = resident > 1 && blocks > filled;
  const int rounds = ceil_div(blocks, filled * (plan.are_shared ? 2 : 1));
  plan.nanoseconds =
      rounds * (plan.are_shared ? kSharing : 1) *
          (ceil_div(steps, plan.cluster) * (Block::kGated ? times.gated_step : times.step) +
           times.block) +
      blocks * crowding;
  return plan;
}

// The bytes of shared memory of a block of `plan`, and where it has what; `depth` is 0 if there is
// no room for two slots: a block loads the weights of a step before it frees the slot of the last.
template <class Block>
int place_in_memory(const Linear& linear, const Plan& plan, Shares* shares) {
  constexpr int kEights = Block::kEights;
  const auto [cluster, parts, are_shared, _] = plan;
  const int steps = ceil_div(linear.inputs, kStep), most_steps = ceil_div(steps, cluster);
  const int sum_bytes =
      parts > 1 ? cluster * ceil_div(kEights, cluster) * Block::kMultiplying * 16 : 0;
  const int squares_each = Block::kNorms ? parts * kNorming : 1;  // of a row
  const int square_bytes = linear.scale ? squares_each * Block::kRows * 4 : 0;
  const int scale_bytes = Block::kNorms ? most_steps * kRowBytes : 0;
  const int next_bytes = linear.next.scale ? Block::kWarps * Block::kRows * 4 : 0;
  // Sums that are sent take the place of slots that have been read if they are many.
  const bool in_slots = Block::kIsLarge && cluster > 1;
  const int other_bytes = kAlignment + (in_slots ? 0 : sum_bytes) + square_bytes + scale_bytes +
                          next_bytes + 2 * sizeof(uint64_t);
  const int slot_bytes = Block::kSlotBytes + 3 * sizeof(uint64_t);
  const auto slots_of = [&](int blocks) {  // that share a multiprocessor
    return (kMultiprocessorBytes / blocks - kReservedBytes - other_bytes) / slot_bytes;
  };
  // Small tiles of few weights leave room for a block of the next matmul, which begins to copy its own.
  const int64_t weights = int64_t(linear.outputs) * (Block::kGated ? 2 : 1) * linear.inputs;
  const bool leaves_room =
      are_shared || (linear.is_followed && Block::kRows <= 64 && weights * 2 <= kTileBytes);
  const int slots = leaves_room && slots_of(2) >= 3 ? slots_of(2) : slots_of(1);
  const int least = in_slots ? ceil_div(sum_bytes, Block::kSlotBytes) : 0;
  *shares = {cluster, parts / cluster, steps / parts, steps % parts, kEights / cluster,
             kEights % cluster};
  shares->depth = slots >= std::max(2, least)
                      ? std::min({std::max(most_steps, least), slots, kMostDepth})
                      : 0;
  const int slots_end = shares->depth * Block::kSlotBytes;
  shares->sums = in_slots ? 0 : slots_end;
  shares->squares = slots_end + (in_slots ? 0 : sum_bytes);
  shares->scale = shares->squares + square_bytes;
  shares->next_squares = shares->scale + scale_bytes;
  shares->barriers = shares->next_squares + next_bytes;
  return other_bytes + shares->depth * slot_bytes;
}

template <class Block>
const char* launch(const Linear& linear, const Plan& plan, bool early, Stream stream) {
  Shares shares;
  const int bytes = place_in_memory<Block>(linear, plan, &shares);
  const bool scales = linear.scaled && !linear.scaled_by_previous;
  if (scales) {
    const int norm_bytes = ceil_div(linear.inputs, kStep) * kRowBytes + plan.parts * kNorming * 4;
    if (const char* error = launch_behind(norm_kernel, linear.rows, kNormThreads, norm_bytes, early,
                                          stream, linear, plan.parts, shares.steps,
                                          shares.more_steps)) {
      return error;
    }
  }
  const uint16_t* rows = linear.scaled ? linear.scaled : linear.x;
  CUtensorMap xs, kernel;
  if (const char* error = map_of(rows, linear.inputs, linear.rows, Block::kRows, &xs)) return error;
  const int columns = linear.outputs * (Block::kGated ? 2 : 1);
  if (const char* error = map_of(linear.kernel, columns, linear.inputs, kStep, &kernel)) {
    return error;
  }
  const dim3 blocks(plan.cluster, ceil_div(linear.rows, Block::kRows),
                    ceil_div(linear.outputs, Block::kOutputs));
  return launch_clusters(hopper_kernel<Block>, plan.cluster, blocks, Block::kThreads, bytes,
                         early || scales, stream, linear, xs, kernel, shares);
}

struct Tile {
  Plan plan;
  const char* (*launch)(const Linear&, const Plan&, bool, Stream);
};

// Makes `fastest` the tile of `Block` if that is faster.
template <class Block>
void consider(const Linear& linear, const Times& times, Tile* fastest) {
  for (const bool splits : {true, false}) {
    const Plan plan = plan_of<Block>(linear, splits, times);
    Shares shares;
    place_in_memory<Block>(linear, plan, &shares);
    const bool is_faster = !fastest->launch || plan.nanoseconds < fastest->plan.nanoseconds;
    if (shares.depth && is_faster) *fastest = {plan, launch<Block>};
  }
}

template <bool gated, bool norms>
const char* launch_fastest(const Linear& linear, bool early, Stream stream) {
  // Of the smallest tile there is always room for two slots, so that some tile is the fastest.
  using Smallest = Block<gated, 32, norms>;
  constexpr int kMostSums = (Smallest::kEights + kMostCluster - 1) * Smallest::kMultiplying * 16;
  constexpr int kMostOther = kAlignment + kMostSums + kMostCluster * kNorming * 32 * 4 +
                             kTileInputs * 2 + Smallest::kWarps * 32 * 4 +
                             2 * int(sizeof(uint64_t));
  static_assert(kMultiprocessorBytes - kReservedBytes - kMostOther >=
                2 * (Smallest::kSlotBytes + 3 * int(sizeof(uint64_t))));
  Tile fastest{};
  consider<Block<gated, 32, norms>>(linear, {160, 290, 1400}, &fastest);
  consider<Block<gated, 64, norms>>(linear, {220, 400, 2100}, &fastest);
  consider<Block<gated, 128, norms>>(linear, {300, 470, 3300}, &fastest);
  if constexpr (!norms) consider<Block<gated, 192, norms>>(linear, {320, 550, 6500}, &fastest);
  return fastest.launch(linear, fastest.plan, early, stream);
}

template <bool gated>
const char* launch_kind(const Linear& linear, bool early, Stream stream) {
  const bool norms = linear.scale && !linear.scaled;  // in the tiles
  return (norms ? launch_fastest<gated, true> : launch_fastest<gated, false>)(linear, early, stream);
}

}  // namespace

const char* linear_hopper(const Linear& linear, bool early, Stream stream) {
  // Elsewhere the kernel is empty, and nothing would say that it wrote no result.
  if (!is_hopper()) {
    return "a matmul of so many rows, or an exact one, needs compute capability 9.0";
  }
  return (linear.gated ? launch_kind<true> : launch_kind<false>)(linear, early, stream);
}

}  // namespace jspec
