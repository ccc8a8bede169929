// Greedy verification on a CPU: the serial scan, a row after the other, for both kernels.
#include "verify/row.h"

namespace jspec {

const char* verify_naive(const Greedy& greedy, int, Stream) {
  for (int64_t row = 0; row < greedy.batch; ++row) {
    greedy.wide ? verify_row<int64_t>(greedy, row) : verify_row<int32_t>(greedy, row);
  }
  return nullptr;
}

const char* verify_ballot(const Greedy& greedy, int warps, Stream stream) {
  return verify_naive(greedy, warps, stream);
}

}  // namespace jspec
