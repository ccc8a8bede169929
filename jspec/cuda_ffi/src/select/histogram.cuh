// Histograms of digits: what a block leaves of its chunk, and the digit that a row's records give.
#pragma once

#include "common/warp.cuh"
#include "select/plan.h"

namespace jspec {

constexpr int kThreads = 512, kWarps = kThreads / 32;

// The sum of `x` over this lane and those behind it.
__device__ __forceinline__ uint32_t suffix_sum(uint32_t x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t next = __shfl_down_sync(kAllLanes, x, step);
    if (lane + step < 32) x += next;
  }
  return x;
}

// Writes the records of `rows` histograms of `bins` counters each, which lie one behind the other in
// shared memory; `record_of(i)` is where that of the i-th goes, or null. Called by all threads once
// every count is there. `totals` is shared memory, a place for every 64 counters.
template <typename RecordOf>
__device__ void write_records(const uint32_t* counters, int bins, int rows, uint32_t* totals,
                              RecordOf record_of) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, segments = bins / 64;
  for (int at = warp; at < rows * segments; at += kWarps) {
    const uint2 own = reinterpret_cast<const uint2*>(counters + at * 64)[lane];
    const uint32_t total = __reduce_add_sync(kAllLanes, own.x + own.y);
    if (lane == 0) totals[at] = total;
  }
  __syncthreads();
  // Totals become sums over the segments behind each.
  for (int row = warp; row < rows; row += kWarps) {
    uint32_t* own = totals + row * segments;
    const int at = 2 * lane;
    const uint32_t x = at < segments ? own[at] : 0, y = at + 1 < segments ? own[at + 1] : 0;
    const uint32_t behind = suffix_sum(x + y) - x - y;
    if (at < segments) own[at] = behind + y;
    if (at + 1 < segments) own[at + 1] = behind;
  }
  __syncthreads();
  for (int at = warp; at < rows * segments; at += kWarps) {
    uint16_t* record = record_of(at / segments);
    if (record == nullptr) continue;
    const int segment = at % segments;
    const uint2 own = reinterpret_cast<const uint2*>(counters + at * 64)[lane];
    const uint32_t from = totals[at] + suffix_sum(own.x + own.y);
    reinterpret_cast<uint32_t*>(record + segment * 64)[lane] = from | (from - own.x) << 16;
    if (lane == 0) record[bins + segment] = static_cast<uint16_t>(from);
  }
}

struct Found {
  int32_t digit;
  int32_t need;  // of the slots with this digit
};

// What `find` needs of shared memory.
struct Finding {
  uint32_t coarse[64], fine[64];
  int32_t at[2];
};

// Adds, over the chunks begin..end - 1, 64 counts of each one's record into `sums`, which are 0.
__device__ __forceinline__ void add_counts(const uint16_t* records, int64_t stride, int begin,
                                           int end, uint32_t* sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t even = 0, odd = 0;
  for (int chunk = begin + warp; chunk < end; chunk += kWarps) {
    const uint32_t two = reinterpret_cast<const uint32_t*>(records + chunk * stride)[lane];
    even += two & 0xFFFFu;
    odd += two >> 16;
  }
  if (begin + warp < end) {
    atomicAdd(sums + 2 * lane, even);
    atomicAdd(sums + 2 * lane + 1, odd);
  }
}

// The highest digit that at least `need` of a row's slots reach. Called by all threads; `records`
// are those of the row's level, of which the chunks begin..end - 1 count. `need` is at least 1 and at
// most how many there are.
__device__ inline Found find(const uint16_t* records, int bins, int begin, int end, int need,
                             Finding& shared) {
  const int64_t stride = bins + 64;
  const int segments = bins / 64;
  const uint32_t wanted = need;
  if (threadIdx.x < 64) shared.coarse[threadIdx.x] = shared.fine[threadIdx.x] = 0;
  __syncthreads();
  add_counts(records + bins, stride, begin, end, shared.coarse);
  __syncthreads();
  const auto pick = [&](const uint32_t* sums, int count, int32_t* at) {
    const int i = threadIdx.x;
    const bool reaches = i < count && sums[i] >= wanted;
    if (reaches && (i + 1 == count || sums[i + 1] < wanted)) *at = i;
  };
  pick(shared.coarse, segments, shared.at);
  __syncthreads();
  const int segment = shared.at[0];
  add_counts(records + segment * 64, stride, begin, end, shared.fine);
  __syncthreads();
  pick(shared.fine, 64, shared.at + 1);
  __syncthreads();
  const int at = shared.at[1];
  const uint32_t over = at < 63 ? shared.fine[at + 1]
                        : segment + 1 < segments ? shared.coarse[segment + 1]
                                                 : 0;
  return {segment * 64 + at, static_cast<int32_t>(wanted - over)};
}

// How many slots of a chunk have a digit of at least `digit`.
__device__ __forceinline__ int reaching(const uint16_t* record, int digit, int bins) {
  return digit < bins ? record[digit] : 0;
}

}  // namespace jspec
