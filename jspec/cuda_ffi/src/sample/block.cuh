// Block verification of a draft with logits: the last block of a position leaves the probabilities of
// its draft token, the last of a row how likely each part of the draft is accepted. Where the draft is
// not taken whole, another kernel sums the residuals, and its last block of a row decides and draws.
#pragma once

#include "sample/arrive.cuh"

namespace jspec {

struct Block {
  Stochastic stochastic;
  Sampling sampling;  // that of `stochastic`, where the kernels look for it
};

__device__ __forceinline__ int32_t keyed_by(const Block& task, int64_t row, int position) {
  return keyed_by(task.stochastic, row, position);
}

// Numbers of a position below the draft's length that are not random: the places of the roles that
// such a position has no use for.
constexpr uint32_t kChance = kDraft;      // that of the draft before it; of the target at first
constexpr uint32_t kDraftChance = kBonus;

// Counts one of the `units` that a position has for each source, by a block. The last one of a row
// commits a draft that is accepted whole, and a greedy row.
template <typename Target, typename Draft>
__device__ __forceinline__ void arrive(const Block& task, int64_t row, int position, int units) {
  const Stochastic& stochastic = task.stochastic;
  const Sampling& sampling = task.sampling;
  const Workspace& workspace = sampling.workspace;
  const int targets = sampling.target.positions, length = length_of(sampling, row);
  const bool drafted = position < length;
  uint32_t* arrived = workspace.arrived + row * targets + position;
  if (!comes_last(arrived, drafted ? 2 * units : units)) return;

  uint64_t* numbers = workspace.numbers + row * targets * kRoles;
  Scale* scales = workspace.scales + row * workspace.positions;
  const bool in_draft = drafted && threadIdx.x >= kThreads / 2;
  const Source& source = in_draft ? sampling.draft : sampling.target;
  const Position here(sampling, source, row, position);
  const Cells cells(here, 0);
  const int32_t token = drafted ? stochastic.draft_tokens[row * stochastic.gamma + position] : 0;
  const Candidate<Target, Draft> candidate(here, in_draft, max(token, 0));
  const Scale scale = warp_scale(here, cells);
  if (threadIdx.x % (kThreads / 2) == 0) {
    scales[source.first + position] = scale;
    if (drafted) {
      numbers[position * kRoles + (in_draft ? kDraftChance : kChance)] =
          candidate.probability(scale);
    }
  }
  Progress* progress = workspace.progress + row;
  if (!comes_last(&progress->judged, length + 1)) return;

  // The chances, by a thread: each needs the one before it.
  __shared__ int shared_at;
  __shared__ bool shared_whole;
  if (threadIdx.x == 0) {
    uint64_t chance = kOne;
    int from = 0;
#pragma unroll 1
    for (int i = 0; i < length; ++i) {
      const uint64_t p = numbers[i * kRoles + kChance], q = numbers[i * kRoles + kDraftChance];
      numbers[i * kRoles + kChance] = chance;
      if (chance == kOne) from = i;
      chance = chance_of(chance, p, q);
    }
    const bool whole =
        length == 0 || takes_block(numbers[(length - 1) * kRoles + kAccept], chance);
    shared_at = whole ? length : from;
    shared_whole = whole;
    if (!whole) progress->rejected = targets - from;
  }
  __syncthreads();
  const int at = shared_at;
  // Behind a token that must be accepted a greedy row has none that can be.
  if (!shared_whole && !here.greedy()) return;
  const Position end(sampling, sampling.target, row, at);
  const Scale end_scale = scales[at];
  const uint32_t following =
      end_scale.certain != kNone
          ? by_first_warp(end_scale.certain)
          : draw_from<Target>(end, end_scale, Cells(end, 0), -1, numbers[at * kRoles + kBonus]);
  if (following == kElsewhere) return;
  commit(stochastic, row, length, at, following, draft_at(stochastic, row, 0),
         stop_at(stochastic, row, 0));
}

// The residuals' masses in each tile of the rows that are not done, a warp a tile, a grid's z a
// position; the last block of a row decides how much is accepted, and draws.
template <typename Target, typename Draft>
__global__ void __launch_bounds__(kThreads, kBlocks<Target, Draft>)
    block_residual_kernel(const __grid_constant__ Block task, int64_t first_row) {
  const Stochastic& stochastic = task.stochastic;
  const Sampling& sampling = task.sampling;
  const int64_t row = first_row + blockIdx.y;
  Progress* progress = sampling.workspace.progress + row;
  const uint32_t behind = progress->rejected;
  if (behind == 0 || sampling.settings.rate[row] == 0) return;
  const int length = length_of(sampling, row), from = sampling.target.positions - behind;
  const int position = blockIdx.z, tile = blockIdx.x * kWarps + threadIdx.x / 32;
  if (position < from || position >= length) return;
  const Scale* scales = sampling.workspace.scales + row * sampling.workspace.positions;
  if (tile < sampling.tiles) {
    const Position p(sampling, sampling.target, row, position);
    const Position q(sampling, sampling.draft, row, position);
    const Scale p_scale = scales[position], q_scale = scales[sampling.draft.first + position];
    const Residual<Target, Draft, true> residual{p, q, p_scale, q_scale,
                                                 number_at(sampling, row, position, kChance)};
    const uint64_t total = residual.total(tile);
    if (threadIdx.x % 32 == 0) q.cells[tile].sum = total;
  }
  if (!comes_last(&progress->summed, gridDim.x * (length - from))) return;

  // Every warp finds the same.
  int at = length - 1;
#pragma unroll 1
  for (; at > from; --at) {
    const Position q(sampling, sampling.draft, row, at);
    uint64_t mass = 0;
    for_cells(q, Cells(q, 0), [&](const Cells& here) {
#pragma unroll
      for (const Cell& cell : here.cell) mass += cell.sum;
      return true;
    });
    const uint64_t number = number_at(sampling, row, at - 1, kAccept);
    if (ends_block(number, number_at(sampling, row, at, kChance), warp_sum(mass))) break;
  }
  const Position p(sampling, sampling.target, row, at), q(sampling, sampling.draft, row, at);
  const Scale p_scale = scales[at], q_scale = scales[sampling.draft.first + at];
  const Residual<Target, Draft, true> residual{p, q, p_scale, q_scale,
                                               number_at(sampling, row, at, kChance)};
  const uint64_t number = number_at(sampling, row, at, kResidual);
  uint32_t token = draw(residual, q, Cells(q, 0), number);
  if (token == kNone) {
    // p and q that differ by rounding alone can leave nothing: then the target's token serves.
    token = p_scale.certain != kNone
                ? by_first_warp(p_scale.certain)
                : draw_from<Target>(p, p_scale, Cells(p, 0), -1, number);
  }
  if (token == kElsewhere) return;
  commit(stochastic, row, length, at, token, draft_at(stochastic, row, 0),
         stop_at(stochastic, row, 0));
}

}  // namespace jspec
