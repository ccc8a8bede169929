// Verification fused with packing or appending on a CPU: first the one, then the other.
#include <algorithm>
#include <cstring>

#include "pack/kv.h"

namespace jspec {

const char* verify_and_pack(const Greedy& greedy, const Pack& given, const Cut& cut,
                            Stream stream) {
  verify_naive(greedy, 1, stream);
  Pack packing = given;
  packing.accepted = greedy.accepted;
  return pack(packing, cut, stream);
}

const char* verify_and_pack_single(const Greedy& greedy, const Pack& pack, Stream stream) {
  return verify_and_pack(greedy, pack, Cut{}, stream);
}

const char* verify_and_append(const Greedy& greedy, const Append& append, const Cut&,
                              Stream stream) {
  verify_naive(greedy, 1, stream);
  for (int64_t row = 0; row < greedy.batch; ++row) {
    const int64_t length = append.lengths[row];
    // What has no slot is not written.
    const int64_t fits = length < 0 ? 0 : std::max<int64_t>(0, append.slots - length);
    const int64_t count = std::min<int64_t>(greedy.accepted[row], fits);
    if (count == 0) continue;
    std::memcpy(append.cache + (row * append.slots + length) * append.row_bytes,
                append.kv + row * greedy.gamma * append.row_bytes, count * append.row_bytes);
  }
  return nullptr;
}

}  // namespace jspec
