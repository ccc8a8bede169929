// Attention of many query rows over a long cache, on the matrix units of Hopper.
//
// A program takes one part of a head's keys after the other. A warp copies keys and values into
// shared memory; warpgroups compute, each of one tile of query rows over one half of every block of
// keys, or over both halves, so that the matmuls of some run during the softmax of others.
// docs/attention.md says more.
#include <algorithm>

#include "attention/attention.h"
#include "attention/merge.cuh"
#include "attention/narrow.cuh"
#include "attention/program.cuh"
#include "common/tensor_map.cuh"

namespace jspec {
namespace {

// The warp that copies all keys and values of this program's items.
template <int kChannels>
__device__ void copy_all(const Work& a, const CUtensorMap& keys, const CUtensorMap& values,
                         Shared<kChannels, false>& shared) {
  constexpr int kChunks = kChannels / kChunk;
  const int lane = threadIdx.x % 32;
  Place<Shared<kChannels, false>::kStages> place;
  uint32_t last_phase = 0;
  each_block(a, [&](const Item& item, int key, int end) {
    const int slot = place.slot;
    char* to = shared.values[slot];
    barrier_wait(&shared.keys_free[slot], place.phase ^ 1);
    if (lane == 0) {
      copy_block<kChunks>(shared.keys[slot], keys, item.row, key, item.head,
                          &shared.keys_full[slot]);
    }
    barrier_wait(&shared.values_free[slot], place.phase ^ 1);
    const bool whole = key + kBlock <= end;
    uint64_t* full = whole ? &shared.values_full[slot] : &shared.last_full;
    if (lane == 0) copy_block<kChunks>(to, values, item.row, key, item.head, full);
    if (!whole) {
      // Slots past the length may hold anything, and 0 * NaN is NaN.
      barrier_wait(full, last_phase);
      last_phase ^= 1;
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        for (int at = (end - key) * kRowBytes + lane * 16; at < kChunkBytes; at += 32 * 16) {
          *reinterpret_cast<uint4*>(to + chunk * kChunkBytes + at) = {0, 0, 0, 0};
        }
      }
      publish_stores();
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.values_full[slot]);
    }
    place = place.next();
  });
}

// A warpgroup that computes: for each item, the partial result of the query rows of a tile, from
// `first` on, over half `half` of each block of keys, or over both halves if kBoth. A tile has 64
// rows if kFull; otherwise every other eight of its rows are unused. `probes`: the last row of the
// tile is the query that only scores.
template <int kChannels, bool kNarrow, bool kFull, bool kBoth>
__device__ void compute(const Work& a, Shared<kChannels, kNarrow>& shared, int tile, int half,
                        int first, bool probes) {
  constexpr int kRows = kFull ? 2 : 1, kChunks = kChannels / kChunk;
  constexpr int kStages = Shape<kChannels, kNarrow>::kStages;
  constexpr int kSteps = kBoth ? 2 : 1;  // steps per block
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32, warp = thread / 32;
  const int eighth = lane / 4, quarter = lane % 4, rows = a.tokens * a.group;
  int row_of[kRows];
  for (int i = 0; i < kRows; ++i) row_of[i] = first + warp * 8 * kRows + eighth + 8 * i;
  const bool is_probe = probes && warp == 3 && eighth == 7;
  Place<kStages> place;
  for (Item item = a.item(blockIdx.x); item.row < a.batch; item = a.after(item)) {
    const int64_t head = int64_t(item.row) * a.kv_heads + item.head;
    const int position = lane_position(a, item.row, lane);
    Softmax<kRows> softmax;
    softmax.unit = a.scale * kLog2e;
    softmax.clear();
    for (int i = 0; i < kRows; ++i) softmax.last[i] = -1;
    uint32_t q[kChannels / 16][4] = {}, weights[4][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint16_t* source = nullptr;
      if (i == 1 && is_probe) source = a.probe + head * kChannels;
      if (i < kRows && row_of[i % kRows] < rows) {
        const int token = row_of[i % kRows] / a.group, query = row_of[i % kRows] % a.group;
        const int64_t at_token = int64_t(item.row) * a.tokens + token;
        softmax.last[i % kRows] = min(a.positions[at_token], a.slots - 1);
        source = a.q + ((at_token * a.kv_heads + item.head) * a.group + query) * kChannels;
      }
      if (source) {
#pragma unroll
        for (int j = 0; j < kChannels / 8; ++j) {
          const uint16_t* pair = source + 8 * j + 2 * quarter;
          const uint32_t both = *reinterpret_cast<const uint32_t*>(pair);
          q[j / 2][j % 2 * 2 + i] = kNarrow ? float16_from_bfloat16(both) : both;
        }
      }
    }
    const int end = end_of(a, position), common = min(common_end_of(position), end);
    const int steps = kSteps * a.count(item.part, (end + kBlock - 1) / kBlock);
    const int unmasked = kSteps * a.count(item.part, common / kBlock);
    const int64_t part = (head * a.parts + item.part) * rows;
    float2* sums_of = reinterpret_cast<float2*>(a.partial_sums) + part;
    const bool writes = kBoth || half == 0;
    if (!steps) {
      for (int i = 0; i < kRows; ++i) {
        if (writes && quarter == 0 && row_of[i] < rows) sums_of[row_of[i]] = {kLowest, 0};
      }
      continue;
    }

    float out[kChunks][32] = {}, scores[32];
    const auto half_of = [&](int step) { return kBoth ? step % 2 : half; };
    const auto wait = [&](uint64_t (&barriers)[kStages]) {
      barrier_wait(&barriers[place.slot], place.phase);
    };
    const auto release = [&](uint64_t (&barriers)[kStages], int slot) {
      if (lane == 0) barrier_arrive(&barriers[slot]);
    };
    // The scores of a step; its keys are free after the last step of a block. Past the last step
    // this multiplies anything, and nothing reads it.
    const auto score = [&](int step) {
      const char* keys = shared.keys[place.slot] + half_of(step) * kHalfBytes;
      multiply_keys<kChannels, kNarrow>(scores, q, keys);
      await_matmul(scores);
      if (step < steps && step % kSteps == kSteps - 1) release(shared.keys_free, place.slot);
    };
    const auto take = [&](auto masked, int step) {
      constexpr bool kMasked = decltype(masked)::value;
      const int slot = place.slot;
      const int key = a.first_key(item.part, step / kSteps) + half_of(step) * kHalf;
      if (__builtin_expect(is_probe, false)) {
        float* to = a.scores + head * a.slots + key + 2 * quarter;
        for (int j = 0; j < 8; ++j) {
          if (key + 8 * j < end) {
            const float2 pair = {scores[4 * j + 2] * a.scale, scores[4 * j + 3] * a.scale};
            reinterpret_cast<float2*>(to)[4 * j] = pair;
          }
        }
      }
      const auto position_of = [&](int i, int j) { return key + 8 * i + 2 * quarter + j; };
      if (softmax.template weigh<kMasked, 8, kNarrow>(scores, weights, position_of)) {
        for (int chunk = 0; chunk < kChunks; ++chunk) softmax.apply_decay(out[chunk]);
      }
      if (step % kSteps == 0) wait(shared.values_full);
      add_values<kNarrow>(out, weights, shared.values[slot] + half_of(step) * kHalfBytes);
      const bool ends_block = step % kSteps == kSteps - 1;
      if (ends_block) {
        place = place.next();
        if (step + 1 < steps) wait(shared.keys_full);
      }
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) await_matmul(out[chunk]);
      if (ends_block) release(shared.values_free, slot);
      score(step + 1);
    };

    wait(shared.keys_full);
    score(0);
    int step = 0;
    for (; step < unmasked; ++step) take(std::false_type(), step);
    for (; step < steps; ++step) take(std::true_type(), step);

    softmax.join_sums();
    if constexpr (!kBoth) {
      // The sums of both halves, one chunk of channels after the other.
      float4* joined = shared.joined[tile][0] + thread;
      float share[kRows], other[kRows];
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        float(&sums)[32] = out[chunk];
        if (half) {
          named_barrier_sync(kHalves + tile);  // what was there before has been read
#pragma unroll
          for (int c = 0; c < 8; ++c) {
            joined[c * kWarpgroup] = {sums[4 * c], sums[4 * c + 1], sums[4 * c + 2],
                                      sums[4 * c + 3]};
          }
          joined[8 * kWarpgroup] = {softmax.top[0], softmax.sum[0], softmax.top[kRows - 1],
                                    softmax.sum[kRows - 1]};
          named_barrier_sync(kHalves + tile);
          continue;
        }
        named_barrier_sync(kHalves + tile);
        named_barrier_sync(kHalves + tile);  // all has been written
        if (chunk == 0) {
          const float4 theirs = joined[8 * kWarpgroup];
          const float their_top[2] = {theirs.x, theirs.z}, their_sum[2] = {theirs.y, theirs.w};
#pragma unroll
          for (int j = 0; j < kRows; ++j) {
            const float top = fmaxf(softmax.top[j], their_top[j]);
            share[j] = exp2_fast(softmax.top[j] - top), other[j] = exp2_fast(their_top[j] - top);
            softmax.sum[j] = fmaf(softmax.sum[j], share[j], __fmul_rn(their_sum[j], other[j]));
            softmax.top[j] = top;
          }
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const float4 theirs = joined[c * kWarpgroup];
          const float their[4] = {theirs.x, theirs.y, theirs.z, theirs.w};
#pragma unroll
          for (int j = 0; j < 2 * kRows; ++j) {
            sums[4 * c + j] =
                fmaf(sums[4 * c + j], share[j / 2], __fmul_rn(their[j], other[j / 2]));
          }
        }
      }
      if (half) continue;
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (row_of[j] >= rows) continue;
      if (quarter == 0) sums_of[row_of[j]] = {softmax.top[j], softmax.sum[j]};
      float* to = a.partial_out + (part + row_of[j]) * kChannels;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        if (j == 0) write_part<0>(to + chunk * kChunk, out[chunk]);
        if (j == 1) write_part<1>(to + chunk * kChunk, out[chunk]);
      }
    }
  }
}

template <int kChannels, bool kNarrow>
__global__ void __launch_bounds__(Shape<kChannels, kNarrow>::kThreads, 1)
    attention_parts(const __grid_constant__ Work a, const __grid_constant__ CUtensorMap keys,
                    const __grid_constant__ CUtensorMap values) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = Shape<kChannels, kNarrow>;
  extern __shared__ char memory[];
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kAlignment - 1) & -kAlignment;
  auto& shared = *reinterpret_cast<Shared<kChannels, kNarrow>*>(begin);
  const int rows = a.tokens * a.group;
  const bool scored = a.probe != nullptr;
  // Warpgroups that compute: of 64 channels those of a tile that is not empty, as the instructions
  // of others would delay them.
  const int computing = kChannels == 64 && rows + scored <= 64 ? 2 : Shape::kComputing;
  if (threadIdx.x == 0) {
    constexpr int kFilling = kNarrow ? 4 : 1;  // a lane of each warp that converts, or the copy
    barrier_init(&shared.last_full, 1);
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(&shared.keys_full[i], kFilling);
      barrier_init(&shared.values_full[i], kFilling);
      barrier_init(&shared.keys_free[i], computing * 4);  // a lane of each warp
      barrier_init(&shared.values_free[i], computing * 4);
    }
    if constexpr (kNarrow) init_barriers(shared.arriving);
    publish_barriers();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == Shape::kWarpgroups - 1) {
    release_registers<Shape::kCopyRegisters>();
    if (threadIdx.x % kWarpgroup < 32) copy_all(a, keys, values, shared);
    return;
  }
  if constexpr (kNarrow) {
    if (warpgroup == Shape::kComputing) {
      release_registers<Shape::kConvertRegisters>();
      convert_all(a, shared);
      return;
    }
  }
  if (warpgroup >= computing) return;
  take_registers<Shape::kComputeRegisters>();
  if constexpr (kChannels == 64) {
    const int tile = warpgroup / 2, half = warpgroup % 2, first = tile * 64;
    const bool probes = scored && tile == computing / 2 - 1;
    // Unused rows cost no softmax: a tile is full only where it must be.
    if (rows > first + 32) {
      compute<64, kNarrow, true, false>(a, shared, tile, half, first, probes);
    } else {
      compute<64, kNarrow, false, false>(a, shared, tile, half, first, probes);
    }
  } else {
    const int half = warpgroup;
    if (rows + scored > 64) {
      compute<128, kNarrow, true, true>(a, shared, half, 0, half * 64, scored && half);
    } else if (rows > 32) {
      compute<128, kNarrow, true, false>(a, shared, 0, half, 0, scored);
    } else {
      compute<128, kNarrow, false, false>(a, shared, 0, half, 0, scored);
    }
  }
#endif
}

// How copies find the blocks of a cache. Returns the error's message, or null.
const char* map_of(const Attention& a, const void* cache, CUtensorMap* map) {
  const cuuint64_t channels = a.channels, heads = a.kv_heads, slots = a.slots;
  const cuuint64_t head_bytes = channels * (a.narrow ? 1 : 2), slot_bytes = heads * head_bytes;
  const auto type = a.narrow ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return map_tiles<4>(map, type, cache, {channels, heads, slots, cuuint64_t(a.batch)},
                      {head_bytes, slot_bytes, slots * slot_bytes},
                      {a.narrow ? cuuint32_t(channels) : kChunk, 1, kBlock, 1},
                      a.narrow ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

template <int kChannels, bool kNarrow>
const char* launch_parts(const Attention& a, const CUtensorMap& keys, const CUtensorMap& values,
                         Stream stream) {
  const int blocks = std::min(a.batch * a.kv_heads * a.parts, multiprocessors());
  constexpr int kBytes = sizeof(Shared<kChannels, kNarrow>) + kAlignment;
  static_assert(kBytes <= 227 * 1024);
  return launch_behind(attention_parts<kChannels, kNarrow>, blocks,
                       Shape<kChannels, kNarrow>::kThreads, kBytes, false, stream,
                       Work(a, blocks), keys, values);
}

template <int kChannels>
const char* launch_of(const Attention& a, const CUtensorMap& keys, const CUtensorMap& values,
                      Stream stream) {
  const auto launch = a.narrow ? launch_parts<kChannels, true> : launch_parts<kChannels, false>;
  return launch(a, keys, values, stream);
}

}  // namespace

const char* attention(const Attention& a, Stream stream) {
  CUtensorMap keys, values;
  if (const char* refused = map_of(a, a.k, &keys)) return refused;
  if (const char* refused = map_of(a, a.v, &values)) return refused;
  const auto launch = a.channels == 64 ? launch_of<64> : launch_of<128>;
  if (const char* failed = launch(a, keys, values, stream)) return failed;
  return launch_merge(Merge{a.partial_out, a.partial_sums, a.positions, a.out, a.lse, a.batch,
                            a.tokens, a.kv_heads, a.group, a.parts},
                      a.channels, stream);
}

}  // namespace jspec
