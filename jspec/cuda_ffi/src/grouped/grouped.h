// Products of rows in groups, each group with a matrix of its own, in MXFP4: arguments, and the
// launch behind the handler. What each field means is said in jspec/ops/grouped.py.
#pragma once

#include "linear/linear.h"

namespace jspec {

constexpr int kMostGroups = 1024;
constexpr int kMostEach = 24;  // rows of a group, in the mean

// What a product has beside its `Linear`, of `rows` rows, whose x is [sources, inputs]; kernel,
// block_scale and bias have an axis of the groups ahead, and nothing is added. Rows from
// starts[group] up to starts[group + 1] are multiplied by the matrix of the group.
struct Groups {
  const int32_t* starts;  // [count + 1]
  const int32_t* taken;   // [rows], null where row i is that of x
  const int32_t* put;     // [rows], null where row i stays there
  const float* weights;   // [rows] of the result, null for none
  int32_t sources;        // divide the rows
  int32_t count;
  float limit, alpha;  // of the gate, if clamped
  bool clamped;
};

// Returns what went wrong, or null. Numbers out of range in `starts`, `taken` and `put` are brought
// into it, so that nothing else is read or written.
const char* grouped_linear(const Linear& linear, const Groups& groups, Stream stream);

}  // namespace jspec
