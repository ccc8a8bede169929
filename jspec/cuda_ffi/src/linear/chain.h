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

// Whether `matmul` may write its results once more, scaled for the norm of `next`; both are in tiles.
// Not if other devices' results are added first, nor while `matmul` itself reads `memory`. Exact
// matmuls add up squares in an order of their own, and tiles with a gate have no code for it.
inline bool can_scale_for_next(const Linear& matmul, const Reduction& sum, const Linear& next) {
  return next.scale && next.inputs == matmul.outputs && !sum.values && !matmul.wide &&
         !matmul.scaled && !matmul.gated && !matmul.exact &&
         next.rows * squares_of_row(next.inputs) <= kMostSquares;
}

// Calls `launch(matmul, early)` for each matmul, and sums what is summed. `is_in_tiles(matmul)`:
// whether it is launched in tiles.
template <class IsInTiles, class Launch>
const char* launch_links(const std::vector<Link>& links, const ScaledRows& memory, Stream stream,
                         IsInTiles is_in_tiles, Launch launch) {
  bool is_scaled = false;  // by the matmul ahead
  for (size_t i = 0; i < links.size(); ++i) {
    auto [matmul, sum] = links[i];
    if (is_scaled) {
      matmul.scaled = memory.scaled, matmul.squares = memory.squares;
      matmul.square_parts = squares_of_row(matmul.inputs), matmul.scaled_by_previous = true;
    }
    const Linear* next = i + 1 < links.size() ? &links[i + 1].matmul : nullptr;
    is_scaled = memory.scaled && next && is_in_tiles(matmul) && is_in_tiles(*next) &&
                can_scale_for_next(matmul, sum, *next);
    if (is_scaled) {
      matmul.next = {next->scale, memory.scaled, memory.squares, squares_of_row(matmul.outputs)};
    }
    matmul.is_followed = next != nullptr;
    if (const char* error = launch(matmul, i > 0)) return error;
    if (!sum.values) continue;
    if (const char* error = all_reduce(sum, true, stream)) return error;
  }
  return nullptr;
}

// Matmuls in a row, each of which may read what those before it gave. On a GPU each begins to read
// its weights while the one ahead of it ends, or is summed.
const char* linear_chain(const std::vector<Link>& links, const ScaledRows& memory, Stream stream);

}  // namespace jspec
