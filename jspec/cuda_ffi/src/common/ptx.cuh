// Instructions without a C++ function, from compute capability 8.0 on.
// tests/cuda_ffi/emulator has the same functions for CPUs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jspec {

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two numbers as bfloat16, `low` in the low half.
__device__ __forceinline__ uint32_t packed(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

}  // namespace jspec
