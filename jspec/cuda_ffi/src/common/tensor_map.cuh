// How copies by the TMA unit of Hopper find the tiles of an array.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace jspec {

// Fills `map` of an array: `sizes` and `box`, which a copy takes, innermost axis first; `strides` in
// bytes, of the second axis first; `promotion`: how many bytes at a time come to the L2. Returns the
// error's message, or null.
template <int kRank>
const char* map_tiles(CUtensorMap* map, CUtensorMapDataType type, const void* data,
                      const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
                      const cuuint32_t (&box)[kRank], CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion promotion) {
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult status;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode,
                                                             12000, cudaEnableDefault, &status);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault, &status);
#endif
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (status != cudaDriverEntryPointSuccess) return "the driver has no cuTensorMapEncodeTiled";
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      map, type, kRank, const_cast<void*>(data), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused an array";
}

}  // namespace jspec
