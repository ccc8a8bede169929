// Verification fused with packing on a CPU: one after the other.
#include "pack/kv.h"

namespace jspec {

const char* verify_and_pack(const Greedy& greedy, const Pack& given, const Cut& cut,
                            Stream stream) {
  verify_ballot(greedy, 1, stream);
  Pack packing = given;
  packing.accepted = greedy.accepted;
  return pack(packing, cut, stream);
}

const char* verify_and_pack_single(const Greedy& greedy, const Pack& pack, Stream stream) {
  return verify_and_pack(greedy, pack, Cut{}, stream);
}

}  // namespace jspec
