// What kernels and handlers share on both platforms.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace jspec {

// cudaStream_t by the name behind it, so that CPU code needs no CUDA headers.
using Stream = CUstream_st*;

}  // namespace jspec
