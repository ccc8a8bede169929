// Packing on a CPU: one copy a batch row.
#include <algorithm>
#include <cstring>

#include "pack/kv.h"

namespace jspec {

const char* pack(const Pack& pack, const Cut&, Stream) {
  int32_t offset = 0;
  for (int64_t row = 0; row < pack.batch; ++row) {
    const int32_t count = std::clamp(pack.accepted[row], 0, pack.gamma);
    std::memcpy(pack.packed + offset * pack.row_bytes,
                pack.kv + row * pack.gamma * pack.row_bytes, count * pack.row_bytes);
    pack.offsets[row] = offset;
    offset += count;
  }
  *pack.total = offset;
  return nullptr;
}

}  // namespace jspec
