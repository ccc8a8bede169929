// The all-to-all of exchange.h: one launch a device.
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

// blockIdx.y is the distance to the rank that is sent to, and from the one that is heard.
__global__ void __launch_bounds__(kThreads) exchange_kernel(const Exchange x, const Peers peers) {
  Workspace* own = peers.of[x.me];
  const int64_t lines = x.bytes / kLineBytes, step = int64_t(gridDim.x) * kThreads;
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const auto to = [&](int rank) {
    return reinterpret_cast<const uint2*>(x.pieces + rank * x.bytes);
  };
  const auto from = [&](int rank) { return reinterpret_cast<uint2*>(x.found + rank * x.bytes); };
  const int distance = blockIdx.y;
  if (distance == 0) {
    for (int64_t i = first; i < lines; i += step) from(x.me)[i] = to(x.me)[i];
  } else {
    const int receiver = (x.me + distance) % x.ranks;
    const int sender = (x.me + x.ranks - distance) % x.ranks;
    const uint32_t sent = own->messages[x.first + receiver] + 1;
    const uint32_t heard = own->messages[x.first + sender] + 1;
    Line* there = peers.of[receiver]->lines[sent % 2][x.first + x.me];
    const Line* here = own->lines[heard % 2][x.first + sender];
    for (int64_t i = first; i < lines; i += step) {
      const uint2 bits = to(receiver)[i];
      send(there + i, {uint64_t(sent) << 32 | bits.x, uint64_t(sent) << 32 | bits.y});
    }
    const int64_t until = now() + x.patience;
    for (int64_t i = first; i < lines; i += step) {
      const Line line = awaited(here + i, heard, until);
      from(sender)[i] = make_uint2(uint32_t(line.low), uint32_t(line.high));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(&own->done, 1) + 1 == gridDim.x * gridDim.y) {
    // No block of this kernel reads them any more.
    own->done = 0;
    for (int rank = 0; rank < x.ranks; ++rank) {
      if (rank != x.me) own->messages[x.first + rank] += 1;
    }
  }
}

const char* open_one(int device) {
  if (workspaces[device]) return nullptr;
  Workspace* made = nullptr;
  cudaError_t error = cudaSetDevice(device);
  // The kernel is loaded now: loading it later could wait for a peer that waits for it.
  cudaFuncAttributes attributes;
  if (!error) error = cudaFuncGetAttributes(&attributes, exchange_kernel);
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
  for (int rank = 0; rank < exchange.ranks; ++rank) {
    peers.of[rank] = workspaces[exchange.first + rank];
    if (!peers.of[rank]) return "a device has no workspace";
  }
  const int64_t lines = exchange.bytes / kLineBytes;
  const auto blocks = std::min<int64_t>((lines + kThreads - 1) / kThreads, kMostBlocks);
  exchange_kernel<<<dim3(unsigned(blocks), exchange.ranks), kThreads, 0, stream>>>(exchange, peers);
  return launch_error();
}

}  // namespace jspec
