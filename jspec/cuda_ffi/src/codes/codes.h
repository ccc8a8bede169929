// Hash codes by themselves: their Hamming scores, and encoding. What each field means is said in
// jspec/ops/hash.py.
#pragma once

#include <cstdint>

#include "common/launch.h"

namespace jspec {

struct KeyScores {
  const uint32_t* q_codes;  // [batch, tokens, heads * group, words]
  const uint32_t* k_codes;  // [batch, n, heads, words]
  const int32_t* lengths;  // [batch]
  const float* norms;  // [batch, n, heads], null for none
  void* scores;  // [batch, heads, n]: float with norms, else int32
  int64_t batch;
  int32_t tokens, heads, group, words, n;
};

constexpr int32_t kMostShared = 4095;  // bits that a key may share with the queries

enum class Float : int32_t { kBfloat16, kFloat32 };

struct Encoding {
  const void *q, *k;  // [tokens, heads * group, size] and [tokens, heads, size], `k` null for none
  const void* w;  // [heads, size, 32 * words]
  uint32_t *q_codes, *k_codes;  // as `q` and `k`, with words for size
  Float x_type, w_type;
  int64_t tokens;
  int32_t heads, group, size, words;
};

constexpr int32_t kMostChannels = 1024;  // of a head: a block holds 48 rows of them

// Each returns what went wrong, or null.
const char* hamming_scores(const KeyScores& scores, Stream stream);
const char* hash_encode(const Encoding& encoding, Stream stream);

}  // namespace jspec
