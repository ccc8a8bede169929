// A matmul of rows with bfloat16 weights, on the matrix units of Hopper.
//
// A block has a tile of 32, 64 or 128 rows and 64 columns of each side. Two warps copy steps of 64
// inputs: one the weights, which no kernel ahead writes, and one the rows. Weights are the first
// factor of the matrix instruction, from registers, where they are scaled for the norm; rows are
// the second, from shared memory. So a thread has the sums of a column of both sides. Four more
// warps add up the squares of the rows. The blocks of a cluster split the inputs of a tile; each
// adds up the sums of its share of the rows, in one order. docs/matmuls.md says more.
#include <algorithm>
#include <iterator>

#include "common/dependent.cuh"
#include "common/swizzle.cuh"
#include "common/tensor_map.cuh"
#include "linear/finish.cuh"

namespace jspec {
namespace {

constexpr int kColumns = 64, kStep = 64;  // of a block; inputs of a step
constexpr int kRowBytes = kStep * 2;      // of a step, of weights and of rows
constexpr int kSideBytes = kStep * kRowBytes;
static_assert(kRowBytes == kSwizzledRowBytes);
constexpr int kMostDepth = 32;    // slots of steps
constexpr int kMostCluster = 4;   // blocks
constexpr int kAlignment = 1024;  // of tiles whose units are permuted
constexpr int kSquaring = 4;      // warps, which share the inputs of a step
constexpr int kRegisters = 1 << 16, kMultiprocessorBytes = 228 * 1024;  // of a multiprocessor
constexpr int kReservedBytes = 1024;                                    // of a block for itself
enum { kScaleMeets = 1, kSquaresMeet, kRootsMeet };  // barriers of a block, by number

template <bool gated, int kRows>
struct Block {
  static constexpr int kEights = kRows / 8;  // of rows, which a thread has two of
  static constexpr int kSides = gated ? 2 : 1, kMultiplying = kSides * kWarpgroup;  // threads
  static constexpr int kWarps = kMultiplying / 32;
  // The warps that copy follow those that multiply; those that square are last, if there is a norm.
  static constexpr int kThreads = kMultiplying + 64, kNormThreads = kThreads + 32 * kSquaring;
  static constexpr int kWeightBytes = kSides * kSideBytes;
  static constexpr int kSlotBytes = kWeightBytes + kRows * kRowBytes;
};

// How the blocks of a cluster share the work, and where a block has what in shared memory after its
// slots; divisions are the host's. The inputs have parts, whose sums are added up in their order:
// by a cluster, a part for each block, or by a single block, one part after another.
struct Shares {
  int blocks;               // of the cluster
  int parts;                // of a block; 1 in a cluster
  int steps, more_steps;    // of a part; so many first parts have one more
  int eights, more_eights;  // the same of the eights of rows whose results a block gives
  int depth;                // slots
  int sums, squares;        // of the parts
  int scale, barriers;
};

// The 16 bytes `unit` of a row of a permuted tile.
__device__ __forceinline__ const char* unit_of(const char* tile, int row, int unit) {
  return tile + row * kRowBytes + (unit ^ row % 8) * 16;
}

__device__ __forceinline__ float squared(uint32_t pair) {
  return fmaf(low(pair), low(pair), high(pair) * high(pair));
}

template <bool gated, int kRows>
__global__ void __launch_bounds__((Block<gated, kRows>::kNormThreads))
    hopper_kernel(const __grid_constant__ Linear linear, const __grid_constant__ CUtensorMap xs,
                  const __grid_constant__ CUtensorMap kernel,
                  const __grid_constant__ Shares shares) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Block = Block<gated, kRows>;
  constexpr int kSides = Block::kSides, kWarps = Block::kWarps, kEights = Block::kEights;
  constexpr int kMultiplying = Block::kMultiplying;
  extern __shared__ char memory[];
  char* shared = memory + (kAlignment - shared_address(memory) % kAlignment) % kAlignment;
  float4* sums_of = reinterpret_cast<float4*>(shared + shares.sums);
  float* squares_of = reinterpret_cast<float*>(shared + shares.squares);
  uint64_t* full = reinterpret_cast<uint64_t*>(shared + shares.barriers);
  uint64_t* free = full + shares.depth;
  uint64_t* received = free + shares.depth;  // waits for what other blocks send
  const int lane = threadIdx.x % 32, warp = __shfl_sync(kAllLanes, int(threadIdx.x / 32), 0);
  const int eighth = lane / 4, quarter = lane % 4;
  const int outputs = linear.outputs, cluster = shares.blocks;
  const int rank = blockIdx.x, first_row = blockIdx.y * kRows, first_column = blockIdx.z * kColumns;
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
      for (int side = 0; side < kSides; ++side) {
        copy_tile(to + side * kSideBytes, kernel, side * outputs + first_column,
                  begin + step * kStep, &full[slot]);
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
      barrier_init(&free[lane], kWarps + (linear.scale ? kSquaring : 0));
    }
    if (lane == 0) {
      const int square_bytes = linear.scale ? kSquaring * 8 * 4 : 0;
      barrier_init(received, 1);
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

  if (warp >= kWarps) {
    const int share = warp - kWarps - 2, thread = threadIdx.x - Block::kThreads;
    float squares[kEights] = {};
    int slot = 0, part = rank, part_end = steps_of(rank);
    uint32_t phase = 0;
    for (int step = 0; step < steps; ++step) {
      barrier_wait(&full[slot], phase);
      const char* rows = shared + slot * Block::kSlotBytes + Block::kWeightBytes;
#pragma unroll
      for (int i = 0; i < kEights; i += 2) {
        uint32_t x[4];
        load_matrices<false>(x, unit_of(rows, i * 8 + lane % 16, share * 2 + lane / 16));
        squares[i] += squared(x[0]) + squared(x[2]);
        squares[i + 1] += squared(x[1]) + squared(x[3]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&free[slot]);
      if (++slot == shares.depth) slot = 0, phase ^= 1;
      if (step + 1 < part_end) continue;
      if (cluster > 1) cluster_wait();  // all blocks have begun
      int block = 0;                    // which gives the results of an eight
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        squares[i] += __shfl_xor_sync(kAllLanes, squares[i], 1);
        squares[i] += __shfl_xor_sync(kAllLanes, squares[i], 2);
        float* place = squares_of + (part * kSquaring + share) * kRows + i * 8 + eighth;
        if (quarter == 0) send(place, block, squares[i]);
        if (++block == cluster) block = 0;
        squares[i] = 0;
      }
      part_end += steps_of(++part);
    }
    if (cluster > 1) barrier_wait(received, 0);
    barrier_of<32 * kSquaring>(kSquaresMeet);
    if (thread < eights * 8) {
      const int row = (rank + thread / 8 * cluster) * 8 + thread % 8;
      float total = 0;
#pragma unroll 4
      for (int i = 0; i < cluster * parts * kSquaring; ++i) total += squares_of[i * kRows + row];
      squares_of[row] = root_of(linear, total);
    }
    barrier_of<kMultiplying + 32 * kSquaring>(kRootsMeet);
    return;
  }

  if (linear.scale) {
#pragma unroll 1
    for (int at = threadIdx.x * 8; at < steps * kStep; at += kMultiplying * 8) {
      const bool is_there = begin + at < linear.inputs;
      *reinterpret_cast<uint4*>(shared + shares.scale + at * 2) =
          is_there ? *reinterpret_cast<const uint4*>(linear.scale + begin + at) : uint4{};
    }
  }
  wait_for_kernels_ahead();

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
  uint32_t added[kEights][kPairs] = {}, shifts[2] = {};
  if (linear.add) {
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        if (!is_there(i, pair)) continue;
        added[i][pair] = *reinterpret_cast<const uint32_t*>(linear.add + place_of(i, pair));
      }
    }
  }
  if (linear.bias) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = column_of(gated ? 0 : half);
      if (column >= outputs) continue;
      const uint16_t* bias = linear.bias + (gated ? half * outputs : 0) + column;
      shifts[half] = *reinterpret_cast<const uint32_t*>(bias);
    }
  }
  if (linear.scale) barrier_of<kMultiplying>(kScaleMeets);

  float sums[kRows / 2] = {};
  uint32_t weights[2][4][4];
  int slot = 0, next_slot = 0;
  uint32_t next_phase = 0;
  // Waits for a step, and loads its weights: a thread has a column of both sides, or two columns.
  const auto load = [&](uint32_t (&weights)[4][4], int step) {
    uint32_t scales[8];
    if (linear.scale) {
      const char* from = shared + shares.scale + (step * kStep + quarter * 2) * 2;
#pragma unroll
      for (int i = 0; i < 8; ++i) scales[i] = *reinterpret_cast<const uint32_t*>(from + i * 16);
    }
    barrier_wait(&full[next_slot], next_phase);
    const char* from = shared + next_slot * Block::kSlotBytes;
    const int half = lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int input = i * 16 + lane / 16 * 8 + lane % 8;
      load_matrices<true>(weights[i], gated ? unit_of(from + half * kSideBytes, input, warp)
                                            : unit_of(from, input, warp * 2 + half));
    }
    if (linear.scale) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint32_t* two = &weights[i / 2][i % 2 * 2];
        two[0] = scaled(two[0], scales[i]), two[1] = scaled(two[1], scales[i]);
      }
    }
    if (++next_slot == shares.depth) next_slot = 0, next_phase ^= 1;
  };
  const auto multiply_step = [&](const uint32_t (&weights)[4][4], uint32_t (&next)[4][4],
                                 int step) {
    const char* rows = shared + slot * Block::kSlotBytes + Block::kWeightBytes;
    begin_matmul();
#pragma unroll
    for (int i = 0; i < 4; ++i) add_matmul(sums, weights[i], descriptor(rows) + i * 32 / 16);
    end_matmul();
    if (step + 1 < steps) load(next, step + 1);
    await_matmul(sums);
    if (lane == 0) barrier_arrive(&free[slot]);
    if (++slot == shares.depth) slot = 0;
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
  load(weights[0], 0);
  for (int step = 0; step < steps; step += 2) {
    multiply_step(weights[0], weights[1], step);
    end_step(step);
    if (step + 1 == steps) break;
    multiply_step(weights[1], weights[0], step + 1);
    end_step(step + 1);
  }

  __syncwarp();
  if (parts > 1) {
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      const float4 total = sums_of[i * kMultiplying + threadIdx.x];
      sums[i * 4] = total.x, sums[i * 4 + 1] = total.y;
      sums[i * 4 + 2] = total.z, sums[i * 4 + 3] = total.w;
    }
  } else if (cluster > 1) {
    cluster_wait();            // all blocks have begun
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
  if (linear.scale) barrier_of<kMultiplying + 32 * kSquaring>(kRootsMeet);

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
        uint16_t* to = static_cast<uint16_t*>(linear.out) + place_of(i, pair);
        *reinterpret_cast<uint32_t*>(to) = packed(results[0], results[1]);
      }
    }
  }
#endif
}

// How copies find `box_rows` rows of 64 numbers. Returns the error's message, or null.
const char* map_of(const void* matrix, cuuint64_t columns, cuuint64_t rows, cuuint32_t box_rows,
                   CUtensorMap* map) {
  return map_tiles<2>(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, matrix, {columns, rows}, {columns * 2},
                      {kStep, box_rows}, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

// The multiprocessors that clusters of so many blocks fill: those of more than two leave some of
// each group of multiprocessors without a block.
int filled_by(int cluster, int processors) {
  return cluster > 2 ? processors * 3 / 4 : processors;
}

// Whether so many blocks in clusters are faster than a block for each tile.
bool is_split_faster(int tiles, int cluster, int resident, int processors) {
  const int blocks = tiles * cluster;
  if (blocks <= filled_by(cluster, processors)) return true;
  // All at once, or three halves one after another in place of two whole tiles.
  return resident > 1 ? blocks <= processors + processors / 2
                      : cluster == 2 && tiles > processors && blocks <= 3 * processors;
}

// The most parts of the inputs of each of so many tiles with which clusters are faster, or 1.
int most_parts(int tiles, int steps, int resident, int processors) {
  int most = 1;
  for (int parts = 2; parts <= std::min(steps, kMostCluster); ++parts) {
    if (is_split_faster(tiles, parts, resident, processors)) most = parts;
  }
  return most;
}

// The blocks, two at most, for which a multiprocessor has the registers.
template <bool gated, int kRows>
int resident_blocks(int threads) {
  static const int registers = [] {
    cudaFuncAttributes attributes{};
    cudaFuncGetAttributes(&attributes, hopper_kernel<gated, kRows>);
    return std::max(attributes.numRegs, 1);
  }();
  return std::clamp(kRegisters / ((registers + 7) / 8 * 8 * threads), 1, 2);
}

// How a matmul is split, and an estimate of its time.
struct Plan {
  int cluster, parts;
  bool are_shared;  // multiprocessors, by two blocks
  float nanoseconds;
};

template <bool gated, int kRows>
Plan plan_of(const Linear& linear) {
  using Block = Block<gated, kRows>;
  // Measured on an H200: of a step of 64 inputs, and of a block besides.
  constexpr int kSize = kRows / 64;  // 0, 1 or 2
  constexpr float kStepTimes[] = {170, 230, 400}, kGatedStepTimes[] = {350, 480, 770};
  constexpr float kBlockTimes[] = {2400, 3300, 3700}, kSharing = 1.25f;
  const int threads = linear.scale ? Block::kNormThreads : Block::kThreads;
  const int resident = resident_blocks<gated, kRows>(threads), processors = multiprocessors();
  const int steps = (linear.inputs + kStep - 1) / kStep;
  const int tiles_of_row = (linear.outputs + kColumns - 1) / kColumns;
  const int tiles = tiles_of_row * ((linear.rows + kRows - 1) / kRows);
  Plan plan;
  if (linear.exact) {
    // The order of sums may not follow from the rows: it is that of a single tile of them.
    plan.parts = most_parts(tiles_of_row, steps, resident_blocks<gated, 32>(threads), processors);
    const bool is_faster = is_split_faster(tiles, plan.parts, resident, processors);
    plan.cluster = is_faster ? plan.parts : 1;
  } else {
    plan.parts = plan.cluster = most_parts(tiles, steps, resident, processors);
  }
  const int blocks = tiles * plan.cluster;
  const int filled = filled_by(plan.cluster, processors);
  plan.are_shared = resident > 1 && blocks > filled;
  const int at_once = filled * (plan.are_shared ? 2 : 1);
  const int rounds = (blocks + at_once - 1) / at_once;
  const int steps_of_block = (steps + plan.cluster - 1) / plan.cluster;
  plan.nanoseconds = rounds * (plan.are_shared ? kSharing : 1) *
                     (steps_of_block * (gated ? kGatedStepTimes : kStepTimes)[kSize] +
                      kBlockTimes[kSize]);
  return plan;
}

template <bool gated, int kRows>
const char* launch(const Linear& linear, const Plan& plan, bool early, Stream stream) {
  using Block = Block<gated, kRows>;
  constexpr int kEights = Block::kEights;
  const int inputs = linear.inputs, columns = linear.outputs * Block::kSides;
  CUtensorMap xs, kernel;
  if (const char* refused = map_of(linear.x, inputs, linear.rows, kRows, &xs)) return refused;
  if (const char* refused = map_of(linear.kernel, columns, inputs, kStep, &kernel)) return refused;
  const auto [cluster, parts, are_shared, _] = plan;
  const int steps = (inputs + kStep - 1) / kStep, most_steps = (steps + cluster - 1) / cluster;
  const dim3 blocks(cluster, (linear.rows + kRows - 1) / kRows,
                    (linear.outputs + kColumns - 1) / kColumns);
  Shares shares{cluster, parts / cluster, steps / parts, steps % parts, kEights / cluster,
                kEights % cluster};
  const int eights = (kEights + cluster - 1) / cluster;
  const int sum_bytes = parts > 1 ? cluster * eights * Block::kMultiplying * 16 : 0;
  const int square_bytes = linear.scale ? parts * kSquaring * kRows * 4 : 0;
  const int scale_bytes = linear.scale ? most_steps * kRowBytes : 0;
  const int other_bytes = kAlignment + sum_bytes + square_bytes + scale_bytes + sizeof(uint64_t);
  const int slot_bytes = Block::kSlotBytes + 2 * sizeof(uint64_t);
  const auto room_of = [&](int blocks) {  // that share a multiprocessor
    return kMultiprocessorBytes / blocks - kReservedBytes - other_bytes;
  };
  // A block loads the weights of a step before it frees the slot of the one before: it would wait
  // forever for a single slot. Its other bytes are the most without a cluster.
  constexpr int kMostOther = kAlignment + kMostCluster * kSquaring * kRows * 4 + kTileInputs * 2 +
                             kRows / 8 * Block::kMultiplying * 16 + int(sizeof(uint64_t));
  static_assert(kMultiprocessorBytes - kReservedBytes - kMostOther >=
                2 * (Block::kSlotBytes + 2 * int(sizeof(uint64_t))));
  const int room = room_of(are_shared && room_of(2) >= 3 * slot_bytes ? 2 : 1);
  shares.depth = std::min({most_steps, room / slot_bytes, kMostDepth});
  shares.sums = shares.depth * Block::kSlotBytes;
  shares.squares = shares.sums + sum_bytes;
  shares.scale = shares.squares + square_bytes;
  shares.barriers = shares.scale + scale_bytes;
  return launch_clusters(hopper_kernel<gated, kRows>, cluster, blocks,
                         linear.scale ? Block::kNormThreads : Block::kThreads,
                         other_bytes + shares.depth * slot_bytes, early, stream, linear, xs,
                         kernel, shares);
}

template <bool gated>
const char* launch_fastest(const Linear& linear, bool early, Stream stream) {
  const Plan plans[] = {plan_of<gated, 32>(linear), plan_of<gated, 64>(linear),
                        plan_of<gated, 128>(linear)};
  const auto is_faster = [](const Plan& a, const Plan& b) { return a.nanoseconds < b.nanoseconds; };
  const Plan* fastest = std::min_element(std::begin(plans), std::end(plans), is_faster);
  switch (fastest - plans) {
    case 0: return launch<gated, 32>(linear, *fastest, early, stream);
    case 1: return launch<gated, 64>(linear, *fastest, early, stream);
    default: return launch<gated, 128>(linear, *fastest, early, stream);
  }
}

}  // namespace

const char* linear_hopper(const Linear& linear, bool early, Stream stream) {
  // Elsewhere the kernel is empty, and nothing would say that it wrote no result.
  if (!is_hopper()) {
    return "a matmul of so many rows, or an exact one, needs compute capability 9.0";
  }
  return linear.gated ? launch_fastest<true>(linear, early, stream)
                      : launch_fastest<false>(linear, early, stream);
}

}  // namespace jspec
