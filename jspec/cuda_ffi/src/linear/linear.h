// A matmul of a few rows with the norm before it and what follows it: arguments, and the launches
// behind the handlers. What each field means is said in jspec/ops/linear.py; values are bfloat16,
// 8 bits with a scale for each column, or 4 bits with one for each block of inputs of a column.
#pragma once

#include "common/launch.h"

namespace jspec {

// What inputs are a multiple of, and those of weights of 8 bits; the most rows and inputs.
constexpr int kGroup = 32, kInt8Group = 16, kMostRows = 24, kMostInputs = 1 << 20;
constexpr int kBlock = 32;  // inputs that share a scale in MXFP4
// The most of a matmul that has all of its weights on their way at once.
constexpr int kSmallRows = 16, kSmallInputs = 1024;
// The most rows of weights of 16 bits that are not transposed, those of an exact matmul, and the
// most inputs of either and of more than kMostRows.
constexpr int kTileRows = 128, kExactRows = 1 << 16, kTileInputs = 1 << 15;
// Up to so many bytes of weights, tiles were measured to be faster for few rows too.
constexpr int64_t kTileBytes = 24 << 20;

// Inputs of one sum of squares that the matmul ahead of a norm writes, and the most such sums of all
// rows: each block reads those of its rows, and many take longer than scaling the rows otherwise.
constexpr int kSquared = 64, kMostSquares = 4096;

// The sums of squares of a row of so many inputs.
inline int squares_of_row(int inputs) { return (inputs + kSquared - 1) / kSquared; }

// Where a matmul scales its results for the norm of the next of a chain; null for none.
struct Next {
  const uint16_t* scale;  // [outputs] of that norm
  uint16_t* scaled;       // [rows, outputs]
  float* squares;         // [rows, parts]
  int32_t parts;          // squares_of_row(outputs)
};

struct Linear {
  const uint16_t* x;          // [rows, inputs]
  const void* kernel;         // [inputs, columns], [columns, inputs] if transposed
  const float* column_scale;  // [columns] of weights of 8 bits, which are transposed; else null
  const uint8_t* block_scale;  // [columns, inputs / kBlock], E8M0, of MXFP4, transposed; else null
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
  bool exact;  // the bits of a row depend on that row alone, on Hopper
  // Rows that are scaled for the norm by a kernel ahead, and sums of their squares; null: the matmul
  // scales them itself.
  uint16_t* scaled = nullptr;  // [rows, inputs]
  float* squares = nullptr;    // [rows, square_parts]
  int32_t square_parts = 0;
  bool scaled_by_previous = false;  // matmul of the chain; else by a kernel of its own
  Next next{};
  bool is_followed = false;  // by a matmul of its chain, which begins early
};

// Returns what went wrong, or null.
const char* linear(const Linear& linear, Stream stream);

// A matmul on a GPU, with the weights on their way in steps; those of 16 bits are not transposed.
// `early`: it may start before the kernel ahead of it, one of the same call, has ended.
const char* linear_stream(const Linear& linear, bool early, Stream stream);

// A matmul on Hopper in tiles of rows, with weights of 16 bits that are not transposed.
const char* linear_hopper(const Linear& linear, bool early, Stream stream);

}  // namespace jspec
