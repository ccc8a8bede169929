// Greedy verification with the bookkeeping of a step: its arguments and its launch. What each field
// means is said in jspec/ops/commit.py.
#pragma once

#include <cfloat>
#include <cmath>

#include "common/host_device.h"
#include "verify/verify.h"

namespace jspec {

constexpr int kMaxPositions = 1 << 10;  // of a row: its target tokens are in shared memory

// `known`, `cached` and `done` are updated in place.
struct Commit {
  Greedy greedy;          // int32 tokens; those of the target follow from the logits
  const void* logits;     // [batch, gamma + 1, vocabulary], float32 or bfloat16
  const int32_t* limits;  // [batch]
  int32_t* known;         // [batch, slots]
  int32_t* cached;        // [batch]
  bool* done;             // [batch]
  int32_t* block;         // [batch, gamma + 3]: accepted, committed, and the tokens
  float* tops;            // [batch, gamma + 1, parts]: the largest logit of each part
  int32_t* firsts;        // [batch, gamma + 1, parts]: the first token that has it
  int64_t slots;
  int32_t vocabulary;
  int32_t part;   // logits of a part; 0: a row's block reads its logits itself
  int32_t parts;  // of a position, 0 as above
  bool bfloat16;
};

// The largest of the logits that it took, and the first token that has it, where tokens are taken
// in order. Before, minus infinity and `token`, which has no larger logit than any that is taken.
struct Largest {
  float top;
  int32_t token;

  JSPEC_HOST_DEVICE explicit Largest(int32_t token) : top(-INFINITY), token(token) {}

  // NaN counts as minus infinity, plus infinity as the largest float32.
  JSPEC_HOST_DEVICE void take(float logit, int32_t at) {
    logit = logit > FLT_MAX ? FLT_MAX : logit;
    if (logit > top) {
      top = logit;
      token = at;
    }
  }
};

// How a row's committed block ends.
struct Ended {
  int32_t accepted;
  int32_t committed;
  bool stopped;
};

// The verification of `row` alone, whose target tokens are `target`.
JSPEC_HOST_DEVICE inline Greedy row_alone(const Greedy& greedy, int64_t row,
                                          const int32_t* target) {
  const int64_t gamma = greedy.gamma;
  const auto at = [&](const void* tokens, int64_t size) {
    return static_cast<const int32_t*>(tokens) + row * size;
  };
  const auto to = [&](void* tokens, int64_t size) {
    return static_cast<int32_t*>(tokens) + row * size;
  };
  return Greedy{at(greedy.draft_tokens, gamma),
                target,
                greedy.draft_lengths + row,
                at(greedy.stop_tokens, greedy.stops),
                greedy.accepted + row,
                greedy.committed + row,
                greedy.mismatch + row,
                to(greedy.next_token, 1),
                greedy.stopped + row,
                to(greedy.tokens, gamma + 1),
                1,
                greedy.gamma,
                greedy.stops,
                false};
}

// Appends a row's block and updates its state, as number `thread` of `threads` that share its
// tokens; `cached` and `done`: its state before, which all have read by now.
JSPEC_HOST_DEVICE inline void commit_row(const Commit& commit, int64_t row, const int32_t* target,
                                         const Ended& ended, int32_t cached, bool done,
                                         int thread, int threads) {
  const int32_t gamma = commit.greedy.gamma;
  const int32_t committed = done ? 0 : ended.committed;
  int32_t* block = commit.block + row * (gamma + 3);
  int32_t* known = commit.known + row * commit.slots;
  for (int32_t i = thread; i <= gamma; i += threads) {
    const bool commits = i < committed;
    block[2 + i] = commits ? target[i] : -1;
    const int64_t slot = int64_t(cached) + 1 + i;
    if (commits && slot < commit.slots) known[slot] = target[i];
  }
  if (thread == 0) {
    block[0] = done ? 0 : ended.accepted;
    block[1] = committed;
    commit.cached[row] = cached + committed;
    commit.done[row] = done || ended.stopped || cached + committed + 1 >= commit.limits[row];
  }
}

// Returns what went wrong, or null. The block of a row, and those of parts, hold `warps` warps.
const char* verify_and_commit(const Commit& commit, int warps, Stream stream);

}  // namespace jspec
