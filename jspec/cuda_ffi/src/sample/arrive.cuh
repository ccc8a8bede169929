// What follows when a position's tiles are all summed: its draft token is accepted or rejected, and
// what would end the row there is drawn, by the last block to finish.
#pragma once

#include "sample/draw.cuh"

namespace jspec {

// Counts this block in `counter`. Whether it is the last of `expected`: it then sees all that the
// others had written before they were counted.
__device__ __forceinline__ bool comes_last(uint32_t* counter, uint32_t expected) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = add_release(counter, 1) + 1 == expected;
    if (last) acquire();
  }
  __syncthreads();
  return last;
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
  uint64_t* numbers =
      sampling.workspace.numbers + (row * sampling.target.positions + position) * kRoles;
  if (lane < kRoles) numbers[lane] = number_of(sampling.settings.seeds + 2 * row, key, lane);
}

__device__ __forceinline__ uint64_t number_at(const Sampling& sampling, int64_t row, int position,
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

// Counts one of the `units` that a position has for each source, by a block. The last one draws.
template <typename Target, typename Draft>
__device__ __forceinline__ void arrive(const Draws& draws, int64_t row, int position, int units) {
  const Sampling& sampling = draws.sampling;
  const int64_t at = row * sampling.target.positions + position;
  if (!comes_last(sampling.workspace.arrived + at, units)) return;
  const Position p(sampling, sampling.target, row, position);
  const Cells cells(p, 0);
  const uint64_t number = number_at(sampling, row, position, draws.role);
  const Scale scale = warp_scale(p, cells);
  const uint32_t token = scale.certain != kNone
                             ? by_first_warp(scale.certain)
                             : draw_from<Target>(p, scale, cells, -1, number);
  if (token != kElsewhere && threadIdx.x % 32 == 0) draws.tokens[at] = token;
}

// A token at a position of target or draft, read before the position's scale is known.
template <typename Target, typename Draft>
struct Candidate {
  const Position& from;
  uint32_t token;
  float x;
  int32_t exponent;

  __device__ __forceinline__ Candidate(const Position& from, bool in_draft, uint32_t token)
      : from(from), token(token), x(-INFINITY) {
    const bool inside = token < from.vocabulary;
    if (inside) {
      x = in_draft ? logit_of(static_cast<const Draft*>(from.logits)[token])
                   : logit_of(static_cast<const Target*>(from.logits)[token]);
    }
    exponent = from.cells[inside ? token / kTile : 0].exponent;
  }

  __device__ __forceinline__ uint64_t probability(const Scale& scale) const {
    return Prober(from, scale, exponent)(token, x);
  }
};

// How far a row has got, in one word, so that one atomic operation says all and nothing need be
// ordered: in the lowest bits how many positions are done; above them the first position known to
// end the row, as the target's positions from there on, and the token that ends it.
struct Ended {
  unsigned long long word;

  __device__ Ended(unsigned long long word) : word(word) {}
  __device__ Ended(int behind, uint32_t token)
      : word(uint64_t(behind) << 48 | uint64_t(token) << 16) {}

  __device__ int behind() const { return word >> 48; }
  __device__ uint32_t token() const { return uint32_t(word >> 16); }
  __device__ int done() const { return word & 0xFFFF; }
};

// Adds to `*ended`, lately `seen`, one of `positions` that is done; it is 0 where the row does not
// end there. Returns what `*ended` then says.
__device__ __forceinline__ Ended add(unsigned long long* ended, Ended seen, Ended position,
                                     int positions) {
  while (true) {
    const Ended now = max(seen.word, position.word | seen.done()) + 1;
    if (now.done() == positions) return now;  // The others are done: none will read it.
    if (position.word == 0) return atomicAdd(ended, 1) + 1;
    const Ended before = atomicCAS(ended, seen.word, now.word);
    if (before.word == seen.word) return now;
    seen = before;
  }
}

// Counts one of the `units` that a position has for each source, by a block. The last one accepts
// or rejects the position's draft token and draws what would end the row there; the last of a row
// commits.
template <typename Target, typename Draft>
__device__ __forceinline__ void arrive(const Stochastic& stochastic, int64_t row, int position,
                                       int units) {
  const Sampling& sampling = stochastic.sampling;
  const Workspace& workspace = sampling.workspace;
  const int targets = sampling.target.positions, length = length_of(sampling, row);
  const bool verifies = position < length, drafted = verifies && sampling.draft.positions > 0;
  const int32_t token = verifies ? stochastic.draft_tokens[row * stochastic.gamma + position] : -1;
  uint32_t* arrived = workspace.arrived + row * targets + position;
  if (!comes_last(arrived, drafted ? 2 * units : units)) return;

  // All that is needed is on its way before the first is waited for. Where the draft has logits,
  // half of the warps see to them.
  Progress* progress = workspace.progress + row;
  const bool in_draft = drafted && threadIdx.x >= kThreads / 2;
  const Source& source = in_draft ? sampling.draft : sampling.target;
  const Position here(sampling, source, row, position);
  const Cells cells(here, 0);
  const Candidate<Target, Draft> candidate(here, in_draft, max(token, 0));
  const uint64_t accept = number_at(sampling, row, position, kAccept);
  const uint64_t number = number_at(sampling, row, position, verifies ? kResidual : kBonus);
  const Ended seen = *static_cast<volatile unsigned long long*>(&progress->ended);
  const int32_t draft = draft_at(stochastic, row, 0), stop = stop_at(stochastic, row, 0);

  uint32_t ending = by_first_warp(kNone);
  // Tiles of a position that is past may be missing. It may become so right now: all take one view.
  if (!__syncthreads_or(is_past(sampling, row, position))) {
    const Scale scale = warp_scale(here, cells);
    uint64_t p = verifies ? candidate.probability(scale) : 0, q = kOne;
    if (drafted) {
      __shared__ uint64_t probabilities[2];
      if (threadIdx.x % (kThreads / 2) == 0) probabilities[in_draft] = p;
      __syncthreads();
      p = probabilities[0], q = probabilities[1];
    }
    const bool rejects = verifies && !accepts(accept, q, p);
    if (rejects && threadIdx.x == 0) atomicMax(&progress->rejected, targets - position);
    if (rejects && drafted && threadIdx.x % (kThreads / 2) == 0) {
      workspace.scales[row * workspace.positions + source.first + position] = scale;
    }
    if (rejects || !verifies) {
      if (scale.certain != kNone) {
        ending = by_first_warp(scale.certain);
      } else if (drafted) {
        ending = by_first_warp(0);  // of no account: the residual's kernel draws
      } else {
        ending = draw_from<Target>(here, scale, cells, token, number);
      }
    }
  }
  if (ending == kElsewhere) return;
  Ended now = 0;
  if (threadIdx.x % 32 == 0) {
    const Ended own = ending == kNone ? 0 : Ended(targets - position, ending);
    now = add(&progress->ended, seen, own, length + 1);
  }
  now = __shfl_sync(kAllLanes, now.word, 0);
  if (now.done() <= length) return;
  const int at = targets - now.behind();
  if (at < length && sampling.draft.positions > 0 && !here.greedy()) return;
  commit(stochastic, row, length, at, now.token(), draft, stop);
}

}  // namespace jspec
