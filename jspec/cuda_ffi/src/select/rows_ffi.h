// What the handlers of every selection check.
#pragma once

#include "common/ffi.h"
#include "select/select.h"

namespace jspec {

using Type = ffi::DataType;

inline bool is_power(int32_t x) { return x > 0 && (x & (x - 1)) == 0; }

// Reads and checks what every selection has: counts and lengths from buffer `first` on, [batch,
// inner...], then the slots, and the workspace that `plan` asks for.
inline ffi::Error rows_of(const Buffers& buffers, size_t first, int64_t batch, int64_t n,
                          int32_t sinks, int32_t recent, Rows* rows) {
  const auto shape = buffers[first + 2].dimensions();
  const int64_t k = shape.size() ? shape.back() : 0;
  if (k < 1 || k > INT32_MAX || n > INT32_MAX - kMostChunk || sinks < 0 || recent < 0) {
    return invalid("slots ", buffers[first + 2], " of n=", n, ", sinks=", sinks, " and recent=",
                   recent, " must be [..., k] with k at least 1 and all below 2^31 - 2^14");
  }
  *rows = Rows{buffers.data<int32_t>(first), buffers.data<int32_t>(first + 1),
               buffers.data<int32_t>(first + 2), batch, static_cast<int32_t>(n),
               static_cast<int32_t>(k), sinks, recent};
  return buffers.check(first, batch, {{"counts", Type::S32, {}},
                                      {"lengths", Type::S32, {}},
                                      {"slots", Type::S32, {k}}});
}

}  // namespace jspec
