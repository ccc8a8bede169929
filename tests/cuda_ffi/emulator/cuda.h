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
  uint32_t swizzle;  // bits of the number of a 16-byte unit that are permuted
};

enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_UINT8 };
enum { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle {
  CU_TENSOR_MAP_SWIZZLE_NONE = 0,
  CU_TENSOR_MAP_SWIZZLE_64B = 2,
  CU_TENSOR_MAP_SWIZZLE_128B = 3,
};
enum CUtensorMapL2promotion {
  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
};
enum { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, unsigned rank, void* data,
                                       const uint64_t* sizes, const uint64_t* strides,
                                       const uint32_t* box, const uint32_t* steps, int,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, int) {
  const uint32_t element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  bool good = rank >= 2 && rank <= 4 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  *map = {static_cast<char*>(data), int(rank), {1, 1, 1, 1}, {element}, {1, 1, 1, 1}, element,
          uint32_t(swizzle)};
  for (unsigned i = 0; i < rank; ++i) {
    map->sizes[i] = sizes[i], map->box[i] = box[i];
    good &= sizes[i] >= 1 && box[i] >= 1 && box[i] <= 256 && steps[i] == 1;
    if (i) map->strides[i] = strides[i - 1], good &= strides[i - 1] % 16 == 0;
  }
  const uint32_t row = box[0] * element;
  good &= swizzle ? row == 16u << swizzle : row % 16 == 0;
  return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                    uint64_t,
                                                    cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
