// What kernels of every subject use: the mask of a whole warp, and what a launch reports.
#pragma once

#include <cuda_runtime.h>

namespace jspec {

constexpr unsigned kAllLanes = 0xffffffff;

// The message of the last launch's error, or null.
inline const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace jspec
