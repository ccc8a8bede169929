// The CUDA kernels of greedy verification, with and without commits, and of trees, for a CPU.
#include "verify/commit.cu"
#include "verify/commit_ffi.cc"
#include "verify/tree.cu"
#include "verify/tree_ffi.cc"
#include "verify/verify.cu"

namespace jspec {
namespace {
EMULATOR_SHARED_MEMORY
}  // namespace
}  // namespace jspec
