// The functions of jspec/cuda_ffi/src/common/bfloat16.cuh on a CPU.
#pragma once

#include "common/bfloat16_cpu.h"

namespace jspec {

inline float low(uint32_t pair) { return wide(uint16_t(pair)); }
inline float high(uint32_t pair) { return wide(uint16_t(pair >> 16)); }
inline uint32_t scaled(uint32_t pair, uint32_t scale) {
  return uint32_t(narrow(high(pair) * high(scale))) << 16 | narrow(low(pair) * low(scale));
}

}  // namespace jspec
