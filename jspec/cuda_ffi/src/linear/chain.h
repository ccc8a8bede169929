// Matmuls in a row, of which some are summed over devices.
#pragma once

#include <vector>

#include "exchange/exchange.h"
#include "linear/linear.h"

namespace jspec {

// A matmul, and the sum of what it gives over the devices of a group, of which none has values null.
struct Link {
  Linear matmul;
  Reduction sum;
};

// Memory for the rows that a matmul of a chain scales for the norm of the next, and for sums of
// their squares; null for none.
struct ScaledRows {
  uint16_t* scaled;
  float* squares;
};

// Lets `matmul`, in tiles, scale its results for `next`, also in tiles. Whether it can: not what is
// summed first, nor while `matmul` reads that memory itself, and exact matmuls add up squares in an
// order of their own.
inline bool scale_for_next(const Linear& next, const Reduction& sum, const ScaledRows& memory,
                           Linear& matmul) {
  if (!next.scale || sum.values || matmul.scaled || matmul.gated || matmul.wide || matmul.exact ||
      next.rows * squares_of_row(next.inputs) > kMostSquares) {
    return false;
  }
  matmul.next = {next.scale, memory.scaled, memory.squares};
  return true;
}

// Lets `matmul` read what the one ahead of it scaled.
inline void read_scaled(const ScaledRows& memory, Linear& matmul) {
  matmul.scaled = memory.scaled, matmul.squares = memory.squares;
  matmul.square_parts = squares_of_row(matmul.inputs), matmul.is_scaled = true;
}

// Matmuls in a row, each of which may read what those before it gave. On a GPU each begins to read
// its weights while the one ahead of it ends, or is summed.
const char* linear_chain(const std::vector<Link>& links, const ScaledRows& memory, Stream stream);

}  // namespace jspec
