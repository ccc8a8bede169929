// Drawing a token by a block: a tile from the masses of all, which every warp finds for itself;
// then the thread in whose share of the tile the token is, and the token.
#pragma once

#include "sample/tile.cuh"

namespace jspec {

constexpr int kWarps = 4;  // of a block that sums tiles, judges and draws
constexpr int kThreads = kWarps * 32;

constexpr int kShare = kTile / kThreads;  // tokens of a tile for a thread

// The logits of a thread's share of a tile, which are neighbours; minus infinity behind the end.
template <typename Logit>
struct Share {
  float x[kShare];

  // From `logits` on, of which `left` are left.
  __device__ __forceinline__ Share(const Logit* logits, int left) {
    if (is_aligned(logits) && left >= kShare) {
      Logit own[kShare];
      uint4 words[sizeof own / sizeof(uint4)];
#pragma unroll
      for (int i = 0; i < sizeof own / sizeof(uint4); ++i) {
        words[i] = __ldg(reinterpret_cast<const uint4*>(logits) + i);
      }
      memcpy(own, words, sizeof own);
#pragma unroll
      for (int i = 0; i < kShare; ++i) x[i] = logit_of(own[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kShare; ++i) x[i] = i < left ? logit_of(logits[i]) : -INFINITY;
  }
};

// Whether the weights of a tile need more than `Weigher::quick`.
__device__ __forceinline__ bool is_rare(const Row& row, const Weigher& weigher) {
  return row.filters() || !weigher.near();
}

// The weight of a logit in such a tile, filters applied. No part of its callers, where it would
// stand between what always runs.
__device__ __noinline__ uint32_t rare_weight(Row row, Norm norm, Weigher weigher, float x) {
  return row.filters() && !row.keeps(x, norm) ? 0 : weigher(x);
}

// The weight of a logit, filters applied.
__device__ __forceinline__ uint32_t kept_weight(const Row& row, const Norm& norm,
                                                const Weigher& weigher, float x) {
  return is_rare(row, weigher) ? rare_weight(row, norm, weigher, x) : weigher.quick(x);
}

// A position to draw from, but for the token `without`.
template <typename Logit>
struct Plain {
  const Row& row;
  const Norm& norm;
  int32_t without;
  uint32_t without_weight;

  __device__ Plain(const Row& row, const Norm& norm, int32_t without)
      : row(row), norm(norm), without(without < row.vocabulary ? without : -1), without_weight(0) {
    if (this->without < 0) return;
    const float x = logit_of(static_cast<const Logit*>(row.logits)[without]);
    without_weight = kept_weight(row, norm, weigher(without / kTile), x);
  }
  __device__ uint32_t mass(const Cell& cell, int tile) const {
    const uint32_t lost = without >= 0 && tile == without / kTile ? without_weight : 0;
    return scaled(cell.sum - lost, scale_of(norm, cell.exponent));
  }
  // The weights of this thread's share of a tile; returns the tile's scale.
  __device__ uint32_t weigh(int tile, uint32_t (&weights)[kShare]) const {
    const int32_t first = tile * kTile + threadIdx.x * kShare;
    const Weigher weigher = this->weigher(tile);
    const Share<Logit> share(static_cast<const Logit*>(row.logits) + first, row.vocabulary - first);
    if (is_rare(row, weigher)) {
#pragma unroll
      for (int i = 0; i < kShare; ++i) weights[i] = rare_weight(row, norm, weigher, share.x[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kShare; ++i) weights[i] = weigher.quick(share.x[i]);
    }
#pragma unroll
    for (int i = 0; i < kShare; ++i) weights[i] = first + i == without ? 0 : weights[i];
    return scale_of(norm, weigher.exponent);
  }

 private:
  __device__ Weigher weigher(int tile) const { return {row.rate, row.cells[tile].exponent}; }
};

// What the target likes more than the draft did, in probabilities.
template <typename Target, typename Draft>
struct Residual {
  const Row &p, &q;
  const Norm &p_norm, &q_norm;

  __device__ uint32_t mass(const Cell& cell, int) const { return static_cast<uint32_t>(cell.sum); }
  // The weights of this thread's share of a tile; returns the tile's scale.
  __device__ uint32_t weigh(int tile, uint32_t (&weights)[kShare]) const {
    const int32_t first = tile * kTile + threadIdx.x * kShare;
    const Weigher p_weigher = this->p_weigher(tile), q_weigher = this->q_weigher(tile);
    const Share<Target> p_share(static_cast<const Target*>(p.logits) + first, p.vocabulary - first);
    const Share<Draft> q_share(static_cast<const Draft*>(q.logits) + first, p.vocabulary - first);
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      weights[i] = weight(p_weigher, q_weigher, p_share.x[i], q_share.x[i]);
    }
    return kWeight;
  }
  // Of a whole tile, by a warp.
  __device__ __forceinline__ uint32_t total(int tile) const {
    const int first = tile * kTile, left = p.vocabulary - first;
    const Weigher p_weigher = this->p_weigher(tile), q_weigher = this->q_weigher(tile);
    Tile<Target> x;
    Tile<Draft> y;
    x.load(static_cast<const Target*>(p.logits) + first, left);
    y.load(static_cast<const Draft*>(q.logits) + first, left);
    uint32_t sum = 0;  // of at most 2^30
    if (p_weigher.near() && q_weigher.near() && !p.filters() && !q.filters()) {
      x.raise(p_weigher.least());
      y.raise(q_weigher.least());
      const uint32_t p_scale = scale_of(p_norm, p_weigher.exponent);
      const uint32_t q_scale = scale_of(q_norm, q_weigher.exponent);
#pragma unroll
      for (int i = 0; i < x.kEach; ++i) {
        sum += over(p_weigher.template raised<Target>(x[i]), p_scale,
                    q_weigher.template raised<Draft>(y[i]), q_scale);
      }
    } else {
#pragma unroll 1
      for (int i = threadIdx.x % 32; i < min(left, kTile); i += 32) sum += weight(first + i);
    }
    return __reduce_add_sync(kAllLanes, sum);
  }

 private:
  __device__ Weigher p_weigher(int tile) const { return {p.rate, p.cells[tile].exponent}; }
  __device__ Weigher q_weigher(int tile) const { return {q.rate, q.cells[tile].exponent}; }
  __device__ uint32_t weight(int32_t token) const {
    const float x = logit_of(static_cast<const Target*>(p.logits)[token]);
    const float y = logit_of(static_cast<const Draft*>(q.logits)[token]);
    return weight(p_weigher(token / kTile), q_weigher(token / kTile), x, y);
  }
  // Of a token with logits x and y.
  __device__ __forceinline__ uint32_t weight(const Weigher& p_weigher, const Weigher& q_weigher,
                                             float x, float y) const {
    return over(kept_weight(p, p_norm, p_weigher, x), scale_of(p_norm, p_weigher.exponent),
                kept_weight(q, q_norm, q_weigher, y), scale_of(q_norm, q_weigher.exponent));
  }
  // Of a token's weights, below 2 * kWeight, and scales.
  __device__ __forceinline__ static uint32_t over(uint32_t p, uint32_t p_scale, uint32_t q,
                                                  uint32_t q_scale) {
    constexpr uint32_t kUp = 2 * kOne / kWeight;
    const uint32_t target = __umulhi(p * kUp, p_scale << 1);
    return target - min(target, __umulhi(q * kUp, q_scale << 1));
  }
};

constexpr uint32_t kElsewhere = kNone - 1;  // the token is another warp's to go on with

// A token that all warps know, for the first of them.
__device__ __forceinline__ uint32_t by_first_warp(uint32_t token) {
  return threadIdx.x < 32 ? token : kElsewhere;
}

// The token that `number` draws, for the warp that finds it; kNone from what has no mass. `row` has
// the masses, and `first` are the first of its cells.
template <typename From>
__device__ __forceinline__ uint32_t draw(const From& from, const Row& row, const Cells& first,
                                         uint32_t number) {
  uint32_t total = 0;
  for_cells(row, first, [&](const Cells& here) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total += from.mass(here.cell[i], here.first + i);
    return true;
  });
  total = __reduce_add_sync(kAllLanes, total);
  if (total == 0) return kNone;

  uint32_t left = target_of(number, total);
  int tile;
  for_cells(row, first, [&](const Cells& here) {
    uint32_t masses[4], own = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) own += masses[i] = from.mass(here.cell[i], here.first + i);
    const uint32_t reached = warp_reached(own);
    const uint32_t over = __ballot_sync(kAllLanes, reached > left);
    if (!over) {
      left -= __shfl_sync(kAllLanes, reached, 31);
      return true;
    }
    uint32_t rest = left - (reached - own);
    int passed = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (passed == i && rest >= masses[i]) rest -= masses[i], ++passed;
    }
    left = __shfl_sync(kAllLanes, rest, __ffs(over) - 1);
    tile = __shfl_sync(kAllLanes, here.first + passed, __ffs(over) - 1);
    return false;
  });

  // The sums are those that `scaled` rounds; the token is the first that brings them to `limit`.
  __shared__ uint64_t sums[kWarps];
  uint32_t weights[kShare];
  const uint64_t scale = from.weigh(tile, weights), limit = (uint64_t(left) + 1) * kWeight;
  uint64_t sum = 0;
#pragma unroll
  for (uint32_t weight : weights) sum += weight * scale;
  uint64_t reached = warp_reached(sum);
  if (threadIdx.x % 32 == 31) sums[threadIdx.x / 32] = reached;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps - 1; ++i) reached += i < threadIdx.x / 32 ? sums[i] : 0;
  const uint32_t over = __ballot_sync(kAllLanes, reached >= limit && reached - sum < limit);
  if (!over) return kElsewhere;
  reached -= sum;
  uint32_t token = tile * kTile + threadIdx.x * kShare;
#pragma unroll
  for (int i = 0; i < kShare - 1; ++i) {
    reached += weights[i] * scale;
    token += reached < limit;
  }
  return __shfl_sync(kAllLanes, token, __ffs(over) - 1);
}

// As `draw`, from a row that is not greedy, but for the token `without` where anything else has
// mass, and 0 where nothing has.
template <typename Logit>
__device__ __forceinline__ uint32_t draw_row(const Row& row, const Norm& norm, const Cells& first,
                                             int32_t without, uint32_t number) {
#pragma unroll 1
  while (true) {
    const uint32_t token = draw(Plain<Logit>(row, norm, without), row, first, number);
    if (token != kNone) return token;
    if (without < 0) return by_first_warp(0);
    without = -1;
  }
}

// The draft token of a lane's position from `start` on, or -1.
__device__ __forceinline__ int32_t draft_at(const Stochastic& stochastic, int64_t row, int start) {
  const int at = start + threadIdx.x % 32;
  return at < stochastic.gamma ? stochastic.draft_tokens[row * stochastic.gamma + at] : -1;
}

__device__ __forceinline__ int32_t stop_at(const Stochastic& stochastic, int64_t row, int index) {
  return index < stochastic.stops ? stochastic.stop_tokens[row * stochastic.stops + index] : -1;
}

// Writes all results of a row, which `following` ends, by a warp. `draft` and `stop` are the first
// of `draft_at` and `stop_at`, read long before.
__device__ __forceinline__ void commit(const Stochastic& stochastic, int64_t row, int length,
                                       int accepted, int32_t following, int32_t draft,
                                       int32_t stop) {
  const int lane = threadIdx.x % 32;
  int32_t* tokens = stochastic.tokens + row * (stochastic.gamma + 1);
  int last = accepted;
  bool stopped = false;
#pragma unroll 1
  for (int start = 0; start <= stochastic.gamma; start += 32) {
    const int at = start + lane;
    if (start > 0) draft = draft_at(stochastic, row, start);
    const int32_t token = at < accepted ? draft : at == accepted ? following : -1;
    bool stops = token == stop;
#pragma unroll 1
    for (int i = 1; i < stochastic.stops; ++i) stops |= token == stop_at(stochastic, row, i);
    const uint32_t ends = __ballot_sync(kAllLanes, stops && token >= 0);
    if (ends && !stopped) stopped = true, last = start + __ffs(ends) - 1;
    if (at <= stochastic.gamma) tokens[at] = at <= last ? token : -1;
  }
  if (lane > 0) return;
  const bool cut = last < accepted;
  stochastic.accepted[row] = cut ? last + 1 : accepted;
  stochastic.committed[row] = last + 1;
  stochastic.mismatch[row] = !cut && accepted < length;
  stochastic.next_token[row] = cut ? -1 : following;
  stochastic.stopped[row] = stopped;
}

}  // namespace jspec
