// Drawing and verifying by random numbers: the arguments, and the launches behind the handlers. What
// each field means is said in jspec/ops/stochastic.py and jspec/ops/sample.py.
#pragma once

#include "common/launch.h"

namespace jspec {

constexpr int32_t kTile = 1024;
constexpr int32_t kRoles = 4;  // of random numbers: see jspec/ops/sample.py

// Logits [batch, positions, vocabulary].
struct Source {
  const void* logits;
  int32_t positions;
  int32_t first;  // index of the first position among those of the workspace
  bool bfloat16;
};

// How rows sample: `jspec.ops.distribution.Settings`.
struct Settings {
  const float* rate;      // [batch]
  const int32_t* top_k;   // [batch]
  const float* top_p;     // [batch]
  const float* min_p;     // [batch]
  const uint32_t* seeds;  // [batch, 2]: upper and lower words
};

// What is kept of a tile: the sum of its weights, its largest logit and its exponent. In a greedy
// row the sum is the first token of the largest logit, counted from the tile's first, or kNone. At
// a rejected position the residual's mass replaces the sum of the draft.
struct alignas(16) Cell {
  uint64_t sum;
  float top;
  int32_t exponent;
};

// What makes masses and probabilities of a position's weights.
struct alignas(16) Scale {
  int32_t exponent;     // the largest of the tiles
  uint32_t reciprocal;  // of the upper 32 bits of the position's mass: 2^62 / mass
  uint32_t rescale;     // see `probability_of`
  uint32_t certain;     // the token that has all mass, in a greedy row or without a finite logit
};

// How far a row has got; all 0 before the first kernel.
struct Progress {
  unsigned long long ended;  // see `Ended` in arrive.cuh
  uint32_t rejected;         // the target's positions from the first rejected one on
  uint32_t summed;           // blocks of the residual
  uint32_t judged;           // positions that are done, under the block rule
  uint32_t unused;
};

// What the kernels keep in one buffer, for the positions of target and draft together.
struct Workspace {
  Cell* cells;           // [batch, positions, tiles]
  Scale* scales;         // [batch, positions]: where a draft token is rejected
  uint64_t* numbers;     // [batch, target positions, kRoles]: random
  Progress* progress;    // [batch]
  uint32_t* arrived;     // [batch, target positions], behind `progress`: blocks that are done
  uint32_t* thresholds;  // [batch, positions]
  int32_t positions;

  // 32-bit words for a row.
  static int64_t words(int64_t targets, int64_t drafted, int64_t tiles) {
    const int64_t positions = targets + drafted;
    return (positions * (tiles * sizeof(Cell) + sizeof(Scale)) + sizeof(Progress)) / 4 +
           positions + (1 + 2 * kRoles) * targets;
  }

  Workspace() = default;
  Workspace(void* buffer, int64_t batch, int64_t targets, int64_t drafted, int64_t tiles)
      : cells(static_cast<Cell*>(buffer)),
        scales(reinterpret_cast<Scale*>(cells + batch * (targets + drafted) * tiles)),
        numbers(reinterpret_cast<uint64_t*>(scales + batch * (targets + drafted))),
        progress(reinterpret_cast<Progress*>(numbers + batch * targets * kRoles)),
        arrived(reinterpret_cast<uint32_t*>(progress + batch)),
        thresholds(arrived + batch * targets),
        positions(static_cast<int32_t>(targets + drafted)) {}
};

struct Sampling {
  Settings settings;
  Source target;
  Source draft;  // without positions where the draft was certain of its tokens
  const int32_t* lengths;  // [batch] drafted tokens; null where every position counts
  Workspace workspace;
  int64_t batch;
  int32_t vocabulary;
  int32_t tiles;
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
  bool block;  // the rule: false for the token rule
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
