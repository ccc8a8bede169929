// Greedy verification of one sequence by one thread: a serial scan that ends at the first mismatch.
// The CPU handlers run it.
#pragma once

#include "common/host_device.h"
#include "verify/verify.h"

namespace jspec {

// Writes all that belongs to `row`, and returns its accepted count.
template <typename Token>
JSPEC_HOST_DEVICE int32_t verify_row(const Greedy& greedy, int64_t row) {
  const int32_t gamma = greedy.gamma;
  const Token* draft = static_cast<const Token*>(greedy.draft_tokens) + row * gamma;
  const Token* target = static_cast<const Token*>(greedy.target_tokens) + row * (gamma + 1);
  const Token* stops = static_cast<const Token*>(greedy.stop_tokens) + row * greedy.stops;
  Token* tokens = static_cast<Token*>(greedy.tokens) + row * (gamma + 1);
  int32_t length = greedy.draft_lengths[row];
  if (length > gamma) length = gamma;

  // The accepted run and the token behind it are the target's tokens up to the first mismatch.
  int32_t at = 0;
  bool stopped = false;
  while (true) {
    const Token token = target[at];
    for (int32_t i = 0; i < greedy.stops; ++i) stopped |= token >= 0 && token == stops[i];
    tokens[at] = token;
    if (stopped || at >= length || draft[at] != token) break;
    ++at;
  }
  const bool accepts = at < length && draft[at] == target[at];  // then a stop token ended the scan
  const int32_t committed = at + 1;
  for (int32_t i = committed; i <= gamma; ++i) tokens[i] = -1;

  const int32_t accepted = accepts ? committed : at;
  greedy.accepted[row] = accepted;
  greedy.committed[row] = committed;
  greedy.mismatch[row] = !accepts && at < length;
  static_cast<Token*>(greedy.next_token)[row] = accepts ? Token(-1) : target[at];
  greedy.stopped[row] = stopped;
  return accepted;
}

}  // namespace jspec
