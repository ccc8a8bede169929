// The kernel that scores hash codes and counts the scores while it does.
#pragma once

#include "common/dependent.cuh"
#include "hashed/planes.cuh"
#include "select/keys.h"

namespace jspec {

constexpr int kScoring = 512, kScoringWarps = kScoring / 32;
constexpr int kCounters = 10240;  // of a block: 40 KiB

// Slots that a lane scores at a time, next to each other. Planes take registers of their own.
template <int words, bool one>
constexpr int kScored = one && words < 8 ? 8 : 4;

// How the heads of a key are shared out: a block scores `heads` of them, the bytes of whose codes lie
// together in memory, `slots` times kScored at a time.
struct Heads {
  int heads, groups, slots;

  Heads(const Hash& hash, int bins) {
    const int fit = kCounters / (bins + 8);
    heads = hash.heads < 32 / hash.words ? hash.heads : 32 / hash.words;  // four whole sectors
    heads = heads < fit ? heads : fit;
    groups = (hash.heads + heads - 1) / heads;
    slots = kScoring / heads;
  }
};

// Writes a record from `bins` counters in shared memory, by a warp, the highest first.
__device__ __forceinline__ void write_record(const uint32_t* counters, int bins, uint32_t* record) {
  const int lane = threadIdx.x % 32;
  uint32_t behind = 0;
  for (int at = bins - 64; at >= 0; at -= 64) {
    const uint2 own = reinterpret_cast<const uint2*>(counters + at)[lane];
    const uint32_t from = behind + suffix_sum(own.x + own.y);
    record[at / 2 + lane] = from | (from - own.x) << 16;
    behind = __shfl_sync(kAllLanes, from, 0);
  }
}

// Shared memory of a block, in words: counters, bases and planes.
struct Scoring {
  int stride, base, planes, words;

  JSPEC_HOST_DEVICE Scoring(int bins, int heads, int count, int code)
      : stride(bins + 8),  // so that heads of a warp count in other banks
        base(heads * stride),
        planes(base + 32),
        words(planes + count * heads * code) {}
};

// Scores of a chunk for some heads of a batch row, and their records. `one`: a single code meets each
// key, which needs no planes.
template <typename Score, int words, bool one>
__global__ void __launch_bounds__(kScoring, 2)
    score_kernel(const __grid_constant__ Hash hash, const __grid_constant__ HashPlan plan,
                 const Heads heads, int chunk_slots, int plane_count, uint32_t* workspace) {
  extern __shared__ __align__(16) uint32_t shared[];
  constexpr int S = kScored<words, one>;
  const int n = hash.rows.n, chunk = blockIdx.x % plan.chunks;
  const int64_t batch = blockIdx.x / plan.chunks / heads.groups;
  const int head0 = blockIdx.x / plan.chunks % heads.groups * heads.heads;
  const Scoring at(plan.bins, heads.heads, plane_count, words);
  uint32_t* planes = shared + at.planes;
  int32_t* bases = reinterpret_cast<int32_t*>(shared + at.base);
  const int own = static_cast<int>(threadIdx.x) % heads.heads, place = threadIdx.x / heads.heads;
  const int head = min(head0 + own, hash.heads - 1), begin = chunk * chunk_slots;
  const int64_t row = batch * hash.heads + head;
  const Taken taken = taken_of(hash.rows, row);
  const bool works = head0 + own < hash.heads && place < heads.slots;
  const int end = works ? min(begin + chunk_slots, taken.high) : 0;
  const int64_t stride = int64_t(hash.heads) * words;
  const uint32_t* k = hash.k_codes + (batch * n * hash.heads + head) * words;
  int slot = begin + place * S;
  uint32_t code[S][words];
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < S; ++i) move_code<words>(k + min(slot + i, n - 1) * stride, code[i]);
  };
  // The first codes are on their way while the kernel ahead makes those of the queries.
  if (slot < end) load();
  for (int i = threadIdx.x; i < at.planes; i += kScoring) shared[i] = 0;
  __syncthreads();
  wait_for_kernels_ahead();
  uint32_t query[words];
  if constexpr (one) {
    move_code<words>(hash.q_codes + row * words, query);
  } else {
    fill_planes<words>(hash, batch, head0, heads.heads, plane_count, planes, bases);
    __syncthreads();
  }

  Score* scores = reinterpret_cast<Score*>(workspace + row * plan.words);
  uint32_t* counters = shared + own * at.stride;
  const bool odd = hash.queries() % 2;
  while (slot < end) {
    int score[S] = {};
    if constexpr (one) {
      score_by_query(code, query, score);
    } else {
      score_by_planes(code, planes + own * words, heads.heads * words, plane_count, bases + own, odd,
                      score);
    }
    constexpr int kPacked = S * sizeof(Score) / 4, kIn = 4 / sizeof(Score);
    uint32_t packed[kPacked];
#pragma unroll
    for (int i = 0; i < kPacked; ++i) {
      packed[i] = 0;
#pragma unroll
      for (int j = 0; j < kIn; ++j) packed[i] |= score[i * kIn + j] << j * 8 * sizeof(Score);
    }
    move_code<kPacked>(packed, reinterpret_cast<uint32_t*>(scores + slot));
    const int from = slot;
    slot += heads.slots * S;
    if (slot < end) load();
    if (from >= taken.low && from + S <= end) {
#pragma unroll
      for (int i = 0; i < S; ++i) atomicAdd(counters + score[i], 1);
    } else {
#pragma unroll
      for (int i = 0; i < S; ++i) {
        if (from + i >= taken.low && from + i < end) atomicAdd(counters + score[i], 1);
      }
    }
  }
  let_next_start();
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = warp; i < heads.heads && head0 + i < hash.heads; i += kScoringWarps) {
    uint32_t* memory = workspace + (batch * hash.heads + head0 + i) * plan.words;
    write_record(shared + i * at.stride, plan.bins,
                 memory + plan.records + int64_t(chunk) * plan.bins / 2);
    if (chunk == 0 && lane < 4) memory[plan.meeting + lane] = 0;
  }
}

// Launches the scoring. `early`: it may start before the kernel ahead, of the same call, has ended.
template <typename Score, int words>
const char* launch_score(const Hash& hash, const HashPlan& plan, const HashCut& cut,
                         uint32_t* workspace, bool early, Stream stream) {
  const Heads heads(hash, plan.bins);
  const bool one = hash.queries() == 1;
  const int planes = one ? 0 : planes_of(hash.queries());
  const int bytes = Scoring(plan.bins, heads.heads, planes, words).words * 4;
  return launch_behind(one ? score_kernel<Score, words, true> : score_kernel<Score, words, false>,
                       hash.batch * heads.groups * plan.chunks, kScoring, bytes, early, stream,
                       hash, plan, heads, cut.chunk, planes, workspace);
}

}  // namespace jspec
