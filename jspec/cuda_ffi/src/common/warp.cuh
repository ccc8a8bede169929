// What kernels of every subject use: the mask of a whole warp, its sums, and what a launch reports.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jspec {

constexpr unsigned kAllLanes = 0xffffffff;

// The message of the last launch's error, or null.
inline const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// The sum of `x` over this lane and those behind it.
__device__ __forceinline__ uint32_t suffix_sum(uint32_t x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t next = __shfl_down_sync(kAllLanes, x, step);
    if (lane + step < 32) x += next;
  }
  return x;
}

// The sum of `x` over the lanes up to this one.
template <typename T>
__device__ __forceinline__ T prefix_sum(T x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T before = __shfl_up_sync(kAllLanes, x, step);
    if (lane >= step) x += before;
  }
  return x;
}

}  // namespace jspec
