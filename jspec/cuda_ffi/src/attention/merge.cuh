// What follows the parts of attention: they are joined into its results.
#pragma once

#include "attention/attention.h"
#include "attention/hopper.cuh"
#include "common/warp.cuh"

namespace jspec {
namespace {

constexpr float kLowest = -1e30f;  // below all scores, and no infinity: differences are numbers
constexpr float kLn2 = 0.6931471805599453f;

// Joins the parts of a query row: sixteen lanes a row, four channels a lane.
__global__ void __launch_bounds__(256) attention_merge(const __grid_constant__ Attention a) {
  constexpr int kLanes = 16;
  static_assert(kLanes == kParts && kLanes * 4 == kChannels);
  const int lane = threadIdx.x % kLanes, rows = a.tokens * a.group;
  const int64_t index = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  if (index >= int64_t(a.batch) * a.kv_heads * rows) return;
  const unsigned mask = 0xffffu << (threadIdx.x % 32 / kLanes * kLanes);
  const int64_t head = index / rows;
  const int row = index % rows, token = row / a.group;
  const int32_t* positions = a.positions + head / a.kv_heads * a.tokens;
  const auto all = [&](float x, auto join) {
    for (int i = kLanes / 2; i > 0; i /= 2) x = join(x, __shfl_xor_sync(mask, x, i, kLanes));
    return x;
  };
  int last = -1;
  for (int i = lane; i < a.tokens; i += kLanes) last = max(last, positions[i]);
  for (int i = kLanes / 2; i > 0; i /= 2) last = max(last, __shfl_xor_sync(mask, last, i, kLanes));
  // Of padding none: its queries may hold anything.
  const int all_parts = min((min(last, a.slots - 1) + kBlock) / kBlock, kParts);
  const int parts = positions[token] < 0 ? 0 : all_parts;
  const int64_t first = head * kParts * rows + row;
  float2 own = {kLowest, 0};
  if (lane < parts) own = reinterpret_cast<const float2*>(a.partial_sums)[first + lane * rows];
  const float top = all(own.x, [](float x, float y) { return fmaxf(x, y); });
  const float weight = exp2_fast(own.x - top);
  const float total = all(own.y * weight, [](float x, float y) { return x + y; });
  float4 sum = {0, 0, 0, 0};
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const float share = __shfl_sync(mask, weight, part, kLanes);
    if (part < parts) {
      const int64_t place = (first + int64_t(part) * rows) * kChannels;
      const float4 x = reinterpret_cast<const float4*>(a.partial_out + place)[lane];
      sum = {sum.x + share * x.x, sum.y + share * x.y, sum.z + share * x.z, sum.w + share * x.w};
    }
  }
  const float inverse = total > 0 ? 1 / total : 0;
  const int64_t before = head / a.kv_heads * a.tokens + token;
  const int64_t to = (before * a.kv_heads + head % a.kv_heads) * a.group + row % a.group;
  if (lane == 0) a.lse[to] = total > 0 ? (top + log2f(total)) * kLn2 : -INFINITY;
  // These channels are those of a thread of `attention_parts`.
  const int channel = lane % 4 * 16 + lane / 4 * 2;
  uint32_t* out = reinterpret_cast<uint32_t*>(a.out + to * kChannels + channel);
  out[0] = packed(sum.x * inverse, sum.y * inverse);
  out[4] = packed(sum.z * inverse, sum.w * inverse);
}

}  // namespace
}  // namespace jspec
