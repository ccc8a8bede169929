// The functions of jspec/cuda_ffi/src/common/bfloat16.cuh on a CPU.
#pragma once

#include "common/bfloat16_cpu.h"

namespace jspec {

inline float low(uint32_t pair) { return wide(uint16_t(pair)); }
inline float high(uint32_t pair) { return wide(uint16_t(pair >> 16)); }
inline uint32_t scaled(uint32_t pair, uint32_t scale) {
  return uint32_t(narrow(high(pair) * high(scale))) << 16 | narrow(low(pair) * low(scale));
}
inline uint4 scaled(const uint4& x, const uint4& by) {
  return {scaled(x.x, by.x), scaled(x.y, by.y), scaled(x.z, by.z), scaled(x.w, by.w)};
}

}  // namespace jspec
