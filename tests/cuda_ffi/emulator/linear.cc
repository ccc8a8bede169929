// The CUDA kernel of matmuls of more rows than a warp's, for a CPU, and the sums of a chain.
#define __CUDA_ARCH_FEAT_SM90_ALL
#include "linear/linear_hopper.cu"

#include "linear/chain.h"

namespace jspec {
namespace {

int tile_rows = 0;  // of every matmul, or 0: as the estimates of time say
bool tile_splits = false;

template <class Block>
const char* launch_tile(const Linear& linear, Stream stream) {
  const Plan plan = plan_of<Block>(linear, tile_splits, {});
  Shares shares;
  place_in_memory<Block>(linear, plan, &shares);
  return shares.depth ? launch<Block>(linear, plan, false, stream) : "there is no room";
}

template <int rows>
const char* launch_rows(const Linear& linear, Stream stream) {
  if (linear.scale && !linear.scaled) {
    if constexpr (rows > 128) return "such tiles scale no rows";
    else
      return linear.gated ? launch_tile<Block<true, rows, true>>(linear, stream)
                          : launch_tile<Block<false, rows, true>>(linear, stream);
  }
  return linear.gated ? launch_tile<Block<true, rows, false>>(linear, stream)
                      : launch_tile<Block<false, rows, false>>(linear, stream);
}

}  // namespace

// Makes the tiles of all matmuls that follow those of `rows` rows, a block for each part of the
// inputs if `splits`; 0 rows: the fastest again.
extern "C" void jspec_use_tile(int rows, bool splits) { tile_rows = rows, tile_splits = splits; }

const char* launch_any(const Linear& linear, bool early, Stream stream) {
  switch (tile_rows) {
    case 32: return launch_rows<32>(linear, stream);
    case 64: return launch_rows<64>(linear, stream);
    case 128: return launch_rows<128>(linear, stream);
    case 192: return launch_rows<192>(linear, stream);
  }
  return linear_hopper(linear, early, stream);
}

const char* linear(const Linear& linear, Stream stream) {
  return launch_any(linear, false, stream);
}

const char* linear_chain(const std::vector<Link>& links, const ScaledRows& memory, Stream stream) {
  return launch_links(
      links, memory, stream, [](const Linear&) { return true; },
      [&](const Linear& matmul, bool early) { return launch_any(matmul, early, stream); });
}

}  // namespace jspec

#include "exchange.cc"
