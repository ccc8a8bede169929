// The CUDA kernels of selection among scores, for a CPU.
#include "select/select.cu"

namespace jspec {
EMULATOR_SHARED_MEMORY
}  // namespace jspec
