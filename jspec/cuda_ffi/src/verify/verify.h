// Greedy verification: its arguments, and the launches behind its handlers. What each field means
// is said in jspec/ops/verify.py.
#pragma once

#include "common/launch.h"

namespace jspec {

// Tokens are int32, or int64 where `wide`. Every array of them has fewer than 2^31.
struct Greedy {
  const void* draft_tokens;      // [batch, gamma]
  const void* target_tokens;     // [batch, gamma + 1]
  const int32_t* draft_lengths;  // [batch]
  const void* stop_tokens;       // [batch, stops]
  int32_t* accepted;             // [batch]
  int32_t* committed;            // [batch]
  bool* mismatch;                // [batch]
  void* next_token;              // [batch]
  bool* stopped;                 // [batch]
  void* tokens;                  // [batch, gamma + 1]
  int64_t batch;
  int32_t gamma;
  int32_t stops;
  bool wide;
};

// Each returns what went wrong, or null. A block holds `warps` warps.
const char* verify_ballot(const Greedy& greedy, int warps, Stream stream);
const char* verify_naive(const Greedy& greedy, int warps, Stream stream);

}  // namespace jspec
