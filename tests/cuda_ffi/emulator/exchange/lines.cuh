// The functions of jspec/cuda_ffi/src/exchange/lines.cuh on a CPU. A thread that awaits a line lets
// others run, those of other devices among them.
#pragma once

#include "cuda_runtime.h"
#include "exchange/exchange.h"

namespace jspec {

inline void send(Line* line, Line value) {
  *line = value;
  ++emulator::events;
}
inline Line receive(const Line* line) { return *line; }
inline int64_t now() { return 0; }

inline uint2 awaited(Line value, const Line* line, uint32_t message, int64_t) {
  const auto is_there = [&] {
    return value.low >> 32 == message && value.high >> 32 == message;
  };
  emulator::wait_until([&] {
    if (!is_there()) value = *line;
    return is_there();
  });
  ++emulator::events;
  return {unsigned(value.low), unsigned(value.high)};
}

}  // namespace jspec
