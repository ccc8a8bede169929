// Drawing a token by a warp: a tile from the masses of all, a lane from the sums of the tile's, a
// token from the weights of the lane's.
#pragma once

#include "tile.cuh"

namespace jspec {

// The weight of a logit, filters applied.
__device__ __forceinline__ uint32_t kept_weight(const Row& row, const Norm& norm,
                                                const Weigher& weigher, float x) {
  return row.filters() && !row.keeps(x, norm) ? 0 : weigher(x);
}

// A position to draw from, but for the token `without`.
template <typename Logit>
struct Plain {
  const Row& row;
  const Norm& norm;
  int32_t without;
  uint32_t without_weight;

  __device__ Plain(const Row& row, const Norm& norm, int32_t without)
      : row(row), norm(norm), without(without), without_weight(0) {
    if (without >= row.vocabulary) this->without = -1;
    if (this->without >= 0) without_weight = all(without);
  }
  __device__ const Cell* cells() const { return row.cells; }
  __device__ uint32_t scale(const Cell& cell) const { return scale_of(norm, cell.exponent); }
  __device__ uint32_t mass(const Cell& cell, int tile) const {
    const uint32_t lost = without >= 0 && tile == without / kTile ? without_weight : 0;
    return scaled(cell.sum - lost, scale(cell));
  }
  // The sum of the weights of this lane's tokens of a tile.
  __device__ uint64_t sum(int tile) const {
    const int32_t begin = tile * kTile + threadIdx.x % 32 * 32;
    const int32_t end = min(begin + 32, row.vocabulary);
    uint64_t sum = 0;
#pragma unroll 4
    for (int32_t token = begin; token < end; ++token) sum += weight(token);
    return sum;
  }
  __device__ uint32_t weight(int32_t token) const { return token == without ? 0 : all(token); }

 private:
  __device__ uint32_t all(int32_t token) const {
    const Weigher weigher{row.rate, row.cells[token / kTile].exponent};
    return kept_weight(row, norm, weigher, logit_of(static_cast<const Logit*>(row.logits)[token]));
  }
};

// What the target likes more than the draft did, in probabilities.
template <typename Target, typename Draft>
struct Residual {
  const Row &p, &q;
  const Norm &p_norm, &q_norm;

  __device__ const Cell* cells() const { return q.cells; }
  __device__ uint32_t scale(const Cell&) const { return kWeight; }
  __device__ uint32_t mass(const Cell& cell, int) const { return static_cast<uint32_t>(cell.sum); }
  __device__ uint32_t weight(int32_t token) const {
    const Weigher p_weigher{p.rate, p.cells[token / kTile].exponent};
    const Weigher q_weigher{q.rate, q.cells[token / kTile].exponent};
    const float x = logit_of(static_cast<const Target*>(p.logits)[token]);
    const float y = logit_of(static_cast<const Draft*>(q.logits)[token]);
    return over(kept_weight(p, p_norm, p_weigher, x), scale_of(p_norm, p_weigher.exponent),
                kept_weight(q, q_norm, q_weigher, y), scale_of(q_norm, q_weigher.exponent));
  }
  // Of this lane's tokens of a tile.
  __device__ uint64_t sum(int tile) const {
    const int32_t begin = tile * kTile + threadIdx.x % 32 * 32;
    const int32_t end = min(begin + 32, p.vocabulary);
    uint64_t sum = 0;
#pragma unroll 4
    for (int32_t token = begin; token < end; ++token) sum += weight(token);
    return sum;
  }
  // Of a whole tile, by a warp.
  __device__ __forceinline__ uint32_t total(int tile) const {
    const int first = tile * kTile, left = p.vocabulary - first;
    const Weigher p_weigher{p.rate, p.cells[tile].exponent};
    const Weigher q_weigher{q.rate, q.cells[tile].exponent};
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
  // Of a token's weights, below 2^27, and scales.
  __device__ __forceinline__ static uint32_t over(uint32_t p, uint32_t p_scale, uint32_t q,
                                                  uint32_t q_scale) {
    const uint32_t target = __umulhi(p << 5, p_scale << 1);
    return target - min(target, __umulhi(q << 5, q_scale << 1));
  }
};

// The token that `number` draws, or kNone from what has no mass.
template <typename From>
__device__ __forceinline__ uint32_t draw(const From& from, uint32_t number, int tiles,
                                         int vocabulary) {
  uint32_t total = 0;
#pragma unroll 1
  for (int begin = 0; begin < tiles; begin += kCells) {
    const Cells here(from.cells(), tiles, begin);
#pragma unroll
    for (int i = 0; i < 4; ++i) total += from.mass(here.cell[i], here.first + i);
  }
  total = __reduce_add_sync(kAllLanes, total);
  if (total == 0) return kNone;

  uint32_t left = target_of(number, total);
  int tile;
  for (int begin = 0;; begin += kCells) {
    const Cells here(from.cells(), tiles, begin);
    uint32_t masses[4], own = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) own += masses[i] = from.mass(here.cell[i], here.first + i);
    const uint32_t reached = warp_reached(own);
    const uint32_t over = __ballot_sync(kAllLanes, reached > left);
    if (!over) {
      left -= __shfl_sync(kAllLanes, reached, 31);
      continue;
    }
    uint32_t rest = left - (reached - own);
    int passed = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (passed == i && rest >= masses[i]) rest -= masses[i], ++passed;
    }
    left = __shfl_sync(kAllLanes, rest, __ffs(over) - 1);
    tile = __shfl_sync(kAllLanes, here.first + passed, __ffs(over) - 1);
    break;
  }

  const int lane = threadIdx.x % 32;
  const uint32_t scale = from.scale(from.cells()[tile]);
  const uint64_t sum = from.sum(tile);
  const uint64_t sums = warp_reached(sum);
  const int first = __ffs(__ballot_sync(kAllLanes, scaled(sums, scale) > left)) - 1;
  const uint64_t before = __shfl_sync(kAllLanes, sums - sum, first);
  const int32_t token = tile * kTile + first * 32;
  const uint64_t weight = token + lane < vocabulary ? from.weight(token + lane) : 0;
  const uint64_t ends = before + warp_reached(weight);
  return token + __ffs(__ballot_sync(kAllLanes, scaled(ends, scale) > left)) - 1;
}

// As `draw`, from a row that is not greedy, but for the token `without` where anything else has
// mass, and 0 where nothing has.
template <typename Logit>
__device__ __forceinline__ int32_t draw_row(const Row& row, const Norm& norm, int32_t without,
                                            uint32_t number) {
#pragma unroll 1
  while (true) {
    const Plain<Logit> plain(row, norm, without);
    const uint32_t token = draw(plain, number, row.tiles, row.vocabulary);
    if (token != kNone) return token;
    if (without < 0) return 0;
    without = -1;
  }
}

// Writes all results of a row, which `following` ends.
__device__ inline void commit(const Stochastic& stochastic, int64_t row, int length, int accepted,
                                   int32_t following) {
  const int lane = threadIdx.x % 32;
  const int32_t* draft = stochastic.draft_tokens + row * stochastic.gamma;
  const int32_t* stops = stochastic.stop_tokens + row * stochastic.stops;
  int32_t* tokens = stochastic.tokens + row * (stochastic.gamma + 1);
  int last = accepted;
  bool stopped = false;
  for (int start = 0; start <= stochastic.gamma; start += 32) {
    const int at = start + lane;
    const int32_t token = at < accepted ? draft[at] : at == accepted ? following : -1;
    bool stop = false;
    for (int i = 0; i < stochastic.stops; ++i) stop |= (token >= 0) & (token == stops[i]);
    const uint32_t ends = __ballot_sync(kAllLanes, stop);
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
