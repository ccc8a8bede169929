// The CUDA kernel of gathered attention, for a CPU.
#include "gathered/gathered.cu"

namespace jspec {
namespace {
EMULATOR_SHARED_MEMORY
}
}  // namespace jspec
