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

// What jspec/ops/acceptance_scan.py takes and gives: no ragged drafts, no stop tokens, no block.
struct Scan {
  const int32_t* draft_tokens;   // [batch, gamma]
  const int32_t* target_tokens;  // [batch, gamma + 1]
  int32_t* accepted;             // [batch]
  bool* mismatch;                // [batch]
  int32_t* next_token;           // [batch]
  int64_t batch;
  int32_t gamma;
};

// Each returns what went wrong, or null. A block holds `warps` warps, and a warp has a sequence, or
// where naive 32, one a thread.
const char* verify_ballot(const Greedy& greedy, int warps, Stream stream);
const char* scan_ballot(const Scan& scan, int warps, Stream stream);
const char* scan_naive(const Scan& scan, int warps, Stream stream);

}  // namespace jspec
