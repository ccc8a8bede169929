// Entries of columns that move within their rows, in place: arguments, and what the handler
// launches. What each field means is said in jspec/ops/path.py.
#pragma once

#include "common/launch.h"

namespace jspec {

// Columns of a launch: they are among its parameters, of which there may be 4 KB.
constexpr int kMostPathColumns = 240;

struct PathColumn {
  char* entries;  // [batch, slots] of `bytes`
  int32_t bytes;
  int32_t access;  // bytes of an access; only where a GPU moves them
};

struct Path {
  PathColumn column[kMostPathColumns];
  int32_t columns;
  int32_t moves;
  const int32_t* source;  // [batch, moves]
  const int32_t* target;  // [batch, moves]
  const int32_t* counts;  // [batch]
  int64_t batch;
  int64_t slots;
};

// Returns what went wrong, or null.
const char* pack_path(const Path& path, Stream stream);

}  // namespace jspec
