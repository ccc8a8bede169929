// The kernel that picks the slots of a row and attends to them.
#pragma once

#include "common/bfloat16.cuh"
#include "common/dependent.cuh"
#include "common/ptx.cuh"
#include "hashed/pick.cuh"

namespace jspec {

constexpr float kLowestScore = -1e30f;  // below all scores, and no infinity: differences are numbers
// Keys that a stream of lanes reads at once.
template <int ROWS>
constexpr int kAtOnce = ROWS == 4 ? 4 : 2;

// Sums of a softmax over some keys, of ROWS query heads: the highest score, the sum of powers of 2 of
// the differences to it, and eight channels of the sum of values that they weigh.
template <int ROWS>
struct Sums {
  float top[ROWS], weight[ROWS], out[ROWS][8];

  // Takes what the lane `step` away has.
  __device__ __forceinline__ void join(int step) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float other = __shfl_xor_sync(kAllLanes, top[r], step);
      const float most = fmaxf(top[r], other), own = exp2_fast(top[r] - most);
      const float its = exp2_fast(other - most);
      weight[r] = weight[r] * own + __shfl_xor_sync(kAllLanes, weight[r], step) * its;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        out[r][i] = out[r][i] * own + __shfl_xor_sync(kAllLanes, out[r][i], step) * its;
      }
      top[r] = most;
    }
  }
};

// Blocks of a row wait here until all of them have come. Those that it waits for are on the device, or
// come as soon as there is room: blocks take their places in the order in which they begin.
__device__ __forceinline__ void meet(uint32_t* counter, uint32_t parts) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counter, 1);
    while (*reinterpret_cast<volatile uint32_t*>(counter) < parts) {
    }
    __threadfence();
  }
  __syncthreads();
}

// Words of shared memory of a block.
template <int SIZE, int ROWS>
JSPEC_HOST_DEVICE int words_of_attending(int bins) {
  const int picking = words_of_finding(bins) + 2 * kPickingWarps;
  const int joining = kPickingWarps * ROWS * (SIZE + 2);
  return picking > joining ? picking : joining;
}

// Attention of the query heads of a KV head: over the slots that were picked, in order, and the tail
// behind them. A block takes an equal share of them; the last one of a row to end joins the parts.
//
// A key lies across a stream of SIZE / 8 lanes, each with 16 bytes of it and of its value.
template <int SIZE, int ROWS>
__device__ void attend(const Hash& hash, const Layer& layer, const HashPlan& plan, int64_t row,
                       int until, int position, int chosen, int part, int parts,
                       uint32_t* workspace, float* memory) {
  constexpr int kLanes = SIZE / 8, kStreams = kPicking / kLanes, kKeys = kAtOnce<ROWS>;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int stream = tid / kLanes, channel = tid % kLanes * 8;
  const int64_t batch = row / hash.heads;
  const int head = row % hash.heads, group = hash.group, n = hash.rows.n;
  // Of the tail a query reads what is up to its own position.
  const int tail = max(min(min(position - until + 1, layer.tail), n - until), 0);
  const int entries = position < 0 ? 0 : chosen + tail;
  const int begin = int64_t(entries) * part / parts, end = int64_t(entries) * (part + 1) / parts;
  const int32_t* slots = hash.rows.slots + row * hash.rows.k;
  const int64_t stride = int64_t(hash.heads) * SIZE, first = (batch * n * hash.heads + head) * SIZE;
  const uint16_t *keys = layer.keys + first + channel, *values = layer.values + first + channel;

  const float scale = layer.scale * 1.4426950408889634f;  // powers are of 2
  float q[ROWS][8];
  Sums<ROWS> sums;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    uint4 raw{0, 0, 0, 0};
    if (r < group) {
      raw = __ldcg(reinterpret_cast<const uint4*>(
          layer.queries + (row * group + r) * SIZE + channel));
    }
    const uint32_t words[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      q[r][2 * i] = low(words[i]) * scale;
      q[r][2 * i + 1] = high(words[i]) * scale;
    }
    sums.top[r] = kLowestScore;
    sums.weight[r] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sums.out[r][i] = 0;
  }

  const auto slot_of = [&](int entry) {
    if (entry >= end) return -1;
    return entry < chosen ? __ldcg(slots + entry) : until + entry - chosen;
  };
  int at[kKeys];
#pragma unroll
  for (int u = 0; u < kKeys; ++u) at[u] = slot_of(begin + u * kStreams + stream);
  for (int from = begin; from < end; from += kKeys * kStreams) {
    uint4 k[kKeys], v[kKeys];
    bool live[kKeys];
#pragma unroll
    for (int u = 0; u < kKeys; ++u) {
      live[u] = at[u] >= 0;
      k[u] = v[u] = {0, 0, 0, 0};
      if (live[u]) k[u] = __ldg(reinterpret_cast<const uint4*>(keys + at[u] * stride));
    }
#pragma unroll
    for (int u = 0; u < kKeys; ++u) {
      if (live[u]) v[u] = __ldg(reinterpret_cast<const uint4*>(values + at[u] * stride));
    }
#pragma unroll
    for (int u = 0; u < kKeys; ++u) at[u] = slot_of(from + kKeys * kStreams + u * kStreams + stream);
    float score[kKeys][ROWS];
#pragma unroll
    for (int u = 0; u < kKeys; ++u) {
      const uint32_t words[] = {k[u].x, k[u].y, k[u].z, k[u].w};
#pragma unroll
      for (int r = 0; r < ROWS; ++r) score[u][r] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          score[u][r] = fmaf(q[r][2 * i], low(words[i]), score[u][r]);
          score[u][r] = fmaf(q[r][2 * i + 1], high(words[i]), score[u][r]);
        }
      }
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
#pragma unroll
      for (int u = 0; u < kKeys; ++u) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          score[u][r] += __shfl_xor_sync(kAllLanes, score[u][r], step);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float top = sums.top[r];
#pragma unroll
      for (int u = 0; u < kKeys; ++u) top = live[u] ? fmaxf(top, score[u][r]) : top;
      const float kept = exp2_fast(sums.top[r] - top);
      sums.top[r] = top;
      sums.weight[r] *= kept;
#pragma unroll
      for (int i = 0; i < 8; ++i) sums.out[r][i] *= kept;
#pragma unroll
      for (int u = 0; u < kKeys; ++u) {
        score[u][r] = live[u] ? exp2_fast(score[u][r] - top) : 0;
        sums.weight[r] += score[u][r];
      }
    }
#pragma unroll
    for (int u = 0; u < kKeys; ++u) {
      const uint32_t words[] = {v[u].x, v[u].y, v[u].z, v[u].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          sums.out[r][2 * i] = fmaf(score[u][r], low(words[i]), sums.out[r][2 * i]);
          sums.out[r][2 * i + 1] = fmaf(score[u][r], high(words[i]), sums.out[r][2 * i + 1]);
        }
      }
    }
  }

  // Streams of a warp, then warps, then parts, each in a fixed order.
#pragma unroll
  for (int step = kLanes; step < 32; step *= 2) sums.join(step);
  float *outs = memory, *tops = memory + kPickingWarps * ROWS * SIZE;
  if (lane < kLanes) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float4* to = reinterpret_cast<float4*>(outs + (warp * ROWS + r) * SIZE + channel);
      to[0] = {sums.out[r][0], sums.out[r][1], sums.out[r][2], sums.out[r][3]};
      to[1] = {sums.out[r][4], sums.out[r][5], sums.out[r][6], sums.out[r][7]};
      if (lane == 0) {
        tops[(warp * ROWS + r) * 2] = sums.top[r];
        tops[(warp * ROWS + r) * 2 + 1] = sums.weight[r];
      }
    }
  }
  __syncthreads();
  // Writes a channel of a query head from `count` parts: `of(i)` gives the highest score and the
  // weight of part i, `channel_of(i)` its channel.
  const auto write = [&](int r, int channel, int count, auto of, auto channel_of, float* partial) {
    float top = kLowestScore, weight = 0, out = 0;
    for (int i = 0; i < count; ++i) top = fmaxf(top, of(i).x);
    for (int i = 0; i < count; ++i) {
      const float2 own = of(i);
      const float share = exp2_fast(own.x - top);
      weight += own.y * share;
      out += channel_of(i) * share;
    }
    if (partial != nullptr) {
      partial[r * SIZE + channel] = out;
      if (channel == 0) {
        reinterpret_cast<float2*>(partial + group * SIZE)[r] = {top, weight};
      }
      return;
    }
    const int64_t to = row * group + r;
    layer.out[to * SIZE + channel] = narrow(weight > 0 ? out / weight : 0);
    if (channel == 0) {
      layer.lse[to] = weight > 0 ? (top + log2f(weight)) * 0.6931471805599453f : -INFINITY;
    }
  };
  const int64_t floats = floats_of(group, SIZE);
  float* found = reinterpret_cast<float*>(workspace + plan.found);
  for (int i = tid; i < group * SIZE; i += kPicking) {
    const int r = i / SIZE, c = i % SIZE;
    write(
        r, c, kPickingWarps,
        [&](int w) { return reinterpret_cast<const float2*>(tops)[w * ROWS + r]; },
        [&](int w) { return outs[(w * ROWS + r) * SIZE + c]; },
        parts > 1 ? found + part * floats : nullptr);
  }
  if (parts == 1) return;
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (tid == 0) is_last = atomicAdd(workspace + plan.meeting + 1, 1) + 1 == uint32_t(parts);
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int i = tid; i < group * SIZE; i += kPicking) {
    const int r = i / SIZE, c = i % SIZE;
    write(
        r, c, parts,
        [&](int p) {
          return __ldcg(reinterpret_cast<const float2*>(found + p * floats + group * SIZE) + r);
        },
        [&](int p) { return __ldcg(found + p * floats + r * SIZE + c); }, nullptr);
  }
}

// `ordered`: there are more blocks than the device holds at once.
template <typename Score, int SIZE, int ROWS>
__global__ void __launch_bounds__(kPicking, ROWS <= 2 ? 2 : 1)
    attend_kernel(const __grid_constant__ Hash hash, const __grid_constant__ Layer layer,
                  const __grid_constant__ HashPlan plan, const HashCut cut, const bool ordered,
                  uint32_t* memory) {
  extern __shared__ __align__(16) uint32_t shared[];
  uint32_t block = blockIdx.x;
  if (ordered) {
    wait_for_kernels_ahead();
    if (threadIdx.x == 0) shared[0] = atomicAdd(memory + plan.meeting + 2, 1);
    __syncthreads();
    block = shared[0];
    __syncthreads();
  }
  const int64_t row = block / cut.parts;
  const int part = block % cut.parts;
  const Taken taken = taken_of(hash.rows, row);
  const int until = layer.until[row / hash.heads], position = layer.positions[row / hash.heads];
  uint32_t* workspace = memory + row * plan.words;
  wait_for_kernels_ahead();
  pick<Score>(hash.rows, plan, workspace, row, taken, cut.chunk, part, shared);
  if (cut.parts > 1) {
    meet(workspace + plan.meeting, cut.parts);
  } else {
    __syncthreads();
  }
  const int chosen = taken.first + taken.need + taken.last;
  attend<SIZE, ROWS>(hash, layer, plan, row, until, position, chosen, part, cut.parts, workspace,
                     reinterpret_cast<float*>(shared));
}

// The slots alone.
template <typename Score>
__global__ void __launch_bounds__(kPicking, 2)
    pick_kernel(const __grid_constant__ Hash hash, const __grid_constant__ HashPlan plan,
                const HashCut cut, uint32_t* memory) {
  extern __shared__ __align__(16) uint32_t shared[];
  const int64_t row = blockIdx.x / cut.parts;
  wait_for_kernels_ahead();
  pick<Score>(hash.rows, plan, memory + row * plan.words, row, taken_of(hash.rows, row), cut.chunk,
              blockIdx.x % cut.parts, shared);
}

}  // namespace jspec
