// The all-to-all, the merge and the all-reduce of exchange.h: one launch a device.
#include <cuda_runtime.h>

#include <algorithm>
#include <mutex>

#include "common/bfloat16.cuh"
#include "common/dependent.cuh"
#include "exchange/exchange.h"
#include "exchange/lines.cuh"

namespace jspec {
namespace {

constexpr int kThreads = 256, kLanes = 32;
constexpr int kMostBlocks = 64;  // for each rank: few enough to run at once

struct Peers {
  Workspace* of[kMostDevices];  // by rank
};

Workspace* workspaces[kMostDevices];  // by device
std::mutex opening;

// What a block does once it has read the numbers of its messages, while these travel: the last block
// of a kernel counts them.
__device__ __forceinline__ void count_messages(Workspace* own, const Group& group) {
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(&own->done, 1) + 1 == gridDim.x * gridDim.y) {
    // No block of this kernel reads them any more.
    own->done = 0;
    for (int rank = 0; rank < group.ranks; ++rank) {
      if (rank != group.me) own->messages[group.first + rank] += 1;
    }
  }
}

__device__ __forceinline__ Line line_of(uint2 bits, uint32_t message) {
  return {uint64_t(message) << 32 | bits.x, uint64_t(message) << 32 | bits.y};
}

// blockIdx.y is the distance to the rank that is sent to, and from the one that is heard.
__global__ void __launch_bounds__(kThreads) exchange_kernel(
    const Exchange x, const __grid_constant__ Peers peers) {
  const auto [ranks, me, origin, patience] = x.group;
  Workspace* own = peers.of[me];
  const int64_t lines = x.bytes / kLineBytes, step = int64_t(gridDim.x) * kThreads;
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const auto to = [&](int rank) {
    return reinterpret_cast<const uint2*>(x.pieces + rank * x.bytes);
  };
  const auto from = [&](int rank) { return reinterpret_cast<uint2*>(x.found + rank * x.bytes); };
  const int distance = blockIdx.y;
  if (distance == 0) {
    count_messages(own, x.group);
    for (int64_t i = first; i < lines; i += step) from(me)[i] = to(me)[i];
    return;
  }
  const int receiver = (me + distance) % ranks, sender = (me + ranks - distance) % ranks;
  const uint32_t sent = own->messages[origin + receiver] + 1;
  const uint32_t heard = own->messages[origin + sender] + 1;
  Line* there = peers.of[receiver]->lines[sent % 2][origin + me];
  const Line* here = own->lines[heard % 2][origin + sender];
  for (int64_t i = first; i < lines; i += step) send(there + i, line_of(to(receiver)[i], sent));
  count_messages(own, x.group);
  const int64_t until = now() + patience;
  for (int64_t i = first; i < lines; i += step) {
    from(sender)[i] = awaited(receive(here + i), here + i, heard, until);
  }
}

// What a device hears from its peers.
struct Heard {
  const Line* from[kMostDevices];
  uint32_t message[kMostDevices];
  int ranks, me;

  __device__ __forceinline__ Heard(const Workspace& own, const Group& group)
      : ranks(group.ranks), me(group.me) {
#pragma unroll
    for (int rank = 0; rank < kMostDevices; ++rank) {
      if (!is_peer(rank)) continue;
      message[rank] = own.messages[group.first + rank] + 1;
      from[rank] = own.lines[message[rank] % 2][group.first + rank];
    }
  }

  __device__ __forceinline__ bool is_peer(int rank) const { return rank < ranks && rank != me; }

  // Line `i` of each peer as it is: all are asked for before one is awaited.
  __device__ __forceinline__ void ask(int64_t i, Line (&asked)[kMostDevices]) const {
#pragma unroll
    for (int rank = 0; rank < kMostDevices; ++rank) {
      if (is_peer(rank)) asked[rank] = receive(from[rank] + i);
    }
  }

  __device__ __forceinline__ uint2 bits(int rank, int64_t i, Line asked, int64_t until) const {
    return awaited(asked, from[rank] + i, message[rank], until);
  }
};

// Adds the numbers of a line times `share`, of which there are two of float32 or four of bfloat16.
template <bool kNarrow>
__device__ __forceinline__ void add_line(float (&sums)[4], uint2 bits, float share) {
  const float parts[] = {low(bits.x), high(bits.x), low(bits.y), high(bits.y)};
  const float whole[] = {__uint_as_float(bits.x), __uint_as_float(bits.y)};
#pragma unroll
  for (int i = 0; i < (kNarrow ? 4 : 2); ++i) {
    sums[i] = fmaf(kNarrow ? parts[i] : whole[i], share, sums[i]);
  }
}

template <bool kNarrow>
__device__ __forceinline__ uint2 rounded(const float (&sums)[4]) {
  if (!kNarrow) return make_uint2(__float_as_uint(sums[0]), __float_as_uint(sums[1]));
  return make_uint2(narrow(sums[0]) | uint32_t(narrow(sums[1])) << 16,
                    narrow(sums[2]) | uint32_t(narrow(sums[3])) << 16);
}

// A warp has a head of a row, of which its log-sum-exp is the last line.
template <bool kNarrow>
__global__ void __launch_bounds__(kThreads) merge_kernel(
    const __grid_constant__ Merging x, const __grid_constant__ Peers peers) {
  const int ranks = x.group.ranks, me = x.group.me, origin = x.group.first;
  Workspace* own = peers.of[me];
  const int64_t items = x.rows * x.heads, lines = x.lines;
  const int64_t first = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  const int64_t step = int64_t(gridDim.x) * (kThreads / kLanes);
  const int lane = threadIdx.x % kLanes;
  const auto outs = reinterpret_cast<const uint2*>(x.outs);
  // The same head of a rank's share.
  const auto head_of = [&](int64_t item, int rank) {
    return (item / x.heads * ranks + rank) * x.heads + item % x.heads;
  };
  for (int distance = 1; distance < ranks; ++distance) {
    const int receiver = (me + distance) % ranks;
    const uint32_t sent = own->messages[origin + receiver] + 1;
    Line* there = peers.of[receiver]->lines[sent % 2][origin + me];
    for (int64_t item = first; item < items; item += step) {
      const int64_t head = head_of(item, receiver);
      for (int64_t i = lane; i <= lines; i += kLanes) {
        const uint2 bits =
            i < lines ? outs[head * lines + i] : make_uint2(__float_as_uint(x.lses[head]), 0);
        send(there + item * (lines + 1) + i, line_of(bits, sent));
      }
    }
  }
  const Heard heard(*own, x.group);
  count_messages(own, x.group);
  const int64_t until = now() + x.group.patience;
  for (int64_t item = first; item < items; item += step) {
    const int64_t head = head_of(item, me), begin = item * (lines + 1);
    Line last[kMostDevices], part[kMostDevices];
    float lses[kMostDevices], shares[kMostDevices];
    heard.ask(begin + lines, last);
    if (lane < lines) heard.ask(begin + lane, part);
    const float own_lse = x.lses[head];
#pragma unroll
    for (int rank = 0; rank < kMostDevices; ++rank) {
      if (rank >= ranks) continue;
      lses[rank] = rank == me ? own_lse
                              : __uint_as_float(
                                    heard.bits(rank, begin + lines, last[rank], until).x);
    }
    const float lse = shares_of(lses, ranks, shares);
    if (lane == 0) x.lse[item] = lse;
    for (int64_t i = lane; i < lines; i += kLanes) {
      if (i != lane) heard.ask(begin + i, part);
      const uint2 own_bits = outs[head * lines + i];
      float sums[4] = {};
#pragma unroll
      for (int rank = 0; rank < kMostDevices; ++rank) {
        if (rank >= ranks) continue;
        const uint2 bits = rank == me ? own_bits : heard.bits(rank, begin + i, part[rank], until);
        // An output without a key may be anything.
        if (shares[rank] > 0) add_line<kNarrow>(sums, bits, shares[rank]);
      }
      reinterpret_cast<uint2*>(x.out)[item * lines + i] = rounded<kNarrow>(sums);
    }
  }
}

// Two numbers as those that are stored.
template <bool kNarrow>
__device__ __forceinline__ void store_sums(const Reduction& x, int64_t i, float2 sum) {
  if constexpr (kNarrow) {
    uint32_t pair = narrow(sum.x) | uint32_t(narrow(sum.y)) << 16;
    if (x.added) {
      const uint32_t added = reinterpret_cast<const uint32_t*>(x.added)[i];
      pair = narrow(low(added) + low(pair)) | uint32_t(narrow(high(added) + high(pair))) << 16;
    }
    reinterpret_cast<uint32_t*>(x.sums)[i] = pair;
  } else {
    if (x.added) {
      const float2 added = reinterpret_cast<const float2*>(x.added)[i];
      sum = make_float2(added.x + sum.x, added.y + sum.y);
    }
    reinterpret_cast<float2*>(x.sums)[i] = sum;
  }
}

template <bool kNarrow>
__global__ void __launch_bounds__(kThreads) reduce_kernel(
    const __grid_constant__ Reduction x, const __grid_constant__ Peers peers) {
  const int ranks = x.group.ranks, me = x.group.me, origin = x.group.first;
  Workspace* own = peers.of[me];
  // All of its blocks run by then, so that those of the next kernel, which wait for them, take no
  // place that they need.
  let_next_start();
  wait_for_kernels_ahead();
  const int64_t lines = x.count * sizeof(float) / kLineBytes;
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  const auto values = reinterpret_cast<const uint2*>(x.values);
  for (int distance = 1; distance < ranks; ++distance) {
    const int receiver = (me + distance) % ranks;
    const uint32_t sent = own->messages[origin + receiver] + 1;
    Line* there = peers.of[receiver]->lines[sent % 2][origin + me];
    for (int64_t i = first; i < lines; i += step) send(there + i, line_of(values[i], sent));
  }
  const Heard heard(*own, x.group);
  count_messages(own, x.group);
  const int64_t until = now() + x.group.patience;
  for (int64_t i = first; i < lines; i += step) {
    Line asked[kMostDevices];
    heard.ask(i, asked);
    const uint2 own_bits = values[i];
    float2 sum;
#pragma unroll
    for (int rank = 0; rank < kMostDevices; ++rank) {
      if (rank >= ranks) continue;
      const uint2 bits = rank == me ? own_bits : heard.bits(rank, i, asked[rank], until);
      const float2 pair = {__uint_as_float(bits.x), __uint_as_float(bits.y)};
      sum = rank ? make_float2(sum.x + pair.x, sum.y + pair.y) : pair;
    }
    store_sums<kNarrow>(x, i, sum);
  }
}

const char* open_one(int device) {
  if (workspaces[device]) return nullptr;
  Workspace* made = nullptr;
  cudaError_t error = cudaSetDevice(device);
  // The kernels are loaded now: loading one later could wait for a peer that waits for it.
  cudaFuncAttributes attributes;
  if (!error) error = cudaFuncGetAttributes(&attributes, exchange_kernel);
  if (!error) error = cudaFuncGetAttributes(&attributes, merge_kernel<false>);
  if (!error) error = cudaFuncGetAttributes(&attributes, merge_kernel<true>);
  if (!error) error = cudaFuncGetAttributes(&attributes, reduce_kernel<false>);
  if (!error) error = cudaFuncGetAttributes(&attributes, reduce_kernel<true>);
  if (!error) error = cudaMalloc(&made, sizeof(Workspace));
  if (!error) error = cudaMemset(made, 0, sizeof(Workspace));
  if (!error) error = cudaDeviceSynchronize();
  if (error) return cudaGetErrorString(error);
  workspaces[device] = made;
  return nullptr;
}

const char* let_reach(int device, int peer) {
  cudaError_t error = cudaSetDevice(device);
  if (!error) error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    error = cudaSuccess;
  }
  return error ? cudaGetErrorString(error) : nullptr;
}

const char* peers_of(const Group& group, Peers& peers) {
  for (int rank = 0; rank < group.ranks; ++rank) {
    peers.of[rank] = workspaces[group.first + rank];
    if (!peers.of[rank]) return "a device has no workspace";
  }
  return nullptr;
}

// The blocks of a launch of `threads`, which take several items each where there are more.
unsigned blocks_of(int64_t threads) {
  return std::min<int64_t>((threads + kThreads - 1) / kThreads, kMostBlocks);
}

}  // namespace

const char* open_exchange(int count) {
  const std::lock_guard<std::mutex> lock(opening);
  int current = 0;
  if (const cudaError_t error = cudaGetDevice(&current)) return cudaGetErrorString(error);
  const char* wrong = nullptr;
  for (int device = 0; device < count && !wrong; ++device) {
    for (int peer = 0; peer < count && !wrong; ++peer) {
      if (peer != device) wrong = let_reach(device, peer);
    }
    if (!wrong) wrong = open_one(device);
  }
  cudaSetDevice(current);
  return wrong;
}

const char* exchange(const Exchange& exchange, Stream stream) {
  Peers peers = {};
  if (const char* wrong = peers_of(exchange.group, peers)) return wrong;
  const dim3 blocks(blocks_of(exchange.bytes / kLineBytes), exchange.group.ranks);
  return launch_behind(exchange_kernel, blocks, kThreads, 0, false, stream, exchange, peers);
}

const char* merge(const Merging& merging, Stream stream) {
  Peers peers = {};
  if (const char* wrong = peers_of(merging.group, peers)) return wrong;
  return launch_behind(merging.narrow ? merge_kernel<true> : merge_kernel<false>,
                       blocks_of(merging.rows * merging.heads * kLanes), kThreads, 0, false,
                       stream, merging, peers);
}

const char* all_reduce(const Reduction& reduction, bool early, Stream stream) {
  Peers peers = {};
  if (const char* wrong = peers_of(reduction.group, peers)) return wrong;
  const int64_t lines = reduction.count * sizeof(float) / kLineBytes;
  return launch_behind(reduction.narrow ? reduce_kernel<true> : reduce_kernel<false>,
                       blocks_of(lines), kThreads, 0, early, stream, reduction, peers);
}

}  // namespace jspec
