// Selection of the best slots of each row: its arguments, and the launches behind its handlers. What
// each field means is said in jspec/ops/select.py.
#pragma once

#include "common/host_device.h"
#include "common/launch.h"

namespace jspec {

enum class Scores : int32_t { kInt32, kFloat32, kBfloat16, kFloat16 };

// Rows of a selection: what is common to every kind of score, those of hash codes too.
struct Rows {
  const int32_t* counts;   // [rows / share]
  const int32_t* lengths;  // [rows / share]
  int32_t* slots;          // [rows, k]
  int64_t rows;
  int32_t n, k, sinks, recent;
  int32_t share = 1;  // rows next to each other that have one count and one length
};

struct Select {
  const void* scores;  // [rows, n]
  Scores type;
  int32_t highest;  // int32 scores lie in -1..highest; -1 where nothing is known
  Rows rows;
};

// How the work is cut for a GPU. A block counts `counted` slots of a row, and later takes slots out of
// `taken`, a multiple of that. Both are powers of 2. Where `counted` holds a whole row of scores, one
// block does all of it.
struct Cut {
  int32_t counted, taken;
};

constexpr int32_t kLeastChunk = 256, kMostChunk = 32768;

// Returns what went wrong, or null. What a row has of the workspace, `Plan` says.
const char* select(const Select& select, const Cut& cut, void* workspace, Stream stream);

}  // namespace jspec
