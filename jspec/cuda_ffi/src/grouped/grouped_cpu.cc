// Products of rows in groups on a CPU: one sum a value.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/bfloat16_cpu.h"
#include "grouped/grouped.h"
#include "linear/mxfp4_cpu.h"

namespace jspec {
namespace {

float activated(const Groups& groups, float gate, float up) {
  if (!groups.clamped) return gate / (1 + std::exp(-gate)) * up;
  const float limit = groups.limit;
  if (gate > limit) gate = limit;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return (up + 1) * (gate / (1 + std::exp(-groups.alpha * gate)));
}

// Row `row` of the product, by the matrix of `group`.
void multiply(const Linear& linear, const Groups& groups, int64_t group, int32_t row) {
  const int64_t inputs = linear.inputs, outputs = linear.outputs;
  const int sides = linear.gated ? 2 : 1;
  const auto in_rows = [&](int32_t number) { return std::clamp(number, 0, linear.rows - 1); };
  const int64_t share = linear.rows / groups.sources;
  const uint16_t* source =
      linear.x + (groups.taken ? in_rows(groups.taken[row]) / share : row) * inputs;
  std::vector<float> x(inputs);
  float squares = 0;
  for (int64_t i = 0; i < inputs; ++i) {
    x[i] = wide(source[i]);
    squares += x[i] * x[i];
    if (linear.scale) x[i] = wide(narrow(x[i] * wide(linear.scale[i])));
  }
  const float root = linear.scale ? 1 / std::sqrt(squares / inputs + linear.eps) : 1.0f;
  const int64_t goal = groups.put ? in_rows(groups.put[row]) : row;
  const auto* codes = static_cast<const uint8_t*>(linear.kernel);
  for (int64_t column = 0; column < outputs; ++column) {
    float totals[2] = {};
    for (int side = 0; side < sides; ++side) {
      const int64_t at = (group * sides + side) * outputs + column, block = at * (inputs / kBlock);
      totals[side] =
          root * multiplied(x, codes + block * (kBlock / 2), linear.block_scale + block);
      if (linear.bias) totals[side] += wide(linear.bias[at]);
    }
    float value = linear.gated ? activated(groups, totals[0], totals[1]) : totals[0];
    if (groups.weights) value *= groups.weights[goal];
    const int64_t place = goal * outputs + column;
    if (linear.wide) {
      static_cast<float*>(linear.out)[place] = value;
    } else {
      static_cast<uint16_t*>(linear.out)[place] = narrow(value);
    }
  }
}

}  // namespace

const char* grouped_linear(const Linear& linear, const Groups& groups, Stream) {
  for (int32_t group = 0; group < groups.count; ++group) {
    const int32_t end = std::min(groups.starts[group + 1], linear.rows);
    for (int32_t row = std::max(groups.starts[group], 0); row < end; ++row) {
      multiply(linear, groups, group, row);
    }
  }
  return nullptr;
}

}  // namespace jspec
