// bfloat16 by its bits, singly and in pairs.
// tests/cuda_ffi/emulator has the same functions for CPUs.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace jspec {

__device__ __forceinline__ float wide(uint16_t value) {
  return __uint_as_float(uint32_t(value) << 16);
}
__device__ __forceinline__ uint16_t narrow(float value) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// The products of two pairs, rounded.
__device__ __forceinline__ uint32_t scaled(uint32_t pair, uint32_t scale) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair),
                                         *reinterpret_cast<const __nv_bfloat162*>(&scale));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// Of eight numbers.
__device__ __forceinline__ uint4 scaled(const uint4& x, const uint4& by) {
  return {scaled(x.x, by.x), scaled(x.y, by.y), scaled(x.z, by.z), scaled(x.w, by.w)};
}

}  // namespace jspec
