// Tensor maps of copies by the TMA unit on a CPU.
#pragma once

#include "cuda_runtime.h"

using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;

struct CUtensorMap {
  char* data;
  int rank;
  uint64_t sizes[5], strides[5];  // innermost first; strides in bytes
  uint32_t box[5];
  uint32_t element;  // bytes
  bool swizzled;
};

enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_UINT8 };
enum { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum { CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_SWIZZLE_NONE };
enum { CU_TENSOR_MAP_L2_PROMOTION_L2_128B };
enum { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, int type, unsigned rank, void* data,
                                       const uint64_t* sizes, const uint64_t* strides,
                                       const uint32_t* box, const uint32_t* steps, int,
                                       int swizzle, int, int) {
  const uint32_t element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  const bool swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  bool good = rank >= 3 && rank <= 5 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  *map = {static_cast<char*>(data), int(rank), {}, {element}, {}, element, swizzled};
  for (unsigned i = 0; i < rank; ++i) {
    map->sizes[i] = sizes[i], map->box[i] = box[i];
    good &= sizes[i] >= 1 && box[i] >= 1 && box[i] <= 256 && steps[i] == 1;
    if (i) map->strides[i] = strides[i - 1], good &= strides[i - 1] % 16 == 0;
  }
  good &= swizzled ? box[0] * element == 128 : box[0] * element % 16 == 0;  // a row
  return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                    uint64_t,
                                                    cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
