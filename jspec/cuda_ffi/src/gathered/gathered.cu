// Attention over selected slots of a cache, read in place.
//
// A team of one, two or four warps attends to a part of a list. Each warp has 16 query rows of a
// head. The team copies keys and values of 16 slots at a time into a ring of tiles in shared
// memory, several tiles ahead. With one warp per head nothing is shared: warps of neighbouring
// heads read neighbouring memory of the same slots, and never wait for each other. Heads of up to 8
// query rows have a kernel of their own in few_rows.cuh. docs/attention.md says more.
#include <algorithm>

#include "attention/merge.cuh"
#include "gathered/few_rows.cuh"
#include "gathered/part.cuh"

namespace jspec {
namespace {

constexpr int kWarpRows = 16;  // query rows of a warp

template <int kTeam>
__device__ __forceinline__ void meet(int team) {
  if constexpr (kTeam == 1) {
    __syncwarp();
  } else {
    barrier_of<32 * kTeam>(1 + team);
  }
}

template <int kChannels, int kTeam, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kWarps == 4 ? 3 : 1)
    gathered_parts(const __grid_constant__ Gathered g) {
  constexpr int kThreads = 32 * kTeam, kChunks = kChannels / kChunk, kUnits = kChannels / 8;
  extern __shared__ char memory[];
  const int team = threadIdx.x / kThreads, thread = threadIdx.x % kThreads;
  const int lane = threadIdx.x % 32, eighth = lane / 4, quarter = lane % 4;
  const int rows = g.tokens * g.group;
  const int row_tiles = (rows + kWarpRows * kTeam - 1) / (kWarpRows * kTeam);
  // The item of this team: neighbours have neighbouring heads.
  int rest = blockIdx.x * (kWarps / kTeam) + team;
  const int head = rest % g.kv_heads;
  rest /= g.kv_heads;
  const int first_row = (rest % row_tiles * kTeam + thread / 32) * kWarpRows;
  rest /= row_tiles;
  const int part = rest % g.parts, batch_row = rest / g.parts;
  if (batch_row >= g.batch) return;

  // Loads that nothing below waits for come first.
  const int32_t* positions = g.positions + int64_t(batch_row) * g.tokens;
  Softmax<2> softmax;
  softmax.unit = g.scale * kLog2e;
  softmax.clear();
  uint32_t q[kChannels / 16][4] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + eighth + 8 * i;
    softmax.last[i] = -1;
    if (row >= rows) continue;
    const int token = row / g.group;
    softmax.last[i] = __ldg(positions + token);
    const int64_t at_token = (int64_t(batch_row) * g.tokens + token) * g.kv_heads + head;
    const uint16_t* source = g.q + (at_token * g.group + row % g.group) * kChannels;
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const uint16_t* pair = source + 8 * j + 2 * quarter;
      q[j / 2][j % 2 * 2 + i] = __ldg(reinterpret_cast<const uint32_t*>(pair));
    }
  }

  Part<kChannels, kThreads> list(
      g, batch_row, head, part, g.parts, memory + team * g.stages * kTileBytes<kChannels>,
      reinterpret_cast<int*>(memory + kWarps / kTeam * g.stages * kTileBytes<kChannels>) +
          team * max_tiles(g, g.parts) * kTile,
      thread);
  int newest = -1;
  for (int i = lane; i < g.tokens; i += 32) newest = max(newest, __ldg(positions + i));
  newest = __reduce_max_sync(kAllLanes, newest);
  const int context_len = g.context_len[batch_row];
  if (list.has_tail() || newest < 0) list.drop_after(newest, context_len);
  meet<kTeam>(team);  // the list is complete
  list.begin_copies();

  float out[kChunks][32] = {};
  for (int tile = list.first, at = 0; tile * kTile < list.entries;
       tile += list.parts, at += kTile) {
    await_copies(g.stages - 2);
    meet<kTeam>(team);  // this tile is there, and the team has read the one before it
    list.copy_next();
    if (first_row >= rows) continue;  // a warp without rows copies only
    const char* keys = list.read_next();
    const char* values = keys + kTileBytes<kChannels> / 2;

    // Two chains of matmuls, as each waits for the one before it.
    float scores[8], halves[2][8] = {};
#pragma unroll
    for (int i = 0; i < kChannels / 16; ++i) {
      uint32_t b[4];
      const int row = lane / 16 * 8 + lane % 8, unit = 2 * i + lane / 8 % 2;
      load_matrices<false>(b, keys + place_of<kChannels>(row, unit));
      multiply_add(halves[i % 2], q[i], b[0], b[1]);
      multiply_add(halves[i % 2] + 4, q[i], b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) scores[i] = halves[0][i] + halves[1][i];

    const auto position_of = [&](int i, int j) {
      const int key = 8 * i + 2 * quarter + j;
      return list.position_at(at + key, tile * kTile + key, context_len);
    };
    uint32_t weights[1][4];
    if (softmax.template weigh<true, 2>(scores, weights, position_of)) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) softmax.apply_decay(out[chunk]);
    }
#pragma unroll
    for (int i = 0; i < kChannels / 16; ++i) {
      uint32_t b[4];
      const int row = lane / 8 % 2 * 8 + lane % 8, unit = 2 * i + lane / 16;
      load_matrices<true>(b, values + place_of<kChannels>(row, unit));
      float* sum = out[i / 4] + i % 4 * 8;
      multiply_add(sum, weights[0], b[0], b[1]);
      multiply_add(sum + 4, weights[0], b[2], b[3]);
    }
  }

  softmax.join_sums();
  const int64_t at_part = ((int64_t(batch_row) * g.kv_heads + head) * g.parts + part) * rows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + eighth + 8 * i;
    if (row >= rows) continue;
    if (quarter == 0) {
      reinterpret_cast<float2*>(g.partial_sums)[at_part + row] = {softmax.top[i], softmax.sum[i]};
    }
    float* to = g.partial_out + (at_part + row) * kChannels;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (i == 0) write_part<0>(to + chunk * kChunk, out[chunk]);
      if (i == 1) write_part<1>(to + chunk * kChunk, out[chunk]);
    }
  }
}

template <int kChannels, int kTeam, int kWarps>
const char* launch_parts(Gathered g, Stream stream) {
  constexpr int kTeams = kWarps / kTeam;
  const int list_bytes = kTeams * max_tiles(g, g.parts) * kTile * 4;
  const int stage_bytes = kTeams * kTileBytes<kChannels>;
  const int room = (shared_limit() - list_bytes) / stage_bytes;
  if (kWarps == 8 && room < kMinStages) return launch_parts<kChannels, kTeam, 4>(g, stream);
  g.stages = std::max(kMinStages, std::min(g.stages, room));
  const int row_tiles = (g.tokens * g.group + kWarpRows * kTeam - 1) / (kWarpRows * kTeam);
  const int items = g.batch * g.parts * row_tiles * g.kv_heads;
  return launch_with_rings(gathered_parts<kChannels, kTeam, kWarps>, 1,
                           (items + kTeams - 1) / kTeams, kWarps * 32,
                           g.stages * stage_bytes + list_bytes, stream, g);
}

template <int kChannels, int kWarps>
const char* launch_team(const Gathered& g, Stream stream) {
  const int rows = g.tokens * g.group;
  if (rows <= kWarpRows) return launch_parts<kChannels, 1, kWarps>(g, stream);
  if (rows <= 2 * kWarpRows) return launch_parts<kChannels, 2, kWarps>(g, stream);
  return launch_parts<kChannels, 4, kWarps>(g, stream);
}

template <int kChannels>
const char* launch_warps(const Gathered& g, Stream stream) {
  if (has_few_rows(g)) return launch_few_rows<kChannels>(g, stream);
  return (g.warps >= 8 ? launch_team<kChannels, 8> : launch_team<kChannels, 4>)(g, stream);
}

}  // namespace

const char* gathered_attention(const Gathered& g, Stream stream) {
  const auto launch = g.channels == 64 ? launch_warps<64> : launch_warps<128>;
  if (const char* failed = launch(g, stream)) return failed;
  if (merges_parts(g)) return nullptr;
  return launch_merge(Merge{g.partial_out, g.partial_sums, g.positions, g.out, g.lse, g.batch,
                            g.tokens, g.kv_heads, g.group, g.parts},
                      g.channels, stream);
}

}  // namespace jspec
