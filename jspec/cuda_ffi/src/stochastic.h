// Drawing and verifying by random numbers: the arguments, and the launches behind the handlers. What
// each field means is said in jspec/ops/stochastic.py and jspec/ops/sample.py.
#pragma once

#include "launch.h"

namespace jspec {

constexpr int32_t kTile = 1024;

// Logits [batch, positions, vocabulary], and what is kept of each position in the workspace of its
// batch row: see `Workspace`.
struct Source {
  const void* logits;
  int32_t positions;
  int32_t first;  // index of the first position among those of the workspace
};

// How rows sample: `jspec.ops.distribution.Settings`.
struct Settings {
  const float* rate;      // [batch]
  const int32_t* top_k;   // [batch]
  const float* top_p;     // [batch]
  const float* min_p;     // [batch]
  const uint32_t* seeds;  // [batch]
};

struct Sampling {
  Settings settings;
  Source target;
  Source draft;  // without positions where the draft was certain of its tokens
  const int32_t* lengths;  // [batch] drafted tokens; null where every position counts
  uint32_t* workspace;     // [batch, words]
  int64_t batch;
  int64_t words;
  int32_t vocabulary;
  int32_t tiles;
  bool bfloat16;
  bool draft_bfloat16;
  bool filtered;
};

struct Stochastic {
  Sampling sampling;
  const int32_t* draft_tokens;  // [batch, gamma]
  const int32_t* stop_tokens;   // [batch, stops]
  const int32_t* positions;     // [batch]
  int32_t* accepted;            // [batch]
  int32_t* committed;           // [batch]
  bool* mismatch;               // [batch]
  int32_t* next_token;          // [batch]
  bool* stopped;                // [batch]
  int32_t* tokens;              // [batch, gamma + 1]
  int32_t gamma;
  int32_t stops;
};

struct Draws {
  Sampling sampling;
  const int32_t* positions;  // [batch, positions]
  int32_t* tokens;           // [batch, positions]
  uint32_t role;
};

// Each returns what went wrong, or null.
const char* verify_stochastic(const Stochastic& stochastic, Stream stream);
const char* sample(const Draws& draws, Stream stream);

}  // namespace jspec
