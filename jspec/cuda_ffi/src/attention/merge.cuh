// The merge of the parts of attention into its results.
#pragma once

#include "attention/parts.h"
#include "attention/softmax.cuh"
#include "common/dependent.cuh"

namespace jspec {
namespace {

constexpr int kMergeThreads = 256, kLanes = 32;  // a warp merges a row
constexpr int kPartsPerLane = kMaxParts / kLanes, kAtOnce = 8;  // reads of parts

struct Merge {
  const float* partial_out;   // [batch, kv_heads, parts, tokens * group, channels]
  const float* partial_sums;  // [batch, kv_heads, parts, tokens * group, 2]; sum 0: empty part
  const int32_t* positions;   // [batch, tokens], -1 for padding
  uint16_t* out;              // [batch, tokens, kv_heads, group, channels]
  float* lse;                 // [batch, tokens, kv_heads, group]
  int32_t batch, tokens, kv_heads, group, parts;
};

template <int kChannels>
__global__ void __launch_bounds__(kMergeThreads) attention_merge(const __grid_constant__ Merge m) {
  constexpr int kPerLane = kChannels / kLanes;
  const int lane = threadIdx.x % kLanes, rows = m.tokens * m.group;
  const int64_t index = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  if (index >= int64_t(m.batch) * m.kv_heads * rows) return;
  wait_for_kernels_ahead();
  const int64_t head = index / rows;
  const int row = index % rows, token = row / m.group;
  const int64_t at_token = head / m.kv_heads * m.tokens + token;
  const int64_t first = head * m.parts * rows + row;
  // Queries that are padding may hold anything.
  const bool is_padding = m.positions[at_token] < 0;
  float2 partials[kPartsPerLane];  // highest score and sum of weights
  float top = kLowest;
#pragma unroll
  for (int i = 0; i < kPartsPerLane; ++i) {
    const int part = i * kLanes + lane;
    partials[i] = {kLowest, 0};
    if (part < m.parts && !is_padding) {
      partials[i] = reinterpret_cast<const float2*>(m.partial_sums)[first + int64_t(part) * rows];
    }
    top = fmaxf(top, partials[i].x);
  }
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, i));
  float weights[kPartsPerLane], total = 0;
#pragma unroll
  for (int i = 0; i < kPartsPerLane; ++i) {
    weights[i] = partials[i].y > 0 ? exp2_fast(partials[i].x - top) : 0;
    total += partials[i].y * weights[i];
  }
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) total += __shfl_xor_sync(kAllLanes, total, i);
  struct alignas(4 * kPerLane) Sums {
    float of[kPerLane];
  } sums = {};
  const Sums* parts = reinterpret_cast<const Sums*>(m.partial_out) + first * kLanes + lane;
#pragma unroll
  for (int group = 0; group < kPartsPerLane; ++group) {
    const int start = group * kLanes, count = min(m.parts - start, kLanes);
#pragma unroll 2
    for (int i = 0; i < count; i += kAtOnce) {
      // Parts that were not written are read too, and past the end the last part again: their share
      // is 0. So the eight loads depend on nothing.
      Sums x[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        x[j] = parts[int64_t(min(start + i + j, m.parts - 1)) * rows * kLanes];
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const float share = __shfl_sync(kAllLanes, weights[group], i + j);
#pragma unroll
        for (int c = 0; c < kPerLane; ++c) {
          if (share > 0) sums.of[c] = fmaf(share, x[j].of[c], sums.of[c]);
        }
      }
    }
  }
  const float inverse = total > 0 ? 1 / total : 0;
  const int64_t to = (at_token * m.kv_heads + head % m.kv_heads) * m.group + row % m.group;
  if (lane == 0) m.lse[to] = total > 0 ? (top + log2f(total)) * kLn2 : -INFINITY;
#pragma unroll
  for (int c = 0; c < kPerLane; c += 2) {
    const int channel = channel_of_part(lane * kPerLane + c);
    *reinterpret_cast<uint32_t*>(m.out + to * kChannels + channel) =
        packed(sums.of[c] * inverse, sums.of[c + 1] * inverse);
  }
}

// Launches the merge after the kernel that writes the parts.
inline const char* launch_merge(const Merge& m, int channels, Stream stream) {
  constexpr int kRowsPerBlock = kMergeThreads / kLanes;
  const int64_t rows = int64_t(m.batch) * m.kv_heads * m.tokens * m.group;
  const int blocks = static_cast<int>((rows + kRowsPerBlock - 1) / kRowsPerBlock);
  return launch_behind(channels == 64 ? attention_merge<64> : attention_merge<128>, blocks,
                       kMergeThreads, 0, true, stream, m);
}

}  // namespace
}  // namespace jspec
