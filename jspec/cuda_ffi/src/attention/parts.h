// What the handlers of split attention know of its parts.
#pragma once

namespace jspec {

constexpr int kMaxParts = 128;  // into which keys may be split: a lane of a warp merges four

}  // namespace jspec
