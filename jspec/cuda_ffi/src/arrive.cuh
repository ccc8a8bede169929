// What follows when a position's tiles are all summed: its draft token is judged, and what the row
// commits is drawn; by the warp that was the last to come.
#pragma once

#include "draw.cuh"

namespace jspec {

// Adds to `counter`, by a warp. Whether that made it `expected`: the warp then sees all that others
// had written before they added.
__device__ __forceinline__ bool comes_last(uint32_t* counter, uint32_t count, uint32_t expected) {
  uint32_t before = 0;
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(count)
                 : "memory");
  }
  if (__shfl_sync(kAllLanes, before, 0) + count < expected) return false;
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  return true;
}

// Positions of the target that count in a row, but for the first.
__device__ __forceinline__ int length_of(const Sampling& sampling, int64_t row) {
  const int most = sampling.target.positions - 1;
  return sampling.lengths ? max(0, min(sampling.lengths[row], most)) : most;
}

// Whether a draft token before `position` is known to be rejected.
__device__ __forceinline__ bool is_past(const Sampling& sampling, int64_t row, int position) {
  const volatile uint32_t* rejected = &sampling.workspace.progress[row].rejected;
  return *rejected > uint32_t(sampling.target.positions - position);
}

// Draws the random numbers of a position, a role a lane: long before they are needed.
__device__ __forceinline__ void draw_numbers(const Sampling& sampling, int64_t row, int position,
                                             int32_t key) {
  const int lane = threadIdx.x % 32;
  uint32_t* numbers =
      sampling.workspace.numbers + (row * sampling.target.positions + position) * kRoles;
  if (lane < kRoles) numbers[lane] = number_of(sampling.settings.seeds[row], key, lane);
}

__device__ __forceinline__ uint32_t number_at(const Sampling& sampling, int64_t row, int position,
                                              uint32_t role) {
  const int64_t at = row * sampling.target.positions + position;
  return sampling.workspace.numbers[at * kRoles + role];
}

// The position that keys the random numbers.
__device__ __forceinline__ int32_t keyed_by(const Draws& draws, int64_t row, int position) {
  return draws.positions[row * draws.sampling.target.positions + position];
}

__device__ __forceinline__ int32_t keyed_by(const Stochastic& stochastic, int64_t row,
                                            int position) {
  return stochastic.positions[row] + position;
}

// Counts `count` of the `units` that a position has for each source. The last one draws.
template <typename Target, typename Draft>
__device__ __forceinline__ void arrive(const Draws& draws, int64_t row, int position, int count,
                                       int units) {
  const Sampling& sampling = draws.sampling;
  uint32_t* arrived = sampling.workspace.arrived + row * sampling.target.positions + position;
  if (!comes_last(arrived, count, units)) return;
  const Row p(sampling, sampling.target, row, position);
  const uint32_t number = number_at(sampling, row, position, draws.role);
  const Norm norm = warp_norm(p);
  int32_t token = norm.best == kNone ? 0 : norm.best;
  if (!p.greedy()) token = draw_row<Target>(p, norm, -1, number);
  if (threadIdx.x % 32 == 0) draws.tokens[row * sampling.target.positions + position] = token;
}

// The probability of a token at a position of target or draft.
template <typename Logit>
__device__ __forceinline__ uint32_t probability(const Sampling& sampling, const Source& source,
                                                int64_t row, int at, int32_t token) {
  const Row here(sampling, source, row, at);
  const bool inside = token < here.vocabulary;
  const int tile = inside ? token / kTile : 0;
  const float x = inside ? logit_of(static_cast<const Logit*>(here.logits)[token]) : -INFINITY;
  const Weigher weigher{here.rate, here.cells[tile].exponent};
  const Norm norm = warp_norm(here);
  if (here.greedy()) return uint32_t(token) == norm.best ? kOne : 0;
  return scaled(kept_weight(here, norm, weigher, x), scale_of(norm, weigher.exponent));
}

// Has data come to L1 that `commit` needs.
__device__ __forceinline__ void prefetch(const void* data) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(data));
}

// Ends a row, but for the residual of a draft with logits.
template <typename Target>
__device__ __forceinline__ void finish(const Stochastic& stochastic, int64_t row, int length) {
  const Sampling& sampling = stochastic.sampling;
  const uint32_t behind = sampling.workspace.progress[row].rejected;
  const bool rejected = behind > 0;
  const int at = rejected ? sampling.target.positions - behind : length;
  const Row p(sampling, sampling.target, row, at);
  const uint32_t number = number_at(sampling, row, at, rejected ? kResidual : kBonus);
  const int32_t without = rejected ? stochastic.draft_tokens[row * stochastic.gamma + at] : -1;
  if (stochastic.gamma) prefetch(stochastic.draft_tokens + row * stochastic.gamma);
  if (stochastic.stops) prefetch(stochastic.stop_tokens + row * stochastic.stops);
  const Norm norm = warp_norm(p);
  int32_t token = norm.best == kNone ? 0 : norm.best;
  if (!p.greedy()) {
    if (rejected && sampling.draft.positions > 0) {
      const Norm q_norm = warp_norm(Row(sampling, sampling.draft, row, at));
      Norm* norms = sampling.workspace.norms + 2 * row;
      if (threadIdx.x % 32 == 0) norms[0] = norm, norms[1] = q_norm;
      return;
    }
    token = draw_row<Target>(p, norm, without, number);
  }
  commit(stochastic, row, length, at, token);
}

// Counts `count` of the `units` that a position has for each source. The last one judges the
// position's draft token, and the last of a row ends it: what is behind the draft is not judged.
template <typename Target, typename Draft>
__device__ __forceinline__ void arrive(const Stochastic& stochastic, int64_t row, int position,
                                       int count, int units) {
  const Sampling& sampling = stochastic.sampling;
  const int length = length_of(sampling, row);
  const int sources = sampling.draft.positions ? 2 : 1;
  uint32_t* arrived = sampling.workspace.arrived + row * sampling.target.positions + position;
  Progress* progress = sampling.workspace.progress + row;
  if (position < length) {
    if (!comes_last(arrived, count, sources * units)) return;
    count = 1;
  }
  // Tiles of a position that is past may be missing.
  if (position < length && !is_past(sampling, row, position)) {
    const int32_t token = max(stochastic.draft_tokens[row * stochastic.gamma + position], 0);
    const uint32_t number = number_at(sampling, row, position, kAccept);
    uint32_t q = kOne;
    if (sampling.draft.positions) {
      q = probability<Draft>(sampling, sampling.draft, row, position, token);
    }
    const uint32_t p = probability<Target>(sampling, sampling.target, row, position, token);
    if (!stands(number, q, p) && threadIdx.x % 32 == 0) {
      atomicMax(&progress->rejected, sampling.target.positions - position);
    }
    __syncwarp();
  }
  if (comes_last(&progress->judged, count, length + units)) {
    finish<Target>(stochastic, row, length);
  }
}

}  // namespace jspec
