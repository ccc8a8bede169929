// The CUDA kernel of matmuls of more rows than a warp's, for a CPU, and the sums of a chain.
#define __CUDA_ARCH_FEAT_SM90_ALL
#include "linear/linear_hopper.cu"

#include "linear/chain.h"

namespace jspec {

const char* linear(const Linear& linear, Stream stream) {
  return linear_hopper(linear, false, stream);
}

const char* linear_chain(const std::vector<Link>& links, Stream stream) {
  for (size_t i = 0; i < links.size(); ++i) {
    const auto& [matmul, sum] = links[i];
    if (const char* error = linear_hopper(matmul, i > 0, stream)) return error;
    if (!sum.values) continue;
    if (const char* error = all_reduce(sum, true, stream)) return error;
  }
  return nullptr;
}

}  // namespace jspec

#include "exchange.cc"
