// Greedy verification on a CPU: the serial scan, a row after the other.
#include "verify/row.h"
#include "verify/scan.h"

namespace jspec {

const char* verify_ballot(const Greedy& greedy, int, Stream) {
  for (int64_t row = 0; row < greedy.batch; ++row) {
    greedy.wide ? verify_row<int64_t>(greedy, row) : verify_row<int32_t>(greedy, row);
  }
  return nullptr;
}

const char* scan_naive(const Scan& scan, int, Stream) {
  for (int64_t row = 0; row < scan.batch; ++row) scan_row(scan, row);
  return nullptr;
}

const char* scan_ballot(const Scan& scan, int warps, Stream stream) {
  return scan_naive(scan, warps, stream);
}

}  // namespace jspec
