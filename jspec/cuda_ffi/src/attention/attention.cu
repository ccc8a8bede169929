// Attention of many query rows over a long cache, on the matrix units of Hopper.
//
// A program takes a part of a head's keys at a time. A warp copies keys and values into shared
// memory; four warpgroups compute, each of one of two tiles of query rows over one half of every
// block of keys, so that the products of some run beside the softmax of others. docs/attention.md
// says more.
#include <algorithm>
#include <type_traits>

#include "attention/attention.h"
#include "attention/hopper.cuh"
#include "attention/merge.cuh"

namespace jspec {
namespace {

constexpr int kComputing = 4, kThreads = (kComputing + 1) * kWarpgroup;  // warpgroups, and threads
constexpr int kStages = 5;              // blocks of keys, and of values, on their way
constexpr uintptr_t kAlignment = 1024;  // of blocks, for copies and products
constexpr float kLog2e = 1.4426950408889634f;
// How much a row's maximum may grow, in powers of 2, before what was summed is scaled.
constexpr float kSlack = 8.0f;
// Of a thread. A warpgroup that wants more than a program begins with would wait for ever.
constexpr int kComputeRegisters = 112, kCopyRegisters = 24;
static_assert(kComputing * kComputeRegisters + kCopyRegisters <=
              (kComputing + 1) * (65536 / kThreads / 8 * 8));

struct Shared {
  alignas(kAlignment) char keys[kStages][kBlockBytes];
  alignas(kAlignment) char values[kStages][kBlockBytes];
  // What the second half of the keys gave to the threads of each tile, on its way to the first's.
  float4 joined[2][9][kWarpgroup];
  uint64_t last_full;  // a block of values that ends beyond the length
  uint64_t keys_full[kStages], keys_free[kStages], values_full[kStages], values_free[kStages];
};

// Barriers between the warpgroups of a tile's halves, by the tile: what is joined is there, and the
// memory for it is free.
constexpr int kJoined = 1, kFree = 3;

// A place in the ring of stages.
struct Place {
  int slot = 0;
  uint32_t phase = 0;

  __device__ Place next() const {
    return slot + 1 == kStages ? Place{0, phase ^ 1} : Place{slot + 1, phase};
  }
};

// What there is to do: a part of the keys of a row's head.
struct Item {
  int row, head, part;

  __device__ Item(const Attention& a, int index)
      : row(index / (a.kv_heads * kParts)),
        head(index % a.kv_heads),
        part(index / a.kv_heads % kParts) {}

  // The blocks of this part among so many of a row.
  __device__ int count(int blocks) const {
    return blocks > part ? (blocks - part + kParts - 1) / kParts : 0;
  }
  __device__ int first_key(int block) const { return (block * kParts + part) * kBlock; }
};

// A lane's position of a row's queries.
__device__ int lane_position(const Attention& a, int row, int lane) {
  return lane < a.tokens ? a.positions[int64_t(row) * a.tokens + lane] : -1;
}

__device__ int end_of(const Attention& a, int position) {
  return min(__reduce_max_sync(kAllLanes, position) + 1, a.slots);
}

// Where the keys end that all queries see.
__device__ int common_of(int position) {
  return __reduce_min_sync(kAllLanes, position < 0 ? INT32_MAX - 1 : position) + 1;
}

// What a warp does that copies all keys and values of this program's items.
__device__ void copy_all(const Attention& a, const CUtensorMap& keys, const CUtensorMap& values,
                         Shared& shared, int items) {
  const int lane = threadIdx.x % 32;
  Place place;
  uint32_t last_phase = 0;
  int position = lane_position(a, Item(a, blockIdx.x).row, lane);
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const Item item(a, index);
    const int end = end_of(a, position);
    // Read an item ahead.
    position = lane_position(a, Item(a, min(index + gridDim.x, items - 1)).row, lane);
    const int count = item.count((end + kBlock - 1) / kBlock);
    for (int i = 0; i < count; ++i) {
      const int slot = place.slot, key = item.first_key(i);
      char* to = shared.values[slot];
      barrier_wait(&shared.keys_free[slot], place.phase ^ 1);
      if (lane == 0) {
        copy_block(shared.keys[slot], keys, item.row, key, item.head, &shared.keys_full[slot]);
      }
      barrier_wait(&shared.values_free[slot], place.phase ^ 1);
      const bool whole = key + kBlock <= end;
      uint64_t* full = whole ? &shared.values_full[slot] : &shared.last_full;
      if (lane == 0) copy_block(to, values, item.row, key, item.head, full);
      if (!whole) {
        // Slots beyond the length may hold anything, and 0 * NaN is NaN.
        barrier_wait(full, last_phase);
        last_phase ^= 1;
        for (int at = (end - key) * kRowBytes + lane * 16; at < kBlockBytes; at += 32 * 16) {
          *reinterpret_cast<uint4*>(to + at) = {0, 0, 0, 0};
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.values_full[slot]);
      }
      place = place.next();
    }
  }
}

// The running softmax of the query rows of a thread: two, or one if the tile's other rows are void.
template <int kRows>
struct Softmax {
  float top[kRows], sum[kRows], decay[kRows];
  int last[kRows];  // the last position that a row sees
  float unit;       // of scores in powers of 2

  // The weights of 64 keys from `key` on, as the left factor of a product. Whether `decay` has to
  // be applied to what was summed before.
  template <bool kMasked>
  __device__ bool weigh(float (&scores)[32], uint32_t (&weights)[4][4], int key) {
    float most[kRows][2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& score = scores[4 * i + 2 * row + j];
          const int here = key + 8 * i + 2 * (threadIdx.x % 4) + j;
          if (kMasked && here > last[row]) score = -INFINITY;
          most[row][j] = i ? fmaxf(most[row][j], score) : score;
        }
      }
    }
    float highest[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) highest[row] = fmaxf(most[row][0], most[row][1]);
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        highest[row] = fmaxf(highest[row], __shfl_xor_sync(kAllLanes, highest[row], lanes));
      }
    }
    bool grew = false;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      highest[row] *= unit;
      const bool grows = highest[row] > top[row] + kSlack;
      const float higher = grows ? highest[row] : top[row];
      decay[row] = exp2_fast(top[row] - higher);
      grew |= grows;
      top[row] = higher;
      float sums[2] = {sum[row] * decay[row], 0};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float low = exp2_fast(fmaf(scores[4 * i + 2 * row], unit, -higher));
        const float high = exp2_fast(fmaf(scores[4 * i + 2 * row + 1], unit, -higher));
        sums[0] += low;
        sums[1] += high;
        weights[i / 2][i % 2 * 2 + row] = packed(low, high);
      }
      sum[row] = sums[0] + sums[1];
    }
    return __any_sync(kAllLanes, grew);
  }

  __device__ void apply_decay(float (&out)[32]) const {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        out[4 * i + 2 * row] *= decay[row];
        out[4 * i + 2 * row + 1] *= decay[row];
      }
    }
  }
};

// What a warpgroup computes: of each item, over a half of each block of keys, the partial result of
// a tile's rows, from `first` on. A tile of 64 rows is full, or half of it is void: every other
// eight rows.
template <bool kFull>
__device__ void compute(const Attention& a, Shared& shared, int items, int tile, int half,
                        int first) {
  constexpr int kRows = kFull ? 2 : 1;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32, warp = thread / 32;
  const int eighth = lane / 4, quarter = lane % 4, rows = a.tokens * a.group;
  int own[kRows];
  for (int i = 0; i < kRows; ++i) own[i] = first + warp * 8 * kRows + eighth + 8 * i;
  // The query that only scores is the last row of the last tile, which nothing else needs.
  const bool is_probe = a.probe && tile == 1 && warp == 3 && eighth == 7;
  Place place;
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const Item item(a, index);
    const int64_t head = int64_t(item.row) * a.kv_heads + item.head;
    const int position = lane_position(a, item.row, lane);
    Softmax<kRows> softmax;
    softmax.unit = a.scale * kLog2e;
    for (int i = 0; i < kRows; ++i) softmax.last[i] = -1;
    uint32_t q[4][4] = {}, weights[4][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint16_t* source = nullptr;
      if (i == 1 && is_probe) source = a.probe + head * kChannels;
      if (i < kRows && own[i % kRows] < rows) {
        const int token = own[i % kRows] / a.group, query = own[i % kRows] % a.group;
        const int64_t before = int64_t(item.row) * a.tokens + token;
        softmax.last[i % kRows] = min(a.positions[before], a.slots - 1);
        source = a.q + ((before * a.kv_heads + item.head) * a.group + query) * kChannels;
      }
      if (source) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint16_t* pair = source + 8 * j + 2 * quarter;
          q[j / 2][j % 2 * 2 + i] = *reinterpret_cast<const uint32_t*>(pair);
        }
      }
      if (i < kRows) softmax.top[i] = kLowest, softmax.sum[i] = 0;
    }
    const int end = end_of(a, position), common = min(common_of(position), end);
    const int count = item.count((end + kBlock - 1) / kBlock), plain = item.count(common / kBlock);
    if (!count) continue;

    float out[32] = {}, scores[32];
    const auto wait = [&](uint64_t (&barriers)[kStages]) {
      barrier_wait(&barriers[place.slot], place.phase);
    };
    const auto release = [&](uint64_t (&barriers)[kStages], int slot) {
      if (lane == 0) barrier_arrive(&barriers[slot]);
    };
    const auto step = [&](auto masked, int i) {
      constexpr bool kMasked = decltype(masked)::value;
      const int key = item.first_key(i) + half * kHalf, slot = place.slot;
      if (__builtin_expect(is_probe, false)) {
        float* to = a.scores + head * a.slots + key + 2 * quarter;
        for (int j = 0; j < 8; ++j) {
          if (key + 8 * j < end) {
            const float2 pair = {scores[4 * j + 2] * a.scale, scores[4 * j + 3] * a.scale};
            reinterpret_cast<float2*>(to)[4 * j] = pair;
          }
        }
      }
      if (softmax.template weigh<kMasked>(scores, weights, key)) softmax.apply_decay(out);
      wait(shared.values_full);
      add_values(out, weights, shared.values[slot] + half * kHalfBytes);
      place = place.next();
      const bool more = i + 1 < count;
      if (more) wait(shared.keys_full);
      // Behind the last block this multiplies anything, and nothing reads it.
      await_product<0>(out);
      release(shared.values_free, slot);
      multiply_keys(scores, q, shared.keys[place.slot] + half * kHalfBytes);
      await_product<0>(scores);
      if (more) release(shared.keys_free, place.slot);
    };

    wait(shared.keys_full);
    multiply_keys(scores, q, shared.keys[place.slot] + half * kHalfBytes);
    await_product<0>(scores);
    release(shared.keys_free, place.slot);
    int i = 0;
    for (; i < plain; ++i) step(std::false_type(), i);
    for (; i < count; ++i) step(std::true_type(), i);

    // Both halves as one.
    float4* joined = shared.joined[tile][0] + thread;
    if (half) {
      named_barrier_sync(kFree + tile);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        joined[c * kWarpgroup] = {out[4 * c], out[4 * c + 1], out[4 * c + 2], out[4 * c + 3]};
      }
      joined[8 * kWarpgroup] = {softmax.top[0], softmax.sum[0], softmax.top[kRows - 1],
                                softmax.sum[kRows - 1]};
      named_barrier_arrive(kJoined + tile);
      continue;
    }
    named_barrier_arrive(kFree + tile);
    named_barrier_sync(kJoined + tile);
    const float4 sums = joined[8 * kWarpgroup];
    const float other_top[2] = {sums.x, sums.z}, other_sum[2] = {sums.y, sums.w};
    float share[kRows], other[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float top = fmaxf(softmax.top[j], other_top[j]);
      share[j] = exp2_fast(softmax.top[j] - top), other[j] = exp2_fast(other_top[j] - top);
      float sum = softmax.sum[j] * share[j] + other_sum[j] * other[j];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      softmax.top[j] = top, softmax.sum[j] = sum;
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float4 theirs = joined[c * kWarpgroup];
      const float their[4] = {theirs.x, theirs.y, theirs.z, theirs.w};
#pragma unroll
      for (int j = 0; j < 2 * kRows; ++j) {
        out[4 * c + j] = out[4 * c + j] * share[j / 2] + their[j] * other[j / 2];
      }
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (own[j] >= rows) continue;
      const int64_t to = (head * kParts + item.part) * rows + own[j];
      if (quarter == 0) {
        reinterpret_cast<float2*>(a.partial_sums)[to] = {softmax.top[j], softmax.sum[j]};
      }
      // A thread's channels lie beside each other; the merge knows which they are.
      float4* place = reinterpret_cast<float4*>(a.partial_out + to * kChannels) + 4 * quarter;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float* from = out + 8 * c + 2 * j;
        place[c] = {from[0], from[1], from[4], from[5]};
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    attention_parts(const __grid_constant__ Attention a, const __grid_constant__ CUtensorMap keys,
                    const __grid_constant__ CUtensorMap values) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
  Shared& shared = *reinterpret_cast<Shared*>((begin + kAlignment - 1) & ~(kAlignment - 1));
  if (threadIdx.x == 0) {
    barrier_init(&shared.last_full, 1);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.keys_full[i], 1);
      barrier_init(&shared.values_full[i], 1);
      barrier_init(&shared.keys_free[i], kComputing * 4);  // a lane of each warp
      barrier_init(&shared.values_free[i], kComputing * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int items = a.batch * a.kv_heads * kParts, rows = a.tokens * a.group;
  const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == kComputing) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCopyRegisters));
    if (threadIdx.x % kWarpgroup < 32) copy_all(a, keys, values, shared, items);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kComputeRegisters));
    const int tile = warpgroup / 2, half = warpgroup % 2, first = tile * (rows > 64 ? 64 : 32);
    // Rows that are void cost no softmax: a tile is full only where it must be.
    if (rows > (tile ? 96 : 64)) {
      compute<true>(a, shared, items, tile, half, first);
    } else {
      compute<false>(a, shared, items, tile, half, first);
    }
  }
#endif
}

// How copies find the blocks of a cache. Returns what went wrong, or null.
const char* map_of(const Attention& a, const uint16_t* cache, CUtensorMap* map) {
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode,
                                                             12000, cudaEnableDefault, &found);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (found != cudaDriverEntryPointSuccess) return "the driver has no cuTensorMapEncodeTiled";
  const cuuint64_t heads = a.kv_heads, slots = a.slots;
  const cuuint64_t sizes[] = {kChannels, heads, slots, cuuint64_t(a.batch)};
  const cuuint64_t strides[] = {kRowBytes, heads * kRowBytes, slots * heads * kRowBytes};
  const cuuint32_t box[] = {kChannels, 1, kBlock, 1}, steps[] = {1, 1, 1, 1};
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<uint16_t*>(cache), sizes, strides, box,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused the cache";
}

}  // namespace

const char* attention(const Attention& a, Stream stream) {
  CUtensorMap keys, values;
  if (const char* refused = map_of(a, a.k, &keys)) return refused;
  if (const char* refused = map_of(a, a.v, &values)) return refused;
  int device, multiprocessors;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int bytes = sizeof(Shared) + kAlignment;
  const cudaError_t error = cudaFuncSetAttribute(
      attention_parts, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const int items = a.batch * a.kv_heads * kParts;
  attention_parts<<<std::min(items, multiprocessors), kThreads, bytes, stream>>>(a, keys, values);
  const int64_t rows = int64_t(a.batch) * a.kv_heads * a.tokens * a.group;
  attention_merge<<<(rows + 15) / 16, 256, 0, stream>>>(a);
  return launch_error();
}

}  // namespace jspec
