// The CUDA kernels of hash codes, for a CPU.
#include "codes/codes.cu"

namespace jspec {
EMULATOR_SHARED_MEMORY
}  // namespace jspec
