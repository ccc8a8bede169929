// A product of a few rows with a matrix of weights, with the norm before it and what follows it.
#pragma once

#include "common/launch.h"

namespace jspec {

constexpr int kMostRows = 64;
constexpr int kMostSplits = 8;  // thread blocks of a cluster

// out = [silu(gate) * up of] x * kernel + bias + add, in bfloat16; null for what there is not.
struct Product {
  const uint16_t* x;       // [rows, inputs]
  const uint16_t* kernel;  // [inputs, outputs], [inputs, 2, outputs] if gated
  const uint16_t* bias;    // [outputs], [2, outputs] if gated
  const uint16_t* add;     // [rows, outputs]
  uint16_t* out;           // [rows, outputs]
  int32_t rows, inputs, outputs;
  int32_t splits;  // of the inputs
  int32_t stages;  // of weights on their way
  bool gated;
};

// A root-mean-square norm: out = x / sqrt(mean of squares + eps), rounded, times scale.
struct Norm {
  const uint16_t* x;      // [rows, width]
  const uint16_t* scale;  // [width]
  uint16_t* out;          // [rows, width]
  int32_t rows, width;
  float eps;
};

// One launch each. `chained`: the call before on the stream was one of these too, and only what it
// wrote may differ from what its own start saw: weights are then read before it ends.
const char* multiply(const Product& product, bool chained, Stream stream);
const char* norm(const Norm& norm, bool chained, Stream stream);

}  // namespace jspec
