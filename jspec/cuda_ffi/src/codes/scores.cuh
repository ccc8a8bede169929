// The kernel of Hamming scores, which reads each code once.
#pragma once

#include "codes/codes.h"
#include "hashed/planes.cuh"

namespace jspec {

constexpr int kScorers = 256;  // threads of a block
constexpr int kTogether = 8;   // slots that a thread scores, next to each other

// Shared memory has a base for each of 32 heads, then the planes.
constexpr int kBases = 32;

// A block scores `heads` heads, whose codes are up to 128 bytes that lie together, of
// kScorers / heads * kTogether slots. `one`: a single code meets each key, which needs no planes.
template <int words, bool one, bool scaled>
__global__ void __launch_bounds__(kScorers, words >= 4 ? 2 : 3)
    hamming_kernel(const __grid_constant__ KeyScores scores, int heads, int groups, int chunks,
                   int plane_count) {
  extern __shared__ __align__(16) char memory[];
  int32_t* bases = reinterpret_cast<int32_t*>(memory);
  uint32_t* planes = reinterpret_cast<uint32_t*>(memory) + kBases;
  const int n = scores.n;
  // Heads of the same slots are adjacent in memory: blocks that run together read them.
  const int head0 = blockIdx.x % groups * heads, chunk = blockIdx.x / groups % chunks;
  const int64_t batch = blockIdx.x / groups / chunks;
  const int index = static_cast<int>(threadIdx.x) % heads, place = threadIdx.x / heads;
  const int head = min(head0 + index, scores.heads - 1), per_block = kScorers / heads;
  const bool works = head0 + index < scores.heads && place < per_block;
  const int64_t slot = (int64_t(chunk) * per_block + place) * kTogether;
  const int length = min(scores.lengths[batch], n);
  const int64_t row = batch * scores.heads + head;
  uint32_t code[kTogether][words];
  float norm[kTogether];
  const bool reads = works && slot < length;
  if (reads) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int64_t key = (batch * n + min(slot + i, int64_t(n) - 1)) * scores.heads + head;
      move_code<words>(scores.k_codes + key * words, code[i]);
      if constexpr (scaled) norm[i] = scores.norms[key];
    }
  }
  int score[kTogether] = {};
  if constexpr (one) {
    uint32_t query[words];
    move_code<words>(scores.q_codes + row * words, query);
    if (reads) score_by_query(code, query, score);
  } else {
    if (threadIdx.x < kBases) bases[threadIdx.x] = 0;
    __syncthreads();
    const Hash hash{scores.q_codes, scores.k_codes, scores.batch, scores.tokens, scores.heads,
                    scores.group, words, {}};
    fill_planes<words>(hash, batch, head0, heads, plane_count, planes, bases);
    __syncthreads();
    if (reads) {
      score_by_planes(code, planes + index * words, heads * words, plane_count, bases + index,
                      hash.queries() % 2, score);
    }
  }
  if (!works) return;
  const int highest = scores.tokens * scores.group * 32 * words;
  float* floats = static_cast<float*>(scores.scores) + row * n;
  int32_t* integers = static_cast<int32_t*>(scores.scores) + row * n;
#pragma unroll
  for (int i = 0; i < kTogether; i += 4) {
    int4 out;
    int* elements = reinterpret_cast<int*>(&out);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool read = slot + i + j < length;
      if constexpr (scaled) {
        const float estimate = float(2 * score[i + j] - highest) / float(32 * words);
        elements[j] = __float_as_int(read ? norm[i + j] * estimate : -INFINITY);
      } else {
        elements[j] = read ? score[i + j] : -1;
      }
    }
    if (n % 4 == 0) {
      if (slot + i < n) *reinterpret_cast<int4*>(integers + slot + i) = out;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (slot + i + j < n) integers[slot + i + j] = elements[j];
      }
    }
  }
}

}  // namespace jspec
