// Histograms of digits: those that a block keeps for itself, and the records that it leaves.
#pragma once

#include "common/warp.cuh"
#include "select/plan.h"

namespace jspec {

constexpr int kThreads = 512, kWarps = kThreads / 32;

// A digit, how many of its slots are needed, and how many slots have a higher one.
struct Found {
  int32_t digit, need, over;
};

// The shared memory of a block, as what it is launched with.
template <typename T>
__device__ __forceinline__ T& shared_memory() {
  extern __shared__ __align__(16) char memory[];
  return *reinterpret_cast<T*>(memory);
}

// Sets `count` counters of a block to 0.
__device__ __forceinline__ void clear(uint32_t* counters, int count) {
  for (int i = threadIdx.x; i < count; i += kThreads) counters[i] = 0;
}

// The sums of `segments` times 64 counters in shared memory, by all threads of a block.
__device__ __forceinline__ void add_segments(const uint32_t* counters, int segments,
                                             uint32_t* totals) {
  const int lane = threadIdx.x % 32;
  for (int at = threadIdx.x / 32; at < segments; at += kWarps) {
    const uint2 own = reinterpret_cast<const uint2*>(counters + at * 64)[lane];
    const uint32_t total = __reduce_add_sync(kAllLanes, own.x + own.y);
    if (lane == 0) totals[at] = total;
  }
}

// Among 64 sums of slots, of which a lane of a warp has two, the last one that with all behind it
// reaches `need`: its place, and the sum of what lies behind. `behind` is the sum behind the last.
__device__ __forceinline__ int2 pick(uint32_t x, uint32_t y, uint32_t behind, uint32_t need) {
  const int at = 2 * (threadIdx.x % 32);
  const uint32_t from = behind + suffix_sum(x + y), after = from - x - y;
  // The last pair that reaches it holds the place.
  const unsigned reaching = __ballot_sync(kAllLanes, from >= need);
  const int lane = 31 - __clz(reaching);
  const bool second = after + y >= need;
  const int place = second ? at + 1 : at, rest = second ? after : after + y;
  return {__shfl_sync(kAllLanes, place, lane), __shfl_sync(kAllLanes, rest, lane)};
}

// The highest digit that at least `need` slots reach, from a histogram of a block in shared memory
// whose counts are all there. `need` is at least 1 and at most their sum. Called by all threads.
__device__ __forceinline__ Found find(const uint32_t* counters, int bins, int need,
                                      uint32_t* totals, Found& shared) {
  add_segments(counters, bins / 64, totals);
  __syncthreads();
  if (threadIdx.x < 32) {
    const int at = 2 * (threadIdx.x % 32), segments = bins / 64;
    const int2 segment = pick(at < segments ? totals[at] : 0,
                              at + 1 < segments ? totals[at + 1] : 0, 0, need);
    const uint32_t* fine = counters + segment.x * 64 + at;
    const int2 digit = pick(fine[0], fine[1], segment.y, need);
    if (threadIdx.x == 0) shared = {segment.x * 64 + digit.x, need - digit.y, digit.y};
  }
  __syncthreads();
  return shared;
}

// Writes the records of `rows` histograms of `bins` counters each, which lie one behind the other in
// shared memory; `record_of(i)` is where that of the i-th goes, or null. Called by all threads once
// every count is there. `totals` is shared memory, a place for every 64 counters.
template <typename RecordOf>
__device__ void write_records(const uint32_t* counters, int bins, int rows, uint32_t* totals,
                              RecordOf record_of) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, segments = bins / 64;
  add_segments(counters, rows * segments, totals);
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

// What a row's records say to one of its blocks: the digit, and what the chunks before the block's
// have above it and at it.
struct Place {
  Found found;
  int32_t over, at;
};

// What `find` needs of shared memory for records: sums of 64 counts over all chunks, and over those
// before the block's, of every 64th digit and of the digits behind one.
struct Finding {
  uint32_t coarse[64], coarse_before[64], fine[64], fine_before[64];
  int32_t segment, digit;
};

// Adds 64 counts of the record of each chunk in begin..end - 1 into `sums`, and of those before
// `chunk` into `before`, which are 0.
__device__ __forceinline__ void add_counts(const uint16_t* records, int64_t stride, int begin,
                                           int end, int chunk, uint32_t* sums, uint32_t* before) {
  const int lane = threadIdx.x % 32, first = begin + static_cast<int>(threadIdx.x) / 32;
  uint32_t even = 0, odd = 0, even_before = 0, odd_before = 0;
#pragma unroll 4
  for (int i = first; i < end; i += kWarps) {
    const uint32_t two = reinterpret_cast<const uint32_t*>(records + i * stride)[lane];
    even += two & 0xFFFFu;
    odd += two >> 16;
    if (i < chunk) even_before += two & 0xFFFFu, odd_before += two >> 16;
  }
  if (first >= end) return;
  atomicAdd(sums + 2 * lane, even);
  atomicAdd(sums + 2 * lane + 1, odd);
  if (first < chunk) {
    atomicAdd(before + 2 * lane, even_before);
    atomicAdd(before + 2 * lane + 1, odd_before);
  }
}

// The highest digit that at least `need` of a row's slots reach, by the records of its chunks
// begin..end - 1, and what lies before `chunk`. `need` is at least 1 and at most how many there are.
// Called by all threads.
__device__ __forceinline__ Place find(const uint16_t* records, int bins, int begin, int end,
                                      int chunk, int need, Finding& shared) {
  const int64_t stride = bins + 64;
  const int segments = bins / 64, i = threadIdx.x;
  const uint32_t wanted = need;
  if (i < 64) {
    shared.coarse[i] = shared.coarse_before[i] = shared.fine[i] = shared.fine_before[i] = 0;
  }
  __syncthreads();
  add_counts(records + bins, stride, begin, end, chunk, shared.coarse, shared.coarse_before);
  __syncthreads();
  const auto last_reaching = [&](const uint32_t* sums, int count) {
    return i < count && sums[i] >= wanted && (i + 1 == count || sums[i + 1] < wanted);
  };
  if (last_reaching(shared.coarse, segments)) shared.segment = i;
  __syncthreads();
  const int segment = shared.segment;
  add_counts(records + segment * 64, stride, begin, end, chunk, shared.fine, shared.fine_before);
  __syncthreads();
  if (last_reaching(shared.fine, 64)) shared.digit = i;
  __syncthreads();
  const int digit = shared.digit;
  const bool behind = segment + 1 < segments;
  const int over = digit < 63 ? shared.fine[digit + 1] : behind ? shared.coarse[segment + 1] : 0;
  const int over_before = digit < 63 ? shared.fine_before[digit + 1]
                          : behind   ? shared.coarse_before[segment + 1]
                                     : 0;
  return {{segment * 64 + digit, need - over, over},
          over_before,
          static_cast<int>(shared.fine_before[digit]) - over_before};
}

}  // namespace jspec
