// A matmul with weights of 4 bits on a CPU.
#pragma once

#include <cmath>
#include <vector>

#include "linear/linear.h"

namespace jspec {

// The sum of a row with a column of weights of 4 bits. Scaled block by block: the factor alone may
// be a number that a CPU takes for zero.
inline float multiplied(const std::vector<float>& x, const uint8_t* codes, const uint8_t* scales) {
  static constexpr float numbers[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  float total = 0;
  for (size_t first = 0; first < x.size(); first += kBlock, ++scales) {
    float sum = 0;
    for (size_t i = first; i < first + kBlock; ++i) {
      const int code = codes[i / 2] >> i % 2 * 4 & 15;
      sum += x[i] * (code & 8 ? -numbers[code & 7] : numbers[code]);
    }
    total += *scales == 255 ? NAN : std::ldexp(sum, *scales - 127);
  }
  return total;
}

}  // namespace jspec
