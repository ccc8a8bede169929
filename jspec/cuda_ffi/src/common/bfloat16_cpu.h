// bfloat16 and E4M3 on a CPU, by their bits.
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

// Of E4M3, which has no infinities.
inline float wide(uint8_t value) {
  const int exponent = value >> 3 & 15, mantissa = value & 7;
  const float size = (value & 127) == 127 ? NAN
                     : exponent           ? std::ldexp(8.0f + mantissa, exponent - 10)
                                          : std::ldexp(float(mantissa), -9);
  return value & 128 ? -size : size;
}

inline uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to nearest, ties to even
}

}  // namespace jspec
