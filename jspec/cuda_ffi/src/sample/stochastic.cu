// Drawing and verifying by random numbers on a GPU, in one pass over the logits: a warp sums tiles,
// the last block of a position accepts or rejects its draft token and draws what would end the row
// there, from the sums and one tile that it reads again, and the last of a row commits. Positions
// behind a rejected token are not read, where that is known in time. A draft with logits has the
// rejected position read again as well, for its residual.
#include <algorithm>

#include "common/dependent.cuh"
#include "sample/arrive.cuh"
#include "sample/block.cuh"
#include "sample/filter.cuh"

namespace jspec {
namespace {

constexpr int64_t kMostRows = 65535;  // of a grid
constexpr int64_t kFewWarps = 12000;  // nearly three times what an H100 holds at once

// Blocks for a row, whose warps have `each` tiles.
unsigned blocks_of(const Sampling& sampling, int each) {
  return (sampling.tiles + kWarps * each - 1) / (kWarps * each);
}

// The cells of `count` tiles of a position, every kWarps-th from tile `begin` on; each tile is on its
// way while the one before it is summed. Calls `meanwhile()` while the first one is.
template <typename Logit, typename Meanwhile>
__device__ __forceinline__ void sum_tiles(const Sampling& sampling, const Source& source,
                                          int64_t row, int position, int begin, int count,
                                          Meanwhile meanwhile) {
  const Logit* logits = static_cast<const Logit*>(source.logits) +
                        (row * source.positions + position) * int64_t(sampling.vocabulary) +
                        begin * kTile;
  const int64_t kept = row * sampling.workspace.positions + source.first + position;
  Cell* cell = sampling.workspace.cells + kept * sampling.tiles + begin;
  int left = sampling.vocabulary - begin * kTile;
  Tile<Logit> next;
  next.load(logits, left);
  const float rate = sampling.settings.rate[row];
  meanwhile();
#pragma unroll 1
  while (true) {
    const Tile<Logit> x = next;
    if (count > 1) next.load(logits + kWarps * kTile, left - kWarps * kTile);
    const Cell sums = cell_of(x, logits, left, rate);
    if (threadIdx.x % 32 == 0) *cell = sums;
    if (--count == 0) return;
    logits += kWarps * kTile;
    left -= kWarps * kTile;
    cell += kWarps;
  }
}

// Positions of target and draft by turns, so that the first ones are verified first. A block has
// `each` tiles for each of its warps.
template <typename Task, typename Target, typename Draft>
__global__ void __launch_bounds__(kThreads, kBlocks<Target, Draft>)
    tiles_kernel(const __grid_constant__ Task task, int64_t first_row, int each) {
  const Sampling& sampling = task.sampling;
  const int64_t row = first_row + blockIdx.y;
  const int begin = blockIdx.x * kWarps * each + threadIdx.x / 32;
  const int count = min(each, (sampling.tiles - begin + kWarps - 1) / kWarps);
  const bool one_hot = sampling.draft.positions == 0;
  // The bonus token's position comes before the last draft token's, which takes less to follow up.
  const int sources = one_hot ? 1 : 2, gamma = sampling.target.positions - 1;
  const int bonus = sources * max(gamma - 1, 0), z = blockIdx.z;
  const int turn = z == bonus ? sources * gamma : z - (z > bonus);
  const int position = one_hot ? turn : turn / 2;
  const bool drafted = !one_hot && turn % 2;
  const int length = length_of(sampling, row);
  const auto numbers = [&] {
    if (begin == 0 && !drafted) {
      draw_numbers(sampling, row, position, keyed_by(task, row, position));
    }
  };
  // What begins before any position can be verified need not wait to know that it counts.
  const bool reads =
      position < 2 || (position + drafted <= length && !is_past(sampling, row, position));
  if (count > 0 && reads) {
    if constexpr (std::is_same_v<Target, Draft>) {
      const Source& source = drafted ? sampling.draft : sampling.target;
      sum_tiles<Target>(sampling, source, row, position, begin, count, numbers);
    } else if (drafted) {
      sum_tiles<Draft>(sampling, sampling.draft, row, position, begin, count, numbers);
    } else {
      sum_tiles<Target>(sampling, sampling.target, row, position, begin, count, numbers);
    }
  }
  if (position + drafted > length || sampling.filtered) return;
  arrive<Target, Draft>(task, row, position, gridDim.x);
}

// A source of logits, and a position of it.
struct Place {
  const Source& source;
  int position;
  bool counts;  // whether its row is so long

  // Number `index` of the positions of the target, then the draft.
  __device__ Place(const Sampling& sampling, int64_t row, int index)
      : source(index < sampling.target.positions ? sampling.target : sampling.draft),
        position(index - source.first),
        counts(position + (index >= sampling.target.positions) <= length_of(sampling, row)) {}
};

// As `filter`, a block a position of target or draft.
__global__ void __launch_bounds__(kFilterThreads)
    filter_kernel(const __grid_constant__ Sampling sampling, int64_t first_row) {
  const int64_t row = first_row + blockIdx.y;
  const Place place(sampling, row, blockIdx.x);
  if (place.counts) filter(sampling, place.source, row, place.position);
}

// What the tiles' kernel does without filters once a position is summed.
template <typename Task, typename Target, typename Draft>
__global__ void __launch_bounds__(kThreads)
    arrive_kernel(const __grid_constant__ Task task, int64_t first_row) {
  const int64_t row = first_row + blockIdx.y;
  const Place place(task.sampling, row, blockIdx.x);
  if (place.counts) arrive<Target, Draft>(task, row, place.position, 1);
}

// The residual's mass in each tile of the rejected rows, a warp a tile; the last block of a row
// draws.
template <typename Target, typename Draft>
__global__ void __launch_bounds__(kThreads, kBlocks<Target, Draft>)
    residual_kernel(const __grid_constant__ Stochastic stochastic, int64_t first_row) {
  const Sampling& sampling = stochastic.sampling;
  const int64_t row = first_row + blockIdx.y;
  const int tile = blockIdx.x * kWarps + threadIdx.x / 32;
  Progress* progress = sampling.workspace.progress + row;
  const uint32_t behind = progress->rejected;
  const float rate = sampling.settings.rate[row];
  if (behind == 0 || rate == 0) return;
  const int at = sampling.target.positions - behind;
  const Position p(sampling, sampling.target, row, at), q(sampling, sampling.draft, row, at);
  const Scale* scales = sampling.workspace.scales + row * sampling.workspace.positions + at;
  const Scale p_scale = scales[0], q_scale = scales[sampling.draft.first];
  const Residual<Target, Draft> residual{p, q, p_scale, q_scale};
  if (tile < sampling.tiles) {
    const uint64_t total = residual.total(tile);
    if (threadIdx.x % 32 == 0) q.cells[tile].sum = total;
  }
  if (!comes_last(&progress->summed, gridDim.x)) return;

  const uint64_t number = number_at(sampling, row, at, kResidual);
  const int32_t draft = draft_at(stochastic, row, 0), stop = stop_at(stochastic, row, 0);
  uint32_t token = draw(residual, q, Cells(q, 0), number);
  if (token == kNone) {
    // p and q that differ by rounding alone can leave nothing: then the target's token serves.
    token = p_scale.certain != kNone
                ? by_first_warp(p_scale.certain)
                : draw_from<Target>(p, p_scale, Cells(p, 0), -1, number);
  }
  if (token == kElsewhere) return;
  commit(stochastic, row, length_of(sampling, row), at, token, draft, stop);
}

// Calls `run(Target(), Draft())` with the types of the logits.
template <typename Run>
const char* for_logits(const Sampling& sampling, Run run) {
  const bool draft_bfloat16 =
      sampling.draft.positions ? sampling.draft.bfloat16 : sampling.target.bfloat16;
  if (sampling.target.bfloat16) {
    return draft_bfloat16 ? run(Bfloat16(), Bfloat16()) : run(Bfloat16(), float());
  }
  return draft_bfloat16 ? run(float(), Bfloat16()) : run(float(), float());
}

// Calls `launch(grid, first_row)`, which returns an error or null, for all rows, a block of the
// grid's y a row.
template <typename Launch>
const char* for_rows(const Sampling& sampling, unsigned across, unsigned positions, Launch launch) {
  for (int64_t first = 0; first < sampling.batch; first += kMostRows) {
    const int64_t rows = std::min(sampling.batch - first, kMostRows);
    const dim3 grid(across, static_cast<unsigned>(rows), positions);
    if (const char* error = launch(grid, first)) return error;
  }
  return nullptr;
}

// All that a task needs but for the residual.
template <typename Task, typename Target, typename Draft>
const char* launch(const Task& task, Stream stream) {
  const Sampling& sampling = task.sampling;
  const Workspace& workspace = sampling.workspace;
  const size_t bytes = sampling.batch * (sizeof(Progress) + 4 * sampling.target.positions);
  if (cudaMemsetAsync(workspace.progress, 0, bytes, stream) != cudaSuccess) return launch_error();
  // Many tiles a warp save work; few leave warps for all multiprocessors.
  const int64_t all = sampling.batch * workspace.positions * sampling.tiles;
  const int each = static_cast<int>(std::clamp<int64_t>(all / kFewWarps, 1, 4));
  const auto tiles = [&](dim3 grid, int64_t first) {
    return launch_behind(tiles_kernel<Task, Target, Draft>, grid, kThreads, 0, false, stream, task,
                         first, each);
  };
  const char* error = for_rows(sampling, blocks_of(sampling, each), workspace.positions, tiles);
  if (error || !sampling.filtered) return error;
  const auto filter = [&](dim3 grid, int64_t first) {
    return launch_behind(filter_kernel, grid, kFilterThreads, 0, false, stream, sampling, first);
  };
  if ((error = for_rows(sampling, workspace.positions, 1, filter))) return error;
  return for_rows(sampling, workspace.positions, 1, [&](dim3 grid, int64_t first) {
    return launch_behind(arrive_kernel<Task, Target, Draft>, grid, kThreads, 0, false, stream, task,
                         first);
  });
}

}  // namespace

const char* verify_stochastic(const Stochastic& stochastic, Stream stream) {
  const Sampling& sampling = stochastic.sampling;
  return for_logits(sampling, [&](auto target, auto draft) {
    using Target = decltype(target);
    using Draft = decltype(draft);
    if (stochastic.block && sampling.draft.positions > 0) {
      const Block task{stochastic, sampling};
      if (const char* error = launch<Block, Target, Draft>(task, stream)) return error;
      return for_rows(sampling, blocks_of(sampling, 1), stochastic.gamma,
                      [&](dim3 grid, int64_t first) {
                        return launch_behind(block_residual_kernel<Target, Draft>, grid, kThreads, 0,
                                             false, stream, task, first);
                      });
    }
    const char* error = launch<Stochastic, Target, Draft>(stochastic, stream);
    if (error || sampling.draft.positions == 0) return error;
    return for_rows(sampling, blocks_of(sampling, 1), 1, [&](dim3 grid, int64_t first) {
      return launch_behind(residual_kernel<Target, Draft>, grid, kThreads, 0, false, stream,
                           stochastic, first);
    });
  });
}

const char* sample(const Draws& draws, Stream stream) {
  return draws.sampling.target.bfloat16 ? launch<Draws, Bfloat16, Bfloat16>(draws, stream)
                                        : launch<Draws, float, float>(draws, stream);
}

}  // namespace jspec
