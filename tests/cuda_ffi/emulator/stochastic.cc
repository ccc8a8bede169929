// The CUDA kernels of drawing and verifying by random numbers, for a CPU.
#include "cuda_runtime.h"

// Variables of functions that a block shares: blocks run one after the other.
#undef __shared__
#define __shared__ static __attribute__((section("shared_variables")))

#include "sample/stochastic.cu"

extern char __start_shared_variables[], __stop_shared_variables[];

namespace jspec {
namespace {
EMULATOR_SHARED_MEMORY

// As other shared memory, they begin as NaN.
const bool has_variables = [] {
  emulator::resets.push_back([] {
    std::fill(__start_shared_variables, __stop_shared_variables, char(0xff));
  });
  return true;
}();
}  // namespace
}  // namespace jspec
