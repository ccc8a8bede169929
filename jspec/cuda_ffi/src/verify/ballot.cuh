// Greedy verification of one sequence by one warp: one lane a position, one ballot for each 32.
#pragma once

#include <type_traits>

#include "common/warp.cuh"
#include "verify/verify.h"

namespace jspec {

// The count of 32-position chunks that goes round in a loop, for gamma of any size.
constexpr int kLoops = 3;

// Verifies `row` and writes all that belongs to it; one lane calls ended(accepted, committed,
// stopped). A block ends at the first position that is rejected or holds a stop token, and one
// ballot a chunk finds it. The time does not depend on where that is: no lane leaves early.
template <typename Token, int chunks, typename Ended>
__device__ void verify_warp(const Greedy& greedy, int row, Ended ended) {
  const int lane = threadIdx.x % 32;
  const int gamma = greedy.gamma;
  // The first of this lane: its others lie at distances that the instructions themselves hold.
  const Token* target =
      static_cast<const Token*>(greedy.target_tokens) + row * (gamma + 1) + lane;
  const Token* draft = static_cast<const Token*>(greedy.draft_tokens) + row * gamma + lane;
  const Token* stops = static_cast<const Token*>(greedy.stop_tokens) + row * greedy.stops;
  Token* tokens = static_cast<Token*>(greedy.tokens) + row * (gamma + 1) + lane;
  // The first stop token is on its way with the rest: one wait for memory, not two.
  const Token first_stop = greedy.stops ? stops[0] : Token(-1);
  const Token bonus = target[gamma - lane];
  const int length = min(greedy.draft_lengths[row], gamma);
  // The bonus token follows a whole accepted draft, as if a draft token had been rejected there.
  int end = gamma;
  bool rejected = true, stopped = false;
  Token next = bonus;

  for (int start = 0; start == 0 || (chunks == kLoops && start < gamma); start += chunks * 32) {
    // All loads are on their way before the first is waited for.
    Token wanted[chunks], drafted[chunks];
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      const bool reads = lane < gamma - start - c * 32;
      wanted[c] = reads ? target[start + c * 32] : Token(-1);
      drafted[c] = reads ? draft[start + c * 32] : Token(-1);
    }
    bool stop[chunks], bonus_stops = bonus == first_stop && first_stop >= 0;
#pragma unroll
    for (int c = 0; c < chunks; ++c) stop[c] = wanted[c] == first_stop && first_stop >= 0;
#pragma unroll 1
    for (int i = 1; i < greedy.stops; ++i) {
      const Token one = stops[i];
      bonus_stops |= bonus == one && one >= 0;
#pragma unroll
      for (int c = 0; c < chunks; ++c) stop[c] |= wanted[c] == one && one >= 0;
    }
    bool rejects[chunks];
    int first = gamma;
#pragma unroll
    for (int c = chunks - 1; c >= 0; --c) {
      rejects[c] = start + c * 32 + lane >= length || drafted[c] != wanted[c];
      const unsigned ends = __ballot_sync(kAllLanes, rejects[c] || stop[c]);
      if (ends) first = start + c * 32 + __ffs(ends) - 1;
    }
    end = min(end, first);
    if (end == gamma) stopped = bonus_stops;
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      const int at = start + c * 32 + lane;
      if (at < gamma) tokens[start + c * 32] = at <= end ? wanted[c] : Token(-1);
      if (at < gamma && at == end) {
        rejected = rejects[c];
        stopped = stop[c];
        next = wanted[c];
      }
    }
  }
  if (end % 32 == lane) {
    const int count = rejected ? end : end + 1;
    greedy.accepted[row] = count;
    greedy.committed[row] = end + 1;
    greedy.mismatch[row] = rejected && end < length;
    static_cast<Token*>(greedy.next_token)[row] = rejected ? next : Token(-1);
    greedy.stopped[row] = stopped;
    tokens[gamma - lane] = end == gamma ? bonus : Token(-1);
    ended(count, end + 1, stopped);
  }
}

// Calls `run(Token(), chunks)`, chunks an integral constant: those that cover gamma positions.
template <typename Run>
const char* for_greedy(const Greedy& greedy, Run run) {
  const auto with_token = [&](auto token) {
    if (greedy.gamma <= 32) return run(token, std::integral_constant<int, 1>());
    if (greedy.gamma <= 64) return run(token, std::integral_constant<int, 2>());
    if (greedy.gamma <= 128) return run(token, std::integral_constant<int, 4>());
    return run(token, std::integral_constant<int, kLoops>());
  };
  return greedy.wide ? with_token(int64_t()) : with_token(int32_t());
}

}  // namespace jspec
