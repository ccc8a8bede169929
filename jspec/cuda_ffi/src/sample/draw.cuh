// Drawing a token by a block: a tile from the masses of all, which every warp finds for itself;
// then the thread in whose share of the tile the token is, and the token.
#pragma once

#include "sample/tile.cuh"

namespace jspec {

constexpr int kWarps = 4;  // of a block that sums tiles, verifies and draws
constexpr int kThreads = kWarps * 32;

constexpr int kShare = kTile / kThreads;  // tokens of a tile for a thread

// Blocks of a multiprocessor: two tiles of logits must fit a warp's registers.
template <typename Target, typename Draft>
constexpr int kBlocks =
    std::is_same_v<Target, Bfloat16> && std::is_same_v<Draft, Bfloat16> ? 8 : 5;

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
__device__ __forceinline__ bool is_rare(const Position& from, const Weigher& weigher) {
  return from.threshold > 0 || !weigher.near();
}

// The weight of a logit in such a tile, filters applied. Not inlined: its code would lie between
// what always runs.
__device__ __noinline__ uint64_t rare_weight(Position from, Weigher weigher, float x) {
  return from.keeps(x) ? weigher(x) : 0;
}

// The weight of a logit, filters applied.
__device__ __forceinline__ uint64_t kept_weight(const Position& from, const Weigher& weigher,
                                                float x) {
  return is_rare(from, weigher) ? rare_weight(from, weigher, x) : weigher.quick(x).value();
}

// A position to draw from, but for the token `without`.
template <typename Logit>
struct Plain {
  const Position& from;
  const Scale& scale;
  int32_t without;
  uint64_t without_weight;

  __device__ Plain(const Position& from, const Scale& scale, int32_t without)
      : from(from),
        scale(scale),
        without(without < from.vocabulary ? without : -1),
        without_weight(0) {
    if (this->without < 0) return;
    const float x = logit_of(static_cast<const Logit*>(from.logits)[without]);
    without_weight = kept_weight(from, weigher(without / kTile), x);
  }
  __device__ uint64_t mass(const Cell& cell, int tile) const {
    const uint64_t lost = without >= 0 && tile == without / kTile ? without_weight : 0;
    return shifted(cell.sum - lost, shift(cell.exponent));
  }
  // The weights of this thread's share of a tile; returns how far they are shifted to be masses.
  __device__ uint32_t weigh(int tile, uint64_t (&weights)[kShare]) const {
    const int32_t first = tile * kTile + threadIdx.x * kShare;
    const Weigher weigher = this->weigher(tile);
    const Share<Logit> share(static_cast<const Logit*>(from.logits) + first,
                             from.vocabulary - first);
    if (is_rare(from, weigher)) {
#pragma unroll
      for (int i = 0; i < kShare; ++i) weights[i] = rare_weight(from, weigher, share.x[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kShare; ++i) weights[i] = weigher.quick(share.x[i]).value();
    }
#pragma unroll
    for (int i = 0; i < kShare; ++i) weights[i] = first + i == without ? 0 : weights[i];
    return shift(weigher.exponent);
  }

 private:
  __device__ Weigher weigher(int tile) const { return {from.rate, from.cells[tile].exponent}; }
  __device__ uint32_t shift(int32_t exponent) const {
    return mass_shift(scale.exponent, exponent, guard_bits(from.tiles));
  }
};

// Probabilities of a tile's tokens in a position, in units of 2^-53.
struct Prober {
  const Position& from;
  const Scale& scale;
  Weigher weigher;
  uint32_t shift;

  __device__ __forceinline__ Prober(const Position& from, const Scale& scale, int32_t exponent)
      : from(from),
        scale(scale),
        weigher{from.rate, exponent},
        shift(mass_shift(scale.exponent, exponent, guard_bits(from.tiles))) {}

  // Whether `quick` may serve.
  __device__ __forceinline__ bool near() const {
    return scale.certain == kNone && !is_rare(from, weigher);
  }

  __device__ __forceinline__ uint64_t quick(float x) const {
    // As `probability_of`, of a mantissa: one shift for its distance and the tile's.
    const Weight weight = weigher.quick(x);
    const uint32_t tile = shift + scale.rescale, count = weight.place + (tile - Weight::kNear);
    return shifted(uint64_t(weight.mantissa) * scale.reciprocal, count < tile + 32 ? count : 64);
  }

  __device__ uint64_t operator()(uint32_t token, float x) const {
    if (scale.certain != kNone) return token == scale.certain ? kOne : 0;
    return probability_of(kept_weight(from, weigher, x), scale, shift);
  }
};

// What the target likes more than the draft did, in probabilities. Under the block rule those of the
// target count by `chance`, in units of 2^-53.
template <typename Target, typename Draft, bool kBlock = false>
struct Residual {
  const Position &p, &q;
  const Scale &p_scale, &q_scale;
  uint64_t chance = kOne;

  __device__ uint64_t mass(const Cell& cell, int) const { return cell.sum; }
  // The weights of this thread's share of a tile; returns how far they are shifted to be masses.
  __device__ uint32_t weigh(int tile, uint64_t (&weights)[kShare]) const {
    const int32_t first = tile * kTile + threadIdx.x * kShare;
    const Prober p_prober(p, p_scale, p.cells[tile].exponent);
    const Prober q_prober(q, q_scale, q.cells[tile].exponent);
    const Share<Target> p_share(static_cast<const Target*>(p.logits) + first, p.vocabulary - first);
    const Share<Draft> q_share(static_cast<const Draft*>(q.logits) + first, p.vocabulary - first);
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      weights[i] =
          over(scaled(p_prober(first + i, p_share.x[i])), q_prober(first + i, q_share.x[i]));
    }
    return 0;
  }
  // Of a whole tile, by a warp.
  __device__ __forceinline__ uint64_t total(int tile) const {
    const int first = tile * kTile, left = p.vocabulary - first;
    const Prober p_prober(p, p_scale, p.cells[tile].exponent);
    const Prober q_prober(q, q_scale, q.cells[tile].exponent);
    Tile<Target> x;
    Tile<Draft> y;
    x.load(static_cast<const Target*>(p.logits) + first, left);
    y.load(static_cast<const Draft*>(q.logits) + first, left);
    uint64_t sum = 0;
    if (p_prober.near() && q_prober.near()) {
#pragma unroll
      for (int i = 0; i < x.kEach; ++i) {
        // Both are below 2^54, so the upper half of their difference has its sign.
        const uint64_t more = scaled(p_prober.quick(x[i])) - q_prober.quick(y[i]);
        if (static_cast<int32_t>(more >> 32) >= 0) sum += more;
      }
    } else {
#pragma unroll 1
      for (int i = threadIdx.x % 32; i < min(left, kTile); i += 32) {
        const float p_x = logit_of(static_cast<const Target*>(p.logits)[first + i]);
        const float q_x = logit_of(static_cast<const Draft*>(q.logits)[first + i]);
        sum += over(scaled(p_prober(first + i, p_x)), q_prober(first + i, q_x));
      }
    }
    return warp_sum(sum);
  }

 private:
  __device__ __forceinline__ uint64_t scaled(uint64_t p) const {
    return kBlock ? times(chance, p) : p;
  }
  __device__ __forceinline__ static uint64_t over(uint64_t p, uint64_t q) {
    return p > q ? p - q : 0;
  }
};

constexpr uint32_t kElsewhere = kNone - 1;  // the token is another warp's to go on with

// A token that all warps know, for the first of them.
__device__ __forceinline__ uint32_t by_first_warp(uint32_t token) {
  return threadIdx.x < 32 ? token : kElsewhere;
}

// The token that `number` draws, for the warp that finds it; kNone from what has no mass. `cells`
// holds the masses, and `first` are the first of its cells.
template <typename From>
__device__ __forceinline__ uint32_t draw(const From& from, const Position& cells,
                                         const Cells& first, uint64_t number) {
  uint64_t total = 0;
  for_cells(cells, first, [&](const Cells& here) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total += from.mass(here.cell[i], here.first + i);
    return true;
  });
  total = warp_sum(total);
  if (total == 0) return kNone;

  uint64_t left = high64(number, total);
  int tile;
  for_cells(cells, first, [&](const Cells& here) {
    uint64_t masses[4], own = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) own += masses[i] = from.mass(here.cell[i], here.first + i);
    const uint64_t reached = warp_reached(own);
    const uint32_t over = __ballot_sync(kAllLanes, reached > left);
    if (!over) {
      left -= __shfl_sync(kAllLanes, reached, 31);
      return true;
    }
    uint64_t rest = left - (reached - own);
    int passed = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (passed == i && rest >= masses[i]) rest -= masses[i], ++passed;
    }
    left = __shfl_sync(kAllLanes, rest, __ffs(over) - 1);
    tile = __shfl_sync(kAllLanes, here.first + passed, __ffs(over) - 1);
    return false;
  });

  // The token is the first whose cumulative weight, shifted, exceeds `left`: reaches `limit`.
  __shared__ uint64_t sums[kWarps];
  uint64_t weights[kShare];
  const uint32_t shift = from.weigh(tile, weights);
  const uint64_t limit = (left + 1) << shift;
  uint64_t sum = 0;
#pragma unroll
  for (uint64_t weight : weights) sum += weight;
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
    reached += weights[i];
    token += reached < limit;
  }
  return __shfl_sync(kAllLanes, token, __ffs(over) - 1);
}

// As `draw`, from a position that is not certain, but for the token `without` where anything else
// has mass.
template <typename Logit>
__device__ __forceinline__ uint32_t draw_from(const Position& from, const Scale& scale,
                                              const Cells& first, int32_t without,
                                              uint64_t number) {
#pragma unroll 1
  while (true) {
    const uint32_t token = draw(Plain<Logit>(from, scale, without), from, first, number);
    if (token != kNone) return token;
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
