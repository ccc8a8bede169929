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

// What a block does last: the last block of a kernel counts its messages.
__device__ __forceinline__ void finish(Workspace* own, const Group& group) {
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
    for (int64_t i = first; i < lines; i += step) from(me)[i] = to(me)[i];
  } else {
    const int receiver = (me + distance) % ranks, sender = (me + ranks - distance) % ranks;
    const uint32_t sent = own->messages[origin + receiver] + 1;
    const uint32_t heard = own->messages[origin + sender] + 1;
    Line* there = peers.of[receiver]->lines[sent % 2][origin + me];
    const Line* here = own->lines[heard % 2][origin + sender];
    for (int64_t i = first; i < lines; i += step) send(there + i, line_of(to(receiver)[i], sent));
    const int64_t until = now() + patience;
    for (int64_t i = first; i < lines; i += step) {
      from(sender)[i] = awaited(receive(here + i), here + i, heard, until);
    }
  }
  finish(own, x.group);
}

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
  const int64_t until = now() + x.group.patience;
  const Line* from[kMostDevices];
  uint32_t heard[kMostDevices];
#pragma unroll
  for (int rank = 0; rank < kMostDevices; ++rank) {
    if (rank >= ranks || rank == me) continue;
    heard[rank] = own->messages[origin + rank] + 1;
    from[rank] = own->lines[heard[rank] % 2][origin + rank];
  }
  for (int64_t item = first; item < items; item += step) {
    const int64_t head = head_of(item, me), begin = item * (lines + 1);
    Line last[kMostDevices], part[kMostDevices];
    float lses[kMostDevices], shares[kMostDevices];
    // All lines are asked for before one is awaited.
    const auto ask = [&](Line(&to)[kMostDevices], int64_t i) {
#pragma unroll
      for (int rank = 0; rank < kMostDevices; ++rank) {
        if (rank < ranks && rank != me) to[rank] = receive(from[rank] + begin + i);
      }
    };
    ask(last, lines);
    if (lane < lines) ask(part, lane);
#pragma unroll
    for (int rank = 0; rank < kMostDevices; ++rank) {
      if (rank >= ranks) continue;
      lses[rank] = rank == me ? x.lses[head]
                              : __uint_as_float(awaited(last[rank], from[rank] + begin + lines,
                                                        heard[rank], until).x);
    }
    const float lse = shares_of(lses, ranks, shares);
    if (lane == 0) x.lse[item] = lse;
    for (int64_t i = lane; i < lines; i += kLanes) {
      if (i != lane) ask(part, i);
      float sums[4] = {};
#pragma unroll
      for (int rank = 0; rank < kMostDevices; ++rank) {
        if (rank >= ranks) continue;
        const uint2 bits = rank == me ? outs[head * lines + i]
                                      : awaited(part[rank], from[rank] + begin + i, heard[rank],
                                                until);
        // An output without a key may be anything.
        if (shares[rank] > 0) add_line<kNarrow>(sums, bits, shares[rank]);
      }
      reinterpret_cast<uint2*>(x.out)[item * lines + i] = rounded<kNarrow>(sums);
    }
  }
  finish(own, x.group);
}

__global__ void __launch_bounds__(kThreads) reduce_kernel(
    const Reduction x, const __grid_constant__ Peers peers) {
  const auto [ranks, me, origin, patience] = x.group;
  Workspace* own = peers.of[me];
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
  const int64_t until = now() + patience;
  for (int64_t i = first; i < lines; i += step) {
    float2 sum;
    for (int rank = 0; rank < ranks; ++rank) {
      uint2 bits = values[i];
      if (rank != me) {
        const uint32_t heard = own->messages[origin + rank] + 1;
        const Line* here = own->lines[heard % 2][origin + rank] + i;
        bits = awaited(receive(here), here, heard, until);
      }
      const float2 pair = {__uint_as_float(bits.x), __uint_as_float(bits.y)};
      sum = rank ? make_float2(sum.x + pair.x, sum.y + pair.y) : pair;
    }
    reinterpret_cast<float2*>(x.sums)[i] = sum;
  }
  finish(own, x.group);
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
  if (!error) error = cudaFuncGetAttributes(&attributes, reduce_kernel);
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

const char* all_reduce(const Reduction& reduction, Stream stream) {
  Peers peers = {};
  if (const char* wrong = peers_of(reduction.group, peers)) return wrong;
  const int64_t lines = reduction.count * sizeof(float) / kLineBytes;
  return launch_behind(reduce_kernel, blocks_of(lines), kThreads, 0, false, stream, reduction,
                       peers);
}

}  // namespace jspec
