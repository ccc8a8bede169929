// What a program of attention has: its shared memory, its registers, and its work.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/hopper.cuh"

namespace jspec {
namespace {

constexpr uintptr_t kAlignment = 1024;  // of blocks, for copies and matmuls

// What depends on the channels of a head: warpgroups that compute, stages (blocks of keys, and of
// values, in flight) and registers per thread. With 64 channels two tiles of query rows have two
// warpgroups each, and those of an empty tile end at once. With 128, whose sums are twice as many,
// two warpgroups have a tile together, or one each where there are two tiles. Of a cache of 8 bits
// (kNarrow), blocks arrive in stages of their own, and a warpgroup converts them.
template <int kChannels, bool kNarrow>
struct Shape {
  static constexpr int kChunks = kChannels / kChunk, kBlockBytes = kChunks * kChunkBytes;
  static constexpr int kComputing = kChunks == 1 ? 4 : 2, kConverting = kNarrow ? 1 : 0;
  static constexpr int kStages = kNarrow ? (kChunks == 1 ? 3 : 2) : (kChunks == 1 ? 5 : 3);
  static constexpr int kWarpgroups = kComputing + kConverting + 1;
  static constexpr int kThreads = kWarpgroups * kWarpgroup;
  static constexpr int kComputeRegisters =
      kNarrow ? (kChunks == 1 ? 104 : 216) : (kChunks == 1 ? 112 : 240);
  static constexpr int kConvertRegisters = kChunks == 1 ? 40 : 56, kCopyRegisters = 24;
  // A warpgroup that requests more than what a program begins with would wait for ever.
  static_assert(kComputing * kComputeRegisters + kConverting * kConvertRegisters +
                    kCopyRegisters <=
                kWarpgroups * (65536 / kThreads / 8 * 8));
};

// Blocks of 8 bits as they arrive: keys and values.
template <int kChannels, bool kNarrow>
struct Arriving {
  static constexpr int kStages = 2;
  alignas(kAlignment) char blocks[2][kStages][kBlock * kChannels];
  uint64_t full[2][kStages], free[2][kStages];
};

template <int kChannels>
struct Arriving<kChannels, false> {};

template <int kChannels, bool kNarrow>
struct Shared {
  using Shape = jspec::Shape<kChannels, kNarrow>;
  static constexpr int kStages = Shape::kStages;
  alignas(kAlignment) char keys[kStages][Shape::kBlockBytes];
  alignas(kAlignment) char values[kStages][Shape::kBlockBytes];
  Arriving<kChannels, kNarrow> arriving;
  // A chunk of the sums over second halves of blocks, and maximum and sum of the weights, on their
  // way to the warpgroups that have the first halves.
  float4 joined[Shape::kComputing / 2][9][kWarpgroup];
  uint64_t last_full;  // a block of values that ends past the length
  uint64_t keys_full[kStages], keys_free[kStages], values_full[kStages], values_free[kStages];
};

// The barrier between the warpgroups of a tile's halves is kHalves + tile. 0 is that of all threads.
constexpr int kHalves = 1;

// A place in the ring of stages.
template <int kStages>
struct Place {
  int slot = 0;
  uint32_t phase = 0;

  __device__ Place next() const {
    return slot + 1 == kStages ? Place{0, phase ^ 1} : Place{slot + 1, phase};
  }
};

// A work item: a part of the keys of a row's head.
struct Item {
  int row, head, part;
};

// The work of a launch, whose items its programs take in turn. A program steps from item to item
// without integer divisions, which took every warp longer than a block takes to be read.
struct Work : Attention {
  Item step;               // from an item of a program to its next
  uint32_t round_inverse;  // 2^32 over the blocks of a round, of which each part has 2^together_log2

  Work(const Attention& a, int programs) : Attention(a) {
    if (parts == 1) together_log2 = 1;  // changes nothing, and the inverse of 1 is out of range
    step = item(programs);
    round_inverse = UINT32_MAX / (parts << together_log2) + 1;
  }

  JSPEC_HOST_DEVICE Item item(int index) const {
    return {index / (kv_heads * parts), index % kv_heads, index / kv_heads % parts};
  }
  __device__ __forceinline__ Item after(Item item) const {
    item.head += step.head, item.part += step.part, item.row += step.row;
    if (item.head >= kv_heads) item.head -= kv_heads, ++item.part;
    if (item.part >= parts) item.part -= parts, ++item.row;
    return item;
  }
  // How many of the first `blocks` blocks of a row belong to a part.
  __device__ __forceinline__ int count(int part, int blocks) const {
    const int round = parts << together_log2, together = 1 << together_log2;
    int rounds = int(uint64_t(blocks) * round_inverse >> 32);
    if (rounds * round > blocks) --rounds;  // the inverse is rounded up
    const int rest = blocks - rounds * round - (part << together_log2);
    return (rounds << together_log2) + min(max(rest, 0), together);
  }
  // The first key of block number `block` of a part.
  __device__ __forceinline__ int first_key(int part, int block) const {
    const int round = block >> together_log2, at = block - (round << together_log2);
    return (((round * parts + part) << together_log2) + at) * kBlock;
  }
};

// The position of a row's query number `lane`, -1 for none.
__device__ int lane_position(const Attention& a, int row, int lane) {
  return lane < a.tokens ? a.positions[int64_t(row) * a.tokens + lane] : -1;
}

// Where the keys end that some query reads.
__device__ int end_of(const Attention& a, int position) {
  return min(__reduce_max_sync(kAllLanes, position) + 1, a.slots);
}

// Calls body(item, key, end) for each block of the keys of this program's items: its first key, and
// where the keys end that some query reads. All lanes of a warp call it.
template <typename Body>
__device__ __forceinline__ void each_block(const Work& a, Body body) {
  const int lane = threadIdx.x % 32;
  Item item = a.item(blockIdx.x);
  int position = lane_position(a, item.row, lane);
  while (item.row < a.batch) {
    const int end = end_of(a, position);
    const Item next = a.after(item);
    position = lane_position(a, min(next.row, a.batch - 1), lane);  // read one item ahead
    const int count = a.count(item.part, (end + kBlock - 1) / kBlock);
    for (int i = 0; i < count; ++i) body(item, a.first_key(item.part, i), end);
    item = next;
  }
}

// Where the keys end that all queries read.
__device__ int common_end_of(int position) {
  return __reduce_min_sync(kAllLanes, position < 0 ? INT32_MAX - 1 : position) + 1;
}

}  // namespace
}  // namespace jspec
