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

// Matmuls in a row, each of which may read what those before it gave. On a GPU each begins to read
// its weights while the one ahead of it ends, or is summed.
const char* linear_chain(const std::vector<Link>& links, Stream stream);

}  // namespace jspec
