// What follows the sums of a matmul of a few rows.
#pragma once

#include "common/bfloat16.cuh"
#include "linear/linear.h"

namespace jspec {
namespace {

// What a row is multiplied by for its norm, from the sum of its squares: a factor of the whole row,
// so that it can wait for their sum.
__device__ float root_of(const Linear& linear, float squares) {
  return linear.scale ? rsqrtf(squares / linear.inputs + linear.eps) : 1.0f;
}

// A value of the result, from the sums of its column on each side. Rounded where a model rounds:
// after the matmul, its bias, its activation and the sum. `root`: of the row.
template <int sides>
__device__ float finished(const Linear& linear, const float (&sums)[sides], float root,
                          const float (&factors)[sides], const float (&shifts)[sides],
                          float added) {
  const auto rounded = [&](float value) { return linear.wide ? value : wide(narrow(value)); };
  float values[sides];
#pragma unroll
  for (int side = 0; side < sides; ++side) {
    // Products are not contracted with sums, whatever surrounds them.
    const float product = __fmul_rn(__fmul_rn(sums[side], root), factors[side]);
    values[side] = rounded(rounded(product) + shifts[side]);
  }
  float value = values[0];
  if constexpr (sides == 2) {
    value = rounded(__fmul_rn(rounded(__fdividef(value, 1 + expf(-value))), values[1]));
  }
  return linear.add ? rounded(added + value) : value;
}

}  // namespace
}  // namespace jspec
