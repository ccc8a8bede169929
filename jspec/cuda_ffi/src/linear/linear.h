// A product of a few rows with the norm before it and what follows it: arguments, and the launch
// behind the handler. What each field means is said in jspec/ops/linear.py; values are bfloat16, or
// 8 bits with a scale for each column.
#pragma once

#include "common/launch.h"

namespace jspec {

// Inputs that a warp multiplies at a time, and most rows and inputs that a kernel takes.
constexpr int kGroup = 32, kMostRows = 16, kMostInputs = 1024;
// The same of weights of 8 bits, whose inputs are not held at once.
constexpr int kInt8Group = 16, kInt8MostInputs = 1 << 20;

struct Linear {
  const uint16_t* x;          // [rows, inputs]
  const void* kernel;         // [inputs, columns], [columns, inputs] if transposed
  const float* column_scale;  // [columns] of weights of 8 bits, which are transposed; else null
  const uint16_t* bias;       // [columns], null for none
  const uint16_t* scale;      // [inputs] of the norm, null for none
  const uint16_t* add;        // [rows, outputs], null for none
  void* out;                  // [rows, outputs], bfloat16, or float32 if wide
  int32_t rows;
  int32_t inputs;
  int32_t outputs;  // columns, or half of them if gated
  float eps;
  bool gated;
  bool transposed;
  bool wide;
};

// Returns what went wrong, or null.
const char* linear(const Linear& linear, Stream stream);

// The same on a GPU, of weights of 8 bits.
const char* linear_int8(const Linear& linear, Stream stream);

}  // namespace jspec
