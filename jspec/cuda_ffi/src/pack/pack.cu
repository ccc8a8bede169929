// Packing on a GPU by counts that are given.
#include "pack/move.cuh"

namespace jspec {

const char* pack(const Pack& pack, const Cut& cut, Stream stream) {
  return launch_move(Given{{pack}}, pack.kv, pack.packed, pack.batch,
                     pack.gamma * pack.row_bytes, pack.row_bytes, cut, stream);
}

}  // namespace jspec
