// Lines of messages: how they are stored in a peer's memory, and awaited in a device's own.
// tests/cuda_ffi/emulator has the same functions for CPUs.
#pragma once

#include <cuda_runtime.h>

#include "exchange/exchange.h"

namespace jspec {

constexpr int kSpins = 256;  // between two looks at the clock

__device__ __forceinline__ void send(Line* line, Line value) {
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(line), "l"(value.low),
               "l"(value.high)
               : "memory");
}

// The line as it is, of this message or of an earlier one.
__device__ __forceinline__ Line receive(const Line* line) {
  Line value;
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(value.low), "=l"(value.high)
               : "l"(line)
               : "memory");
  return value;
}

__device__ __forceinline__ int64_t now() {
  int64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// The data of `line` once both of its words are of `message`; `value` is what it was before.
__device__ __forceinline__ uint2 awaited(Line value, const Line* line, uint32_t message,
                                         int64_t until) {
  for (int spins = 0; value.low >> 32 != message || value.high >> 32 != message; ++spins) {
    if (spins == kSpins) {
      // An error of the program is better than a GPU that hangs.
      if (now() > until) __trap();
      spins = 0;
    }
    value = receive(line);
  }
  return make_uint2(uint32_t(value.low), uint32_t(value.high));
}

}  // namespace jspec
