// The acceptance scan of one sequence by one thread, serial up to the first mismatch, as the
// verification paper's naive kernel does it.
#pragma once

#include "common/host_device.h"
#include "verify/verify.h"

namespace jspec {

JSPEC_HOST_DEVICE inline void scan_row(const Scan& scan, int64_t row) {
  const int32_t* draft = scan.draft_tokens + row * scan.gamma;
  const int32_t* target = scan.target_tokens + row * (scan.gamma + 1);
  int32_t accepted = 0;
  while (accepted < scan.gamma && draft[accepted] == target[accepted]) ++accepted;
  scan.accepted[row] = accepted;
  scan.mismatch[row] = accepted < scan.gamma;
  scan.next_token[row] = target[accepted];
}

}  // namespace jspec
