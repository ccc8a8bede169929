// bfloat16 on a CPU, by its bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace jspec {

inline float wide(uint16_t value) {
  const uint32_t bits = uint32_t(value) << 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}

inline uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to nearest, ties to even
}

}  // namespace jspec
