// Attention over selected slots for heads of up to 8 query rows.
//
// The warps of a block share a part of a head's list: each has slots of its own, and the block
// merges their sums. From Hopper on, the blocks of a head's parts are a cluster and merge theirs
// too. Keys are the rows of the matmuls and queries the columns, of which there are 8, so that
// heads of few rows compute little for nothing.
//
// The new token of a batch row may be appended in the same kernel. Every warp norms and rotates the
// queries. The warp whose tile has the token's slot also norms and rotates the key, and writes key
// and value into the cache and over the copy of that slot in its tile, which began earlier.
#pragma once

#include "common/ptx_hopper.cuh"
#include "gathered/new_token.cuh"

namespace jspec {
namespace {

constexpr int kMaxClusterParts = 8;  // blocks of a cluster that every device has
constexpr int kBarrierBytes = 16;   // a barrier, before what the other blocks of a cluster send

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kHasClusters = true;
#else
constexpr bool kHasClusters = false;
#endif

inline bool has_few_rows(const Gathered& g) { return g.tokens * g.group <= kFewRows; }

// Whether the parts of a head are merged by the kernel that attends.
inline bool merges_parts(const Gathered& g) {
  const bool in_cluster = g.parts <= kMaxClusterParts && is_hopper_or_newer();
  return has_few_rows(g) && (g.parts == 1 || in_cluster);
}

// A row of a warp's sums: its channels, the highest score and the sum of weights, and room so that
// rows begin in different banks.
template <int kChannels>
constexpr int kSumsRow = kChannels + 4;

// The token of a row: no division, which takes longer for so few.
__device__ __forceinline__ int token_of(const Gathered& g, int row) {
  int token = 0;
  while (row >= (token + 1) * g.group) ++token;
  return token;
}

// kWarps: of a block, at most. Three blocks of 8 warps fit into the registers of a multiprocessor.
// kInCluster: the parts of a head are the blocks of a cluster, which merge their results.
// kAppends: the token of a row is not in the cache yet.
template <int kChannels, int kWarps, bool kInCluster, bool kAppends>
__global__ void __launch_bounds__(kWarps * 32, kWarps == 8 && kChannels == 64 ? 3 : 1)
    few_rows_parts(const __grid_constant__ Gathered g, int max_listed) {
  constexpr int kSteps = kChannels / 16, kRow = kSumsRow<kChannels>;
  extern __shared__ char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int eighth = lane / 4, quarter = lane % 4;
  const int rows = g.tokens * g.group;
  const int part = blockIdx.x, head = blockIdx.y, batch_row = blockIdx.z;
  const int ring_bytes = g.stages * kTileBytes<kChannels>;
  char* const ring = memory + warp * ring_bytes;
  int* const listed = reinterpret_cast<int*>(memory + g.warps * ring_bytes) + warp * max_listed;
  // Of a cluster, block r gives the results r * share to (r + 1) * share of all pairs of channels.
  const int pairs = rows * kChannels / 2, share = (pairs + g.parts - 1) / g.parts;
  uint64_t* const received =
      reinterpret_cast<uint64_t*>(memory + g.warps * (ring_bytes + 4 * max_listed));
  float4* const inbox =
      reinterpret_cast<float4*>(reinterpret_cast<char*>(received) + kBarrierBytes);
  if constexpr (kInCluster && kHasClusters) {
    if (threadIdx.x == 0) {
      const int own = min(share, max(pairs - part * share, 0));
      barrier_init(received, 1);
      publish_barriers();
      barrier_expect(received, (g.parts - 1) * own * int(sizeof(float4)));
    }
    __syncwarp();
    cluster_arrive_relaxed();
  } else if (g.parts > 1) {
    let_next_start();
  }
  Part<kChannels, 32> list(g, batch_row, head, part * g.warps + warp, g.parts * g.warps, ring,
                           listed, lane);
  const int64_t first_token = int64_t(batch_row) * g.tokens;
  // The last positions that this thread's rows read; -1 for padding, whose sums are left out.
  int last[2], context_len = 0;
  const auto load_positions = [&] {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = 2 * quarter + j;
      last[j] = row < rows ? __ldg(g.positions + first_token + token_of(g, row)) : -1;
    }
  };
  NewToken<kChannels> token;
  if (list.has_tail()) {
    load_positions();
    context_len = g.context_len[batch_row];
    const int newest = __reduce_max_sync(kAllLanes, max(last[0], last[1]));
    list.drop_after(newest, context_len);
    if constexpr (kAppends) {
      token.find(g, batch_row, newest - context_len, list.first, list.parts);
    }
  }
  __syncwarp();  // the list is complete
  list.begin_copies();

  // Copies are on their way; what the first tile needs is loaded meanwhile.
  if (!list.has_tail()) load_positions();
  // The number of a row's head and token among all.
  const auto query_at = [&](int row) {
    const int token = token_of(g, row);
    return ((first_token + token) * g.kv_heads + head) * g.group + row - token * g.group;
  };
  uint32_t q[kSteps][2] = {};
  if (eighth < rows) {
    const uint16_t* source =
        (kAppends ? projection_of<kChannels>(g, batch_row, head) + eighth * kChannels
                  : g.q + query_at(eighth) * kChannels) +
        2 * quarter;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      q[i / 2][i % 2] = __ldg(reinterpret_cast<const uint32_t*>(source + 8 * i));
    }
  }
  if constexpr (kAppends) {
    rotate_queries<kChannels>(q, g, batch_row, quarter);
    token.append(g, batch_row, head, lane);
  }

  // Of scores, element 2 i + j is that of key eighth + 8 i and row 2 quarter + j; of sums, that of
  // channel eighth + 8 i.
  const float unit = g.scale * kLog2e;  // scores are in powers of 2
  float top[2] = {kLowest, kLowest}, sum[2] = {}, out[kSteps][4] = {};
  for (int tile = list.first, at = 0; tile * kTile < list.entries;
       tile += list.parts, at += kTile) {
    int positions[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = eighth + 8 * i;
      positions[i] = list.position_at(at + key, tile * kTile + key, context_len);
    }
    await_copies(g.stages - 2);
    __syncwarp();  // this tile is there, and all lanes have read the one before it
    list.copy_next();
    char* const keys = list.read_next();
    if constexpr (kAppends) token.put_into(keys, tile, lane);
    const char* values = keys + kTileBytes<kChannels> / 2;

    // Two chains of matmuls, as each waits for the one before it.
    float halves[2][4] = {}, scores[4], highest[2] = {kLowest, kLowest};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint32_t a[4];
      load_matrices<false>(a, keys + place_of<kChannels>(lane % 16, 2 * i + lane / 16));
      multiply_add(halves[i % 2], a, q[i][0], q[i][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool reads = positions[i / 2] <= last[i % 2];
      scores[i] = reads ? (halves[0][i] + halves[1][i]) * unit : -INFINITY;
      highest[i % 2] = fmaxf(highest[i % 2], scores[i]);
    }
    if (__any_sync(kAllLanes, highest[0] > top[0] + kSlack || highest[1] > top[1] + kSlack)) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          highest[j] = fmaxf(highest[j], __shfl_xor_sync(kAllLanes, highest[j], lanes));
        }
        const float higher = fmaxf(top[j], highest[j]), decay = exp2_fast(top[j] - higher);
        top[j] = higher;
        sum[j] *= decay;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) out[i][j] *= decay, out[i][2 + j] *= decay;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i] = exp2_fast(scores[i] - top[i % 2]);
      sum[i % 2] += scores[i];
    }
    const uint32_t weights[2] = {transposed(packed(scores[0], scores[1])),
                                 transposed(packed(scores[2], scores[3]))};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint32_t a[4];
      const int row = lane / 16 * 8 + lane % 8, place = 2 * i + lane / 8 % 2;
      load_matrices<true>(a, values + place_of<kChannels>(row, place));
      multiply_add(out[i], a, weights[0], weights[1]);
    }
  }

  __syncwarp();  // all lanes have read the last tile: the ring is free for this warp's sums
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      sum[j] += __shfl_xor_sync(kAllLanes, sum[j], lanes);
    }
    const int row = 2 * quarter + j;
    if (row >= rows) continue;
    float* to = reinterpret_cast<float*>(ring) + row * kRow;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      // A row of padding may have summed NaN, as no query of it reads the slots.
      to[8 * i + eighth] = last[j] < 0 ? 0 : out[i / 2][i % 2 * 2 + j];
    }
    if (eighth == 0) to[kChannels] = top[j], to[kChannels + 1] = sum[j];
  }
  __syncthreads();

  const auto write = [&](int row, int channel, float first, float second, float highest,
                         float total) {
    const float inverse = total > 0 ? 1 / total : 0;
    const int64_t query = query_at(row);
    *reinterpret_cast<uint32_t*>(g.out + query * kChannels + channel) =
        packed(first * inverse, second * inverse);
    if (channel == 0) g.lse[query] = total > 0 ? (highest + log2f(total)) * kLn2 : -INFINITY;
  };
  if constexpr (kInCluster && kHasClusters) cluster_wait();  // all blocks have begun
  // A thread merges two neighbouring channels of a row.
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
    const int row = i / (kChannels / 2), channel = i % (kChannels / 2) * 2;
    const auto sums_of = [&](int warp) {
      return reinterpret_cast<const float*>(memory + warp * ring_bytes) + row * kRow;
    };
    float highest = kLowest, total = 0, merged[2] = {};
#pragma unroll 4
    for (int w = 0; w < g.warps; ++w) highest = fmaxf(highest, sums_of(w)[kChannels]);
#pragma unroll 4
    for (int w = 0; w < g.warps; ++w) {
      const float* sums = sums_of(w);
      const float share = exp2_fast(sums[kChannels] - highest);
      total += share * sums[kChannels + 1];
      merged[0] += share * sums[channel];
      merged[1] += share * sums[channel + 1];
    }
    if constexpr (kInCluster && kHasClusters) {
      const int block = i / share;
      const float4 sums{merged[0], merged[1], highest, total};
      float4* place = inbox + part * share + i - block * share;
      if (block == part) {
        *place = sums;
      } else {
        store_in(address_in(block, place), sums, address_in(block, received));
      }
    } else if (g.parts == 1) {
      write(row, channel, merged[0], merged[1], highest, total);
    } else {
      const int64_t at = ((int64_t(batch_row) * g.kv_heads + head) * g.parts + part) * rows + row;
      float* to = g.partial_out + at * kChannels + place_in_part(channel);
      *reinterpret_cast<float2*>(to) = {merged[0], merged[1]};
      if (channel == 0) reinterpret_cast<float2*>(g.partial_sums)[at] = {highest, total};
    }
  }
  if constexpr (kInCluster && kHasClusters) {
    __syncthreads();  // this block's own results are there
    barrier_wait(received, 0);
    for (int i = threadIdx.x; i < share && part * share + i < pairs; i += blockDim.x) {
      float highest = kLowest, total = 0, merged[2] = {};
#pragma unroll 4
      for (int p = 0; p < g.parts; ++p) highest = fmaxf(highest, inbox[p * share + i].z);
#pragma unroll 4
      for (int p = 0; p < g.parts; ++p) {
        const float4 sums = inbox[p * share + i];
        const float weight = exp2_fast(sums.z - highest);
        total += weight * sums.w;
        merged[0] += weight * sums.x, merged[1] += weight * sums.y;
      }
      const int pair = part * share + i;
      write(pair / (kChannels / 2), pair % (kChannels / 2) * 2, merged[0], merged[1], highest,
            total);
    }
  }
}

template <int kChannels, bool kInCluster, bool kAppends>
const char* launch_few_rows_merging(Gathered g, Stream stream) {
  static_assert(kMaxWarps == 16);
  static_assert(kFewRows * kSumsRow<kChannels> * 4 <= kMinStages * kTileBytes<kChannels>);
  const int max_listed = max_tiles(g, g.parts * g.warps) * kTile;
  const int pairs = g.tokens * g.group * kChannels / 2, share = (pairs + g.parts - 1) / g.parts;
  const int inbox_bytes =
      kInCluster ? kBarrierBytes + g.parts * share * int(sizeof(float4)) : 0;
  const int room =
      ((shared_limit() - inbox_bytes) / g.warps - 4 * max_listed) / kTileBytes<kChannels>;
  if (room < kMinStages && g.warps > 1) {
    g.warps /= 2;
    return launch_few_rows_merging<kChannels, kInCluster, kAppends>(g, stream);
  }
  g.stages = std::max(kMinStages, std::min(g.stages, room));
  const int bytes = g.warps * (g.stages * kTileBytes<kChannels> + 4 * max_listed) + inbox_bytes;
  const auto kernel = g.warps > 8 ? few_rows_parts<kChannels, 16, kInCluster, kAppends>
                                  : few_rows_parts<kChannels, 8, kInCluster, kAppends>;
  const dim3 blocks(g.parts, g.kv_heads, g.batch);
  return launch_with_rings(kernel, kInCluster ? g.parts : 1, blocks, g.warps * 32, bytes, stream,
                           g, max_listed);
}

template <int kChannels>
const char* launch_few_rows(const Gathered& g, Stream stream) {
  const bool in_cluster = g.parts > 1 && merges_parts(g);
  if (g.appended.joined) {
    return (in_cluster ? launch_few_rows_merging<kChannels, true, true>
                       : launch_few_rows_merging<kChannels, false, true>)(g, stream);
  }
  return (in_cluster ? launch_few_rows_merging<kChannels, true, false>
                     : launch_few_rows_merging<kChannels, false, false>)(g, stream);
}

}  // namespace
}  // namespace jspec
