// What follows the scores of hash codes: the threshold of a row, and its slots.
#pragma once

#include "common/warp.cuh"
#include "hashed/hashed.h"
#include "select/keys.h"

namespace jspec {

constexpr int kPicking = 512, kPickingWarps = kPicking / 32;
// Scores of a tile: a thread has kRuns runs of 32 bytes, the runs of a warp lie one behind the other.
constexpr int kRuns = 2;

// How many slots before some place lie above a threshold, and how many at it.
struct Ahead {
  int over, at;
};

// What the blocks of a row find in its records: the threshold, how many slots at it are needed, and
// what lies before the first chunk of a part.
struct Threshold {
  uint32_t score;
  int32_t need;
  Ahead before;
};

// Words of shared memory that `find_threshold` takes.
constexpr JSPEC_HOST_DEVICE int words_of_finding(int bins) { return 2 * bins + 4; }

// The highest score that at least `need` of a row's slots reach, from the records of its chunks
// begin..end - 1; `chunk`: the first of the part. `need` is in 1..how many slots they count. Called by
// all threads.
__device__ __forceinline__ Threshold find_threshold(const uint32_t* records, int bins, int begin,
                                                    int end, int chunk, int need,
                                                    uint32_t* memory) {
  uint32_t *all = memory, *before = memory + bins, *found = memory + 2 * bins;
  const int pairs = bins / 2, sets = max(kPicking / pairs, 1);
  for (int i = threadIdx.x; i < 2 * bins; i += kPicking) all[i] = 0;
  __syncthreads();
  // Some sets of threads have a share of the chunks each.
  for (int i = threadIdx.x; i < pairs * sets; i += kPicking) {
    const int pair = i % pairs;
    uint32_t low = 0, high = 0, low_before = 0, high_before = 0;
#pragma unroll 8
    for (int j = begin + i / pairs; j < end; j += sets) {
      const uint32_t two = __ldcg(records + int64_t(j) * pairs + pair);
      low += two & 0xFFFFu;
      high += two >> 16;
      if (j < chunk) low_before += two & 0xFFFFu, high_before += two >> 16;
    }
    atomicAdd(all + 2 * pair, low);
    atomicAdd(all + 2 * pair + 1, high);
    if (chunk > begin) {
      atomicAdd(before + 2 * pair, low_before);
      atomicAdd(before + 2 * pair + 1, high_before);
    }
  }
  __syncthreads();
  const uint32_t wanted = need;
  for (int d = threadIdx.x; d < bins; d += kPicking) {
    const uint32_t over = d + 1 < bins ? all[d + 1] : 0;
    if (all[d] < wanted || over >= wanted) continue;
    const uint32_t ahead = d + 1 < bins ? before[d + 1] : 0;
    found[0] = d, found[1] = wanted - over, found[2] = ahead, found[3] = before[d] - ahead;
  }
  __syncthreads();
  return {found[0], int32_t(found[1]), {int32_t(found[2]), int32_t(found[3])}};
}

// Which of the scores in `x` are at least those in `y`: a bit each, the first one's the lowest.
template <typename Score>
__device__ __forceinline__ uint32_t reaching(uint32_t x, uint32_t y) {
  constexpr uint32_t kHigh = sizeof(Score) == 1 ? 0x80808080u : 0x80008000u;
  const uint32_t difference = (x | kHigh) - (y & ~kHigh);  // no part borrows of the next
  const uint32_t high = ((x & ~y) | (~(x ^ y) & difference)) & kHigh;
  // Their highest bits, next to each other: no two terms of the product meet.
  return sizeof(Score) == 1 ? high * 0x00204081u >> 28 : high * 0x00008001u >> 30;
}

// Writes the slots of a part of a row, ascending, at their places in the row's selection. Part `part`
// has the slots of `plan.each` chunks. Called by all threads; `memory` is shared: as many words as
// `find_threshold` takes, and 2 kPickingWarps.
template <typename Score>
__device__ void pick(const Rows& rows, const HashPlan& plan, const uint32_t* workspace, int64_t row,
                     const Taken& taken, int chunk_slots, int part, uint32_t* memory) {
  constexpr int kIn = 4 / sizeof(Score), kRun = 8 * kIn, kTile = kPicking * kRuns * kRun;
  constexpr int kWidth = 8 * sizeof(Score);  // bits of a score
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  int32_t* slots = rows.slots + row * rows.k;
  const int chunk = part * plan.each;
  const int64_t start = int64_t(chunk) * chunk_slots;
  const int end = min(start + int64_t(plan.each) * chunk_slots, int64_t(taken.high));
  const bool works = taken.need > 0 && start < end && end > taken.low;
  const Score* scores = reinterpret_cast<const Score*>(workspace);
  uint4 held[2 * kRuns];
  const auto run_at = [&](int tile, int i) {
    return tile + ((warp * kRuns + i) * 32 + lane) * kRun;
  };
  const auto load = [&](int tile) {
#pragma unroll
    for (int i = 0; i < 2 * kRuns; ++i) {
      const int at = run_at(tile, i / 2) + i % 2 * (kRun / 2);
      held[i] = {0, 0, 0, 0};
      if (at < end) held[i] = __ldcg(reinterpret_cast<const uint4*>(scores + at));
    }
  };
  if (works) load(start);
  if (part == 0) {  // what is taken whatever it scores, and the end
    for (int i = tid; i < rows.k; i += kPicking) {
      const int behind = i - taken.first - taken.need;
      if (i < taken.first) slots[i] = i;
      if (behind >= 0) slots[i] = behind < taken.last ? taken.high + behind : -1;
    }
  }
  if (!works) return;
  slots += taken.first;
  const Threshold threshold = find_threshold(
      workspace + plan.records, plan.bins, taken.low / chunk_slots,
      (taken.high + chunk_slots - 1) / chunk_slots, chunk, taken.need, memory);
  constexpr uint32_t kEach = sizeof(Score) == 1 ? 0x01010101u : 0x00010001u;
  const uint32_t least = threshold.score * kEach, more = least + kEach;
  const bool highest = threshold.score + 1 == 1u << kWidth;  // nothing is above it
  uint32_t* sums = memory + words_of_finding(plan.bins);
  Ahead ahead = threshold.before;
  for (int tile = start, turn = 0;; turn ^= 1) {
    uint32_t over[kRuns], ties[kRuns], own[kRuns], total = 0;  // a bit for each score of a run
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      over[r] = ties[r] = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4& four = held[2 * r + half];
        const uint32_t words[] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int place = (half * 4 + i) * kIn;
          over[r] |= reaching<Score>(words[i], more) << place;
          ties[r] |= reaching<Score>(words[i], least) << place;
        }
      }
      if (highest) over[r] = 0;
      const int at = run_at(tile, r);
      if (at < taken.low || at + kRun > end) {
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
          const bool inside = at + i >= taken.low && at + i < end;
          over[r] &= ~(uint32_t(!inside) << i);
          ties[r] &= ~(uint32_t(!inside) << i);
        }
      }
      ties[r] &= ~over[r];
      // Above the threshold in the lower half, at it in the upper.
      own[r] = __popc(over[r]) | __popc(ties[r]) << 16;
      total += own[r];
    }
    total = __reduce_add_sync(kAllLanes, total);
    if (lane == 0) sums[turn * kPickingWarps + warp] = total;
    __syncthreads();
    uint32_t before = 0, all = 0;
#pragma unroll
    for (int i = 0; i < kPickingWarps; ++i) {
      const uint32_t x = sums[turn * kPickingWarps + i];
      if (i < warp) before += x;
      all += x;
    }
    if (total != 0) {
      uint32_t at = before;
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        const uint32_t sum = prefix_sum(own[r]), here = at + sum - own[r];
        at += __shfl_sync(kAllLanes, sum, 31);
        Ahead place{ahead.over + int(here & 0xFFFFu), ahead.at + int(here >> 16)};
        const int first = run_at(tile, r);
        for (uint32_t left = over[r] | ties[r]; left; left &= left - 1) {
          const int i = __ffs(left) - 1;
          const bool above = over[r] >> i & 1;
          if (above || place.at < threshold.need) {
            slots[place.over + min(place.at, threshold.need)] = first + i;
          }
          above ? ++place.over : ++place.at;
        }
      }
    }
    ahead.over += all & 0xFFFFu, ahead.at += all >> 16;
    if ((tile += kTile) >= end) break;
    load(tile);
  }
}

}  // namespace jspec
