// The kernel that scores hash codes and counts the scores while it does.
#pragma once

#include "select/take.cuh"

namespace jspec {

constexpr int kScored = 8;  // slots that a thread scores at a time, next to each other

// How the heads of a key are shared out: a block scores `heads` of them, the bytes of whose codes lie
// together in memory, `slots` at a time.
struct Heads {
  int heads, groups, slots;
};

// Words of a code of one key, loaded at once.
template <int words>
__device__ __forceinline__ void load_code(const uint32_t* from, uint32_t* to) {
  if constexpr (words >= 4) {
#pragma unroll
    for (int i = 0; i < words; i += 4) {
      *reinterpret_cast<uint4*>(to + i) = __ldg(reinterpret_cast<const uint4*>(from + i));
    }
  } else if constexpr (words == 2) {
    *reinterpret_cast<uint2*>(to) = __ldg(reinterpret_cast<const uint2*>(from));
  } else {
    *to = __ldg(from);
  }
}

// Scores of a chunk for some heads of a batch row, and their records. `queries` is how many query
// codes a key meets, 0 where that is known at run time only.
template <int words, int queries>
__global__ void __launch_bounds__(kThreads, kBlocks)
    score_kernel(const __grid_constant__ Work work, const __grid_constant__ Hash hash,
                 const Heads heads) {
  extern __shared__ __align__(16) uint32_t counters[];
  const int bins = work.plan.digits.bins[0], chunk = blockIdx.x % work.plan.chunks;
  const int64_t batch = blockIdx.x / work.plan.chunks / heads.groups;
  const int head0 = blockIdx.x / work.plan.chunks % heads.groups * heads.heads;
  const int head = head0 + static_cast<int>(threadIdx.x) % heads.heads;
  const int place = threadIdx.x / heads.heads;
  uint32_t* totals = counters + heads.heads * bins;
  clear(counters, heads.heads * bins);
  __syncthreads();

  const bool works = head < hash.heads && place < heads.slots;
  const int64_t own = batch * hash.heads + min(head, hash.heads - 1);
  const Row<Uint16Key> row(work, own);
  uint16_t* scores = reinterpret_cast<uint16_t*>(row.workspace + work.plan.scores);
  const int64_t token = int64_t(hash.heads) * hash.group * words;  // words of a token's queries
  const uint32_t* q = hash.q_codes + batch * hash.tokens * token +
                      (own - batch * hash.heads) * hash.group * words;
  const uint32_t* k =
      hash.k_codes + (batch * work.rows.n * hash.heads + own - batch * hash.heads) * words;
  const auto query = [&](int i) { return q + i / hash.group * token + i % hash.group * words; };
  uint32_t held[queries ? queries * words : 1];
  if constexpr (queries > 0) {
#pragma unroll
    for (int i = 0; i < queries; ++i) load_code<words>(query(i), held + i * words);
  }
  const int end = min((chunk + 1) * work.cut.counted, row.taken.high);
  const uint32_t highest = hash.highest();
  if (works) {
    for (int slot = chunk * work.cut.counted + place * kScored; slot < end;
         slot += heads.slots * kScored) {
      uint32_t code[kScored][words], distance[kScored] = {};
#pragma unroll
      for (int i = 0; i < kScored; ++i) {
        const int64_t at = min(slot + i, work.rows.n - 1);
        load_code<words>(k + at * hash.heads * words, code[i]);
      }
      const auto meet = [&](const uint32_t* q) {
#pragma unroll
        for (int i = 0; i < kScored; ++i) {
#pragma unroll
          for (int j = 0; j < words; ++j) distance[i] += __popc(code[i][j] ^ q[j]);
        }
      };
      if constexpr (queries > 0) {
#pragma unroll
        for (int i = 0; i < queries; ++i) meet(held + i * words);
      } else {
        for (int i = 0; i < hash.tokens * hash.group; ++i) {
          uint32_t one[words];
          load_code<words>(query(i), one);
          meet(one);
        }
      }
      uint32_t packed[kScored / 2];
#pragma unroll
      for (int i = 0; i < kScored; ++i) {
        const uint32_t score = highest - distance[i];
        packed[i / 2] = i % 2 ? packed[i / 2] | score << 16 : score;
        if (slot + i >= row.taken.low && slot + i < end) {
          atomicAdd(counters + (head - head0) * bins + score, 1);
        }
      }
      *reinterpret_cast<uint4*>(scores + slot) = *reinterpret_cast<uint4*>(packed);
    }
  }
  __syncthreads();
  write_records(counters, bins, heads.heads, totals, [&](int i) -> uint16_t* {
    if (head0 + i >= hash.heads) return nullptr;
    const int64_t at = batch * hash.heads + head0 + i;
    return Row<Uint16Key>(work, at).record(chunk);
  });
}

}  // namespace jspec
