// The instructions of jspec/cuda_ffi/src/common/ptx.cuh on a CPU.
#pragma once

#include "common/bfloat16_cpu.h"
#include "cuda_runtime.h"

namespace jspec {

inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

inline float exp2_fast(float x) { return std::exp2(x); }

inline uint32_t packed(float low, float high) { return uint32_t(narrow(high)) << 16 | narrow(low); }

}  // namespace jspec
