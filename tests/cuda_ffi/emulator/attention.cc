// The CUDA kernel of attention, for a CPU.
#define __CUDA_ARCH_FEAT_SM90_ALL
#include "attention/attention.cu"

namespace jspec {
namespace {
EMULATOR_SHARED_MEMORY
}
}  // namespace jspec
