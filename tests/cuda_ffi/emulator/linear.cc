// The CUDA kernel of matmuls of more rows than a warp's, for a CPU.
#define __CUDA_ARCH_FEAT_SM90_ALL
#include "linear/linear_hopper.cu"

namespace jspec {
namespace {
EMULATOR_SHARED_MEMORY
}

const char* linear(const Linear& linear, Stream stream) {
  return linear_hopper(linear, false, stream);
}

const char* linear_chain(const std::vector<Linear>& links, Stream stream) {
  for (size_t i = 0; i < links.size(); ++i) {
    if (const char* error = linear_hopper(links[i], i > 0, stream)) return error;
  }
  return nullptr;
}

}  // namespace jspec
