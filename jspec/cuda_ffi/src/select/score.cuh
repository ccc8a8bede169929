// The kernel that scores hash codes and counts the scores while it does.
#pragma once

#include "select/take.cuh"

namespace jspec {

constexpr int kMostPlanes = 8;  // for fewer than 128 codes of queries

// Slots that a thread scores at a time, next to each other.
template <int words>
constexpr int kScored = words == 8 ? 4 : 8;

// How the heads of a key are shared out: a block scores `heads` of them, the bytes of whose codes lie
// together in memory, `slots` times kScored at a time.
struct Heads {
  int heads, groups, slots;

  // Places for the totals of histograms of so many bins; what lies behind stays aligned.
  JSPEC_HOST_DEVICE int totals(int bins) const { return (heads * bins / 64 + 3) / 4 * 4; }
};

// What a key meets in place of Q codes of queries. c of them have a 1 at a bit: u = c - Q / 2, rounded
// down, is a number of two's complement, whose digits at all bits are the planes. A key with the bits
// k shares  base + 2 sum(k u) - (Q odd) sum(k)  bits with the queries, where base is what a key
// without bits shares: sum(Q - c).
struct Planes {
  int count;
  uint32_t* words;  // [count, heads, words]
  int32_t* base;    // [heads]
};

inline int planes_of(int64_t queries) {
  int count = 1;
  while ((int64_t(1) << (count - 1)) - 1 < (queries + 1) / 2) ++count;
  return count;
}

// Words of a code, loaded at once.
template <int words>
__device__ __forceinline__ void load_code(const uint32_t* from, uint32_t* to) {
  if constexpr (words >= 4) {
#pragma unroll
    for (int i = 0; i < words; i += 4) {
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    }
  } else if constexpr (words == 2) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
  } else {
    *to = *from;
  }
}

// Fills the planes of `heads` heads from `head0` on, a thread a word. The bases are 0 before.
template <int words>
__device__ __forceinline__ void fill_planes(const Hash& hash, int64_t batch, int head0, int heads,
                                            const Planes& planes) {
  const int own = threadIdx.x / words, word = threadIdx.x % words, head = head0 + own;
  if (own >= heads || head >= hash.heads) return;
  const int queries = hash.tokens * hash.group, half = queries / 2;
  uint32_t digits[kMostPlanes];
#pragma unroll
  for (int p = 0; p < kMostPlanes; ++p) digits[p] = -half >> p & 1 ? ~0u : 0;
  for (int i = 0; i < queries; ++i) {
    const int64_t token = batch * hash.tokens + i / hash.group;
    const int64_t at = (token * hash.heads + head) * hash.group + i % hash.group;
    uint32_t carry = hash.q_codes[at * words + word];
#pragma unroll
    for (int p = 0; p < kMostPlanes; ++p) {
      const uint32_t next = digits[p] & carry;
      digits[p] ^= carry;
      carry = next;
    }
  }
  int sum = half * 32;  // of c over the word's bits
#pragma unroll
  for (int p = 0; p < kMostPlanes; ++p) {
    if (p < planes.count) {
      planes.words[(p * heads + own) * words + word] = digits[p];
      const int weight = p + 1 == planes.count ? -(1 << p) : 1 << p;
      sum += weight * __popc(digits[p]);
    }
  }
  atomicAdd(planes.base + own, queries * 32 - sum);
}

// Scores of a chunk for some heads of a batch row, and their records. `one`: a single code meets each
// key, which needs no planes.
template <int words, bool one>
__global__ void __launch_bounds__(kThreads, kBlocks)
    score_kernel(const __grid_constant__ Work work, const __grid_constant__ Hash hash,
                 const Heads heads, int plane_count) {
  extern __shared__ __align__(16) uint32_t counters[];
  constexpr int S = kScored<words>;
  const int bins = work.plan.digits.bins[0], chunk = blockIdx.x % work.plan.chunks;
  const int64_t batch = blockIdx.x / work.plan.chunks / heads.groups;
  const int head0 = blockIdx.x / work.plan.chunks % heads.groups * heads.heads;
  const int own = static_cast<int>(threadIdx.x) % heads.heads, head = head0 + own;
  const int place = threadIdx.x / heads.heads;
  uint32_t* totals = counters + heads.heads * bins;
  int32_t* base = reinterpret_cast<int32_t*>(totals + heads.totals(bins));
  const Planes planes{plane_count, reinterpret_cast<uint32_t*>(base + 32), base};
  clear(counters, heads.heads * bins + heads.totals(bins) + 32);
  __syncthreads();
  if constexpr (!one) {
    fill_planes<words>(hash, batch, head0, heads.heads, planes);
    __syncthreads();
  }

  const bool works = head < hash.heads && place < heads.slots;
  const int64_t at = batch * hash.heads + min(head, hash.heads - 1);
  const Row<Uint16Key> row(work, at);
  uint16_t* scores = reinterpret_cast<uint16_t*>(row.workspace + work.plan.scores);
  const uint32_t* k = hash.k_codes +
                      (batch * work.rows.n * hash.heads + min(head, hash.heads - 1)) * words;
  uint32_t query[words];
  if constexpr (one) load_code<words>(hash.q_codes + at * words, query);
  const int end = min((chunk + 1) * work.cut.counted, row.taken.high);
  const bool odd = hash.queries() % 2;
  if (works) {
    for (int slot = chunk * work.cut.counted + place * S; slot < end; slot += heads.slots * S) {
      uint32_t code[S][words];
#pragma unroll
      for (int i = 0; i < S; ++i) {
        const int64_t from = min(slot + i, work.rows.n - 1);
        load_code<words>(k + from * hash.heads * words, code[i]);
      }
      int score[S] = {};
      if constexpr (one) {
#pragma unroll
        for (int i = 0; i < S; ++i) {
#pragma unroll
          for (int j = 0; j < words; ++j) score[i] += __popc(~(code[i][j] ^ query[j]));
        }
      } else {
        for (int p = 0; p < planes.count; ++p) {
          uint32_t plane[words];
          load_code<words>(planes.words + (p * heads.heads + own) * words, plane);
          const int weight = p + 1 == planes.count ? -(2 << p) : 2 << p;
#pragma unroll
          for (int i = 0; i < S; ++i) {
            int ones = 0;
#pragma unroll
            for (int j = 0; j < words; ++j) ones += __popc(code[i][j] & plane[j]);
            score[i] += weight * ones;
          }
        }
        const int base = planes.base[own];
#pragma unroll
        for (int i = 0; i < S; ++i) {
          score[i] += base;
          if (odd) {
#pragma unroll
            for (int j = 0; j < words; ++j) score[i] -= __popc(code[i][j]);
          }
        }
      }
      uint32_t packed[S / 2];
#pragma unroll
      for (int i = 0; i < S; ++i) {
        packed[i / 2] = i % 2 ? packed[i / 2] | score[i] << 16 : score[i];
        if (slot + i >= row.taken.low && slot + i < end) {
          atomicAdd(counters + own * bins + score[i], 1);
        }
      }
      load_code<S / 2>(packed, reinterpret_cast<uint32_t*>(scores + slot));
    }
  }
  __syncthreads();
  write_records(counters, bins, heads.heads, totals, [&](int i) -> uint16_t* {
    if (head0 + i >= hash.heads) return nullptr;
    return Row<Uint16Key>(work, batch * hash.heads + head0 + i).record(chunk);
  });
}

}  // namespace jspec
