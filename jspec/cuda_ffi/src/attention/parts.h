// What the handlers of split attention know of its parts.
#pragma once

namespace jspec {

// Into which keys may be split, a multiple of a warp's lanes: each lane merges an equal share.
constexpr int kMaxParts = 128;

}  // namespace jspec
