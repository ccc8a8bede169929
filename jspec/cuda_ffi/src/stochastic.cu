// Drawing and verifying by random numbers on a GPU: one pass over the logits leaves sums of tiles,
// from which a block a row decides; then one tile is read again. A draft with logits has the rejected
// row read again as well, for its residual.
#include "filter.cuh"
#include "tile.cuh"

namespace jspec {
namespace {

constexpr int kTileThreads = 256;
constexpr int kRowThreads = 256;

// The largest logit and the sum of the weights of each tile, a warp a tile.
template <typename Logit, bool aligned>
__device__ void sum_tile(const Sampling& sampling, const Source& source, int64_t row, int position,
                         int tile) {
  float x[kTile / 32];
  const int64_t begin = (row * source.positions + position) * int64_t(sampling.vocabulary);
  const float rate = sampling.settings.rate[row];
  load_tile<Logit, aligned>(source.logits, begin, sampling.vocabulary, tile, x);
  const float top = top_of(x);
  uint64_t sum = 0;
  if (rate == 0) {
    sum = first_of<Logit>(x, top, tile);
  } else {
#pragma unroll
    for (int i = 0; i < kTile / 32; i += 2) {
      sum += weight_in_tile((x[i] - top) * rate) + weight_in_tile((x[i + 1] - top) * rate);
    }
    sum = warp_sum(sum);
  }
  if (threadIdx.x % 32 == 0) {
    const Workspace workspace(sampling, row);
    const int64_t cell = int64_t(source.first + position) * sampling.tiles + tile;
    workspace.sums[cell] = sum;
    workspace.tops[cell] = top;
  }
}

template <typename Target, typename Draft, bool aligned>
__global__ void __launch_bounds__(kTileThreads) tiles_kernel(const Sampling sampling) {
  const int tile = blockIdx.x * (kTileThreads / 32) + threadIdx.x / 32;
  if (tile >= sampling.tiles) return;
  const int position = blockIdx.y, drafted = position - sampling.target.positions;
  for (int64_t row = blockIdx.z; row < sampling.batch; row += gridDim.z) {
    const int last = sampling.lengths ? sampling.lengths[row] : INT32_MAX;
    if (drafted < 0) {
      if (position == 0 || position <= last) {
        sum_tile<Target, aligned>(sampling, sampling.target, row, position, tile);
      }
    } else if (drafted < last) {
      sum_tile<Draft, aligned>(sampling, sampling.draft, row, drafted, tile);
    }
  }
}

// One row to draw from, but for the token `without`.
struct Plain {
  Row row;
  Norm norm;
  int32_t without;
  uint32_t without_weight;

  __device__ Plain(const Row& row, const Norm& norm, int32_t without)
      : row(row), norm(norm), without(without), without_weight(0) {
    if (without >= 0 && without < row.vocabulary) without_weight = row.weight(without, norm);
  }
  __device__ uint32_t scale(int tile) const { return row.scale(tile, norm); }
  __device__ uint32_t mass(int tile) const {
    const uint64_t rest = row.sums[tile] - (tile == without / kTile ? without_weight : 0);
    return scaled(rest, scale(tile));
  }
  __device__ uint32_t weight(int32_t token) const {
    return token == without ? 0 : row.weight(token, norm);
  }
};

// What the target likes more than the draft did.
struct Residual {
  Row p, q;
  Norm p_norm, q_norm;
  const uint32_t* masses;

  __device__ uint32_t scale(int) const { return kOne; }
  __device__ uint32_t mass(int tile) const { return masses[tile]; }
  __device__ uint32_t weight(int32_t token) const {
    const uint32_t target = p.probability(token, p_norm, kNone);
    return target - min(target, q.probability(token, q_norm, kNone));
  }
};

// The token that `number` draws, or kNone from what has no mass; by all threads of a block.
template <typename From>
__device__ uint32_t draw(const From& from, uint32_t number, int tiles, int vocabulary) {
  __shared__ uint32_t tile_found, left_found, token_found;
  __shared__ uint64_t sums[kRowThreads / 32];
  const int each = (tiles + kRowThreads - 1) / kRowThreads;
  const int begin = threadIdx.x * each, end = min(begin + each, tiles);
  uint64_t mass = 0;
  for (int tile = begin; tile < end; ++tile) mass += from.mass(tile);
  uint64_t total;
  const uint64_t before = block_before<kRowThreads>(mass, sums, &total);
  if (total == 0) return kNone;
  uint64_t left = target_of(number, static_cast<uint32_t>(total));
  if (threadIdx.x == 0) token_found = kNone;
  if (before <= left && left < before + mass) {
    left -= before;
    int tile = begin;
    for (uint32_t here; left >= (here = from.mass(tile)); ++tile) left -= here;
    tile_found = tile;
    left_found = static_cast<uint32_t>(left);
  }
  __syncthreads();

  constexpr int kEach = kTile / kRowThreads;
  const int32_t first = tile_found * kTile + threadIdx.x * kEach;
  uint32_t weights[kEach];
  uint64_t own = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    weights[i] = first + i < vocabulary ? from.weight(first + i) : 0;
    own += weights[i];
  }
  uint64_t reached = block_before<kRowThreads>(own, sums, &total);
  const uint32_t scale = from.scale(tile_found);
  for (int i = kEach - 1; i >= 0; --i) {
    if (scaled(reached + own, scale) > left_found) atomicMin(&token_found, first + i);
    own -= weights[i];
  }
  __syncthreads();
  return token_found;
}

// As `draw`, from a row and its norm; of a greedy row `best`, and 0 where nothing has mass.
__device__ int32_t draw_row(const Row& row, const Norm& norm, uint32_t best, int32_t without,
                            uint32_t number) {
  uint32_t token = best;
  if (!row.greedy()) {
    token = draw(Plain(row, norm, without), number, row.tiles, row.vocabulary);
    if (token == kNone && without >= 0) {
      token = draw(Plain(row, norm, -1), number, row.tiles, row.vocabulary);
    }
  }
  return token == kNone ? 0 : token;
}

struct Judged {
  Norm norm;
  uint32_t best;
};

// Decides what of a row's draft stands, a block a row. Where no draft has logits it also draws the
// token that follows.
__global__ void __launch_bounds__(kRowThreads) decide_kernel(const Stochastic stochastic) {
  extern __shared__ Judged judged[];  // [gamma + 1]
  __shared__ int accepted;
  const Sampling& sampling = stochastic.sampling;
  const int64_t row = blockIdx.x;
  const int gamma = stochastic.gamma, lane = threadIdx.x % 32;
  const int length = max(0, min(sampling.lengths[row], gamma));
  const int32_t* draft = stochastic.draft_tokens + row * gamma;
  const uint32_t seed = sampling.settings.seeds[row];
  const int32_t first = stochastic.positions[row];
  const bool one_hot = sampling.draft.positions == 0;
  const Workspace workspace(sampling, row);
  if (threadIdx.x == 0) accepted = length;
  __syncthreads();

  for (int at = threadIdx.x / 32; at <= length; at += kRowThreads / 32) {
    const Row p(sampling, sampling.target, sampling.bfloat16, row, at);
    uint32_t best;
    const Norm norm = warp_norm(p, &best);
    if (lane == 0) judged[at].norm = norm, judged[at].best = best;
    if (at == length) break;
    const int32_t token = max(draft[at], 0);
    uint32_t q_token = kOne;
    if (!one_hot) {
      const Row q(sampling, sampling.draft, sampling.draft_bfloat16, row, at);
      uint32_t q_best;
      const Norm q_norm = warp_norm(q, &q_best);
      q_token = q.probability(token, q_norm, q_best);
    }
    const uint32_t p_token = p.probability(token, norm, best);
    if (lane == 0 && !stands(number_of(seed, first + at, kAccept), q_token, p_token)) {
      atomicMin(&accepted, at);
    }
  }
  __syncthreads();

  const int at = accepted;
  const bool rejected = at < length;
  const Row p(sampling, sampling.target, sampling.bfloat16, row, at);
  if (one_hot) {
    const uint32_t number = number_of(seed, first + at, rejected ? kResidual : kBonus);
    const int32_t without = rejected ? draft[at] : -1;
    const int32_t token = draw_row(p, judged[at].norm, judged[at].best, without, number);
    if (threadIdx.x == 0) commit(stochastic, row, length, at, token);
    return;
  }
  if (threadIdx.x == 0) {
    workspace.accepted[0] = at;
    workspace.rejected[0] = rejected && !p.greedy();
    workspace.norms[0] = judged[at].norm;
  }
  if (rejected && threadIdx.x < 32) {
    const Row q(sampling, sampling.draft, sampling.draft_bfloat16, row, at);
    uint32_t best;
    const Norm norm = warp_norm(q, &best);
    if (lane == 0) workspace.norms[1] = norm;
  }
}

__device__ Residual residual_of(const Sampling& sampling, const Workspace& workspace, int64_t row) {
  const int at = workspace.accepted[0];
  return {Row(sampling, sampling.target, sampling.bfloat16, row, at),
          Row(sampling, sampling.draft, sampling.draft_bfloat16, row, at), workspace.norms[0],
          workspace.norms[1], workspace.residual};
}

// The residual's mass in each tile of the rejected rows, a warp a tile.
template <typename Target, typename Draft, bool aligned>
__global__ void __launch_bounds__(kTileThreads) residual_kernel(const Sampling sampling) {
  const int tile = blockIdx.x * (kTileThreads / 32) + threadIdx.x / 32;
  const int64_t row = blockIdx.y;
  const Workspace workspace(sampling, row);
  if (tile >= sampling.tiles || !workspace.rejected[0]) return;
  const Residual from = residual_of(sampling, workspace, row);
  float p[kTile / 32], q[kTile / 32];
  load_tile<Target, aligned>(from.p.logits, 0, sampling.vocabulary, tile, p);
  load_tile<Draft, aligned>(from.q.logits, 0, sampling.vocabulary, tile, q);
  const uint32_t p_scale = from.p.scale(tile, from.p_norm) << 1;
  const uint32_t q_scale = from.q.scale(tile, from.q_norm) << 1;
  const float p_top = from.p.tops[tile], q_top = from.q.tops[tile];
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kTile / 32; ++i) {
    uint32_t p_weight = weight_in_tile((logit_of(p[i]) - p_top) * from.p.rate);
    uint32_t q_weight = weight_in_tile((logit_of(q[i]) - q_top) * from.q.rate);
    if (sampling.filtered) {
      if (!kept(from.p, from.p_norm, logit_of(p[i]))) p_weight = 0;
      if (!kept(from.q, from.q_norm, logit_of(q[i]))) q_weight = 0;
    }
    const uint32_t target = __umulhi(p_weight << 1, p_scale);
    sum += target - min(target, __umulhi(q_weight << 1, q_scale));
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) workspace.residual[tile] = static_cast<uint32_t>(sum);
}

// Draws the token that follows where drafts have logits, a block a row.
__global__ void __launch_bounds__(kRowThreads) follow_kernel(const Stochastic stochastic) {
  const Sampling& sampling = stochastic.sampling;
  const int64_t row = blockIdx.x;
  const int length = max(0, min(sampling.lengths[row], stochastic.gamma));
  const Workspace workspace(sampling, row);
  const int at = workspace.accepted[0];
  const uint32_t role = at < length ? kResidual : kBonus;
  const uint32_t number =
      number_of(sampling.settings.seeds[row], stochastic.positions[row] + at, role);
  uint32_t token = kNone;
  if (workspace.rejected[0]) {
    const Residual from = residual_of(sampling, workspace, row);
    token = draw(from, number, sampling.tiles, sampling.vocabulary);
  }
  if (token == kNone) {
    const Row p(sampling, sampling.target, sampling.bfloat16, row, at);
    __shared__ uint32_t best;
    if (threadIdx.x < 32) warp_norm(p, &best);
    __syncthreads();
    token = draw_row(p, workspace.norms[0], best, -1, number);
  }
  if (threadIdx.x == 0) commit(stochastic, row, length, at, token);
}

// Draws a token for each position, a block a position.
__global__ void __launch_bounds__(kRowThreads) sample_kernel(const Draws draws) {
  __shared__ Judged judged;
  const Sampling& sampling = draws.sampling;
  const int positions = sampling.target.positions;
  const int64_t row = blockIdx.x / positions;
  const int at = blockIdx.x % positions;
  const Row p(sampling, sampling.target, sampling.bfloat16, row, at);
  if (threadIdx.x < 32) judged.norm = warp_norm(p, &judged.best);
  __syncthreads();
  const uint32_t number =
      number_of(sampling.settings.seeds[row], draws.positions[blockIdx.x], draws.role);
  const int32_t token = draw_row(p, judged.norm, judged.best, -1, number);
  if (threadIdx.x == 0) draws.tokens[blockIdx.x] = token;
}

// Calls `run(Target(), Draft(), aligned)` with the types of the logits.
template <typename Run>
const char* for_logits(const Sampling& sampling, Run run) {
  const auto is_aligned = [&](const void* logits, bool bfloat16) {
    const int64_t bytes = int64_t(sampling.vocabulary) * (bfloat16 ? 2 : 4);
    return reinterpret_cast<uintptr_t>(logits) % 16 == 0 && bytes % 16 == 0;
  };
  const bool draft = sampling.draft.positions > 0;
  const bool aligned =
      is_aligned(sampling.target.logits, sampling.bfloat16) &&
      (!draft || is_aligned(sampling.draft.logits, sampling.draft_bfloat16));
  const auto with_types = [&](auto target, auto drafted) {
    return aligned ? run(target, drafted, std::true_type())
                   : run(target, drafted, std::false_type());
  };
  const bool draft_bfloat16 = draft ? sampling.draft_bfloat16 : sampling.bfloat16;
  if (sampling.bfloat16) {
    return draft_bfloat16 ? with_types(Half(), Half()) : with_types(Half(), float());
  }
  return draft_bfloat16 ? with_types(float(), Half()) : with_types(float(), float());
}

// The sums of all tiles, filters applied.
const char* launch_tiles(const Sampling& sampling, Stream stream) {
  const unsigned positions = sampling.target.positions + sampling.draft.positions;
  const unsigned across = (sampling.tiles * 32 + kTileThreads - 1) / kTileThreads;
  const unsigned rows = static_cast<unsigned>(sampling.batch < 65535 ? sampling.batch : 65535);
  const char* error = for_logits(sampling, [&](auto target, auto draft, auto aligned) {
    tiles_kernel<decltype(target), decltype(draft), aligned.value>
        <<<dim3(across, positions, rows), kTileThreads, 0, stream>>>(sampling);
    return launch_error();
  });
  if (error || !sampling.filtered) return error;
  filter_kernel<<<dim3(positions, rows), kFilterThreads, 0, stream>>>(sampling);
  return launch_error();
}

}  // namespace

const char* verify_stochastic(const Stochastic& stochastic, Stream stream) {
  const Sampling& sampling = stochastic.sampling;
  const unsigned batch = static_cast<unsigned>(sampling.batch);
  if (const char* error = launch_tiles(sampling, stream)) return error;
  const size_t judged = (stochastic.gamma + 1) * sizeof(Judged);
  decide_kernel<<<batch, kRowThreads, judged, stream>>>(stochastic);
  const char* error = launch_error();
  if (error || sampling.draft.positions == 0) return error;
  const unsigned across = (sampling.tiles * 32 + kTileThreads - 1) / kTileThreads;
  error = for_logits(sampling, [&](auto target, auto draft, auto aligned) {
    residual_kernel<decltype(target), decltype(draft), aligned.value>
        <<<dim3(across, batch), kTileThreads, 0, stream>>>(sampling);
    return launch_error();
  });
  if (error) return error;
  follow_kernel<<<batch, kRowThreads, 0, stream>>>(stochastic);
  return launch_error();
}

const char* sample(const Draws& draws, Stream stream) {
  const Sampling& sampling = draws.sampling;
  if (const char* error = launch_tiles(sampling, stream)) return error;
  const unsigned blocks = static_cast<unsigned>(sampling.batch * sampling.target.positions);
  sample_kernel<<<blocks, kRowThreads, 0, stream>>>(draws);
  return launch_error();
}

}  // namespace jspec
