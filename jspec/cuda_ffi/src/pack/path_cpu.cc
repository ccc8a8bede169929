// Packing of a path on a CPU: one entry after the other.
#include <algorithm>
#include <cstring>

#include "pack/path.h"

namespace jspec {

const char* pack_path(const Path& path, Stream) {
  for (int64_t row = 0; row < path.batch; ++row) {
    const int32_t* source = path.source + row * path.moves;
    const int32_t* target = path.target + row * path.moves;
    const int count = std::clamp(path.counts[row], 0, path.moves);
    for (int c = 0; c < path.columns; ++c) {
      const int64_t bytes = path.column[c].bytes;
      char* entries = path.column[c].entries + row * path.slots * bytes;
      for (int i = 0; i < count; ++i) {
        if (source[i] == target[i]) continue;
        std::memcpy(entries + target[i] * bytes, entries + source[i] * bytes, bytes);
      }
    }
  }
  return nullptr;
}

}  // namespace jspec
