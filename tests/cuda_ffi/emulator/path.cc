// The CUDA kernel that packs a path, for a CPU.
#include "pack/path.cu"

namespace jspec {
namespace {
EMULATOR_SHARED_MEMORY
}  // namespace
}  // namespace jspec
