// The all-to-all and the all-reduce of exchange.h: one launch a device.
#include <cuda_runtime.h>

#include <algorithm>
#include <mutex>

#include "common/warp.cuh"
#include "exchange/exchange.h"

namespace jspec {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 64;  // for each rank: few enough to run at once
constexpr int kSpins = 256;      // between two looks at the clock

struct Peers {
  Workspace* of[kMostDevices];  // by rank
};

Workspace* workspaces[kMostDevices];  // by device
std::mutex opening;

__device__ __forceinline__ void send(Line* line, Line value) {
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(line), "l"(value.low),
               "l"(value.high)
               : "memory");
}

__device__ __forceinline__ Line receive(const Line* line) {
  Line value;
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(value.low), "=l"(value.high)
               : "l"(line)
               : "memory");
  return value;
}

__device__ __forceinline__ int64_t now() {
  int64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// The line once both of its words are of `message`.
__device__ __forceinline__ Line awaited(const Line* line, uint32_t message, int64_t until) {
  Line value = receive(line);
  for (int spins = 0; value.low >> 32 != message || value.high >> 32 != message; ++spins) {
    if (spins == kSpins) {
      // An error of the program is better than a GPU that hangs.
      if (now() > until) __trap();
      spins = 0;
    }
    value = receive(line);
  }
  return value;
}

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
      const Line line = awaited(here + i, heard, until);
      from(sender)[i] = make_uint2(uint32_t(line.low), uint32_t(line.high));
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
        const Line line = awaited(own->lines[heard % 2][origin + rank] + i, heard, until);
        bits = make_uint2(uint32_t(line.low), uint32_t(line.high));
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

unsigned blocks_of(int64_t bytes) {
  const int64_t lines = bytes / kLineBytes;
  return std::min<int64_t>((lines + kThreads - 1) / kThreads, kMostBlocks);
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
  const dim3 blocks(blocks_of(exchange.bytes), exchange.group.ranks);
  exchange_kernel<<<blocks, kThreads, 0, stream>>>(exchange, peers);
  return launch_error();
}

const char* all_reduce(const Reduction& reduction, Stream stream) {
  Peers peers = {};
  if (const char* wrong = peers_of(reduction.group, peers)) return wrong;
  const unsigned blocks = blocks_of(reduction.count * sizeof(float));
  reduce_kernel<<<blocks, kThreads, 0, stream>>>(reduction, peers);
  return launch_error();
}

}  // namespace jspec
