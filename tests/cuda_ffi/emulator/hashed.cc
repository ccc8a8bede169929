// The CUDA kernels of selection by hash codes and of a layer around it, for a CPU.
#include "hashed/hashed.cu"

namespace jspec {
alignas(4096) uint32_t shared[emulator::kSharedBytes / 4];
const bool has_memory = (emulator::shared_memory = reinterpret_cast<char*>(shared)) != nullptr;
}  // namespace jspec
