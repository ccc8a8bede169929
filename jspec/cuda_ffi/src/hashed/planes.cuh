// Hamming scores of the codes of keys, and what stands in them for many codes of queries.
#pragma once

#include "common/warp.cuh"
#include "hashed/hashed.h"

namespace jspec {

constexpr int kMostDigits = 8;  // of two's complement, for fewer than 128 codes of queries

// What a key meets in place of Q codes of queries. c of them have a 1 at a bit: the sign of 2 c - Q
// at all bits is the first plane, 1 for a negative one, and the digits of |2 c - Q| / 2, rounded down,
// are the others. A key agrees with most queries where it differs from the first plane: where the bits
// a are 1 it shares  base + 2 sum(a |2 c - Q| / 2) + (Q odd) sum(a)  bits with the queries, and base is
// what a key that agrees nowhere shares.
inline int planes_of(int64_t queries) {
  int count = 1;
  for (int64_t most = queries / 2; most > 0; most /= 2) ++count;
  return count;
}

// How many bits of `words` words are set. Three words of four are added bit by bit first: counting is
// the slowest of these instructions.
template <int words>
__device__ __forceinline__ int count_bits(const uint32_t (&x)[words]) {
  int ones = 0;
  if constexpr (words % 4 == 0) {
#pragma unroll
    for (int i = 0; i < words; i += 4) {
      const uint32_t sum = x[i] ^ x[i + 1] ^ x[i + 2];
      const uint32_t carry = (x[i] & x[i + 1]) | (x[i + 2] & (x[i] | x[i + 1]));
      ones += __popc(sum) + __popc(x[i + 3]) + 2 * __popc(carry);
    }
  } else {
#pragma unroll
    for (int i = 0; i < words; ++i) ones += __popc(x[i]);
  }
  return ones;
}

// Words of a code, loaded or stored at once.
template <int words>
__device__ __forceinline__ void move_code(const uint32_t* from, uint32_t* to) {
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

// Fills the planes [count, heads, words] of `heads` heads from `head0` on, a thread a word. The bases
// are 0 before.
template <int words>
__device__ __forceinline__ void fill_planes(const Hash& hash, int64_t batch, int head0, int heads,
                                            int count, uint32_t* planes, int32_t* base) {
  const int own = threadIdx.x / words, word = threadIdx.x % words, head = head0 + own;
  if (own >= heads || head >= hash.heads) return;
  const int queries = hash.tokens * hash.group, half = queries / 2;
  uint32_t digits[kMostDigits];  // of c - Q / 2, rounded down
#pragma unroll
  for (int p = 0; p < kMostDigits; ++p) digits[p] = (half - queries) >> p & 1 ? ~0u : 0;
  for (int i = 0; i < queries; ++i) {
    const int64_t token = batch * hash.tokens + i / hash.group;
    const int64_t at = (token * hash.heads + head) * hash.group + i % hash.group;
    uint32_t carry = hash.q_codes[at * words + word];
#pragma unroll
    for (int p = 0; p < kMostDigits; ++p) {
      const uint32_t next = digits[p] & carry;
      digits[p] ^= carry;
      carry = next;
    }
  }
  const uint32_t sign = digits[kMostDigits - 1];
  planes[own * words + word] = sign;
  int sum = half * 32;  // of half - |2 c - Q| / 2 over the word's bits
  // The magnitude of a negative x is ~x + 1, and that of x + 1/2, for odd Q, is ~x + 1/2.
  uint32_t carry = queries % 2 ? 0 : sign;
#pragma unroll
  for (int p = 0; p < kMostDigits - 1; ++p) {
    const uint32_t digit = digits[p] ^ sign, magnitude = digit ^ carry;
    carry &= digit;
    if (p + 1 < count) {
      planes[((p + 1) * heads + own) * words + word] = magnitude;
      sum -= __popc(magnitude) << p;
    }
  }
  atomicAdd(base + own, sum);
}

// Scores of slots with these codes, by the only code of a query.
template <int S, int words>
__device__ __forceinline__ void score_by_query(const uint32_t (&code)[S][words],
                                               const uint32_t (&query)[words], int (&score)[S]) {
#pragma unroll
  for (int i = 0; i < S; ++i) {
    uint32_t same[words];
#pragma unroll
    for (int j = 0; j < words; ++j) same[j] = ~(code[i][j] ^ query[j]);
    score[i] = count_bits<words>(same);
  }
}

// Adds the scores of slots with these codes, by `count` planes, which lie `stride` words apart, and
// leaves the bits that agree with the first one. `base` is that of `fill_planes`; `odd`: whether the
// number of queries is.
template <int S, int words>
__device__ __forceinline__ void score_by_planes(uint32_t (&code)[S][words], const uint32_t* planes,
                                                int stride, int count, const int32_t* base,
                                                bool odd, int (&score)[S]) {
  uint32_t plane[words];
  move_code<words>(planes, plane);
  const int bits = *base;
#pragma unroll
  for (int i = 0; i < S; ++i) {
#pragma unroll
    for (int j = 0; j < words; ++j) code[i][j] ^= plane[j];
    score[i] += bits + (odd ? count_bits<words>(code[i]) : 0);
  }
  for (int p = 1; p < count; ++p) {
    move_code<words>(planes + p * stride, plane);
#pragma unroll
    for (int i = 0; i < S; ++i) {
      uint32_t both[words];
#pragma unroll
      for (int j = 0; j < words; ++j) both[j] = code[i][j] & plane[j];
      score[i] += count_bits<words>(both) << p;
    }
  }
}

}  // namespace jspec
