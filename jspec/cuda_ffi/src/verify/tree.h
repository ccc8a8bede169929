// Verification of trees: arguments, and the launch behind the handler. What each field means is said
// in jspec/ops/tree.py.
#pragma once

#include "verify/verify.h"

namespace jspec {

constexpr int kMostNodes = 32;  // the root included

struct TreeCall {
  Greedy greedy;           // of at most kMostNodes - 1 draft tokens
  const int32_t* parents;  // [batch, gamma]
  int32_t* path;           // [batch, gamma]
};

// Returns what went wrong, or null.
const char* verify_tree(const TreeCall& tree, Stream stream);

}  // namespace jspec
