// The products by plain loops, rounded and added up as the CUDA kernel does.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "linear/linear.h"

namespace jspec {
namespace {

float widened(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// To the nearest bfloat16, ties to even.
uint16_t narrowed(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (std::isnan(x)) return 0x7fff;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float rounded(float x) { return widened(narrowed(x)); }

// A row's product with one column of the kernel, slice by slice.
float product(const Product& p, const std::vector<float>& x, int64_t column, int64_t width) {
  const int slice = (p.inputs + p.splits - 1) / p.splits;
  float total = 0;
  for (int first = 0; first < p.inputs; first += slice) {
    float sum = 0;
    for (int i = first; i < std::min(first + slice, p.inputs); ++i) {
      sum += x[i] * widened(p.kernel[i * width + column]);
    }
    total += sum;
  }
  return total;
}

}  // namespace

const char* norm(const Norm& n, bool, Stream) {
  for (int64_t row = 0; row < n.rows; ++row) {
    const uint16_t* x = n.x + row * n.width;
    float squares = 0;
    for (int i = 0; i < n.width; ++i) squares += widened(x[i]) * widened(x[i]);
    const float root = 1.0f / std::sqrt(squares / n.width + n.eps);
    for (int i = 0; i < n.width; ++i) {
      n.out[row * n.width + i] = narrowed(rounded(widened(x[i]) * root) * widened(n.scale[i]));
    }
  }
  return nullptr;
}

const char* multiply(const Product& p, bool, Stream) {
  const int64_t width = p.gated ? 2 * int64_t(p.outputs) : p.outputs;
  std::vector<float> x(p.inputs);
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int i = 0; i < p.inputs; ++i) x[i] = widened(p.x[row * p.inputs + i]);
    for (int64_t column = 0; column < p.outputs; ++column) {
      const int64_t up = p.gated ? p.outputs + column : column;
      float y = rounded(product(p, x, up, width));
      if (p.bias) y = rounded(y + widened(p.bias[up]));
      if (p.gated) {
        float gate = rounded(product(p, x, column, width));
        if (p.bias) gate = rounded(gate + widened(p.bias[column]));
        y = rounded(rounded(gate / (1 + std::exp(-gate))) * y);
      }
      const int64_t at = row * p.outputs + column;
      p.out[at] = narrowed(p.add ? widened(p.add[at]) + y : y);
    }
  }
  return nullptr;
}

}  // namespace jspec
