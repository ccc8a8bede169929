// Selection of the best slots of each row: its arguments, and the launches behind its handlers. What
// each field means is said in jspec/ops/select.py and jspec/ops/hash_select.py.
#pragma once

#include "common/host_device.h"
#include "common/launch.h"

namespace jspec {

enum class Scores : int32_t { kInt32, kFloat32, kBfloat16, kFloat16 };

// Rows of a selection: what is common to every kind of score.
struct Rows {
  const int32_t* counts;   // [rows]
  const int32_t* lengths;  // [rows]
  int32_t* slots;          // [rows, k]
  int64_t rows;
  int32_t n, k, sinks, recent;
};

struct Select {
  const void* scores;  // [rows, n]
  Scores type;
  int32_t highest;  // int32 scores lie in -1..highest; -1 where nothing is known
  Rows rows;
};

struct Hash {
  const uint32_t* q_codes;  // [batch, tokens, heads * group, words]
  const uint32_t* k_codes;  // [batch, n, heads, words]
  int64_t batch;
  int32_t tokens, heads, group, words;
  Rows rows;  // batch * heads of them

  JSPEC_HOST_DEVICE int64_t queries() const { return int64_t(tokens) * group; }
  JSPEC_HOST_DEVICE int64_t highest() const { return queries() * 32 * words; }
};

// How the work is cut for a GPU. A block counts `counted` slots of a row, and later takes slots out of
// `taken`, a multiple of that. Both are powers of 2. Where `counted` holds a whole row of scores, one
// block does all of it.
struct Cut {
  int32_t counted, taken;
};

constexpr int32_t kLeastChunk = 256, kMostChunk = 32768;

// Each returns what went wrong, or null. What a row has of the workspace, `Plan` says.
const char* select(const Select& select, const Cut& cut, void* workspace, Stream stream);
const char* hash_select(const Hash& hash, const Cut& cut, void* workspace, Stream stream);

}  // namespace jspec
