// A matmul of a few rows on a CPU: one sum a value.
#include <cmath>
#include <vector>

#include "common/bfloat16_cpu.h"
#include "linear/chain.h"
#include "linear/mxfp4_cpu.h"

namespace jspec {

const char* linear(const Linear& linear, Stream) {
  const int64_t inputs = linear.inputs, outputs = linear.outputs;
  const int sides = linear.gated ? 2 : 1;
  const float* scales = linear.column_scale;
  const auto* eight = static_cast<const int8_t*>(linear.kernel);
  const auto* four = static_cast<const uint8_t*>(linear.kernel);
  const auto* sixteen = static_cast<const uint16_t*>(linear.kernel);
  const auto rounded = [&](float value) { return linear.wide ? value : wide(narrow(value)); };
  std::vector<float> x(inputs);
  for (int64_t row = 0; row < linear.rows; ++row) {
    float squares = 0;
    for (int64_t i = 0; i < inputs; ++i) {
      x[i] = wide(linear.x[row * inputs + i]);
      squares += x[i] * x[i];
      if (linear.scale) x[i] = wide(narrow(x[i] * wide(linear.scale[i])));
    }
    const float root = linear.scale ? 1 / std::sqrt(squares / inputs + linear.eps) : 1.0f;
    for (int64_t column = 0; column < outputs; ++column) {
      float totals[2] = {};
      for (int side = 0; side < sides; ++side) {
        const int64_t at = side * outputs + column;
        const int64_t down = linear.transposed ? 1 : sides * outputs;
        const int64_t first = at * (linear.transposed ? inputs : 1);
        if (linear.block_scale) {
          const uint8_t* blocks = linear.block_scale + first / kBlock;
          totals[side] = multiplied(x, four + first / 2, blocks);
        } else {
          for (int64_t i = 0; i < inputs; ++i) {
            const int64_t place = first + i * down;
            totals[side] += x[i] * (scales ? eight[place] : wide(sixteen[place]));
          }
        }
        totals[side] = rounded(totals[side] * root * (scales ? scales[at] : 1.0f));
        if (linear.bias) totals[side] = rounded(totals[side] + wide(linear.bias[at]));
      }
      float value = totals[sides - 1];
      if (linear.gated) value = rounded(rounded(totals[0] / (1 + std::exp(-totals[0]))) * value);
      const int64_t place = row * outputs + column;
      if (linear.add) value = rounded(wide(linear.add[place]) + value);
      if (linear.wide) {
        static_cast<float*>(linear.out)[place] = value;
      } else {
        static_cast<uint16_t*>(linear.out)[place] = narrow(value);
      }
    }
  }
  return nullptr;
}

const char* linear_chain(const std::vector<Link>& links, const ScaledRows&, Stream stream) {
  for (const auto& [matmul, sum] : links) {
    linear(matmul, stream);
    if (!sum.values) continue;
    if (const char* error = all_reduce(sum, false, stream)) return error;
  }
  return nullptr;
}

}  // namespace jspec
