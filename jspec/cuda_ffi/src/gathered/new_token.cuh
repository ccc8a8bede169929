// A new token that the kernel appends to the cache and attends from.
#pragma once

#include "common/bfloat16.cuh"
#include "gathered/part.cuh"

namespace jspec {
namespace {

// The projections of a row's token for a head: its queries, its key and its value.
template <int kChannels>
__device__ __forceinline__ const uint16_t* projection_of(const Gathered& g, int batch_row,
                                                         int head) {
  return g.appended.joined +
         (int64_t(batch_row) * g.kv_heads + head) * (g.group + 2) * kChannels;
}

// One over the root of the mean of kChannels squares.
template <int kChannels>
__device__ __forceinline__ float root_of(float squares, float eps) {
  return 1 / __fsqrt_rn(squares / kChannels + eps);
}

// A normed channel: rounded where the model rounds, after the norm and after its scale.
__device__ __forceinline__ float normed(float x, float root, float scale) {
  return wide(narrow(wide(narrow(x * root)) * scale));
}

// Norms and rotates queries in the layout of the matmuls: channels 8 i + 2 quarter and the next one
// are `q[i / 2][i % 2]`. They rotate with the pair that lies half of the channels behind.
template <int kChannels>
__device__ __forceinline__ void rotate_queries(uint32_t (&q)[kChannels / 16][2], const Gathered& g,
                                               int batch_row, int quarter) {
  constexpr int kHalf = kChannels / 16;  // pairs of a thread up to the half
  const Appended& own = g.appended;
  const int64_t angles = int64_t(batch_row) * (kChannels / 2) + 2 * quarter;
  float2 cosine[kHalf], sine[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    cosine[i] = __ldg(reinterpret_cast<const float2*>(own.cosine + angles + 8 * i));
    sine[i] = __ldg(reinterpret_cast<const float2*>(own.sine + angles + 8 * i));
  }
  if (own.q_scale) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 2 * kHalf; ++i) {
      const uint32_t pair = q[i / 2][i % 2];
      squares += low(pair) * low(pair) + high(pair) * high(pair);
    }
    squares += __shfl_xor_sync(kAllLanes, squares, 1);
    squares += __shfl_xor_sync(kAllLanes, squares, 2);
    const float root = root_of<kChannels>(squares, own.q_eps);
#pragma unroll
    for (int i = 0; i < 2 * kHalf; ++i) {
      const uint32_t scale =
          __ldg(reinterpret_cast<const uint32_t*>(own.q_scale + 8 * i + 2 * quarter));
      uint32_t& pair = q[i / 2][i % 2];
      pair = packed(normed(low(pair), root, low(scale)), normed(high(pair), root, high(scale)));
    }
  }
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    uint32_t &first = q[i / 2][i % 2], &second = q[(i + kHalf) / 2][(i + kHalf) % 2];
    const float2 c = cosine[i], s = sine[i], a = {low(first), high(first)},
                 b = {low(second), high(second)};
    first = packed(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y);
    second = packed(b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y);
  }
}

// Key and value of the token of a row, in the warp that reads their slot: a lane has channels
// lane + 32 j of each half.
template <int kChannels>
struct NewToken {
  static constexpr int kEach = kChannels / 64;
  int slot = -1, tile = -1, row = 0;  // of the cache, of the list, and in the tile
  uint16_t keys[kEach][2], values[kEach][2];

  // Finds slot `entry` of the tail, if it is in a tile that part `first` of `parts` reads.
  __device__ __forceinline__ void find(const Gathered& g, int batch_row, int entry, int first,
                                       int parts) {
    if (entry < 0 || entry >= g.tail_count || entry / kTile % parts != first) return;
    slot = __ldg(g.tail + int64_t(batch_row) * g.tail_count + entry);
    if (slot >= 0) tile = entry / kTile, row = entry % kTile;
  }

  // Norms and rotates the key, and writes it and the value into the cache.
  __device__ __forceinline__ void append(const Gathered& g, int batch_row, int head, int lane) {
    if (tile < 0) return;
    const Appended& own = g.appended;
    const uint16_t* key = projection_of<kChannels>(g, batch_row, head) + g.group * kChannels;
    const float* angles = own.cosine + int64_t(batch_row) * (kChannels / 2);
    const float* sines = own.sine + int64_t(batch_row) * (kChannels / 2);
    float x[kEach][2], cosine[kEach], sine[kEach], squares = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int c = lane + 32 * j;
      cosine[j] = __ldg(angles + c), sine[j] = __ldg(sines + c);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = c + half * kChannels / 2;
        x[j][half] = wide(__ldg(key + channel));
        values[j][half] = __ldg(key + kChannels + channel);
        squares += x[j][half] * x[j][half];
      }
    }
    if (own.k_scale) {
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        squares += __shfl_xor_sync(kAllLanes, squares, lanes);
      }
      const float root = root_of<kChannels>(squares, own.k_eps);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint16_t scale = __ldg(own.k_scale + lane + 32 * j + half * kChannels / 2);
          x[j][half] = normed(x[j][half], root, wide(scale));
        }
      }
    }
    const int64_t place =
        ((int64_t(batch_row) * g.slots + slot) * g.kv_heads + head) * kChannels + lane;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const float first = x[j][0], second = x[j][1];
      keys[j][0] = narrow(first * cosine[j] - second * sine[j]);
      keys[j][1] = narrow(second * cosine[j] + first * sine[j]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t to = place + 32 * j + half * kChannels / 2;
        own.keys[to] = keys[j][half], own.values[to] = values[j][half];
      }
    }
  }

  // Writes key and value over what was copied of their slot into tile `at` of the list.
  __device__ __forceinline__ void put_into(char* to, int at, int lane) const {
    if (at != tile) return;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = lane + 32 * j + half * kChannels / 2;
        char* const place = to + place_of<kChannels>(row, channel / 8) + channel % 8 * 2;
        *reinterpret_cast<uint16_t*>(place) = keys[j][half];
        *reinterpret_cast<uint16_t*>(place + kTileBytes<kChannels> / 2) = values[j][half];
      }
    }
    __syncwarp();
  }
};

}  // namespace
}  // namespace jspec
